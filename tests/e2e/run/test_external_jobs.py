"""--transferqueue-mode external through train.py, with real parts: rollout jobs that share an address with the run."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.jobs import gateway_address, produce
from tests.helpers.training import Finished, TinyTask, Training, train
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims

ROUNDS = 4
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
