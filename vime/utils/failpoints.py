"""Named places where a fault test ends, stops or holds the process that passes. Off unless the environment arms one.

    VIME_FAILPOINTS=trainer.optimizer:2:kill     the second pass of a process kills it; several are joined by commas
    VIME_FAILPOINTS_DIR=DIR                      where a note is made, first of all, that a point fires

With VIME_FAILPOINTS_DIR alone, the file DIR/armed arms points in the same format, and may be replaced while the
processes run: passes count from then. A pass then costs one look at that file.

A note is a file that only one process can make. So a point fires once in DIR, whichever rank gets there first, and a
run that was killed by it continues when it is started again. `hold` waits for a file beside the note with the suffix
`.go`; meanwhile a test may do anything to any other process. When nothing is armed a pass costs one dict lookup.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

ARMED, DIRECTORY = "VIME_FAILPOINTS", "VIME_FAILPOINTS_DIR"
ARMED_FILE = "armed"
HOLD_S = 120.0
POLL_S = 0.02
EXIT_CODE = 70


class Point(StrEnum):
    """Every failpoint. Its name begins with the process that passes it; the text says what is done and what is not
    yet."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Point:
        point = str.__new__(cls, name)
        point._value_, point.meaning = name, meaning
        return point

    ISSUE = "manager.issue", "the ledger has issued prompts, generation has not begun"
    GENERATE = "manager.generate", "a group is about to be sent to the router"
    REWARD = "manager.reward", "a completion is there and has no reward"
    SPOOL = "manager.spool", "a group is scored and kept, its payload is nowhere"
    SPOOLED = "manager.spooled", "its payload is in the spool, not in the queue"
    COMMIT = "manager.commit", "its payload is stored, the ledger does not know"
    COMMITTED = "manager.committed", "the ledger shows it, the producer continues"
    KEEP = "manager.keep", "what a stop left of a group is in the spool, the ledger does not know"
    LEASE = "manager.lease", "a round is to be leased"
    LEASED = "manager.leased", "a round is leased, its facts are not read"
    CONVERT = "manager.convert", "every group of a round is scored and stored, none is planned"
    PUT = "manager.put", "a round is planned, and has no ticket"
    PUT_HALF = "manager.put.half", "its rows are in the queue, nobody has looked whether they can be seen"
    STORED = "manager.stored", "a round is stored and has its ticket, the driver does not know"
    FETCH = "trainer.fetch", "a rank has its ticket and no rows"
    FORWARD = "trainer.forward", "a rank has its rows, the model has seen none"
    OPTIMIZER = "trainer.optimizer", "gradients are complete, no weight has changed"
    STEPPED = "trainer.stepped", "the weights of a step have changed, no other process knows"
    SAVE = "trainer.save", "a rank has written its part of a checkpoint, the metadata is missing"
    PAUSE = "trainer.publish.pause", "new weights are to be published, every engine still generates"
    SEND = "trainer.publish.send", "a bucket of new weights is filled, no engine has been asked to take it"
    CONFIRM = "trainer.publish.confirm", "every engine reports what it has loaded, not compared yet, all are paused"
    CONFIRMED = "trainer.publish.confirmed", "every engine has confirmed, all are paused"
    LEDGER_COMMIT = "ledger.commit", "a commit is in the ledger's file, the call has not returned"
    TRAINED = "driver.trained", "every rank has trained a round, the ledger does not know"
    CLEAR = "driver.clear", "a round is trained, the queue still holds it"
    DRAFT = "driver.checkpoint.draft", "the ranks are about to write a checkpoint"
    WRITTEN = "driver.checkpoint.written", "a checkpoint is written, its directory has no name yet"
    RENAMED = "driver.checkpoint.renamed", "it has its name, the marker names the previous one"
    MARKED = "driver.checkpoint.marked", "the marker names it, the previous one is not removed yet"
    DURABLE = "driver.durable", "a checkpoint is the latest, the ledger does not know"
    COMPACT = "driver.compact", "its rounds are durable, the spool still holds them"
    RELEASE = "driver.release", "the engines generate with new weights, the ledger does not know"
    RELEASED = "driver.released", "the ledger knows, the round's metrics are not written"
    STOP = "driver.stop", "the last round is over, every part still runs"


class Action(StrEnum):
    """What happens to the process that passes."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP: alive, and it does nothing
    EXIT = "exit"  # at once, with EXIT_CODE, without clean-up
    RAISE = "raise"  # FailpointError
    HOLD = "hold"  # waits for the go-ahead, HOLD_S at most


class FailpointError(RuntimeError):
    """Raised by an armed failpoint with the action `raise`."""


class Failpoint:
    """One armed point in one process."""

    def __init__(self, point: Point, count: int, action: Action, directory: Path) -> None:
        self.point, self.count, self.action = point, count, action
        self.note = directory / f"{point}.{count}"
        self._passes = 0
        self._lock = threading.Lock()

    def meet(self) -> None:
        """Pass the point once. Safe from any thread."""
        with self._lock:
            self._passes += 1
            is_due = self._passes == self.count
        if is_due and self._note():
            self._act()

    def _note(self) -> bool:
        """Whether this process is the one that fires."""
        self.note.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(self.note, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(file, "w") as note:
            json.dump({"pid": os.getpid(), "action": self.action, "t": time.time()}, note)
        return True

    def _act(self) -> None:
        if self.action is Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action is Action.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action is Action.EXIT:
            os._exit(EXIT_CODE)
        elif self.action is Action.RAISE:
            raise FailpointError(f"failpoint {self.point}, pass {self.count}: {self.point.meaning}")
        else:
            self._hold()

    def _hold(self) -> None:
        go, ends = go_ahead(self.note), time.monotonic() + HOLD_S
        while not go.exists():
            if time.monotonic() > ends:
                raise FailpointError(f"held at failpoint {self.point} for {HOLD_S:g} s, and {go} was not made")
            time.sleep(POLL_S)


def go_ahead(note: Path) -> Path:
    """Return the file that ends a hold."""
    return note.with_name(f"{note.name}.go")


def read_armed(environment: Mapping[str, str]) -> dict[str, Failpoint]:
    """Return the points that `environment` arms, by name. ValueError for what cannot be read, also for unknown
    names."""
    armed: dict[str, Failpoint] = {}
    points = {str(point): point for point in Point}
    text = environment.get(ARMED, "")
    if text and not environment.get(DIRECTORY):
        raise ValueError(f"{ARMED}={text!r} needs {DIRECTORY}, a directory to note what has fired. Set it.")
    for entry in filter(None, text.split(",")):
        name, _, rest = entry.partition(":")
        count, _, action = rest.partition(":")
        if name not in points:
            raise ValueError(f"{ARMED}: no failpoint is called {name!r}; expected one of {', '.join(Point)}.")
        if name in armed:
            raise ValueError(f"{ARMED}: {name} is there twice. Arm one pass of it at a time.")
        if not count.isdigit() or int(count) < 1 or action not in {str(known) for known in Action}:
            raise ValueError(
                f"{ARMED}: got {entry!r}, expected NAME:PASS:ACTION, with an action of {', '.join(Action)}."
            )
        armed[name] = Failpoint(points[name], int(count), Action(action), Path(environment[DIRECTORY]))
    return armed


class ArmedFile:
    """Return what DIR/armed arms now: nothing while it is not there."""

    def __init__(self, directory: Path) -> None:
        self._path, self._lock = directory / ARMED_FILE, threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._armed: dict[str, Failpoint] = {}

    def get(self, point: Point) -> Failpoint | None:
        with self._lock:
            try:
                found = self._path.stat()
            except FileNotFoundError:
                return None
            if self._seen != (found.st_ino, found.st_mtime_ns):
                self._armed = read_armed({ARMED: self._path.read_text(), DIRECTORY: str(self._path.parent)})
                self._seen = (found.st_ino, found.st_mtime_ns)
            return self._armed.get(point)


def arm(directory: Path, text: str) -> None:
    """Write `text` to DIR/armed at once, and remove the notes of the points that it names: they may fire again."""
    for failpoint_ in read_armed({ARMED: text, DIRECTORY: str(directory)}).values():
        failpoint_.note.unlink(missing_ok=True)
        go_ahead(failpoint_.note).unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f"{ARMED_FILE}.draft"
    draft.write_text(text)
    draft.rename(directory / ARMED_FILE)


def failpoint(point: Point) -> None:
    """Pass `point`."""
    armed = _ARMED.get(point)
    if armed is not None:
        armed.meet()


def check_armed() -> None:
    """Raise ValueError when the environment arms an unknown point. For the driver, before it starts anything: the other
    processes inherit its environment."""
    read_armed(os.environ)


def _of_this_process() -> Mapping[str, Failpoint] | ArmedFile:
    if os.environ.get(DIRECTORY) and not os.environ.get(ARMED):
        return ArmedFile(Path(os.environ[DIRECTORY]))
    try:
        return read_armed(os.environ)
    except ValueError:  # the driver's `check_armed` reports it to the user
        return {}


_ARMED = _of_this_process()
