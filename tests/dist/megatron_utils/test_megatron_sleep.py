"""A sleeping trainer holds no weights, gradients or optimizer state on its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("case", "bytes_per_parameter"),
    [
        # fp32 weight and gradient, two moments: 4 + 4 + 8
        ("asleep-single", 16),
        # bf16 weight, fp32 gradient, main weight and moments: 2 + 4 + 4 + 8
        ("asleep-bf16", 18),
        # the same with main weight and moments cut over two ranks: 2 + 4 + (4 + 8) / 2
        ("asleep-bf16-distributed", 12),
    ],
)
def test_sleep_gives_back_all_that_grows_with_the_model_and_waking_takes_as_much(
    answers: Callable[[str], list[Any]], case: str, bytes_per_parameter: float
) -> None:
    for rank in answers(case):
        assert rank["freed"] == pytest.approx(bytes_per_parameter, rel=0.01)
        assert rank["taken"] == pytest.approx(rank["freed"], rel=0.01)
