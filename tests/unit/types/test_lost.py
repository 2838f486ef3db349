"""What may pass, so that a run starts again, and what ends it at once."""

import pytest
import torch

from vime.handoff.ledger_types import LeaseLostError, TransitionError
from vime.handoff.spool_format import SpoolDamageError
from vime.types import (
    ClusterError,
    ConfigError,
    EngineError,
    EngineLostError,
    HandoffError,
    HandoffLostError,
    LostError,
    PartError,
    PluginError,
    PublishError,
    PublishLostError,
    RewardError,
    StaleError,
    VimeError,
    WaitTimeoutError,
    is_machine_fault,
    may_pass,
)

LOST = {ClusterError, EngineLostError, HandoffLostError, LeaseLostError, LostError, PublishLostError, WaitTimeoutError}
ENDS = {
    *(ConfigError, EngineError, HandoffError, PartError, PluginError, PublishError, RewardError, StaleError),
    *(TransitionError, SpoolDamageError),
}


def test_one_branch_of_the_errors_is_worth_a_restart() -> None:
    assert all(issubclass(kind, LostError) for kind in LOST)
    assert not any(issubclass(kind, LostError) for kind in ENDS)
    # who catches a failure of the hand-over, an engine or a publish catches a lost one too
    assert issubclass(HandoffLostError, HandoffError)
    assert issubclass(EngineLostError, EngineError)
    assert issubclass(PublishLostError, PublishError)


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1"),
        torch.distributed.DistNetworkError("failed to recv, got 0 bytes"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
def test_a_fault_of_a_device_the_network_or_a_peer_may_pass(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("NCCL"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ValueError("connection reset"),
        AssertionError("shapes"),
        VimeError("NCCL"),
        FileNotFoundError(2, "No such file or directory"),
    ],
)
def test_a_fault_of_a_program_comes_again(error: Exception) -> None:
    assert not may_pass(error)
    assert isinstance(error, VimeError) or not is_machine_fault(error)
