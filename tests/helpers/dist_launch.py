"""Run one function in several processes that meet through torch.distributed, with a hard deadline.

    results = launch("tests.helpers.megatron_worker:run", world_size=4, directory=..., arguments={...}, deadline_s=200)

Each process gets a `Ranks` as the first argument and its answer is pickled back. When one fails, its traceback is
shown and the others are ended: a test never waits for a collective whose peer is gone.

One process is started, which forks the ranks. Imports would dominate a launch: what `preload` imports is imported once,
before the fork, for all of them, and for all further launches of the session (`Base`), which are forks of the process
that has it. It may not touch a GPU, which does not survive a fork. Nor do threads: where an import started some (on a
machine with a GPU), each rank is a new process that imports for itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from vime.utils.network import free_port

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
NOT_FOR_RANKS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that change in a session: another in each test, and what torch sets when it is first needed."""


@dataclass
class Ranks:
    """Who this process is."""

    rank: int
    world_size: int
    directory: Path
    deadline: float  # time.time()
    _calls: dict[str, int] = field(default_factory=dict)

    def rendezvous(self, group: str, size: int) -> int:
        """A free port for the next meeting of the first `size` ranks under the name `group`, the same on all of them.
        Chosen by rank 0 when all are here, so that a meeting's own deadline is for the meeting alone."""
        number = self._calls.get(group, 0)
        self._calls[group] = number + 1
        place = self.directory / f"port-{group}-{number}"
        if self.rank == 0:
            for rank in range(1, size):
                self._wait_for(self._of_rank(place, rank))
            _write(place, str(free_port()))
        else:
            _write(self._of_rank(place, self.rank), "here")
            self._wait_for(place)
        return int(place.read_text())

    @staticmethod
    def _of_rank(place: Path, rank: int) -> Path:
        return place.with_name(f"{place.name}-rank-{rank}")

    def _wait_for(self, file: Path) -> None:
        while not file.exists():
            if time.time() > self.deadline:
                raise TimeoutError(f"rank {self.rank} waited for {file.name}")
            time.sleep(POLL_S)


def launch(
    target: str,
    *,
    world_size: int,
    directory: Path,
    arguments: Mapping[str, Any],
    deadline_s: float,
    killed: frozenset[int] = frozenset(),
    preload: str | None = None,
) -> list[Any]:
    """Answers of `function(Ranks, **arguments)`, by rank. `target` and `preload` are "package.module:function". Ranks
    in `killed` must end by SIGKILL; their answer is None."""
    directory.mkdir(parents=True, exist_ok=True)
    job = directory / "job.pkl"
    deadline = time.time() + deadline_s
    job.write_bytes(pickle.dumps((preload, world_size)) + pickle.dumps((target, deadline, dict(arguments))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    for name in NOT_FOR_RANKS:
        environment.pop(name, None)
    base = None if preload is None else _base(preload, environment)
    parent: Parent = _start_parent(job, environment) if base is None else base.fork(job)
    try:
        _wait(parent, directory, deadline, [-signal.SIGKILL if rank in killed else 0 for rank in range(world_size)])
    finally:
        parent.terminate()  # it ends its ranks first
        parent.wait()
    return [
        None if rank in killed else pickle.loads((directory / f"result-{rank}.pkl").read_bytes())
        for rank in range(world_size)
    ]


class Parent(Protocol):
    """The process that forks the ranks and says how each ended."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self) -> int: ...


def _start_parent(job: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with (job.parent / "log.txt").open("wb") as log:
        words = [sys.executable, "-m", "tests.helpers.dist_launch", str(job)]
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment, cwd=ROOT)


class Base:
    """A process that has imported what `preload` names, and forks the parent of each launch that wants it."""

    def __init__(self, preload: str, environment: Mapping[str, str]) -> None:
        words = [sys.executable, "-m", "tests.helpers.dist_launch", "--base", preload]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
        )
        self.can_fork = self._answer() == "one thread"

    def fork(self, job: Path) -> Parent:
        self._ask(str(job))
        return _Forked(self, int(self._answer()))

    def has_ended(self, pid: int, *, is_waited_for: bool) -> bool:
        """Whether a process that it has forked is gone."""
        self._ask(json.dumps([pid, is_waited_for]))
        return self._answer() == "ended"

    def end(self) -> None:
        """It ends when nobody can ask any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            _open(pipe).close()
        self._process.wait()

    def _ask(self, line: str) -> None:
        pipe = _open(self._process.stdin)
        pipe.write(line + "\n")
        pipe.flush()

    def _answer(self) -> str:
        line = _open(self._process.stdout).readline()
        assert line, "the process with the imports of all launches is gone; its last words are in the test's output"
        return line.rstrip()


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@dataclass
class _Forked:
    """A `Parent` that is a fork of a base, which alone can wait for it."""

    base: Base
    pid: int

    def poll(self) -> int | None:
        return 0 if self.base.has_ended(self.pid, is_waited_for=False) else None

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        self.base.has_ended(self.pid, is_waited_for=True)
        return 0


_bases: dict[tuple[str, frozenset[tuple[str, str]]], Base | None] = {}


def _base(preload: str, environment: Mapping[str, str]) -> Base | None:
    """The session's base of these imports and this environment, which they may have read; None where it cannot fork."""
    key = preload, frozenset(environment.items())
    if key not in _bases:
        made = Base(preload, environment)
        _bases[key] = made if made.can_fork else None
        if not made.can_fork:
            made.end()
    return _bases[key]


def pytest_sessionfinish() -> None:
    """Before tests/conftest.py looks for processes that are left."""
    while _bases:
        _, base = _bases.popitem()
        if base is not None:
            base.end()


def _wait(parent: Parent, directory: Path, deadline: float, expected: list[int]) -> None:
    files = [directory / f"code-{rank}" for rank in range(len(expected))]
    while True:
        is_over = parent.poll() is not None  # looked at first: all codes are written by then
        codes = [int(file.read_text()) if file.exists() else None for file in files]
        if codes == expected:
            return
        if is_over or any(code not in (None, good) for code, good in zip(codes, expected, strict=True)):
            time.sleep(1.0)  # let the rank that failed first finish writing why; its peers may fail after it
            raise AssertionError(_report(directory, codes))
        if time.time() > deadline:
            raise AssertionError("deadline reached\n" + _report(directory, codes))
        time.sleep(POLL_S)


def _report(directory: Path, codes: list[int | None]) -> str:
    lines = [f"exit codes by rank (None: still running): {codes}", _last_output(directory / "log.txt")]
    for rank, code in enumerate(codes):
        error = directory / f"error-{rank}.txt"
        if error.exists():
            lines.append(f"--- rank {rank} raised\n{error.read_text()}")
        elif code != 0:
            lines.append(f"--- rank {rank}, last output\n{_last_output(directory / f'log-{rank}.txt')}")
    return "\n".join(lines)


def _last_output(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:] if log.exists() else ""


def _write(file: Path, text: str) -> None:
    """There with all of its text, or not there."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.rename(file)


def _parent(job: Path, *, has_imports: bool = False) -> None:
    """Fork the ranks and write down how each ended; SIGTERM ends them."""
    with job.open("rb") as file:
        preload, world_size = pickle.load(file)
    if preload is not None and not has_imports:
        _function(preload)()
    can_fork = len(list(Path("/proc/self/task").iterdir())) == 1
    ranks: dict[int, int] = {}  # by process id
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in ranks])
    for rank in range(world_size):
        if can_fork:
            pid = os.fork()
            if pid == 0:
                _rank(job, rank)
        else:
            command = [sys.executable, "-m", "tests.helpers.dist_launch", str(job), str(rank)]
            pid = os.posix_spawn(sys.executable, command, os.environ)
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        _write(job.parent / f"code-{ranks.pop(pid)}", str(os.waitstatus_to_exitcode(status)))


def _serve(preload: str) -> None:
    """A line is a job, whose parent's number is answered, or such a number, and answered is whether that has ended.
    The end of the lines is the end of the parents."""
    _function(preload)()
    can_fork = len(list(Path("/proc/self/task").iterdir())) == 1
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    said.write("one thread\n" if can_fork else "threads\n")
    said.flush()
    alive: set[int] = set()
    while line := sys.stdin.readline():
        if line.startswith("["):
            pid, is_waited_for = json.loads(line)
            if pid in alive and os.waitpid(pid, 0 if is_waited_for else os.WNOHANG)[0] == pid:
                alive.remove(pid)
            said.write("alive\n" if pid in alive else "ended\n")
        else:
            pid = os.fork()
            if pid == 0:
                os.close(said.fileno())
                _forked_parent(Path(line.rstrip()))
            alive.add(pid)
            said.write(f"{pid}\n")
        said.flush()
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def _forked_parent(job: Path) -> None:
    try:
        log = os.open(job.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(log, 1), os.dup2(log, 2)
        _parent(job, has_imports=True)
    except BaseException:  # boundary: no way back into the base's loop
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _rank(job: Path, rank: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    directory = job.parent
    log = os.open(directory / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    try:
        with job.open("rb") as file:
            _, world_size = pickle.load(file)
            target, deadline, arguments = pickle.load(file)  # imports what the arguments are made of
        ranks = Ranks(rank=rank, world_size=world_size, directory=directory, deadline=deadline)
        answer = _function(target)(ranks, **arguments)
        (directory / f"result-{rank}.pkl").write_bytes(pickle.dumps(answer))
        code = 0
    except BaseException:  # boundary: the traceback goes to the test, which shows it
        (directory / f"error-{rank}.txt").write_text(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: a broken process group could hang in it


def _function(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--base":
        _serve(sys.argv[2])
    elif len(sys.argv) == 2:
        _parent(Path(sys.argv[1]))
    else:
        _rank(Path(sys.argv[1]), int(sys.argv[2]))
