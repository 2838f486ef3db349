"""What tests of the ledger, the spool and the audit share: a clock in hand, rules, and steps of a small run."""

from __future__ import annotations

import functools
import zlib
from dataclasses import replace
from pathlib import Path

from vime.handoff.audit import AuditReport, audit
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import IssuedPrompt, LedgerRules, Payload, RoundLease, Task
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger

TIMEOUT_S = 10.0
RULES = LedgerRules(max_slots=8, max_staleness=1, lease_timeout_s=TIMEOUT_S)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def open_ledger(directory: Path, clock: Clock | None = None, **rules: object) -> Ledger:
    return Ledger(directory / "ledger.db", replace(RULES, **rules), clock=clock or Clock())


def payload(group: int = 0, *, version: int = 0, newest: int | None = None, tokens: int = 10) -> Payload:
    return Payload(
        checksum=zlib.crc32(str(group).encode()),
        num_bytes=4 * tokens,
        num_tokens=tokens,
        num_rows=2,
        min_version=version,
        max_version=version if newest is None else newest,
    )


def issue(ledger: Ledger, count: int, producer: str = "p", partition: str = "train") -> list[Task]:
    issue.number += 1
    grant = ledger.prompts.issue(producer, count, request=f"request {issue.number}", partition=partition)
    return [prompt.task for prompt in grant.prompts]


issue.number = 0


def make_ready(ledger: Ledger, count: int, *, version: int = 0) -> list[Task]:
    tasks = issue(ledger, count)
    for task in tasks:
        ledger.prompts.commit(task, payload(task.group, version=version))
    return tasks


def lease(ledger: Ledger, round_id: int, count: int = 2, **options: object) -> RoundLease:
    answer = ledger.rounds.lease(round_id, **{"version": round_id, "holder": "t", "count": count, **options})
    assert answer.lease is not None, answer.waits_for
    return answer.lease


def train(ledger: Ledger, round_id: int, count: int = 2, *, version: int | None = None) -> list[int]:
    """Make groups ready, train round `round_id` on them and serve its weights; answers the groups."""
    make_ready(ledger, count, version=round_id if version is None else version)
    found = lease(ledger, round_id, count)
    ledger.rounds.trained(round_id, found.fence)
    ledger.rounds.release(round_id + 1)
    return groups_of(found)


def groups_of(found: RoundLease) -> list[int]:
    return [group.task.group for group in found.groups]


def numbers(prompts: tuple[IssuedPrompt, ...]) -> list[tuple[int, int]]:
    return [(prompt.task.group, prompt.task.attempt) for prompt in prompts]


def has_all(task: Task, checksum: int) -> bool:
    """A spool that lost nothing."""
    return True


def checked(directory: Path, *, checkpoint_round: int | None = None) -> AuditReport:
    """The audit of a ledger without a spool, which must find nothing."""
    report = audit(directory / "ledger.db", checkpoint_round=checkpoint_round, spool=None)
    assert report.findings == (), "\n".join(map(str, report.findings))
    return report


class AsLedger:
    """A `LedgerPort` in the shape of the ledger, so that the functions of this file take either."""

    def __init__(self, port):
        self.prompts, self.rounds = _AsPart(port, PromptLedger), _AsPart(port, RoundLedger)


class _AsPart:
    def __init__(self, port, part):
        self._port, self._part = port, part

    def __getattr__(self, name):
        return functools.partial(self._port.call, getattr(self._part, name))
