"""A call that the gateway does not carry out, as an exception with everything that the caller is told."""

from __future__ import annotations

from vime.gateway.messages import Code, ErrorBody


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


def lease_lost(got: str) -> Refusal:
    return Refusal(
        409,
        "lease_lost",
        "the lease has ended.",
        got=got,
        expected="a lease that the producer still has",
        next_action="Discard the work of this lease; heartbeats keep a lease alive.",
    )
