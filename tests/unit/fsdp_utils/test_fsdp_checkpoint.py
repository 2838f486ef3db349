"""What a checkpoint says about where it was written, in a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vime.backends.fsdp_utils import checkpoint
from vime.types import CheckpointError


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Steps:
    """The part of `ShardOptimizer` that a checkpoint needs."""

    num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def adopt(self, num_steps: int) -> None:
        self.num_steps = num_steps


def saved(directory: Path) -> torch.nn.Linear:
    """Of step 3, after a draw."""
    model, optimizer = torch.nn.Linear(2, 2), Steps()
    optimizer.num_steps = 3
    checkpoint.save(directory, model, optimizer, with_optimizer=True)  # type: ignore[arg-type]
    torch.rand(1)
    return model


@pytest.mark.parametrize("device", ["here", "elsewhere"])
def test_random_states_of_another_kind_of_device_are_left_alone_and_the_rest_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    before = torch.get_rng_state()
    with monkeypatch.context() as patched:
        if device == "elsewhere":
            layout = {**checkpoint._layout(), "device": "another"}
            patched.setattr(checkpoint, "_layout", lambda: layout)
        written = saved(tmp_path)
    model, optimizer, seeded = torch.nn.Linear(2, 2), Steps(), torch.get_rng_state()
    checkpoint.load(tmp_path, model, optimizer)  # type: ignore[arg-type]
    assert torch.equal(model.weight, written.weight)
    assert optimizer.num_steps == 3
    assert torch.equal(torch.get_rng_state(), seeded) == (device == "elsewhere")
    assert not torch.equal(before, seeded)


def test_another_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FORMAT", "fsdp 99")
        saved(tmp_path)
    with pytest.raises(CheckpointError, match="format 'fsdp 99', expected 'fsdp 2'"):
        checkpoint.load(tmp_path, torch.nn.Linear(2, 2), Steps())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
        (dist.DistBackendError("peer"), dist.DistBackendError, "peer"),
        (RuntimeError("Connection closed by peer"), CheckpointError, "read the log of each trainer rank first"),
        (KeyError("exp_avg.weight"), CheckpointError, "remove it to start from --hf-checkpoint"),
    ],
)
def test_a_checkpoint_is_given_up_only_for_what_its_files_caused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, raised: type[Exception], says: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint.dcp, "load", fail)
    with pytest.raises(raised, match=says):
        checkpoint.load(tmp_path, torch.nn.Linear(2, 2), Steps())  # type: ignore[arg-type]
