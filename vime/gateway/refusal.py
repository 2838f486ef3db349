"""A call that the gateway does not carry out, as an exception with everything that the caller is told."""

from __future__ import annotations

from collections.abc import Sequence

from vime.gateway.messages import Code, ErrorBody, GivenSample, PutOwnGroup
from vime.handoff.ledger_types import OwnGrant, OwnOutcome


class Refusal(Exception):
    """`retry_after_s`: the same call may be repeated after so many seconds; None: it would be refused again."""

    def __init__(
        self,
        status: int,
        code: Code,
        what: str,
        *,
        got: str,
        expected: str,
        next_action: str,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(f"{what} got {got}; expected {expected}. {next_action}")
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        self.body = ErrorBody(
            code=code, what=what, got=got, expected=expected, next=next_action, may_repeat=retry_after_s is not None
        )


STOPPING = Refusal(
    503,
    "unavailable",
    "the run is being stopped.",
    got="a wait for prompts",
    expected="a run that goes on, perhaps when it was started again",
    next_action="Repeat the call after Retry-After.",
    retry_after_s=2,
)

OWN_LATE = Refusal(
    503,
    "unavailable",
    "storing the group took longer than a lease lasts.",
    got="a group that was given up meanwhile",
    expected="a spool and a queue that store it in time",
    next_action="Repeat the same call after Retry-After.",
    retry_after_s=1,
)


def lease_lost(got: str) -> Refusal:
    return Refusal(
        409,
        "lease_lost",
        "the lease has ended.",
        got=got,
        expected="a lease that the producer still has",
        next_action="Discard the work of this lease; heartbeats keep a lease alive.",
    )


def shown(rows: Sequence[GivenSample]) -> str:
    """Return a few words about the rows of one sample."""
    tokens = sum(len(row.tokens) // (4 if isinstance(row.tokens, bytes) else 1) for row in rows)
    return f"{len(rows)} rows of {tokens} tokens, reward {rows[0].reward}"[:200]


def own_refusal(call: PutOwnGroup, grant: OwnGrant) -> Refusal:
    """Return why a group whose prompt the job brought itself has no slot."""
    if grant.outcome is OwnOutcome.OTHER_CONTENT:
        return Refusal(
            409,
            "other_content",
            f"key {call.key!r} names a group of this producer with other content.",
            got=shown(call.samples),
            expected=f"what was put under this key as group {grant.task and grant.task.group}, byte for byte",
            next_action="Choose another key for another group; this one counts once for the whole life of the run.",
        )
    if grant.outcome is OwnOutcome.OVER:
        return Refusal(
            409,
            "run_over",
            "the run is over: no round is left that could train this group.",
            got=f"a group under key {call.key!r}",
            expected="a run with rounds left",
            next_action="Leave.",
        )
    return Refusal(
        429,
        "no_room",
        "every slot is taken.",
        got=f"a group under key {call.key!r}",
        expected=grant.waits_for,
        next_action="Repeat the same call after Retry-After: it keeps its place in the line.",
        retry_after_s=1,
    )
