"""A real process is killed (SIGKILL) while it saves: what is found afterwards is the checkpoint before or the new one,
whole, and the next save works."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoint_writer import KEEP, content, save
from vime.ray.checkpoint import PARTIAL, find_latest

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 300.0  # of one test, against a hang; 2 s are usual, 10 on a busy machine
NUM_KILLS = 40


class Writer:
    """The process of tests/helpers/checkpoint_writer.py, which forks one child for each request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.checkpoint_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            bufsize=0,
            start_new_session=True,
        )
        self.deadline = time.monotonic() + DEADLINE_S

    def ask(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, self.deadline - time.monotonic()))
        assert ready, f"no answer from the writing process within {DEADLINE_S} s"
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    os.killpg(writer.process.pid, signal.SIGKILL)  # the writing process and its child, if one still saves
    writer.process.communicate(timeout=DEADLINE_S)


def found(root: Path) -> tuple[int, str] | None:
    latest = find_latest(root)
    return content(latest) if latest is not None else None


def leftovers(root: Path) -> list[Path]:
    return list(root.glob(f"{PARTIAL}*"))


@pytest.mark.parametrize(
    ("saved_before", "rollout_id", "is_async"),
    [
        pytest.param([], 0, False, id="first save"),
        pytest.param([1, 2], 3, False, id="new round, one to remove"),
        pytest.param([1, 2], 2, False, id="the latest round again"),
        pytest.param([1, 2], 3, True, id="in the background"),
    ],
)
def test_before_every_step_of_a_save_a_kill_leaves_the_old_or_the_new_one(
    saved_before: list[int], rollout_id: int, is_async: bool, writer: Writer, tmp_path: Path
) -> None:
    template, root = tmp_path / "template", tmp_path / "root"
    template.mkdir()
    for earlier in saved_before:
        save(template, earlier)
    old = found(template)
    is_new, had_leftovers, was_killed = [], [], True
    while was_killed:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        writer.ask(root=str(root), rollout_id=rollout_id, kill_at=len(is_new) + 1, is_async=is_async)
        reply = writer.answer()
        assert reply["code"] in (0, -signal.SIGKILL)
        was_killed = reply["was_killed"]
        now = found(root)
        assert now == old or (now is not None and now[0] == rollout_id)
        is_new.append(now != old)
        had_leftovers.append(bool(leftovers(root)))
        save(root, rollout_id + 1)  # whatever was left does not hinder the next save, which cleans up
        after = found(root)
        assert after is not None
        assert after[0] == rollout_id + 1
        assert not leftovers(root)
        assert len(list(root.glob("iter_*"))) <= KEEP
    # 2 files in 2 directories, each made, hashed and flushed, are 10 steps alone; one rename is the whole difference
    # between the old and the new one
    assert len(is_new) > 15
    assert is_new == sorted(is_new)
    assert not is_new[0]
    assert is_new[-1]
    assert any(had_leftovers)
    assert not had_leftovers[-1]


def seconds_of_a_save(root: Path) -> float:
    """On this disk, now: so that kills fall into saves on a slow one as on a fast one."""
    started = time.monotonic()
    for rollout_id in range(4):
        save(root, rollout_id)
    return (time.monotonic() - started) / 4


def test_kills_at_any_time_lose_at_most_the_save_that_was_running(writer: Writer, tmp_path: Path) -> None:
    seeded, root, save_s = random.Random(5), tmp_path / "root", seconds_of_a_save(tmp_path / "timed")
    rounds, num_torn, longest_s = [-1], 0, 3 * save_s
    for _ in range(NUM_KILLS):
        writer.ask(root=str(root))
        pid = writer.answer()["pid"]
        time.sleep(seeded.uniform(0.0, longest_s))  # the point of the kill, not a wait for something
        os.kill(pid, signal.SIGKILL)
        assert writer.answer()["was_killed"]
        now = found(root)
        rounds.append(now[0] if now is not None else -1)
        # The machine may be busier than when the save was timed: the writer gets longer until it comes to an end.
        longest_s *= 1.3 if rounds[-1] == rounds[-2] else 0.9
        num_torn += bool(leftovers(root))
    assert rounds == sorted(rounds)
    assert rounds[-1] > 0
    assert num_torn > 0
    save(root, rounds[-1] + 1)
    assert len(list(root.glob("iter_*"))) == KEEP
    assert not leftovers(root)
