"""The ledger's history replayed from its first line, with rules of its own: what must be true of any run.

It is written apart from the ledger on purpose: it shares only the names of states with the code that it checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vime.handoff.ledger_types import EVAL_PREFIX, State

FROM_FLIGHT = (State.ISSUED, State.READY)
TRAINED = (State.TRAINED, State.DURABLE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach: which check, of what, and what is wrong."""

    check: str
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.subject}: {self.message}"


@dataclass(slots=True)
class GroupTrace:
    """The state of a group after the lines read so far."""

    state: str
    attempt: int
    tokens: int = 0
    num_bytes: int = 0
    is_held: bool = False  # its size counts against the capacity
    round_id: int | None = None
    content: str = ""  # hash of its tokens when they were committed
    producer: str = ""  # of the newest attempt
    own: tuple[str, str] | None = None  # key and content of a group whose prompt the producer brought itself


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table `history`; the partition by name."""

    sequence: int
    event: str
    partition: str
    group: int
    attempt: int
    round_id: int
    tokens: int
    num_bytes: int
    note: str

    @property
    def name(self) -> str:
        return f"{self.partition}/{self.group}#{self.attempt}"


@dataclass(slots=True)
class History:
    """Feed it every line in order with `read`; then compare `groups` and `rounds` with the ledger's tables."""

    train: str = "train"
    rules: dict[str, int | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    groups: dict[tuple[str, int], GroupTrace] = field(default_factory=dict)
    rounds: dict[int, list[tuple[str, int]]] = field(default_factory=dict)  # in the order of training
    versions: dict[int, int] = field(default_factory=dict)  # round -> version of the weights that train on it
    unsaved: set[int] = field(default_factory=set)  # rounds that are not durable
    unreleased: set[int] = field(default_factory=set)  # rounds whose version is `serving` or newer
    receipts: dict[int, str] = field(default_factory=dict)  # trained round -> link of what the trainer stepped on
    cursors: dict[str, int] = field(default_factory=dict)
    own: dict[tuple[str, str], str] = field(default_factory=dict)  # (producer, key) -> the group that was committed
    num_active: int = 0
    num_retry: int = 0
    serving: int = 0
    held: dict[str, int] = field(default_factory=lambda: {"groups": 0, "tokens": 0, "bytes": 0})
    restored_to: int | None = None  # only between the lines of a restore

    def read(self, lines: Iterable[Line]) -> None:
        for line in lines:
            handler = HANDLERS.get(line.event)
            if handler is None:
                self.find("history", f"line {line.sequence}", f"event {line.event!r} is unknown")
                continue
            if line.event not in ("restored", "durable", "replay", "loosened", "retry"):
                self.restored_to = None
            handler(self, line)

    def undo(self, line: Line) -> list[tuple[str, int]]:
        """Return a round to ready: allowed for trained ones only in a restart from a checkpoint before it."""
        keys = self.rounds.get(line.round_id, [])
        self.receipts.pop(line.round_id, None)
        self.unsaved.add(line.round_id)
        is_restored = self.restored_to is not None and line.round_id > self.restored_to
        for key in keys:
            trace = self.groups[key]
            if trace.state in TRAINED:
                if not is_restored:
                    self.find("terminal", f"{key[0]}/{key[1]}", f"round {line.round_id} undone without a restart")
                trace.is_held = True
                self.held["groups"] += 1
                self.held["tokens"] += trace.tokens
                self.held["bytes"] += trace.num_bytes
            trace.state = State.READY
        return keys

    def end_flight(self, line: Line, state: State) -> None:
        trace = self.trace(line, FROM_FLIGHT)
        if line.partition == self.train:
            self.num_active -= 1
        self.unhold(trace)
        trace.state = state

    def trace(self, line: Line, states: tuple[State, ...]) -> GroupTrace:
        trace = self.groups.get((line.partition, line.group))
        if trace is None:
            self.find("terminal", line.name, f"{line.event} without ever being issued")
            trace = self.groups[line.partition, line.group] = GroupTrace(states[0], line.attempt)
        self.expect(line, trace, states, attempt=trace.attempt)
        return trace

    def expect(self, line: Line, trace: GroupTrace, states: tuple[State, ...], *, attempt: int) -> None:
        if trace.state not in states or line.attempt != attempt:
            wanted = " or ".join(states)
            self.find(
                "terminal",
                line.name,
                f"{line.event} while {trace.state} at attempt {trace.attempt}; expected {wanted} at {attempt}",
            )

    def hold(self, line: Line, trace: GroupTrace) -> None:
        trace.tokens, trace.num_bytes, trace.is_held = line.tokens, line.num_bytes, line.partition == self.train
        if trace.is_held:
            self.held["groups"] += 1
            self.held["tokens"] += trace.tokens
            self.held["bytes"] += trace.num_bytes
            for what, amount in self.held.items():
                self.bound(line, what, amount, f"max_{what}")

    def unhold(self, trace: GroupTrace) -> None:
        if trace.is_held:
            self.held["groups"] -= 1
            self.held["tokens"] -= trace.tokens
            self.held["bytes"] -= trace.num_bytes
            trace.is_held = False

    def bound(self, line: Line, what: str, amount: int, rule: str) -> None:
        most = self.rules.get(rule)
        if most is not None and amount > most:
            self.find("bound", f"line {line.sequence} ({line.name})", f"{amount} {what} held, {rule} is {most}")

    def find(self, check: str, subject: str, message: str) -> None:
        self.findings.append(Finding(check, subject, message))


def on_opened(history: History, line: Line) -> None:
    history.rules = json.loads(line.note)
    history.train = str(history.rules["partition"])


def on_issued(history: History, line: Line) -> None:
    key, trace = (line.partition, line.group), history.groups.get((line.partition, line.group))
    cursor = history.cursors.setdefault(line.partition, 0)
    is_train = line.partition == history.train
    if trace is None:
        if line.group != cursor or line.attempt != 1:
            history.find("cursor", line.name, f"issued when the next new group was {cursor}")
        history.cursors[line.partition] = max(cursor, line.group + 1)
        history.groups[key] = trace = GroupTrace(State.ISSUED, line.attempt)
    else:
        history.expect(line, trace, (State.RETRY,), attempt=trace.attempt + 1)
        history.num_retry -= is_train
        trace.state, trace.attempt = State.ISSUED, line.attempt
        if trace.own is not None:
            history.find("own", line.name, f"issued again to {line.note}, who has not its prompt")
    trace.producer = line.note
    if is_train:
        history.num_active += 1
        history.bound(line, "slots", history.num_active, "max_slots")


def on_own(history: History, line: Line) -> None:
    trace = history.trace(line, (State.ISSUED,))
    note = json.loads(line.note)
    trace.own = (str(note["key"]), str(note["content"]))
    if line.partition != history.train:
        history.find("own", line.name, f"a group of {trace.producer}'s own; only {history.train} may have some")


def on_admitted(history: History, line: Line) -> None:
    trace = history.trace(line, (State.ISSUED,))
    history.hold(line, trace)


def on_ready(history: History, line: Line) -> None:
    trace = history.trace(line, (State.ISSUED,))
    history.unhold(trace)
    history.hold(line, trace)
    trace.state, trace.content = State.READY, line.note
    if trace.own is not None:
        first = history.own.setdefault((trace.producer, trace.own[0]), line.name)
        if first != line.name:
            history.find("own", line.name, f"committed under key {trace.own[0]!r} of {trace.producer}, as was {first}")


def on_dropped(history: History, line: Line) -> None:
    history.end_flight(line, State.DROPPED)


def on_retry(history: History, line: Line) -> None:
    history.end_flight(line, State.RETRY)
    history.num_retry += line.partition == history.train


def on_leased(history: History, line: Line) -> None:
    trace = history.trace(line, (State.READY,))
    if trace.round_id is not None:
        history.find("rounds", line.name, f"leased for round {line.round_id} and for round {trace.round_id}")
    if line.partition != history.train or line.partition.startswith(EVAL_PREFIX):
        history.find("eval", line.name, f"leased for training in round {line.round_id}")
    trace.state, trace.round_id = State.LEASED, line.round_id
    history.rounds.setdefault(line.round_id, []).append((line.partition, line.group))
    history.versions[line.round_id] = int(line.note)
    history.unsaved.add(line.round_id)
    if int(line.note) >= history.serving:
        history.unreleased.add(line.round_id)


def on_leased_again(history: History, line: Line) -> None:
    for key in history.rounds.get(line.round_id, []):
        if history.groups[key].state == State.READY:
            history.groups[key].state = State.LEASED


def on_trained(history: History, line: Line) -> None:
    keys, tokens = history.rounds.get(line.round_id, []), 0
    if not keys:
        history.find("rounds", f"round {line.round_id}", "trained without a lease")
    for key in keys:
        trace = history.groups[key]
        if trace.state != State.LEASED:
            what = "twice" if trace.state in TRAINED else f"while {trace.state}"
            history.find("terminal", f"{key[0]}/{key[1]}", f"trained {what} (round {line.round_id})")
        tokens += trace.tokens
        history.unhold(trace)
        trace.state = State.TRAINED
    history.receipts[line.round_id] = line.note
    if tokens != line.tokens:
        history.find("tokens", f"round {line.round_id}", f"trained {line.tokens} tokens, its groups hold {tokens}")
    if history.versions.get(line.round_id, 0) < history.serving:
        history.num_active -= len(keys)


def on_released(history: History, line: Line) -> None:
    freed = {round_id for round_id in history.unreleased if history.versions[round_id] < line.round_id}
    history.unreleased -= freed
    history.num_active -= sum(len(history.rounds[round_id]) for round_id in freed)
    history.serving = line.round_id


def on_durable(history: History, line: Line) -> None:
    saved = {round_id for round_id in history.unsaved if round_id <= line.round_id}
    history.unsaved -= saved
    for round_id in saved:
        for key in history.rounds.get(round_id, ()):
            if history.groups[key].state not in TRAINED:
                history.find("terminal", f"{key[0]}/{key[1]}", f"durable while {history.groups[key].state}")
            history.groups[key].state = State.DURABLE


def on_restored(history: History, line: Line) -> None:
    history.restored_to = line.round_id
    if line.note:  # version of the weights that are loaded
        start = int(line.note)
        for round_id, version in history.versions.items():
            if start <= version < history.serving:  # their slots had been freed, and are taken again
                states = [history.groups[key].state for key in history.rounds[round_id]]
                history.num_active += sum(state in TRAINED for state in states)
                history.unreleased.add(round_id)
        history.serving = min(history.serving, start)


def on_replay(history: History, line: Line) -> None:
    history.undo(line)


def on_loosened(history: History, line: Line) -> None:
    for key in history.undo(line):
        history.groups[key].round_id = None
    history.rounds.pop(line.round_id, None)
    history.versions.pop(line.round_id, None)
    history.unsaved.discard(line.round_id)
    history.unreleased.discard(line.round_id)


HANDLERS: dict[str, Callable[[History, Line], None]] = {
    "opened": on_opened,
    "issued": on_issued,
    "own": on_own,
    "admitted": on_admitted,
    "ready": on_ready,
    "dropped": on_dropped,
    "retry": on_retry,
    "leased": on_leased,
    "leased_again": on_leased_again,
    "trained": on_trained,
    "released": on_released,
    "durable": on_durable,
    "restored": on_restored,
    "replay": on_replay,
    "loosened": on_loosened,
}
