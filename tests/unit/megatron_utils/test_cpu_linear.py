"""Large products of linear layers: the formula and its gradients by every way, and which way is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vime.backends.megatron_utils import cpu_linear
from vime.backends.megatron_utils.cpu_linear import (
    ADD_WEIGHT_GRADIENT,
    FORWARD,
    INPUT_GRADIENT,
    Ways,
    embedding,
    linear,
    pays,
    with_onednn,
)

WAYS = max(len(kind.ways) for kind in (FORWARD, INPUT_GRADIENT, ADD_WEIGHT_GRADIENT))


@pytest.mark.parametrize("columns", [(48, 20), (20, 48)])  # either factor of the weight's gradient may be the smaller
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("way", range(WAYS))
def test_a_layer_and_its_gradients_are_their_formula_by_every_way(
    columns: tuple[int, int], has_bias: bool, way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (FORWARD, INPUT_GRADIENT, ADD_WEIGHT_GRADIENT):
        monkeypatch.setattr(kind, "ways", [kind.ways[way % len(kind.ways)]])
        monkeypatch.setattr(kind, "chosen", {})
    inputs, outputs = columns
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(37, 1, inputs, generator=draw)
    weight_NK = torch.randn(outputs, inputs, generator=draw)
    bias = [torch.randn(outputs, generator=draw)] if has_bias else []
    direction = torch.randn(37, 1, outputs, generator=draw)

    leaves = [value.clone().requires_grad_() for value in (x, weight_NK, *bias)]
    got = linear(leaves[0], leaves[1], leaves[2] if has_bias else None, None)
    gradients = torch.autograd.grad(got, leaves, direction)

    true = [value.double().requires_grad_() for value in (x, weight_NK, *bias)]
    expected = true[0] @ true[1].T + (true[2] if has_bias else 0)
    true_gradients = torch.autograd.grad(expected, true, direction.double())
    # sums of at most 48 terms near 1: rounding of fp32 stays below 48 * 6e-8 * 10
    for mine, theirs in zip([got, *gradients], [expected, *true_gradients], strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=3e-5)


def test_the_answer_may_be_overwritten_as_the_logits_are() -> None:
    x, weight_NK = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    y = linear(x, weight_NK, None, None)
    with torch.no_grad():
        y.zero_()
    y.sum().backward()
    assert weight_NK.grad is not None
    assert weight_NK.grad.tolist() == [[3.0] * 4] * 2  # three rows of ones


def learning(weight: Tensor) -> Tensor:
    """A parameter whose gradients are added up in a buffer of 1.0, as `PolicyOptimizer` asks."""
    parameter = torch.nn.Parameter(weight)
    parameter.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    parameter.is_summed_in_place = True  # type: ignore[attr-defined]
    return parameter


@pytest.mark.parametrize("entries", [1 << 21, 60, 1])  # blocks of all rows, of 3 of the 20, of one at least
def test_a_learning_weights_gradients_are_added_up_where_they_are_made(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(ADD_WEIGHT_GRADIENT, "chosen", {})  # so that trials are among what may go wrong
    draw = torch.Generator().manual_seed(0)
    weight = learning(torch.randn(20, 16, generator=draw))
    expected = torch.ones(20, 16, dtype=torch.float64)
    for length in (37, 5):
        x = torch.randn(length, 16, generator=draw)
        direction = torch.randn(length, 20, generator=draw)
        linear(x, weight, None, None).backward(direction)
        expected += direction.double().T @ x.double()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=3e-5)  # type: ignore[attr-defined]


def test_an_embedding_adds_the_gradients_of_its_tokens() -> None:
    weight = learning(torch.arange(12.0).view(4, 3))
    tokens = torch.tensor([[2, 0, 2]])
    out = embedding(tokens, weight)
    assert out.tolist() == [[[6.0, 7.0, 8.0], [0.0, 1.0, 2.0], [6.0, 7.0, 8.0]]]
    out.backward(torch.tensor([[[1.0] * 3, [10.0] * 3, [100.0] * 3]]))
    assert weight.grad is None
    # 1 in the beginning; token 2 gets 1 + 100, token 0 gets 10
    assert weight.main_grad.tolist() == [[11.0] * 3, [1.0] * 3, [102.0] * 3, [1.0] * 3]  # type: ignore[attr-defined]


def test_an_embedding_without_a_buffer_leaves_its_gradient_to_autograd() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 3))
    embedding(torch.tensor([1, 1]), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0] * 3, [2.0] * 3, [0.0] * 3, [0.0] * 3]


PLAIN = {"bias": None, "sequence_parallel": False, "gradient_accumulation_fusion": False, "allreduce_dgrad": False}


@pytest.mark.parametrize(
    ("rows", "dtype", "changes", "by_onednn"),
    [
        (64, torch.float32, {}, True),
        (63, torch.float32, {}, False),  # too small to pay
        (64, torch.bfloat16, {}, False),
        (64, torch.float32, {"sequence_parallel": True}, False),
        (64, torch.float32, {"gradient_accumulation_fusion": True}, False),
        (64, torch.float32, {"grad_output_buffer": []}, False),
    ],
)
def test_products_that_do_not_pay_stay_with_megatron(
    rows: int, dtype: torch.dtype, changes: dict[str, Any], by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "MIN_FLOPS", 2 * 64 * 8 * 4)
    x, weight_NK = torch.ones(rows, 1, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype)
    seen: list[dict[str, Any]] = []

    def original(input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        seen.append(options)
        return input @ weight.T

    options = {**PLAIN, "tp_group": None, **changes}
    answer = with_onednn(original)(x, weight_NK, **options)
    assert answer.tolist() == [[[8.0] * 4]] * rows
    assert seen == ([] if by_onednn else [options])


def test_a_torch_without_the_operator_computes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight_NK = torch.ones(1024, 256), torch.ones(256, 256)  # 2 * 1024 * 256 * 256 = MIN_FLOPS
    assert pays(x, weight_NK)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not pays(x, weight_NK)


class Clock:
    """A clock of which the test moves the hands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "thread_time", lambda: self.now)

    def way(self, seconds: list[float], answer: float) -> Callable[..., Tensor]:
        """Takes these seconds, one call after another, and then none."""
        left = iter(seconds)

        def compute(first: Tensor, second: Tensor) -> Tensor:
            self.now += next(left, 0.0)
            return torch.full((first.size(0), second.size(1)), answer)

        return compute


def test_the_way_whose_best_trial_is_fastest_is_kept_for_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    # each shape is tried twice: [1, 9] against [5, 2] is won by 1; of the second shape [9, 9] against [5, 5] by 5
    product = Ways([clock.way([1, 9, 0, 0, 9, 9], 1.0), clock.way([5, 2, 5, 5], 2.0)])
    x, weight = torch.ones(5, 3), torch.ones(3, 4)
    assert product(x, weight)[0, 0] == 1.0
    assert product(torch.ones(7, 3), weight)[0, 0] == 1.0  # 7 rows count as 5 do (4 to 7): not tried again
    assert product(torch.ones(8, 3), weight)[0, 0] == 2.0
    assert product(x, weight)[0, 0] == 1.0


def test_with_deterministic_algorithms_no_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    product = Ways([clock.way([9, 9, 9], 1.0), clock.way([1, 1], 2.0)])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert product(torch.ones(5, 3), torch.ones(3, 4))[0, 0] == 1.0
    assert product.chosen == {}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert product(torch.ones(5, 3), torch.ones(3, 4))[0, 0] == 2.0  # what a clock would have said
