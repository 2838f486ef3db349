"""One run that is killed on purpose and started again until it is complete, and what became of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vime.cli.chaos_faults import BETWEEN_LIVES, FAULTS, HUNG_S, STOPPED_S, How, fill_disk
from vime.cli.chaos_members import POLL_S, Members
from vime.handoff.ledger_types import LEDGER_NAME
from vime.handoff.receipts import RECEIPTS_NAME
from vime.observability.events import Event, EventKind, read_events
from vime.observability.metrics import METRICS_FILE, VERSION, read_metrics
from vime.types import WaitTimeoutError
from vime.utils.failpoints import ARMED, DIRECTORY, Action, Point, arm, go_ahead

END_GRACE_S = 30.0
"""Seconds for what a killed driver leaves to end by itself."""
AUDIT_S = 300
MORE_RESTARTS = 3  # than kills
KEPT, EQUAL, WHOLE = "kept", "equal", "whole"
NOT_REACHED = "(not reached)"
PATIENCE_S, LOOK_S = 15.0, 0.3
SAID = 90  # characters of an error
LIVES_ON = 2  # rounds trained after a kill: then it ended nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of all runs."""

    out: Path
    script: str
    flags: tuple[str, ...]
    deadline_s: float
    has_own_weights: bool = False  # what is trained depends on time: attempts of one run are compared with each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hit `target`, or several joined by `+` at once, in the phase of `point` at its pass number `count`; or `after_s`
    seconds after the start or the previous hit; or, with `is_at_work`, after the engines next have their first weights:
    a start takes longer than any round, so most hits would fall there. `draw`, from 0 to 1, chooses among several
    processes. Without a point a missing target is waited for PATIENCE_S, and then another is hit."""

    target: str
    draw: float = 0.0
    point: Point | None = None
    count: int = 1
    after_s: float = 0.0
    is_at_work: bool = False
    how: How = How.KILL

    @property
    def victims(self) -> list[str]:
        """Return the names of the processes to hit."""
        return ["driver" if name in BETWEEN_LIVES else name for name in self.target.split("+")]

    def __str__(self) -> str:
        how = "" if self.how is How.KILL else f"/{self.how}"
        where = f"{'work' if self.is_at_work else 'start'}+{self.after_s:.1f}s"
        return f"{self.target}@{where if self.point is None else f'{self.point}:{self.count}'}{how}"


@dataclass(slots=True, kw_only=True)
class Strike:
    """One case: what was hit, and how the run continued."""

    case: Case
    hit: str = NOT_REACHED  # names of the processes; in brackets why there was none
    then: str = "-"
    log_bytes: int = 0  # bytes of the driver's event log at that moment

    @property
    def is_hit(self) -> bool:
        return not self.hit.startswith("(")

    def __str__(self) -> str:
        return f"{self.case}{'' if self.hit == self.case.target else ' ' + self.hit}"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of one run."""

    strikes: list[Strike] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # exit code of each attempt; negative: ended by that signal
    left: list[str] = field(default_factory=list)  # what did not end by itself
    audit: str = "-"
    weights: str = "-"  # of every published version, compared with the undisturbed run's
    metrics: str = "-"  # whether each round has its line
    save_interval: int = 1  # rounds
    num_restarts: int = 0  # by the run itself, and by a new command
    seconds: float = 0.0

    @property
    def num_kills(self) -> int:
        return sum(strike.is_hit for strike in self.strikes)

    @property
    def is_good(self) -> bool:
        is_told = self.audit in ("-", KEPT) and self.metrics in ("-", WHOLE)
        return self.codes[-1:] == [0] and not self.left and is_told and self.weights == EQUAL


class ChaosRun:
    """A run directory and every attempt to complete it. `expected`: content hash by version; None records them."""

    def __init__(self, plan: Plan, name: str, *, expected: Mapping[int, str] | None, save_interval: int = 1) -> None:
        self._plan, self._expected, self._save_interval = plan, expected, save_interval
        self.directory = plan.out / name
        self.log = plan.out / f"{name}.out"
        self._notes = plan.out / f"{name}.failpoints"
        self._members = Members()
        self._process: subprocess.Popen[bytes]
        self._undo: list[tuple[float, Callable[[], object]]] = []  # from when on, and what
        self._between_lives: list[str] = []  # what is still to be done
        self.hashes: dict[int, str] = {}

    @property
    def _driver_events(self) -> Path:
        return self.directory / "events" / "driver.jsonl"

    def complete(self, cases: Sequence[Case] = ()) -> Outcome:
        """Start it, kill it as in `cases`, one after the other, and start it again when it ended, until it is
        complete."""
        started, waiting = time.monotonic(), list(cases)
        outcome = Outcome(save_interval=self._save_interval)
        self._plan.out.mkdir(parents=True, exist_ok=True)
        while outcome.codes[-1:] != [0] and len(outcome.codes) <= len(cases) + MORE_RESTARTS and not outcome.left:
            first_of_attempt = len(outcome.strikes)
            try:
                self._start(waiting)
                while waiting and (strike := self._strike(waiting[0])) is not None:
                    outcome.strikes.append(strike)
                    del waiting[0]
                outcome.codes.append(self._wait_for_end())
                outcome.left = self._members.wait_until_gone(END_GRACE_S)
            except WaitTimeoutError as error:
                outcome.left = [str(error)]
            finally:
                self._members.kill()
                self._mend(float("inf"))
                self._process.wait(END_GRACE_S)
            for fault in self._between_lives[:]:
                if (directory := BETWEEN_LIVES[fault](self.directory)) is not None:
                    self.directory = directory
                    self._between_lives.remove(fault)
            self._explain(outcome.strikes[first_of_attempt:], outcome.codes[-1] if outcome.codes else 0)
        outcome.strikes += [Strike(case=case) for case in waiting]
        outcome.seconds = time.monotonic() - started
        outcome.weights, outcome.audit = self._compare(), _audit(self.directory, self.log)
        outcome.metrics = _count_lines(self.directory, max(self.hashes, default=0))
        outcome.num_restarts = len(outcome.codes) - 1 + len(_events(self.directory, EventKind.RUN_RESTARTED))
        return outcome

    def _explain(self, strikes: Sequence[Strike], code: int) -> None:
        """Record how the run continued after each of an attempt's strikes; the attempt ended with `code`."""
        log = self._driver_events.read_bytes() if self._driver_events.exists() else b""
        for strike, after in itertools.zip_longest(strikes, strikes[1:]):
            between = log[strike.log_bytes : None if after is None else after.log_bytes].splitlines()
            restarts = [line for line in between if b'"run_restarted"' in line]
            strike.then = "continued"
            if restarts:
                strike.then = f"restarted itself: {_error(restarts[0])}"
            elif after is None and code:
                strike.then = f"ended with {code}, was started again"
            elif after is not None and sum(b'"round_trained"' in line for line in between) < LIVES_ON:
                strike.then = "the next kill came before any effect was seen"

    def _start(self, waiting: Sequence[Case]) -> None:
        checkpoints = str(self.directory / "checkpoints")
        is_torn = "spool" in [*self._between_lives, *(case.target for case in waiting)]
        own = [] if not is_torn else ["--transferqueue-fsync", "never"]  # else what was stored may not be lost
        own += ["--run-dir", str(self.directory), "--load", checkpoints, "--save", checkpoints]
        own += ["--save-interval", str(self._save_interval)]
        environment = {**os.environ, **self._members.environment, "PYTHONUNBUFFERED": "1", DIRECTORY: str(self._notes)}
        environment.pop(ARMED, None)
        self._armed: Case | None = None
        self._arm(waiting[0] if waiting else None)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, self._plan.script, *own, *self._plan.flags],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._note_time()
        self._ends = self._since + self._plan.deadline_s * (1 + len(waiting))

    def _strike(self, case: Case) -> Strike | None:
        """Send the signal at its moment. None when the attempt ended before."""
        note = self._notes / f"{case.point}.{case.count}"
        while not self._is_due(case, note):
            if self._is_over(f"{case} to be due"):
                return None
        strike = Strike(case=case, log_bytes=_size(self._driver_events))
        try:
            strike.hit = self._hit(case)
        finally:
            self._note_time()
            if case.point is not None:
                go_ahead(note).touch()
        return strike

    def _hit(self, case: Case) -> str:
        """Return what was hit, or in brackets why nothing was."""
        if case.target == "disk":
            self._undo.append((time.monotonic() + STOPPED_S, fill_disk(self._plan.out)))
            return case.target
        if case.target in BETWEEN_LIVES:
            self._between_lives.append(case.target)
        there = self._members.find(self._process.pid)
        names = [name for name in case.victims if name in there]
        if not names and case.point is None:
            names = list(there)[int(case.draw * len(there)) :][:1]
        if not names:
            return "(was not there)"
        hit = []
        for name in names:
            victim = there[name][int(case.draw * len(there[name]))]
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL if case.how is How.KILL else signal.SIGSTOP)
                hit.append(name)
            if case.how is not How.KILL:
                after_s, action = (STOPPED_S, victim.resume) if case.how is How.STOP else (HUNG_S, victim.kill)
                self._undo.append((time.monotonic() + after_s, action))
        if not hit:
            return "(had just ended)"
        return case.target if case.target in FAULTS else "+".join(hit)

    def _mend(self, now: float) -> None:
        """Undo what was to last until `now`."""
        for entry in [entry for entry in self._undo if entry[0] < now]:
            self._undo.remove(entry)
            with contextlib.suppress(psutil.NoSuchProcess):
                entry[1]()

    def _note_time(self) -> None:
        """Return the moment from which the next kill counts, and the size of the driver's log by then."""
        self._since, self._log_bytes, self._has_news = time.monotonic(), _size(self._driver_events), 0
        self._at_work: float | None = None

    def _is_due(self, case: Case, note: Path) -> bool:
        self._hear()
        if case.point is not None:
            if self._armed is not case and self._at_work is not None:
                self._arm(case)
            return self._armed is case and note.exists()
        begin, now = self._at_work if case.is_at_work else self._since, time.monotonic()
        if begin is None or now < begin + case.after_s:
            return False
        if case.victims == ["driver"] or case.is_at_work or now > begin + case.after_s + PATIENCE_S:
            return True
        time.sleep(LOOK_S)  # looking at every process of the machine takes a while
        return set(case.victims) <= set(self._members.find(self._process.pid))

    def _hear(self) -> None:
        """Whether the run is at work since the last strike: its engines got their first weights, or it trained rounds
        anyway. Before that no point is armed: the remains of the struck attempt could pass it."""
        size = _size(self._driver_events)
        if size == self._has_news or self._at_work is not None:
            return
        self._has_news = size
        with self._driver_events.open("rb") as events:
            events.seek(self._log_bytes)
            news = events.read()
        if b'"first_weights"' in news or news.count(b'"round_trained"') >= LIVES_ON:
            self._at_work = time.monotonic()

    def _arm(self, case: Case | None) -> None:
        self._armed = case
        arm(self._notes, "" if case is None or case.point is None else f"{case.point}:{case.count}:{Action.HOLD}")

    def _is_over(self, name: str) -> bool:
        """Whether the attempt has ended; waits a moment."""
        if time.monotonic() > self._ends:
            raise WaitTimeoutError(name, self._plan.deadline_s, "the run", f"Raise --deadline, or see {self.log}.")
        self._mend(time.monotonic())
        time.sleep(POLL_S)
        return self._process.poll() is not None

    def _wait_for_end(self) -> int:
        while not self._is_over("the end of an attempt"):
            pass
        return self._process.wait()

    def _compare(self) -> str:
        """Check that every version that any attempt published has one content, the expected one, and that the last is
        there."""
        learns = self._expected is None or self._plan.has_own_weights
        for event in _events(self.directory, EventKind.WEIGHTS_CONFIRMED):
            version, content = int(str(event.fields["version"])), str(event.fields["content_hash"])
            known = self.hashes if learns else self._expected or {}
            if content != known.get(version, content if learns else None):
                return f"version {version} is another"
            self.hashes[version] = content
        if self._expected is not None and max(self._expected) not in self.hashes:
            return f"version {max(self._expected)} is missing"
        return EQUAL


def _audit(run_dir: Path, output: Path) -> str:
    if not any((run_dir / name).exists() for name in (RECEIPTS_NAME, LEDGER_NAME)):
        return "-"
    command = [sys.executable, "-m", "vime", "audit", str(run_dir)]
    with output.open("ab") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=AUDIT_S, check=False)
    return KEPT if done.returncode == 0 else "BROKEN"


def _count_lines(run_dir: Path, num_rounds: int) -> str:
    """Whether each round has its line of metrics."""
    if not (run_dir / METRICS_FILE).exists():
        return "-"
    written = read_metrics(run_dir)
    missing = [number for number in range(num_rounds) if VERSION not in written.get(number, {})]
    return f"without rounds {missing}" if missing else WHOLE


def _error(line: bytes) -> str:
    """The first line of an event's error, also when a full disk cut the event off."""
    with contextlib.suppress(ValueError):
        return str(json.loads(line)["error"]).splitlines()[0][:SAID]
    return "(its event was cut off)"


def published(run_dir: Path) -> dict[int, str]:
    """Content hash by version of a run that was never killed."""
    events = _events(run_dir, EventKind.WEIGHTS_CONFIRMED)
    return {int(str(event.fields["version"])): str(event.fields["content_hash"]) for event in events}


def _events(run_dir: Path, kind: EventKind) -> list[Event]:
    events = read_events(run_dir) if (run_dir / "events").is_dir() else []
    return [event for event in events if event.kind == kind]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
