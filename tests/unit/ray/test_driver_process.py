"""The driver's process: nothing of the trainer's device layer in it, demands added up, rounds due when they are due."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from vime.config.parse import parse
from vime.ray import components as components_module
from vime.ray.checkpoint import RunState, find_start, save_checkpoint
from vime.ray.cluster import demand_of, start_ray
from vime.ray.components import Components, Parts, Watchers, is_due
from vime.ray.trainers import TrainedRound
from vime.types import ClusterError
from vime.weights.versions import VersionLedger

PROBE = """
import sys
import torch
before = torch.cuda.current_device
import vime.ray.launch, vime.ray.startup, vime.backends.megatron_utils.backend, vime.training.worker
assert torch.cuda.current_device is before and before.__module__ == "torch.cuda", before
loaded = [name for name in ("megatron", "vllm", "transfer_queue") if name in sys.modules]
assert not loaded, loaded
"""


def test_importing_the_driver_redirects_nothing_and_loads_no_engine() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True, timeout=60)


def test_the_driver_needs_no_torch() -> None:
    """200 MB and two seconds. `PublishReport` is what a rank answers with, a ticket what a round is known by."""
    received = "vime.weights.publish, vime.handoff.ticket, vime.rollout.coordinator"
    probe = f"import sys, vime.ray.launch, vime.ray.startup, {received}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


@pytest.mark.parametrize(
    ("flags", "cpus"),
    [
        # 0.2 manager + 1 x 0.5 trainer + 1 x 0.5 engine
        ([], 1.2),
        # 0.2 + 4 x 0.5 + 2 x 0.5 + (1 controller + 3 storage units) x 0.1
        (
            [
                *("--actor-num-gpus-per-node", "4", "--rollout-num-engines", "2"),
                *("--transferqueue-mode", "buffer", "--num-data-storage-units", "3"),
            ],
            3.6,
        ),
        # as above, with one controller, one storage unit and the ledger
        (["--transferqueue-mode", "streaming"], 1.5),
        (["--transferqueue-mode", "streaming", "--num-rollout-workers", "2"], 1.8),
        # 0.2 + 0.5 + (2 policy + 2 reference + 2 teacher) x 0.5
        (["--actor-num-gpus-per-node", "2", "--separate-roles", "reference", "teacher"], 3.7),
        # 0.2 + 0.5: no engine
        (["--debug-train-only"], 0.7),
    ],
)
def test_the_demand_is_the_sum_of_the_parts(flags: list[str], cpus: float) -> None:
    demand = demand_of(parse([*flags, "--device", "cpu"]))
    assert demand.cpus == pytest.approx(cpus)
    assert demand.gpus == 0


def test_a_cluster_that_does_not_answer_is_said_and_not_waited_for() -> None:
    with socket.socket() as listener:  # a port that was free a moment ago
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    config = parse(["--device", "cpu", "--ray-address", f"127.0.0.1:{port}"])
    with pytest.raises(ClusterError, match=rf"--ray-address 127\.0\.0\.1:{port}.*: no Ray cluster responds there"):
        start_ray(config)


def test_a_station_is_due_every_interval_and_after_the_last_round() -> None:
    assert [rollout_id for rollout_id in range(8) if is_due(3, rollout_id, 7)] == [2, 5, 7]
    assert not any(is_due(None, rollout_id, 7) for rollout_id in range(8))


def test_a_run_keeps_as_many_checkpoints_as_asked_and_the_one_it_was_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rollout_id in range(2):
        save_checkpoint(tmp_path, RunState(rollout_id=rollout_id, version=rollout_id, data_source={}), lambda _: None)
    flags = ["--save", str(tmp_path), "--load", str(tmp_path), "--keep-checkpoints", "2", "--save-interval", "1"]
    config = parse(["--hf-checkpoint", "models/m", "--device", "cpu", *flags])
    monkeypatch.setattr(components_module, "wait_for", lambda *_, **__: [{"cursor": 1}])
    trainers = Mock(train=Mock(return_value=TrainedRound(metrics={}, stepped=[])))
    trainers.save.return_value.wait.return_value = {}
    parts = Parts(Mock(), trainers, None, num_rollout=6)
    watchers = Watchers(
        screen=Mock(), interrupts=Mock(), events=Mock(), round_metrics=Mock(timed=lambda _: contextlib.nullcontext())
    )
    start = find_start(config.model.load)
    components = Components(config, tmp_path, parts, watchers, VersionLedger(), start)
    rounds = list(components.rounds())
    for rollout_id in rounds:
        components.train(SimpleNamespace(rollout_id=rollout_id, ticket=object(), work=None, cursor={}, num_begun=0))
        components.save_if_due(rollout_id)
    assert rounds == [2, 3, 4, 5]
    kept = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert kept == ["iter_0000001", "iter_0000004", "iter_0000005"]
