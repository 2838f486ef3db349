"""Running train.py as a user does: a process of its own, a deadline, and proof that nothing survived it."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from vime.observability.metrics import read_metrics
from vime.utils.processes import read_processes, tree

ROOT = Path(__file__).resolve().parents[2]
MARK = "VIME_TEST_RUN"
UNREAD = "Unhandled error"
"""What Ray writes on the screen of a run that has thrown such an answer away."""


@dataclass(frozen=True)
class TinyTask:
    """A random two-layer model with its tokenizer, prompts, and a reward that a random model can earn."""

    model: Path
    prompts: Path
    reward: str

    def flags(self) -> list[str]:
        return [
            *("--hf-checkpoint", str(self.model), "--prompt-data", str(self.prompts), "--input-key", "input"),
            *("--label-key", "label", "--custom-rm-path", self.reward, "--device", "cpu"),
            *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "12"),
            *("--rollout-max-context-len", "64", "--micro-batch-size", "8", "--lr", "1e-3"),
        ]


@dataclass(frozen=True)
class Finished:
    """What is left of a run."""

    code: int
    output: str
    run_dir: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._all_events() if event["kind"] == kind]

    def metrics(self) -> dict[int, dict[str, float]]:
        return read_metrics(self.run_dir)

    def confirmed_hashes(self) -> list[str]:
        return [event["content_hash"] for event in self.events("weights_confirmed")]

    def _all_events(self) -> Iterator[dict[str, Any]]:
        for path in sorted((self.run_dir / "events").glob("*.jsonl")):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # the run may be writing its last one
                    yield json.loads(line)


class Training:
    """One running train.py."""

    def __init__(
        self,
        script: str | Sequence[str],
        flags: Sequence[str],
        run_dir: Path,
        *,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`script`: what Python runs, in one or several words. `variables`: of its environment, beside those of this
        process."""
        words = [script] if isinstance(script, str) else script
        self.run_dir, self._mark = run_dir, uuid.uuid4().hex
        self._seen: set[psutil.Process] = set()
        self._log = run_dir.with_suffix(".out")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        ours = {MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = {**os.environ, **ours, **(variables or {})}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words, "--run-dir", str(run_dir), *flags],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_event(self, kind: str, *, count: int = 1, deadline_s: float = 240) -> None:
        """Until the run has logged `count` events of `kind`."""
        ends = time.monotonic() + deadline_s
        while time.monotonic() < ends:
            if len(Finished(0, "", self.run_dir).events(kind)) >= count:
                self._members()  # remembered: what loses its parent by a kill that follows could not be found any more
                return
            if self.process.poll() is not None:
                pytest.fail(f"the run ended with {self.process.returncode} before {kind}:\n{self._log.read_text()}")
            time.sleep(0.1)
        pytest.fail(f"no event {kind} x {count} within {deadline_s} s:\n{self._log.read_text()}")

    def finish(self, deadline_s: float = 560) -> Finished:
        """Wait for the end. The test fails when the run does not end, leaves a process behind or shows an error that it
        has not read."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the run did not end within {deadline_s} s:\n{self._log.read_text()[-4000:]}")
        except BaseException:  # Ctrl-C: the run is of another session and would live on
            self.kill()
            raise
        survivors = self.survivors(grace_s=30)
        self.kill()
        output = self._log.read_text()
        assert not survivors, f"left running: {survivors}\n{output[-2000:]}"
        assert UNREAD not in output, f"an answer of an actor was an error and nobody has read it:\n{output[-8000:]}"
        return Finished(code, output, self.run_dir)

    def survivors(self, grace_s: float) -> list[str]:
        """Processes of this run that are still there after `grace_s`."""
        ends = time.monotonic() + grace_s
        while True:
            alive = [" ".join(command.split()[:4]) for _, command in self._members()]
            if not alive or time.monotonic() > ends:
                return alive
            time.sleep(0.2)

    def kill_member(self, name: str) -> None:
        """SIGKILL the one process of this run whose command line or title has `name` in it."""
        self.member(name).kill()

    def member(self, name: str) -> psutil.Process:
        [found] = self.members(name)
        return found

    def members(self, name: str) -> list[psutil.Process]:
        return [process for process, command in self._members() if name in command]

    def so_far(self) -> Finished:
        """What the run has written until now."""
        return Finished(-1, self._log.read_text(), self.run_dir)

    def kill(self) -> None:
        """End every process of this run and of no other."""
        for process, _ in self._members():
            with_suppressed_absence(process.kill)
        with_suppressed_absence(self.process.kill)
        self.process.wait(60)

    def _members(self) -> list[tuple[psutil.Process, str]]:
        """Each live process of this run with its command line: those with its mark and what they started, which may
        have overwritten the mark with a title, also after it lost its parent. Not by `process_iter`: it remembers
        processes, and leaves out one whose number another had before."""
        table, members = read_processes(), []
        for pid in table:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if pid != os.getpid() and psutil.Process(pid).environ().get(MARK) == self._mark:
                    self._seen |= {psutil.Process(seen.pid) for seen in tree(pid, table)}
        for process in sorted(self._seen, key=lambda seen: seen.pid):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    members.append((process, " ".join(process.cmdline()) or process.name()))
        return members


def with_suppressed_absence(action: Any) -> None:
    try:
        action()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return


def train(
    flags: Sequence[str],
    run_dir: Path,
    *,
    script: str = "train.py",
    deadline_s: float = 560,
    variables: Mapping[str, str] | None = None,
) -> Finished:
    """Run to the end."""
    return Training(script, flags, run_dir, variables=variables).finish(deadline_s)


def interrupt(training: Training, number: signal.Signals = signal.SIGINT) -> None:
    """Ctrl-C (SIGINT) or its end (SIGHUP) as a terminal sends it: to the whole foreground process group."""
    os.killpg(training.process.pid, number)


REWARD = '''"""Reward: the share of response tokens with an even id; a random model earns about half."""


async def even_share(args, sample, **kwargs):
    answer = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in answer) / max(1, len(answer))
'''


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    """The quick start's model and tokenizer without its warm start (seconds instead of a minute)."""
    quickstart = runpy.run_path(str(ROOT / "examples" / "quickstart" / "warm_start.py"))
    directory = tmp_path_factory.mktemp("tiny")
    quickstart["build_model"](0).save_pretrained(directory / "model")
    quickstart["build_tokenizer"]().save_pretrained(directory / "model")
    write_data = runpy.run_path(str(ROOT / "examples" / "quickstart" / "prepare.py"))["write_data"]
    write_data(directory, num_train=64, num_eval=8, seed=0)
    (directory / "reward.py").write_text(REWARD)
    return TinyTask(
        model=directory / "model", prompts=directory / "train.jsonl", reward=f"{directory / 'reward.py'}:even_share"
    )
