"""The audit of a run: from the ledger's file, the spool, the trainer's receipts and the newest checkpoint, is every
promise kept?

Checks, by the name that a finding carries:
    cursor      every group from 0 to the cursor was issued, none twice
    terminal    each group has one state, reached by legal steps; none is trained twice or both trained and dropped
    rounds      no group in two rounds; rounds have no gap and are trained in order
    checkpoint  what is durable is in a checkpoint that survives, what the checkpoint carries is trained, and it was
                written by the run of this ledger
    staleness   no round holds a token older than the bound or newer than its weights
    bound       slots, groups, tokens and bytes stayed within their bounds at every step
    tokens      what was committed is what was trained, dropped, sent back or is still held
    spool       every payload that may be needed again is there, whole and with its checksum, and the bytes at the end
                that are no record never were one that the ledger knows
    own         a group whose prompt a job brought itself is committed once for each key of the job, is never given to
                somebody else, and its payload in the spool names the key
    eval        no group of an evaluation was ever in a round
    file        the ledger's file is whole: its structure, the checksum of each row, the chain of the history
    history     the history tells of the same states as the tables
    receipts    what the trainer recorded is what was committed and leased, and what the checkpoint, the
                metrics and the events name (audit_receipts.py)
    weights     no version was confirmed with two contents

It reads and never writes, so it may run beside a live run.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from vime.data.claims import RunClaims
from vime.data.images import images_of
from vime.data.payload import join_samples, record_size, split_record, unpack_rows
from vime.handoff.audit_history import Finding, History, Line
from vime.handoff.audit_receipts import CommittedGroup, LedgerRound, SavedReceipt, audit_receipts
from vime.handoff.ledger_checksums import find_faults
from vime.handoff.ledger_file import OLD_COPY
from vime.handoff.ledger_identity import find_difference
from vime.handoff.ledger_schema import expected_schema, open_for_reading
from vime.handoff.ledger_types import EXTERNAL, LEDGER_NAME, OWN_KEY, SPOOL_NAME, LedgerMark, State, Task
from vime.handoff.ledger_undo import lasting_file
from vime.handoff.receipts import group_content
from vime.handoff.spool import Spools
from vime.handoff.spool_check import find_known_tail
from vime.types import HandoffError

MAX_SHOWN = 50

_LINES = """select h.sequence, h.event, coalesce(p.name, ''), coalesce(h.grp, -1), coalesce(h.attempt, 0),
    coalesce(h.round, 0), coalesce(h.num_tokens, 0), coalesce(h.num_bytes, 0), coalesce(h.note, '')
    from history h left join partition p on p.id = h.partition order by h.sequence"""
_GROUPS = """select p.name, g.grp, g.attempt, g.state, g.round, g.position, g.checksum, g.num_bytes, g.num_tokens,
    g.num_rows, g.min_version, g.max_version, g.partial_attempt, g.partial_checksum, g.producer,
    g.own_key, g.own_content from prompt_group g join partition p on p.id = g.partition order by g.partition, g.grp"""
SIZED = (State.READY, State.LEASED, State.TRAINED, State.DURABLE)
IN_ROUND = (State.LEASED, State.TRAINED, State.DURABLE)
NEEDED = (State.READY, State.LEASED, State.TRAINED)

_PRODUCERS = """select g.producer, count(*) from prompt_group g join partition p on p.id = g.partition
    where p.name = ? and g.state in ('trained', 'durable') group by g.producer"""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    partition: str
    group: int
    attempt: int
    state: str
    round_id: int | None
    position: int | None
    checksum: int
    num_bytes: int
    num_tokens: int
    num_rows: int
    min_version: int
    max_version: int
    partial_attempt: int | None
    partial_checksum: int
    producer: str
    own_key: str | None
    own_content: str | None

    @property
    def task(self) -> Task:
        return Task(self.partition, self.group, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFacts:
    """What a checkpoint names: its round, its place in the ledger (None: from before ledgers had ids, or of a run
    without one), and the link of its receipt (None: from before there were any)."""

    round_id: int
    mark: LedgerMark | None
    receipt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """`findings` is empty when every promise is kept. `groups` and `tokens` count by partition kind and state."""

    findings: tuple[Finding, ...]
    groups: dict[str, int]
    tokens: dict[str, int]
    num_rounds: int
    num_lines: int
    receipts: tuple[int, int] | None = None  # the first and the last round that the trainer's receipts show
    num_unhashed: int = 0  # groups of them whose tokens could not be compared with what was committed
    trained: Mapping[int, LedgerRound] = field(default_factory=dict, repr=False)  # as the ledger has it
    producers: Mapping[str, int] = field(default_factory=dict)  # groups that were trained, by who generated them
    own: Mapping[str, int] = field(default_factory=dict)  # of them: with a prompt that the producer brought itself

    def shown(self) -> str:
        """Return one phrase about how far the trainer's own evidence goes."""
        if self.receipts is None:
            return "no receipts of the trainer"
        rounds = f"the trainer's receipts of rounds {self.receipts[0]} to {self.receipts[1]}"
        return f"{rounds} ({self.num_unhashed:,} groups committed without a hash)" if self.num_unhashed else rounds

    def counts(self) -> str:
        """Return one line: groups by state."""
        states = ", ".join(f"{total:,} {state}" for state, total in sorted(self.groups.items()))
        own = {name: f", {total:,} of them with prompts of its own" for name, total in self.own.items()}
        jobs = [f"{total:,} by {name}{own.get(name, '')}" for name, total in sorted(self.producers.items())]
        whose = f" ({', '.join(jobs)})" if any(name.startswith(EXTERNAL) for name in self.producers) else ""
        return f"{sum(self.groups.values()):,} groups: {states or 'none'}{whose}"

    def summary(self, run: Path) -> str:
        """Return the breaches, the first MAX_SHOWN in words."""
        lines = [f"{len(self.findings)} breaches in {run}:", *(f"  {finding}" for finding in self.findings[:MAX_SHOWN])]
        if len(self.findings) > MAX_SHOWN:
            lines.append(f"  ... {len(self.findings) - MAX_SHOWN} more")
        return "\n".join(lines)


def audit_run(
    run: Path,
    *,
    saved: SavedFacts | None,
    claims: Callable[[], RunClaims] | None = None,
    has_ledger: bool = True,
    has_spool: bool = False,
) -> AuditReport:
    """Audit a run directory; `saved`: what the newest complete checkpoint names, `claims` what metrics and events name.
    `has_ledger`: whether the run is of mode streaming; `has_spool`: whether it keeps payloads on disk. One that is
    there is checked in any case."""
    receipt = None if saved is None else SavedReceipt(saved.round_id, saved.receipt)
    if not has_ledger:
        shown = audit_receipts(run, None, receipt, claims)
        return AuditReport(
            findings=shown.findings, groups={}, tokens={}, num_rounds=0, num_lines=0, receipts=shown.rounds
        )
    spool, round_id = run / SPOOL_NAME, None if saved is None else saved.round_id
    own, lasting = run / LEDGER_NAME, lasting_file(run / LEDGER_NAME, round_id)
    report = audit(
        lasting,
        checkpoint_round=round_id,
        mark=None if saved is None else saved.mark,
        spool=spool if has_spool or spool.is_dir() else None,
    )
    if lasting != own:  # a resume from another checkpoint continues with this file
        report = replace(report, findings=(*report.findings, *find_damage(own)))
    if report.num_lines == 0:  # the ledger is damaged beyond reading
        return report
    shown = audit_receipts(run, report.trained, receipt, claims)
    findings = (*report.findings, *shown.findings)
    return replace(report, findings=findings, receipts=shown.rounds, num_unhashed=shown.num_unhashed)


def audit(
    ledger: Path, *, checkpoint_round: int | None, spool: Path | None, mark: LedgerMark | None = None
) -> AuditReport:
    """Check everything but receipts. `checkpoint_round`: round of the newest complete checkpoint, None without one;
    `mark`: what it keeps of its ledger, None for one from before ledgers had ids.

    `spool` None: the run keeps none, and payloads are not checked. It is read after the ledger: everything that the
    ledger knows is in it by then, also in a live run.
    """
    faults = find_damage(ledger)
    with closing(open_for_reading(ledger)) as connection:
        try:
            report = _audit_content(connection, checkpoint_round, spool, mark)
        except Exception as error:  # boundary: a damaged file may hold anything; the damage is reported instead
            if faults:
                return AuditReport(findings=faults, groups={}, tokens={}, num_rounds=0, num_lines=0)
            if isinstance(error, sqlite3.Error):
                raise HandoffError(f"{ledger}: cannot be read: {error}. {OLD_COPY}.") from error
            raise
    return replace(report, findings=(*faults, *report.findings))


def find_damage(ledger: Path) -> tuple[Finding, ...]:
    """Return the damage in a ledger's file."""
    with closing(open_for_reading(ledger)) as connection:
        return tuple(Finding("file", ledger.name, fault) for fault in find_faults(connection, expected_schema()))


def _audit_content(
    connection: sqlite3.Connection, checkpoint_round: int | None, spool: Path | None, mark: LedgerMark | None
) -> AuditReport:
    history = History()
    history.read(_lines(connection))
    facts = [GroupFacts(*row) for row in connection.execute(_GROUPS)]
    rounds = {
        int(round_id): (str(state), int(version), int(num_groups))
        for round_id, state, version, num_groups in connection.execute(
            "select id, state, version, num_groups from round order by id"
        )
    }
    cursors = dict(connection.execute("select name, next_group from partition"))
    [num_lines] = connection.execute("select count(*) from history").fetchone()
    findings = list(history.findings)
    difference = None if mark is None else find_difference(connection, mark, checkpoint_round or 0)
    if difference is not None:
        findings.append(Finding("checkpoint", f"round {checkpoint_round}", f"the ledger {difference}"))
    findings += _check_cursor(facts, cursors)
    findings += _check_history(facts, history)
    findings += _check_rounds(facts, rounds, history)
    findings += _check_checkpoint(rounds, checkpoint_round)
    findings += _check_partitions(facts, history.train)
    if spool is not None:
        findings += _check_spool(facts, spool, connection, history)
    groups: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for fact in facts:
        name = fact.state if fact.partition == history.train else f"{fact.partition} {fact.state}"
        groups[name] += 1
        tokens[name] += fact.num_tokens if fact.state in SIZED else 0
    return AuditReport(
        findings=tuple(findings),
        groups=dict(groups),
        tokens=dict(tokens),
        num_rounds=len(rounds),
        num_lines=num_lines,
        trained=_trained_rounds(facts, rounds, history),
        producers=_producers(connection, history.train),
        own=Counter(
            fact.producer for fact in facts if fact.own_key is not None and fact.state in ("trained", "durable")
        ),
    )


def _producers(connection: sqlite3.Connection, train: str) -> dict[str, int]:
    """Count the groups of rounds by the job outside that generated them, or by the rollout workers together."""
    producers: Counter[str] = Counter()
    for name, total in connection.execute(_PRODUCERS, (train,)):
        producers[name if name.startswith(EXTERNAL) else "rollout workers"] += total
    return dict(producers)


def _trained_rounds(
    facts: list[GroupFacts], rounds: dict[int, tuple[str, int, int]], history: History
) -> dict[int, LedgerRound]:
    groups: dict[int, dict[tuple[int, int], CommittedGroup]] = {}
    for fact in facts:
        if fact.round_id is not None and fact.partition == history.train:
            content = history.groups[fact.partition, fact.group].content
            member = CommittedGroup(fact.num_rows, fact.num_tokens, content)
            groups.setdefault(fact.round_id, {})[fact.group, fact.attempt] = member
    return {
        round_id: LedgerRound(history.receipts.get(round_id, ""), version, groups.get(round_id, {}))
        for round_id, (state, version, _) in rounds.items()
        if state in ("trained", "durable")
    }


def _lines(connection: sqlite3.Connection) -> Iterator[Line]:
    for row in connection.execute(_LINES):
        yield Line(*row)


def _check_cursor(facts: list[GroupFacts], cursors: dict[str, int]) -> Iterator[Finding]:
    """Check that rows are 0 .. cursor - 1 of each partition."""
    seen: dict[str, list[int]] = {name: [] for name in cursors}
    for fact in facts:
        seen[fact.partition].append(fact.group)
    for name, groups in seen.items():
        missing = sorted(set(range(cursors[name])) - set(groups))
        beyond = [group for group in groups if group >= cursors[name]]
        for what, found in (("never issued", missing), ("beyond the cursor", beyond)):
            if found:
                yield Finding(
                    "cursor", name, f"groups {found[:5]} {what} ({len(found)} in all, cursor {cursors[name]})"
                )


def _check_history(facts: list[GroupFacts], history: History) -> Iterator[Finding]:
    """Check that tables and history agree, group by group."""
    for fact in facts:
        trace = history.groups.get((fact.partition, fact.group))
        if trace is None:
            yield Finding("history", str(fact.task), "is in the ledger, but was never issued")
            continue
        told, shown = (str(trace.state), trace.attempt, trace.round_id), (fact.state, fact.attempt, fact.round_id)
        if told != shown:
            yield Finding("history", str(fact.task), f"(state, attempt, round) {shown}, the history says {told}")
        own = None if fact.own_key is None else (fact.own_key, fact.own_content)
        if own != trace.own or (own is not None and fact.producer != trace.producer):
            told_own = f"the history says {trace.own} of {trace.producer}"
            yield Finding("own", str(fact.task), f"key and content {own} of {fact.producer}; {told_own}")
        if fact.state in SIZED and (trace.tokens, trace.num_bytes) != (fact.num_tokens, fact.num_bytes):
            sizes = f"{fact.num_tokens} tokens, {fact.num_bytes} bytes; committed: {trace.tokens}, {trace.num_bytes}"
            yield Finding("tokens", str(fact.task), sizes)
    known = {(fact.partition, fact.group) for fact in facts}
    for partition, group in history.groups.keys() - known:
        yield Finding("cursor", f"{partition}/{group}", "was issued, and is not in the ledger any more")


def _check_rounds(
    facts: list[GroupFacts], rounds: dict[int, tuple[str, int, int]], history: History
) -> Iterator[Finding]:
    members: dict[int, list[GroupFacts]] = {round_id: [] for round_id in rounds}
    for fact in facts:
        if fact.round_id is not None:
            members.setdefault(fact.round_id, []).append(fact)
        elif fact.state in IN_ROUND:
            yield Finding("rounds", str(fact.task), f"{fact.state}, but in no round")
    for round_id, groups in sorted(members.items()):
        if round_id in rounds:
            yield from _check_members(round_id, groups, rounds[round_id], history)
        else:
            yield Finding("rounds", f"round {round_id}", f"holds {len(groups)} groups, but is no round")
    first = min(rounds, default=0)
    gaps = [round_id for round_id in rounds if round_id != first and round_id - 1 not in rounds]
    for round_id in gaps:
        yield Finding("rounds", f"round {round_id}", "the round before it is gone")
    trained = [round_id for round_id, (state, _, _) in rounds.items() if state in ("trained", "durable")]
    untrained = [round_id for round_id, (state, _, _) in rounds.items() if state in ("leased", "replay")]
    if trained and untrained and min(untrained) < max(trained):
        yield Finding("rounds", f"round {max(trained)}", f"trained before round {min(untrained)}")


def _check_members(
    round_id: int, groups: list[GroupFacts], row: tuple[str, int, int], history: History
) -> Iterator[Finding]:
    state, version, num_groups = row
    order = [fact.group for fact in sorted(groups, key=lambda fact: (fact.position is None, fact.position))]
    told = [group for _, group in history.rounds.get(round_id, [])]
    if order != told or len(groups) != num_groups:
        yield Finding("rounds", f"round {round_id}", f"groups {order} of {num_groups}; the history says {told}")
    bound = history.rules.get("max_staleness")
    for fact in groups:
        if fact.state != (State.READY if state == "replay" else state):
            yield Finding("terminal", str(fact.task), f"{fact.state} in round {round_id}, which is {state}")
        if fact.max_version > version or (bound is not None and version - fact.min_version > bound):
            versions = f"versions {fact.min_version} to {fact.max_version} in round {round_id} on version {version}"
            yield Finding("staleness", str(fact.task), f"{versions}; the bound is {bound}")


def _check_checkpoint(rounds: dict[int, tuple[str, int, int]], checkpoint_round: int | None) -> Iterator[Finding]:
    last = -1 if checkpoint_round is None else checkpoint_round
    for round_id, (state, _, _) in rounds.items():
        if state == "durable" and round_id > last:
            yield Finding("checkpoint", f"round {round_id}", f"durable, but the newest checkpoint is of round {last}")
        if round_id <= last and state not in ("trained", "durable"):
            yield Finding("checkpoint", f"round {round_id}", f"{state}, but the checkpoint of round {last} carries it")
    if rounds and last > max(rounds):
        yield Finding("checkpoint", f"round {last}", f"in a checkpoint, but the ledger ends at round {max(rounds)}")


def _check_partitions(facts: list[GroupFacts], train: str) -> Iterator[Finding]:
    for fact in facts:
        if fact.partition != train and (fact.state in IN_ROUND or fact.round_id is not None):
            yield Finding("eval", str(fact.task), f"{fact.state} in round {fact.round_id}; only {train} is trained")


def _check_spool(
    facts: list[GroupFacts], directory: Path, connection: sqlite3.Connection, history: History
) -> Iterator[Finding]:
    try:
        spool = Spools(directory)
    except HandoffError as error:
        yield Finding("spool", directory.name, str(error))
        return
    tail = find_known_tail(spool, connection, train=history.train)
    if tail is not None:
        yield Finding("spool", tail.name, str(tail))
    yield from _check_payloads(facts, spool, history)


def _check_payloads(facts: list[GroupFacts], spool: Spools, history: History) -> Iterator[Finding]:
    for fact in facts:
        if fact.partial_attempt is not None and fact.state in (State.ISSUED, State.RETRY):
            task = Task(fact.partition, fact.group, fact.partial_attempt)
            try:
                spool.read(task, fact.partial_checksum)
            except HandoffError as error:
                yield Finding("spool", str(task), f"{fact.state} continues tokens that cannot be read: {error}")
        if fact.state not in NEEDED:
            continue
        try:
            data = spool.read(fact.task, fact.checksum)
            size = len(data), record_size(data)[1]
            trace = history.groups.get((fact.partition, fact.group))
            content = trace.content if trace is not None else ""
            found = _content(data) if content else ""
        except HandoffError as error:
            yield Finding("spool", str(fact.task), f"{fact.state}, but its payload cannot be read: {error}")
            continue
        if size != (fact.num_bytes, fact.num_tokens):
            wanted = f"{fact.num_bytes} bytes, {fact.num_tokens} tokens"
            yield Finding("spool", str(fact.task), f"payload of {size[0]} bytes, {size[1]} tokens; committed: {wanted}")
        elif found != content:
            yield Finding("spool", str(fact.task), f"tokens with the hash {found}; committed: {content}")
        elif fact.own_key is not None:
            yield from _check_own_payload(fact, data)


def _check_own_payload(fact: GroupFacts, data: bytes) -> Iterator[Finding]:
    chunks, rest = split_record(data)
    samples = join_samples([row for chunk in chunks for row in unpack_rows(chunk)], rest)
    keys = {str(sample.metadata.get(OWN_KEY)) for sample in samples}
    if keys != {fact.own_key}:
        yield Finding("own", str(fact.task), f"its payload names the keys {sorted(keys)}, the ledger {fact.own_key!r}")


def _content(data: bytes) -> str:
    rows = [row for chunk in split_record(data)[0] for row in unpack_rows(chunk)]
    return group_content((row.sample_index, row.tokens, row.response_length, images_of(row)) for row in rows)
