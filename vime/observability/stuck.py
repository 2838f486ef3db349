"""Who blocks a run: the graph of waits, followed from the driver to the party that makes no progress.

A process's wait names its owners; their own waits lead further, until a process that is dead, stopped or silent, one
that works or idles, a cycle, or something that is not a process of the run. `explain` reads a run, `judge` is the pure
part. Used by `vime why-stuck` and by the driver's own deadlines.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from pathlib import Path

from vime.observability.events import outcome, read_events
from vime.observability.waits import RunProcess, SeenWait, State, read_run
from vime.types import DataError
from vime.utils.waits import AGENT, CLIENT, JOB, NO_NODE, STARTS_AGAIN

SAMPLE_S = 0.5
PATIENCE_S = 30.0
"""Seconds that a wait may lead to no progress (its owner idles, has not begun, or waits back) before it is stuck."""
OVERDUE_S = 2.0
GONE_BEFORE_S = 12.0
"""A process last seen this long before the driver did not die with it: files are touched every 5 s."""
GONE_SHARE = 0.5
"""Part of a lease that a job outside may be silent: it is to send a heartbeat every quarter, so it missed two."""
ROOT = "driver"
AWAY = {
    STARTS_AGAIN: "is lost and starts again since {age_s:.0f} s",
    NO_NODE: "is lost, and no node of the cluster has room for it since {age_s:.0f} s",
}
"""What is said of a lost part, by how the driver's work begins."""


class Kind(IntEnum):
    """How a chain of waits ends; of several chains the lowest explains the run."""

    DEAD = auto()
    STOPPED = auto()
    SILENT = auto()
    OVERDUE = auto()  # past a deadline that should have ended it
    ABSENT = auto()  # no known process matches the owner
    BUSY = auto()
    WITHIN = auto()  # waits for something in itself, which has a deadline
    OUTSIDE = auto()  # the owner is not a process of the run, and has a deadline
    CIRCLE = auto()  # all of them wait only for each other
    IDLE = auto()  # neither waits nor computes
    PROGRAM = auto()  # the owner is a program of others, which works or not, and has a deadline


STUCK_AT_ONCE = (Kind.DEAD, Kind.STOPPED, Kind.SILENT, Kind.OVERDUE)
STUCK_AFTER_PATIENCE = (Kind.CIRCLE, Kind.ABSENT, Kind.IDLE)
_OF_STATE = {State.DEAD: Kind.DEAD, State.STOPPED: Kind.STOPPED, State.SILENT: Kind.SILENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """From the driver through `links` (who waits, for what) to `end`: a process, or the name of something else."""

    links: tuple[tuple[RunProcess, SeenWait], ...]
    end: RunProcess | str
    kind: Kind

    @property
    def age_s(self) -> float:
        """Return how long the last of them has waited; in a cycle, since it closed."""
        ages = [wait.age_s for _, wait in self.links] or [0.0]
        if self.kind is Kind.CIRCLE:
            return min(ages[next(at for at, (process, _) in enumerate(self.links) if process is self.end) :])
        return ages[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`line` names the blocking party."""

    is_stuck: bool  # or the run died
    line: str
    processes: tuple[RunProcess, ...]


def explain(run_dir: Path, *, sample_s: float = SAMPLE_S) -> Verdict:
    """Read a live or dead run. DataError when nothing in `run_dir` says what its processes waited for."""
    processes = read_run(run_dir, sample_s=sample_s)
    if not any(process.name == ROOT for process in processes):
        raise DataError(
            f"{run_dir}: no process has said what it waits for. Expected files in {run_dir / 'waits'}, which a run "
            "writes from its first second on; this one never began, or an older Vime made it."
        )
    return judge(processes, outcome(read_events(run_dir, ROOT, with_spans=False)))


def judge(processes: Sequence[RunProcess], ended: str) -> Verdict:
    """`ended`: "finished", "failed: why", or "not finished", as the driver's events have it."""
    driver = next(process for process in processes if process.name == ROOT)
    away = {
        work.name.removeprefix(begin): how.format(age_s=work.age_s)
        for work in driver.work
        for begin, how in AWAY.items()
        if work.name.startswith(begin)
    }
    if away and driver.state is not State.DEAD:  # nobody waits for them: others do their work
        found = _judged([process for process in processes if process.name not in away], ended)
        told = ", ".join(f"{name} {how}" for name, how in away.items())
        return replace(found, line=f"{found.line}; {told}", processes=tuple(processes))
    return _judged(processes, ended)


def _judged(processes: Sequence[RunProcess], ended: str) -> Verdict:
    by_name = {process.name: process for process in processes}
    driver = by_name[ROOT]
    if driver.state is State.DEAD:
        return Verdict(is_stuck=ended != "finished", line=_last_words(by_name, ended), processes=tuple(processes))
    chain = min(_chains(by_name, driver), key=_rank, default=None) or _circle(by_name, driver)
    is_stuck = chain.kind in STUCK_AT_ONCE or (chain.kind in STUCK_AFTER_PATIENCE and chain.age_s >= PATIENCE_S)
    line = _told(chain, by_name)
    unnoticed = [_condition(each) for each in processes if each.state in (State.DEAD, State.STOPPED)]
    unnoticed += _gone_jobs(processes)
    if not is_stuck and unnoticed:
        others = "; ".join(unnoticed)
        return Verdict(is_stuck=True, line=f"{others}; meanwhile {line}", processes=tuple(processes))
    return Verdict(is_stuck=is_stuck, line=line, processes=tuple(processes))


def _rank(chain: Chain) -> tuple[Kind, int, float]:
    """Sort the most informative chain first; of passed deadlines, the innermost."""
    return chain.kind, -len(chain.links) if chain.kind is Kind.OVERDUE else 0, -chain.age_s


class Names:
    """Which processes a name means: `engine-0` one, `engine` every `engine-<number>`; how it is spelled
    (`RolloutManager`, `rollout-manager`) does not matter. Found by look-up, because thousands of ranks may each wait
    for all the others."""

    def __init__(self, processes: Iterable[RunProcess]) -> None:
        self._exact: dict[str, list[RunProcess]] = {}
        self._numbered: dict[str, list[RunProcess]] = {}
        for process in processes:
            name = _plain(process.name)
            self._exact.setdefault(name, []).append(process)
            while name[-1:].isdecimal():
                name = name[:-1]
                self._numbered.setdefault(name, []).append(process)

    def owned_by(self, owner: str, *, but: RunProcess) -> list[RunProcess]:
        """Return the processes that `owner` names. A process does not wait for itself."""
        return [process for process in self._all_of(owner) if process is not but]

    def is_other(self, owner: str, *, than: RunProcess) -> bool:
        """Whether `owner` names any process but `than`."""
        named = self._all_of(owner)
        return len(named) > 1 or (len(named) == 1 and named[0] is not than)

    def _all_of(self, owner: str) -> Sequence[RunProcess]:
        name = _plain(owner)
        return self._exact.get(name, ()) or self._numbered.get(name, ())


def _plain(name: str) -> str:
    return name.lower().replace("-", "")


def _chains(by_name: dict[str, RunProcess], start: RunProcess, *, is_over: bool = False) -> Iterator[Chain]:
    """Shortest first, each process once. `is_over`: everything is dead, and only what it waited for last is of
    interest."""
    names = Names(by_name.values())
    todo: deque[tuple[tuple[tuple[RunProcess, SeenWait], ...], RunProcess]] = deque([((), start)])
    queued = {start.name}
    whole: set[str] = set()  # owners all of whose processes are queued
    while todo:
        links, process = todo.popleft()
        if process.state is not State.ALIVE and not is_over:
            yield Chain(links=links, end=process, kind=_OF_STATE[process.state])
            continue
        steps = [(wait, owner) for wait in process.waits for owner in wait.owners]
        late = next((wait for wait in process.waits if wait.left_s is not None and wait.left_s < -OVERDUE_S), None)
        if late is not None and not is_over:
            yield Chain(links=(*links, (process, late)), end=", ".join(late.owners) or process, kind=Kind.OVERDUE)
        if not steps:
            yield Chain(links=links, end=process, kind=_leaf(process))
        for wait, owner in steps:
            further = (*links, (process, wait))
            if not names.is_other(owner, than=process):
                yield Chain(links=further, end=owner, kind=_outside(owner, wait))
            elif owner not in whole:
                parties = names.owned_by(owner, but=process)
                todo.extend((further, party) for party in parties if party.name not in queued)
                queued.update(party.name for party in parties)
                whole.add(owner)  # `process` itself, if it is one of them, was queued before


def _outside(owner: str, wait: SeenWait) -> Kind:
    """Return how a chain ends whose last owner is no process that is known."""
    if "://" in owner:
        return Kind.OUTSIDE
    return Kind.PROGRAM if owner in (AGENT, CLIENT) and wait.deadline_s is not None else Kind.ABSENT


def _circle(by_name: dict[str, RunProcess], start: RunProcess) -> Chain:
    """Find a cycle when no chain has an end: any path returns to where it was."""
    names, here = Names(by_name.values()), start
    links: list[tuple[RunProcess, SeenWait]] = []
    seen: set[str] = set()
    while here.name not in seen:
        seen.add(here.name)
        wait, following = next(
            (wait, party) for wait in here.waits for owner in wait.owners for party in names.owned_by(owner, but=here)
        )
        links.append((here, wait))
        here = following
    return Chain(links=tuple(links), end=here, kind=Kind.CIRCLE)


def _leaf(process: RunProcess) -> Kind:
    if process.waits:
        return Kind.WITHIN
    return Kind.BUSY if process.is_busy else Kind.IDLE


def _told(chain: Chain, by_name: dict[str, RunProcess]) -> str:
    """Return the chain as one sentence, ending with the blocking party."""
    path = _path(chain)
    end = chain.end
    if chain.kind is Kind.OVERDUE:
        late = chain.links[-1][1]
        return f"{path}, {-(late.left_s or 0):.0f} s past its deadline of {late.deadline_s:g} s, which did not end it"
    if isinstance(end, str):
        is_outside = chain.kind in (Kind.OUTSIDE, Kind.PROGRAM)
        what = "is outside the run" if is_outside else "is no process that has shown itself in this run"
        return f"{path}; {end} {what}"
    if chain.kind is Kind.CIRCLE:
        return f"{path}, which waits for them: a circle"
    if chain.kind is Kind.IDLE and chain.links:
        same = [each.end for each in _chains(by_name, by_name[ROOT]) if each.kind is Kind.IDLE]
        names = ", ".join(process.name for process in same if isinstance(process, RunProcess))
        return f"{path}; {names}: alive, but no wait is known and no CPU is used"
    return f"{path}; {_condition(end)}" if path else _condition(end)


def _path(chain: Chain) -> str:
    """`driver waits 43 s for 'a round of generation' from rollout-manager, which waits ... from engine-0`."""
    parts: list[str] = []
    for at, (process, wait) in enumerate(chain.links):
        following = chain.links[at + 1][0] if at + 1 < len(chain.links) else chain.end
        party = following if isinstance(following, str) else following.name
        source = "" if party == process.name else f" from {party}"
        who = f"{process.name} waits" if not parts else "which waits"
        parts.append(f"{who} {wait.age_s:.0f} s for {quoted(wait)}{source}")
    return ", ".join(parts)


def quoted(wait: SeenWait) -> str:
    """`'a completion'`, or of several `'a completion' (4 of them, the oldest 41 s)`."""
    return f"'{wait.name}'" + (f" ({wait.count} of them, the oldest {wait.age_s:.0f} s)" if wait.count > 1 else "")


def _condition(process: RunProcess) -> str:
    """Say what the process itself works on."""
    if process.state is State.DEAD:
        return f"{process.name} (pid {process.pid}) is DEAD"
    if process.state is not State.ALIVE:
        return f"{process.name} (pid {process.pid}) is {process.state}" + (
            f" ({process.detail})" if process.detail else ""
        )
    if process.waits:
        wait = max(process.waits, key=lambda each: each.age_s)
        return f"{process.name} waits {wait.age_s:.0f} s for {quoted(wait)} in itself"
    if process.work:
        return f"{process.name} has been at '{process.work[-1].name}' for {process.work[-1].age_s:.0f} s"
    return f"{process.name} is at work"


def _gone_jobs(processes: Sequence[RunProcess]) -> list[str]:
    """Say of each job outside that has groups and is silent what it has, when others get them, and what to do."""
    return [
        f"job {owner.removeprefix(JOB)}, outside the run, has {wait.name} and has not been heard of for "
        f"{wait.age_s:.0f} s; its leases end in {max(0.0, wait.deadline_s - wait.age_s):.0f} s, and others get them. "
        "If it is dead, start it again with its token, and they get them at once; `vime producers RUN` shows every job"
        for process in processes
        for wait in process.waits
        for owner in wait.owners
        if owner.startswith(JOB) and wait.deadline_s is not None and wait.age_s > GONE_SHARE * wait.deadline_s
    ]


def _last_words(by_name: dict[str, RunProcess], ended: str) -> str:
    """Return the verdict on a run that is over."""
    driver = by_name[ROOT]
    if ended == "finished":
        return "the run has finished"
    left = [process.name for process in by_name.values() if process.state is not State.DEAD]
    survivors = f" Still there: {', '.join(left)}." if left else ""
    if ended.startswith("failed: "):
        return f"the run has ended: {ended.partition(': ')[2].splitlines()[0]}{survivors}"
    seen = time.strftime("%H:%M:%S", time.localtime(driver.last_seen))
    line = f"the run is dead: driver (pid {driver.pid}) ended without a last word, last seen at {seen}."
    earlier = [process for process in by_name.values() if driver.last_seen - process.last_seen > GONE_BEFORE_S]
    if earlier:
        first = min(earlier, key=lambda process: process.last_seen)
        line += f" {first.name} (pid {first.pid}) was gone {driver.last_seen - first.last_seen:.0f} s before."
    chains = list(_chains(by_name, driver, is_over=True)) or [_circle(by_name, driver)]
    last = max(chains, key=lambda each: (len(each.links), each.age_s))
    if last.links:
        line += f" At the end {_path(last)}."
    if isinstance(last.end, RunProcess) and last.end.work:
        line += f" {last.end.name} was at '{last.end.work[-1].name}'."
    return line + survivors
