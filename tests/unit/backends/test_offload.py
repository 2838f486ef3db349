"""Storages that leave and come back: what stays in use, what is zero, and host memory that is taken once."""

import torch

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
