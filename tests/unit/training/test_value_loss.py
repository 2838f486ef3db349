"""The critic's loss of one micro-batch and what is said about it, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.rows import make_row
from vime.batching.pack import PackedBatch, pack
from vime.training.columns import RETURN, SAMPLE_TOKENS, VALUE
from vime.training.value_loss import VALUE_STATISTICS, ValueLoss, value_metrics
from vime.types import StepPlan

# Rows of 3 (the second is a tool's) and 1 response tokens. At the start of the round the values were .5 and 1 | 0, the
# returns are 1 and 0 | 2; now the values are 1 and .9 | .5. Clip .2:
# token 0: bounded .7, plain 0, clipped .09: 0.045, clipped    token 2: inside, .81: 0.405    token 3: bounded .2,
# plain 2.25, clipped 3.24: 1.62, clipped
ROWS = [make_row(prompt=[1], response=[1] * len(mask), loss_mask=mask) for mask in ([1, 0, 1], [1])]
OLD, NOW, TARGET = ([0.5, 9.0, 1.0], [0.0]), ([1.0, -9.0, 0.9], [0.5]), ([1.0, 7.0, 0.0], [2.0])
STEP = StepPlan(micro_batches=(((0, 1),),), num_samples=2, num_tokens=3)


def packed(numbers: list[int], **options: int) -> PackedBatch:
    columns = {VALUE: OLD, RETURN: TARGET, "now": NOW}
    extra = {name: [torch.tensor(column[number]) for number in numbers] for name, column in columns.items()}
    return pack([ROWS[number] for number in numbers], extra=extra, **options)


def statistics(*batches: PackedBatch, per_token: bool = False) -> dict[str, float]:
    total_S = torch.zeros(len(VALUE_STATISTICS), dtype=torch.float64)
    for batch in batches:
        value_T = batch.extra_T["now"].requires_grad_()
        loss, shares_S = ValueLoss(STEP, value_clip=0.2, per_token=per_token)(value_T, torch.zeros(1), batch)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(shares_S[0].item())
        total_S += shares_S
    return dict(zip(VALUE_STATISTICS, total_S.tolist(), strict=True))


def test_the_loss_is_the_mean_over_tokens_then_samples_or_over_all_tokens() -> None:
    assert statistics(packed([0, 1]))["value_loss"] == pytest.approx(((0.045 + 0.405) / 2 + 1.62) / 2)
    assert statistics(packed([0, 1]), per_token=True)["value_loss"] == pytest.approx((0.045 + 0.405 + 1.62) / 3)


def test_two_rows_of_one_sample_are_averaged_over_the_tokens_of_both() -> None:
    columns = {VALUE: OLD, RETURN: TARGET, "now": NOW}
    extra = {name: [torch.tensor(column[number]) for number in (0, 1)] for name, column in columns.items()}
    extra[SAMPLE_TOKENS] = [torch.full((3,), 3), torch.full((1,), 3)]
    batch, step = pack(ROWS, extra=extra), replace(STEP, num_samples=1)
    loss, _ = ValueLoss(step, value_clip=0.2, per_token=False)(batch.extra_T["now"], torch.zeros(1), batch)
    assert float(loss) == pytest.approx((0.045 + 0.405 + 1.62) / 3)


def test_metrics_are_means_over_trainable_tokens_of_what_the_round_began_with() -> None:
    # returns 1, 0, 2: mean 1, variance 2/3; errors .5, -1, 2: mean .5, mean square 5.25 / 3, variance 1.5
    metrics = value_metrics(list(statistics(packed([0, 1])).values()))
    assert metrics == pytest.approx(
        {
            "train/value_loss": 0.9225,
            "train/value_clipfrac": 2 / 3,
            "train/value_mean": 0.5,
            "train/return_mean": 1.0,
            "train/explained_variance": 1 - 1.5 / (2 / 3),
        }
    )


@pytest.mark.parametrize("per_token", [False, True])
def test_packing_and_padding_change_nothing_and_an_empty_pack_adds_nothing(per_token: bool) -> None:
    together = statistics(packed([0, 1]), per_token=per_token)
    apart = statistics(
        packed([1], pad_to_multiple=8), packed([]), packed([0], sequence_multiple=4), per_token=per_token
    )
    assert apart == pytest.approx(together)


def test_equal_returns_have_no_explained_variance() -> None:
    totals = dict.fromkeys(VALUE_STATISTICS, 0.0) | {"target": 1.0, "target_square": 1.0, "error_square": 0.3}
    assert "train/explained_variance" not in value_metrics(list(totals.values()))
