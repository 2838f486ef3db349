"""--num-rollout-workers through train.py, with real parts: a worker that is killed costs its answers under way."""

import sqlite3
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.helpers.training import Finished, TinyTask, Training
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.handoff.ledger_types import LEDGER_NAME
from vime.handoff.queue_view import read_overview
from vime.observability.claims import read_claims
from vime.rollout.worker import worker_number

ROUNDS = 6
SLOW_REWARD = '''"""A second for each answer, so that a worker that was seen at work has not ended when it is killed."""

import asyncio


async def reward(args, sample, **kwargs):
    await asyncio.sleep(1.0)
    return float(len(set(sample.tokens)) % 3)
'''


def worker(training: Training, number: int) -> psutil.Process:
    """The process of worker `number`, by the log that it writes."""
    log = training.run_dir / "logs" / f"rollout-worker-{number}.log"
    holders = [
        process
        for process, command in training._members()
        if "RolloutWorkerActor" in command and str(log) in {file.path for file in process.open_files()}
    ]
    [found] = holders
    return found


def wait_until_at_work(training: Training, number: int) -> None:
    """Until the ledger says that the worker has a prompt under way. It is asked again and again: nothing else tells."""
    ends = time.monotonic() + 60
    while not any(name.startswith(f"rollout-worker-{number}.") for name in read_overview(training.run_dir).in_flight):
        assert time.monotonic() < ends, "the worker got no prompt"


def history(run_dir: Path) -> list[tuple[int, str, int | None, str]]:
    """Lines of the ledger: sequence, event, group, note."""
    with sqlite3.connect(f"file:{run_dir / LEDGER_NAME}?mode=ro", uri=True) as connection:
        return connection.execute("select sequence, event, grp, coalesce(note, '') from history").fetchall()


def producers(finished: Finished) -> set[str]:
    """The workers that answered prompts, `rollout-worker-<n>`."""
    return {note.partition(".")[0] for _, event, _, note in history(finished.run_dir) if event == "issued"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_worker_that_hangs_is_replaced_like_a_dead_one(tiny_task: TinyTask, tmp_path: Path) -> None:
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW_REWARD)
    flags = [
        *tiny_task.flags(), "--transferqueue-mode", "streaming", "--num-rollout-workers", "2",
        "--debug-engine-module", "vime.backends.vllm_utils.scripted_server",
        "--custom-rm-path", f"{plugin}:reward", "--num-rollout", str(ROUNDS),
    ]  # fmt: skip
    training = Training("train.py", flags, tmp_path / "run")
    training.wait_for_event("round_trained")
    victim = worker(training, 0)
    wait_until_at_work(training, 0)
    victim.suspend()
    training.wait_for_event("worker_lost")
    finished = training.finish()
    assert finished.code == 0, finished.output
    assert finished.events("run_restarted") == []
    assert "every promise kept" in finished.output
    assert not victim.is_running()


@pytest.mark.timeout(600)
def test_two_workers_are_killed_one_after_the_other_and_the_run_goes_on(tiny_task: TinyTask, tmp_path: Path) -> None:
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW_REWARD)
    flags = [
        *tiny_task.flags(), "--transferqueue-mode", "streaming", "--num-rollout-workers", "2", "--save-interval", "2",
        "--custom-rm-path", f"{plugin}:reward", "--num-rollout", str(ROUNDS),
    ]  # fmt: skip
    training = Training("train.py", flags, tmp_path / "run")
    for number in (0, 1):
        training.wait_for_event("round_trained", count=1 + 2 * number)
        victim = worker(training, number)
        wait_until_at_work(training, number)
        victim.kill()
        training.wait_for_event("worker_lost", count=1 + number)
    finished = training.finish()
    assert finished.code == 0, finished.output
    assert [event["worker"].partition(".")[0] for event in finished.events("worker_lost")] == [
        "rollout-worker-0",
        "rollout-worker-1",
    ]
    assert finished.events("run_restarted") == []
    assert producers(finished) == {"rollout-worker-0", "rollout-worker-1"}
    # what a dead worker was at went back at once, and the worker that lived took it, not the one that came in its place
    lines = history(finished.run_dir)
    for lost in finished.events("worker_lost"):
        given_back = [(at, group) for at, event, group, note in lines if event == "retry" and lost["worker"] in note]
        assert len(given_back) == lost["prompts"]
        for at, group in given_back:
            taker = next(note for later, event, of, note in lines if later > at and (event, of) == ("issued", group))
            assert worker_number(taker) != worker_number(lost["worker"])
    assert sum(event["prompts"] for event in finished.events("worker_lost")) > 0
    report = audit_run(
        finished.run_dir,
        saved=newest_checkpoint(finished.run_dir),
        claims=partial(read_claims, finished.run_dir),
    )
    assert report.findings == ()
    assert report.groups == {"durable": 4 * ROUNDS}
    assert sorted(finished.metrics()) == list(range(ROUNDS))
