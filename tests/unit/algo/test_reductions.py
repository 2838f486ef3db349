import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.losses import reduce_loss, row_means, row_sums

VALUE_T = torch.tensor([1.0, 3.0, 99.0, 5.0])
MASK_T = torch.tensor([1.0, 1.0, 0.0, 1.0])
ROWS = [slice(0, 3), slice(3, 4)]
CELL = st.tuples(st.floats(-9, 9), st.integers(0, 1))  # value, mask


def test_by_default_each_sample_is_averaged_first():
    # ((1 + 3) / 2 + 5 / 1) / 2 = 3.5; the masked 99 is not counted
    assert reduce_loss(VALUE_T, MASK_T, ROWS, per_token=False, num_samples=2, num_tokens=3).item() == 3.5


def test_per_token_all_tokens_weigh_the_same():
    # (1 + 3 + 5) / 3
    assert reduce_loss(VALUE_T, MASK_T, ROWS, per_token=True, num_samples=2, num_tokens=3).item() == 3.0


def test_a_sample_without_trainable_tokens_adds_nothing_and_still_counts():
    # (2 + 0) / 2
    mask_T = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert reduce_loss(VALUE_T, mask_T, ROWS, per_token=False, num_samples=2, num_tokens=2).item() == 1.0


def test_masked_values_are_never_read():
    value_T = torch.tensor([1.0, 3.0, float("nan"), 5.0], requires_grad=True)
    loss = reduce_loss(value_T, MASK_T, ROWS, per_token=False, num_samples=2, num_tokens=3)
    loss.backward()
    assert loss.item() == 3.5
    # d/dvalue = 1 / tokens of the row / samples: 1/4, 1/4, 0, 1/2
    assert value_T.grad.tolist() == [0.25, 0.25, 0.0, 0.5]


@pytest.mark.parametrize("per_token", [False, True])
def test_an_empty_pack_answers_zero_and_can_be_differentiated(per_token):
    value_T = torch.ones(2, requires_grad=True)
    loss = reduce_loss(value_T, torch.zeros(2), [], per_token=per_token, num_samples=4, num_tokens=9)
    loss.backward()
    assert loss.item() == 0.0
    assert value_T.grad.tolist() == [0.0, 0.0]


def test_a_step_without_trainable_tokens_is_zero_and_not_nan():
    assert reduce_loss(VALUE_T, torch.zeros(4), ROWS, per_token=True, num_samples=2, num_tokens=0).item() == 0.0


@given(
    rows=st.lists(st.lists(CELL, min_size=1, max_size=5), min_size=1, max_size=6),
    cut=st.integers(0, 6),
    per_token=st.booleans(),
)
def test_the_sum_over_packs_is_the_value_of_the_whole_step(rows, cut, per_token):
    def share(part):
        flat = [cell for row in part for cell in row]
        value_T = torch.tensor([value for value, _ in flat], dtype=torch.float64)
        mask_T = torch.tensor([mask for _, mask in flat], dtype=torch.float32)
        slices, start = [], 0
        for row in part:
            slices.append(slice(start, start + len(row)))
            start += len(row)
        num_tokens = sum(mask for row in rows for _, mask in row)
        return reduce_loss(
            value_T, mask_T, slices, per_token=per_token, num_samples=len(rows), num_tokens=num_tokens
        ).item()

    assert share(rows[:cut]) + share(rows[cut:]) == pytest.approx(share(rows), abs=1e-4)


def test_row_sums_and_means_read_masked_tokens_of_their_own_row():
    # rows (1, [9 masked], 3) and (5,), position 3 outside of rows, and a row whose only token is masked
    value_T = torch.tensor([1.0, 9.0, 3.0, 7.0, 5.0, float("nan")])
    mask_T = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    rows = [slice(0, 3), slice(4, 5), slice(5, 6)]
    assert row_sums(value_T, mask_T, rows).tolist() == [4.0, 4.0, 4.0, 0.0, 5.0, 0.0]
    assert row_means(value_T, mask_T, rows).tolist() == [2.0, 2.0, 2.0, 0.0, 5.0, 0.0]
    assert row_means(torch.zeros(2), torch.zeros(2), []).tolist() == [0.0, 0.0]


def test_a_sample_of_three_rows_has_the_gradient_of_one_sample():
    """Rows of 2, 1 and 3 tokens, of which 2, 1 and 2 are masked in: a sample of 5 tokens; beside it a sample of one row
    of 2 tokens. Loss: ((1 + 2 + 4 + 8 + 32) / 5 + (64 + 128) / 2) / 2 samples = (9.4 + 96) / 2 = 52.7. Gradient of a
    token: 1 / tokens of its sample / samples = 1/10 in the first, 1/4 in the second, 0 where the mask is 0."""
    value_T = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], requires_grad=True)
    mask_T = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    rows = [slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 8)]
    tokens_T = torch.tensor([5, 5, 5, 5, 5, 5, 2, 2])
    loss = reduce_loss(value_T, mask_T, rows, per_token=False, num_samples=2, num_tokens=7, sample_tokens_T=tokens_T)
    loss.backward()
    assert loss.item() == pytest.approx(52.7)
    assert value_T.grad.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.0, 0.1, 0.25, 0.25])
    # the same tokens end to end in one row of the sample
    whole = [slice(0, 6), slice(6, 8)]
    assert reduce_loss(value_T, mask_T, whole, per_token=False, num_samples=2, num_tokens=7).item() == loss.item()
    # three samples of one row each would weigh the first sample three times: (1.5 + 4 + 20 + 96) / 4
    apart = reduce_loss(value_T, mask_T, rows, per_token=False, num_samples=4, num_tokens=7)
    assert apart.item() == pytest.approx(30.375)


def test_a_sample_whose_rows_have_no_trainable_token_adds_nothing():
    tokens_T = torch.tensor([0, 0, 0, 1])
    mask_T = torch.tensor([0.0, 0.0, 0.0, 1.0])
    loss = reduce_loss(VALUE_T, mask_T, ROWS, per_token=False, num_samples=2, num_tokens=1, sample_tokens_T=tokens_T)
    assert loss.item() == 2.5  # 5 / 1 / 2


def test_per_token_the_rows_of_a_sample_do_not_matter():
    tokens_T = torch.tensor([3, 3, 3, 3])
    options = {"per_token": True, "num_samples": 1, "num_tokens": 3}
    assert reduce_loss(VALUE_T, MASK_T, ROWS, **options, sample_tokens_T=tokens_T).item() == 3.0
