"""One product for the rows of all experts against a product for each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vime.backends.megatron_utils.grouped_experts import grouped_linear

INPUTS, OUTPUTS = 16, 24


def one_by_one(x_TI: Tensor, counts: list[int], weights: list[Tensor]) -> Tensor:
    return torch.cat([x @ weight.T for x, weight in zip(x_TI.split(counts), weights, strict=True)])


@pytest.mark.parametrize("counts", [[4, 7, 5], [0, 9, 0], [3], [0, 0, 0]], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_values_and_gradients_are_those_of_a_product_for_each_expert(
    counts: list[int], dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    made = [torch.randn(sum(counts), INPUTS, dtype=dtype), *(torch.randn(OUTPUTS, INPUTS, dtype=dtype) for _ in counts)]
    found = []
    for is_grouped in (True, False):
        x_TI, *weights = [tensor.clone().requires_grad_() for tensor in made]
        ends_E = torch.tensor(counts).cumsum(0).to(torch.int32)
        y_TO = grouped_linear(x_TI, ends_E, weights) if is_grouped else one_by_one(x_TI, counts, weights)
        y_TO.backward(torch.linspace(-1, 1, y_TO.numel(), dtype=dtype).view_as(y_TO))
        found.append([y_TO.detach(), x_TI.grad, *(weight.grad for weight in weights)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


def test_frozen_experts_cost_no_product_for_gradients_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []

    def counted(*args: Tensor, **kwargs: Tensor) -> Tensor:
        products.append(1)
        return product(*args, **kwargs)

    product = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", counted)
    for is_frozen, expected in ((True, 2), (False, 3)):
        products.clear()
        x_TI, weight = (
            torch.ones(3, INPUTS, requires_grad=True),
            torch.ones(OUTPUTS, INPUTS, requires_grad=not is_frozen),
        )
        grouped_linear(x_TI, torch.tensor([3], dtype=torch.int32), [weight]).sum().backward()
        assert len(products) == expected
        assert x_TI.grad is not None
        assert (weight.grad is None) == is_frozen


def test_a_gradient_that_is_expanded_from_one_number_is_taken() -> None:
    """That of a sum: torch's kernel refuses strides of 0."""
    x_TI, weight = torch.ones(3, INPUTS, requires_grad=True), torch.ones(OUTPUTS, INPUTS, requires_grad=True)
    grouped_linear(x_TI, torch.tensor([3], dtype=torch.int32), [weight]).sum().backward()
    assert x_TI.grad is not None
    assert weight.grad is not None
    assert (x_TI.grad == OUTPUTS).all()
    assert (weight.grad == 3).all()
