"""Storages that leave and come back: what stays in use, what is zero, and host memory that is taken once."""

import logging

import pytest
import torch

from vime.backends import offload as offload_module
from vime.backends.offload import Offload


def test_what_rests_leaves_all_but_the_weights_and_sleep_takes_those_too() -> None:
    weights, moments, gradients = torch.arange(4.0), torch.arange(8.0), torch.ones(16)
    half = weights[:2]  # a view, which must be whole again when its storage is
    offload = Offload()
    offload.rest([moments, half], [gradients], but=[weights])
    sizes = [tensor.untyped_storage().nbytes() for tensor in (weights, moments, gradients)]
    assert (sizes, offload.is_asleep, offload.is_resting) == ([16, 0, 0], False, True)
    assert half.tolist() == [0.0, 1.0]
    offload.sleep([weights, moments], [gradients])  # what is freed already is passed again
    assert weights.untyped_storage().nbytes() == 0
    assert (offload.is_asleep, offload.is_resting) == (True, False)
    offload.wake_up()
    assert (offload.is_asleep, offload.is_resting) == (False, False)
    assert weights.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert half.tolist() == [0.0, 1.0]
    assert moments.tolist() == list(map(float, range(8)))
    assert gradients.tolist() == [0.0] * 16


def test_a_second_sleep_brings_back_what_was_changed_meanwhile() -> None:
    weights, offload = torch.zeros(4), Offload()
    for value in (1.0, 2.0):
        weights.fill_(value)
        offload.sleep([weights])
        offload.wake_up()
        assert weights.tolist() == [value] * 4


class Runtime:
    """CUDA's, as far as host memory is locked. Like CUDA it takes no address twice."""

    def __init__(self, error: int = 0) -> None:
        self._error, self.locked = error, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        assert address not in self.locked
        self.locked |= {} if self._error else {address: num_bytes}
        return self._error

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


def test_host_memory_is_locked_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host = torch.empty(1024)  # of four bytes each
    offload_module.lock_pages(host, "a sleeping trainer")
    assert runtime.locked == {host.data_ptr(): 4096}
    del host
    assert runtime.locked == {}


def test_a_system_that_locks_no_memory_is_said_and_the_copy_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error=304))
    host = torch.empty(4096, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        offload_module.lock_pages(host, "a sleeping trainer")
    assert "4096 bytes of host memory for a sleeping trainer cannot be page-locked (CUDA error 304)" in caplog.text
    del host
