"""How long the driver waits for trainer ranks, with actors that stand in for them."""

import threading
from pathlib import Path

import pytest

from vime.config.parse import parse
from vime.ray import trainers as trainers_module
from vime.ray.placement import ANYWHERE
from vime.ray.trainers import Trainers
from vime.ray.waits import Interrupted
from vime.types import ClusterError, EngineError, WaitTimeoutError
from vime.weights.publish import PublishReport

pytestmark = pytest.mark.usefixtures("ray_cluster")
FLAGS = ["--device", "cpu", "--actor-num-gpus-per-node", "2", "--distributed-timeout-minutes", "0.1"]
FLAGS += ["--train-timeout-secs", "7000"]


SENT = PublishReport(
    version=1, content_hash="", engine_reports=(), num_tensors=1, num_bytes=1, pause_s=0.0, confirm_s=0.0
)


class Stub:
    """A rank whose publish goes on until `release`."""

    def __init__(self, _config, rank: int, _run_dir, _address, _roles) -> None:
        self._rank, self._released, self._is_publishing = rank, threading.Event(), False

    def meeting_place(self):
        return "127.0.0.1", 1

    def start(self, *_) -> None:
        return None

    def publish(self, *_) -> None:
        self._is_publishing = True
        self._released.wait(60)
        self._is_publishing = False

    def release(self) -> None:
        self._released.set()

    def save(self, _directory: str, _in_background: bool) -> None:
        assert not self._is_publishing

    def finish_save(self, _deadline_s: float) -> None:
        return None

    def train(self, *_) -> None:
        if self._rank == 1:
            import os

            os._exit(1)
        threading.Event().wait(600)

    def close(self) -> None:
        return None


@pytest.fixture
def trainers(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(trainers_module, "TrainerActor", Stub)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1_000_000_000)  # takes no space
    made = Trainers(parse([*FLAGS, "--hf-checkpoint", str(tmp_path)]), tmp_path, None, ANYWHERE)
    yield made
    made.stop()


def test_each_wait_has_its_own_deadline(trainers, monkeypatch) -> None:
    """Not the collective's 6 s: a long round of live ranks is not a fault."""
    waited: dict[str, float] = {}

    def recorded(refs, *, name, deadline_s, **_):
        waited[name] = deadline_s
        if "publish" in name:
            return [SENT, None]
        return [("127.0.0.1", 1)] if "placed" in name else [{}] * len(refs)

    monkeypatch.setattr(trainers_module, "wait_for", recorded)
    trainers.start(1)
    trainers.wait_ready()
    trainers.save(Path("unused"))
    trainers._policy.call(Stub.release)
    assert trainers.publish(1, []) == SENT
    assert waited == {
        "trainer rank 0 to be placed": 300,  # --start-timeout-secs
        "trainer ranks to build the model": 310,  # and a second for each 100 MB of the checkpoint
        "trainer ranks to save": 7000,  # --train-timeout-secs
        "trainer ranks to release": 7000,
        "trainer ranks to publish": 362,  # --update-weight-timeout-secs, 2 s for 2 GB in fp32, and a minute
    }


def test_ctrl_c_ends_the_wait_for_a_place(trainers) -> None:
    def poll() -> None:
        raise Interrupted("start-up")

    with pytest.raises(Interrupted):
        trainers.start(1, poll)


def test_a_rank_that_dies_in_a_round_ends_it_at_once(trainers) -> None:
    with pytest.raises(ClusterError, match="trainer ranks to train: trainer 1 died"):
        trainers.train(0, None, 0, is_judged=False)


def test_a_save_does_not_begin_beside_a_publish_that_was_given_up(trainers) -> None:
    def poll() -> None:
        raise EngineError("engine-0 hangs")

    with pytest.raises(EngineError):
        trainers.publish(1, [], poll)
    for actor in trainers._policy._actors:
        actor.ask(Stub.release)
    trainers.save(Path("unused"))  # the stub asserts


def test_a_publish_that_never_ends_is_named_by_the_save_that_waits_for_it(trainers, monkeypatch) -> None:
    def poll() -> None:
        raise EngineError("engine-0 hangs")

    with pytest.raises(EngineError):
        trainers.publish(1, [], poll)
    monkeypatch.setattr(trainers_module, "GRACE_S", 0.1 - trainers._config.weights.update_weight_timeout_secs)
    with pytest.raises(WaitTimeoutError, match="2 of 2 trainer ranks to end the call before"):
        trainers.save(Path("unused"))
