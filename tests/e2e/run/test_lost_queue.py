"""A part of TransferQueue that dies in mode streaming: another queue takes its place and the run goes on."""

from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.helpers.metrics_page import undocumented
from tests.helpers.training import Finished, TinyTask, Training
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims

SCRIPTED = "vime.backends.vllm_utils.scripted_server"
NUM_ROUNDS = 12
STREAMING = ["--transferqueue-mode", "streaming", "--debug-engine-module", SCRIPTED]
PACE = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "8"}  # a round takes over a second


def kill_part(training: Training, name: str, *, times: int) -> None:
    """SIGKILL an actor of the queue, and wait until another queue is in use."""
    parts: list[psutil.Process] = [process for process, command in training._members() if name in command]
    parts[0].kill()
    training.wait_for_event("queue_ready", count=times)


def assert_the_run_went_on(finished: Finished, *, num_kills: int) -> None:
    """No restart of the run; each group trained once, by the ledger's history and the trainers' receipts."""
    assert finished.code == 0, finished.output
    assert finished.events("run_restarted") == []
    assert len(finished.events("queue_lost")) == num_kills
    report = audit_run(
        finished.run_dir, saved=newest_checkpoint(finished.run_dir), claims=partial(read_claims, finished.run_dir)
    )
    assert report.findings == ()
    assert report.receipts == (0, NUM_ROUNDS - 1)
    assert report.groups == {"trained": 4 * NUM_ROUNDS}
    lines = finished.metrics()
    assert sum(line.get("transferqueue/lost", 0) for line in lines.values()) == num_kills
    assert undocumented(name for line in lines.values() for name in line) == []
    assert "the queue works again" in finished.output


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("train.py", []),
        ("train.py", ["--num-rollout-workers", "2"]),
        ("train.py", ["--num-data-storage-units", "2"]),
        ("train_async.py", ["--transferqueue-max-staleness", "1"]),
    ],
)
def test_a_run_whose_queue_is_killed_three_times_trains_what_it_would_have(
    tiny_task: TinyTask, tmp_path: Path, script: str, more: list[str]
) -> None:
    is_repeatable = script == "train.py"  # in the other the weights that sample a round depend on time
    flags = [*tiny_task.flags(), *STREAMING, *more, "--num-rollout", str(NUM_ROUNDS)]
    flags += ["--reference-mode"] if is_repeatable else []
    training = Training(script, flags, tmp_path / "killed", variables=PACE)
    training.wait_for_event("round_trained", count=1)
    kill_part(training, "SimpleStorageUnit", times=1)
    kill_part(training, "TransferQueueController", times=2)
    training.wait_for_event("round_trained", count=5)
    # The driver has asked the queue's actors every half second: without torch, whose import would stop it for seconds.
    assert "libtorch" not in Path(f"/proc/{training.process.pid}/maps").read_text(), "the driver has imported torch"
    kill_part(training, "SimpleStorageUnit", times=3)
    finished = training.finish()
    assert_the_run_went_on(finished, num_kills=3)
    if is_repeatable:
        whole = Training(script, flags, tmp_path / "whole").finish()
        assert whole.code == 0, whole.output
        assert finished.confirmed_hashes() == whole.confirmed_hashes()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_storage_unit_that_hangs_is_replaced_like_a_dead_one(tiny_task: TinyTask, tmp_path: Path) -> None:
    """It lives, so that its connections stay open, and says nothing."""
    flags = [*tiny_task.flags(), *STREAMING, "--num-rollout", str(NUM_ROUNDS)]
    training = Training("train.py", flags, tmp_path / "run", variables=PACE)
    training.wait_for_event("round_trained", count=1)
    training.member("SimpleStorageUnit").suspend()
    training.wait_for_event("queue_ready")
    finished = training.finish()
    assert_the_run_went_on(finished, num_kills=1)
    assert "lives, but has not responded for 30 s" in finished.output
