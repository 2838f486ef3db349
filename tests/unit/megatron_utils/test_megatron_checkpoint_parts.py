"""What a checkpoint does around megatron's own functions, for optimizers that this machine may not have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from vime.backends.megatron_utils import checkpoint
from vime.backends.megatron_utils.checkpoint_writer import PendingSave
from vime.types import CheckpointError


class GroupedStep(torch.optim.Optimizer):
    """As Transformer Engine's and Apex' FusedAdam: "step" is in the groups, and an entry of a parameter is a moment."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})


def part_of(optimizer: torch.optim.Optimizer | None) -> SimpleNamespace:
    """A megatron optimizer around `optimizer`; its function for moments is megatron's."""

    def moments(inner: torch.optim.Optimizer, config: str) -> None:
        assert config == "config"
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    return SimpleNamespace(optimizer=optimizer, config="config", init_state_fn=None if optimizer is None else moments)


def policy(*parts: SimpleNamespace) -> Any:
    given: list[dict[Any, Any]] = []
    return SimpleNamespace(parts=list(parts), megatron=SimpleNamespace(load_state_dict=given.append), given=given)


def test_before_the_first_step_every_optimizer_gets_moments_and_only_torchs_a_step_of_each_parameter() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    torchs, other = torch.optim.AdamW(weights[:1]), GroupedStep(weights[1:])
    checkpoint.prepare_states(policy(part_of(torchs), part_of(other), part_of(None)))
    assert set(torchs.state[weights[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(other.state[weights[1]]) == {"exp_avg"}


def test_only_what_torchs_adam_loads_is_given_the_step_zero_that_megatron_left_out() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    torchs, other = part_of(torch.optim.AdamW([weight])), part_of(GroupedStep([weight]))

    def state() -> dict[str, Any]:
        return {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}

    both = policy(torchs, other)
    checkpoint._load_optimizer(both, {0: {"optimizer": state()}, 1: {"optimizer": state()}})
    [given] = both.given
    assert float(given[0]["optimizer"]["state"]["common_step"]) == 0
    assert set(given[1]["optimizer"]["state"]) == {0}
    alone = policy(other)  # megatron does not number the states of one optimizer
    checkpoint._load_optimizer(alone, state())
    assert set(alone.given[0]["state"]) == {0}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), dist.DistBackendError("peer")])
def test_no_memory_and_a_lost_peer_are_not_taken_for_a_bad_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", fail)
    with pytest.raises(type(error)):
        checkpoint.load(tmp_path, [], policy())


def test_an_optimizer_without_moments_is_a_checkpoint_error_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("exp_avg")

    monkeypatch.setattr(checkpoint, "_state", fail)
    with pytest.raises(CheckpointError, match="exp_avg") as caught:
        checkpoint.save(tmp_path / "new", [], policy(), with_optimizer=True, group=None, in_background=False)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, KeyError)


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU; `cpu` gives a plain copy, as a tensor there does."""

    is_cpu = False

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


def test_tensors_of_a_gpu_are_written_from_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, file = torch.arange(6.0), tmp_path / "part"
    item = WriteItem(
        index=MetadataIndex("weight", torch.Size([0]), 0),
        type=WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size([0]), sizes=tensor.shape),
            properties=TensorProperties.create_from_tensor(tensor),
            size=tensor.shape,
        ),
    )
    writer = FileSystemWriterAsync(tmp_path, thread_count=1)
    writer.write_buckets = [(str(file), file.name, ([], [(item, tensor.as_subclass(OnGpu))]))]
    pending = PendingSave(tmp_path, SimpleNamespace(writer=writer, metadata=None), group=None)  # type: ignore[arg-type]
    agreed: list[object] = []
    monkeypatch.setattr(pending, "_agree", agreed.append)  # by collectives, which are not what this is about
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    pending.run()
    [[result]] = agreed
    assert result.index.fqn == "weight"
    assert torch.equal(torch.load(file), tensor)
    assert pending.hashes[file][0] == file.stat().st_size
