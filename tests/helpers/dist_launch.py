"""Run one function in several processes that meet through torch.distributed, with a hard deadline.

    results = launch("tests.helpers.megatron_worker:run", world_size=4, directory=..., arguments={...}, deadline_s=200)

Each process gets a `Ranks` as the first argument and its answer is pickled back. When one fails, its traceback is
shown and the others are ended: a test never waits for a collective whose peer is gone. Start-up (imports) dominates, so
one launch should do the work of many tests.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.utils.network import free_port

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05


@dataclass
class Ranks:
    """Who this process is. `rendezvous` gives a fresh port on each call, the same on all ranks of a group."""

    rank: int
    world_size: int
    directory: Path
    deadline: float  # time.time()
    _calls: dict[str, int] = field(default_factory=dict)

    def rendezvous(self, group: str) -> int:
        """A free port chosen by rank 0 for its next meeting under the name `group`."""
        number = self._calls.get(group, 0)
        self._calls[group] = number + 1
        file = self.directory / f"port-{group}-{number}"
        if self.rank == 0:
            partial = file.with_suffix(".partial")
            partial.write_text(str(free_port()))
            partial.rename(file)
        while not file.exists():
            if time.time() > self.deadline:
                raise TimeoutError(f"rank {self.rank} waited for rank 0 to name a port for {group}")
            time.sleep(POLL_S)
        return int(file.read_text())


def launch(
    target: str,
    *,
    world_size: int,
    directory: Path,
    arguments: Mapping[str, Any],
    deadline_s: float,
    killed: frozenset[int] = frozenset(),
) -> list[Any]:
    """Answers of `function(Ranks, **arguments)`, by rank. `target` is "package.module:function". Ranks in `killed` must
    end by SIGKILL; their answer is None."""
    directory.mkdir(parents=True, exist_ok=True)
    job = directory / "job.pkl"
    deadline = time.time() + deadline_s
    job.write_bytes(pickle.dumps((target, world_size, deadline, dict(arguments))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    children = []
    try:
        for rank in range(world_size):
            log = (directory / f"log-{rank}.txt").open("wb")
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.helpers.dist_launch", str(job), str(rank)],
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=ROOT,
                )
            )
            log.close()
        _wait(children, directory, deadline, killed)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
    return [
        None if rank in killed else pickle.loads((directory / f"result-{rank}.pkl").read_bytes())
        for rank in range(world_size)
    ]


def _wait(children: list[subprocess.Popen[bytes]], directory: Path, deadline: float, killed: frozenset[int]) -> None:
    expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(len(children))]
    while True:
        codes = [child.poll() for child in children]
        if any(code not in (None, good) for code, good in zip(codes, expected, strict=True)):
            time.sleep(1.0)  # let the rank that failed first finish writing why; its peers may fail after it
            raise AssertionError(_report(directory, codes))
        if codes == expected:
            return
        if time.time() > deadline:
            raise AssertionError("deadline reached\n" + _report(directory, codes))
        time.sleep(POLL_S)


def _report(directory: Path, codes: list[int | None]) -> str:
    lines = [f"exit codes by rank (None: still running): {codes}"]
    for rank, code in enumerate(codes):
        error = directory / f"error-{rank}.txt"
        if error.exists():
            lines.append(f"--- rank {rank} raised\n{error.read_text()}")
        elif code != 0:
            tail = (directory / f"log-{rank}.txt").read_text(errors="replace")[-3000:]
            lines.append(f"--- rank {rank}, last output\n{tail}")
    return "\n".join(lines)


def _child(job: Path, rank: int) -> None:
    directory = job.parent
    try:
        target, world_size, deadline, arguments = pickle.loads(job.read_bytes())
        module, _, function = target.partition(":")
        ranks = Ranks(rank=rank, world_size=world_size, directory=directory, deadline=deadline)
        answer = getattr(importlib.import_module(module), function)(ranks, **arguments)
        (directory / f"result-{rank}.pkl").write_bytes(pickle.dumps(answer))
        code = 0
    except BaseException:  # boundary: the traceback goes to the test, which shows it
        (directory / f"error-{rank}.txt").write_text(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: a broken process group could hang in it


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]))
