"""--transferqueue-mode external through train.py, with real parts: rollout jobs that share an address with the run."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.jobs import gateway_address, produce
from tests.helpers.training import Finished, TinyTask, Training, interrupt, train
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims

ROUNDS = 4
SLOW_REWARD = '''"""Three seconds for each answer: a round lasts longer than a job takes to load its weights."""

import asyncio


async def reward(args, sample, **kwargs):
    await asyncio.sleep(3.0)
    return float(len(set(sample.tokens)) % 3)
'''
FILTER = '''"""Drop about half of the groups, so that what a round is made of depends on what was sampled."""


def keep(args, samples):
    return sum(sample.reward for sample in samples) >= len(samples) / 2
'''


def hashes(finished: Finished) -> dict[int, str]:
    """Version -> content hash."""
    return {event["version"]: event["content_hash"] for event in finished.events("weights_confirmed")}


def job_flags(tiny_task: TinyTask) -> list[str]:
    """The part of the task's flags that a rollout job has: the run has the prompts."""
    flags = tiny_task.flags()
    for name in ("--prompt-data", "--input-key", "--label-key", "--micro-batch-size", "--lr"):
        at = flags.index(name)
        del flags[at : at + 2]
    return flags


def brought(training: Training) -> int:
    """Groups of job-a in the rounds that were trained so far."""
    if not (training.run_dir / "metrics.jsonl").exists():
        return 0
    return int(sum(of_round.get("producers/job-a/groups", 0) for of_round in training.so_far().metrics().values()))


def wait_until_it_brings(training: Training, *, more_than: int = 0) -> None:
    ends = time.monotonic() + 240
    while brought(training) <= more_than:
        assert training.process.poll() is None, training.so_far().output
        assert time.monotonic() < ends, training.so_far().output
        time.sleep(0.1)


@pytest.mark.timeout(900)
def test_a_job_in_place_of_the_inside_worker_gives_the_same_bits_also_after_the_trainer_was_killed(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    """One job lives through both lives of the trainer: it loads the versions that the second one serves."""
    plugin = tmp_path / "filter.py"
    plugin.write_text(FILTER)
    shared = ["--reference-mode", "--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path", f"{plugin}:keep"]
    flags = [*tiny_task.flags(), "--num-rollout", str(ROUNDS), "--save-interval", "1"]
    inside = train([*flags, *shared], tmp_path / "off")
    assert inside.code == 0, inside.output
    assert len(set(hashes(inside).values())) == ROUNDS + 1

    address, run = gateway_address(), tmp_path / "run"
    flags += [
        *("--reference-mode", "--transferqueue-mode", "external", "--transferqueue-address", address),
        *("--rollout-num-engines", "0", "--save", str(tmp_path / "checkpoints")),
    ]
    job = produce(tmp_path / "job", address, "job-a", [*job_flags(tiny_task), *shared], run=run)
    training = Training("train.py", flags, run)
    training.wait_for_event("weights_confirmed", count=3)
    os.kill(training.process.pid, signal.SIGKILL)
    killed = training.finish()
    assert killed.code == -signal.SIGKILL
    resumed = train([*flags, "--load", str(tmp_path / "checkpoints")], run)
    assert resumed.code == 0, resumed.output
    assert job.finish(deadline_s=60).code == 0
    assert hashes(resumed) == hashes(inside)
    report = audit_run(run, saved=newest_checkpoint(run), claims=partial(read_claims, run))
    assert report.findings == ()
    assert report.groups["durable"] == 4 * ROUNDS


@pytest.mark.timeout(900)
def test_workers_of_the_run_and_two_jobs_feed_it_while_gateway_and_job_are_killed(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    """K = 1. The gateway comes back at its address and asks for the weights' hashes again; the job that was killed
    comes back with the same token. The run is stopped when all of this was seen."""
    address, run, plugin = gateway_address(), tmp_path / "run", tmp_path / "slow.py"
    plugin.write_text(SLOW_REWARD)
    slow = ["--custom-rm-path", f"{plugin}:reward"]
    flags = [
        *tiny_task.flags(), *slow, "--num-rollout", "1000", "--save-interval", "8", "--max-staleness", "1",
        "--transferqueue-mode", "external", "--transferqueue-address", address,
    ]  # fmt: skip
    first = produce(tmp_path / "first", address, "job-a", [*job_flags(tiny_task), *slow], run=run)
    training = Training("train.py", flags, run)
    wait_until_it_brings(training)
    training.kill_member("GatewayActor")
    training.wait_for_event("worker_lost")
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.finish().code == -signal.SIGKILL
    again = produce(tmp_path / "again", address, "job-a", [*job_flags(tiny_task), *slow], run=run)
    wait_until_it_brings(training, more_than=brought(training))
    interrupt(training)
    finished = training.finish()
    assert finished.code == 130, finished.output
    interrupt(again)
    assert again.finish(deadline_s=60).code == 130
    report = audit_run(run, saved=newest_checkpoint(run), claims=partial(read_claims, run))
    assert report.findings == ()
    assert report.groups["durable"] == 4 * len(finished.metrics())
    assert set(report.producers) == {"rollout workers", "external/job-a"}
    assert report.producers["external/job-a"] == brought(training)
