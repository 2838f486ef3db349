"""Weights of tokens that another policy sampled, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.losses import (
    decoupled_weight,
    effective_sample_size,
    kept_weight,
    multi_level_weight,
    off_policy_sequence_mask,
    ratio,
    truncated_weight,
)
from vime.types import ConfigError

RATIOS = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])


def answer(weight):
    return [round(value, 5) for value in weight[0].tolist()], weight[1].tolist()


def test_truncation_cuts_a_weight_to_the_bounds():
    found = truncated_weight(RATIOS.log(), low=0.4, high=1.5)
    assert answer(found) == ([0.4, 0.5, 1.0, 1.5, 1.5], [True, False, False, True, True])


def test_icepop_drops_a_token_outside_of_the_bounds():
    found = kept_weight(RATIOS.log(), low=0.4, high=1.5)
    assert answer(found) == ([0.0, 0.5, 1.0, 0.0, 0.0], [True, False, False, True, True])


def test_decoupled_drops_a_token_above_the_cap_only():
    found = decoupled_weight(RATIOS.log(), cap=3.0)
    assert answer(found) == ([0.25, 0.5, 1.0, 2.0, 0.0], [False, False, False, False, True])


ROWS, MASK = [slice(0, 3), slice(3, 4)], torch.tensor([1.0, 0.0, 1.0, 1.0])
LOG_RATIOS = torch.tensor([2.0, 100.0, 8.0, 3.0]).log()  # the second token is not trainable


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 100.0, 8.0, 3.0]),
        ("sequence", [16.0, 16.0, 16.0, 3.0]),  # 2 * 8
        ("geometric", [4.0, 4.0, 4.0, 3.0]),  # sqrt(16)
    ],
)
def test_mis_weighs_a_token_or_the_trainable_tokens_of_its_answer(level, expected):
    weight_T, is_changed_T = multi_level_weight(LOG_RATIOS, MASK, ROWS, level=level, mode="truncate", low=0.0, high=1e9)
    torch.testing.assert_close(weight_T, torch.tensor(expected))
    assert not is_changed_T.any()


def test_mis_masks_or_truncates_a_whole_answer():
    masked = multi_level_weight(LOG_RATIOS, MASK, ROWS, level="sequence", mode="mask", low=0.0, high=5.0)
    assert answer(masked) == ([0.0, 0.0, 0.0, 3.0], [True, True, True, False])
    cut = multi_level_weight(LOG_RATIOS, MASK, ROWS, level="sequence", mode="truncate", low=0.0, high=5.0)
    assert answer(cut) == ([5.0, 5.0, 5.0, 3.0], [True, True, True, False])
    with pytest.raises(ConfigError, match="--mis-level"):
        multi_level_weight(LOG_RATIOS, MASK, ROWS, level="word", mode="mask", low=0.0, high=5.0)


@given(st.lists(st.floats(-200, 200), min_size=1, max_size=8), st.floats(0, 1), st.floats(1, 10))
def test_every_weight_is_finite_constant_and_inside_its_bounds(log_ratios, low, high):
    log_ratio_T = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    for weight_T, _ in (
        truncated_weight(log_ratio_T, low=low, high=high),
        kept_weight(log_ratio_T, low=low, high=high),
        decoupled_weight(log_ratio_T, cap=high),
    ):
        assert not weight_T.requires_grad
        assert bool((weight_T <= high + 1e-9).all())
        assert bool(((weight_T >= 0) & weight_T.isfinite()).all())


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_equal_policies_need_no_correction(logps):
    logp_T = torch.tensor(logps)
    mask_T, rows = torch.ones(len(logps)), [slice(0, len(logps))]
    for weight_T, is_changed_T in (
        truncated_weight(logp_T - logp_T, low=0.5, high=2.0),
        kept_weight(logp_T - logp_T, low=0.5, high=2.0),
        decoupled_weight(logp_T - logp_T, cap=2.0),
        multi_level_weight(logp_T - logp_T, mask_T, rows, level="sequence", mode="mask", low=0.5, high=2.0),
    ):
        assert weight_T.tolist() == [1.0] * len(logps)
        assert not is_changed_T.any()


def test_opsm_leaves_out_a_bad_answer_that_drifted_and_keeps_a_good_one():
    # behaviour .5 .5, policy .25 .5: drift (ln 2 + 0) / 2 = 0.347 nats a token
    behaviour_T, policy_T = torch.tensor([0.5, 0.5, 0.5, 0.5]).log(), torch.tensor([0.25, 0.5, 0.25, 0.5]).log()
    rows, mask_T = [slice(0, 2), slice(2, 4)], torch.ones(4)
    advantage_T = torch.tensor([-1.0, -1.0, 1.0, 1.0])

    def left_out(delta):
        return off_policy_sequence_mask(policy_T, behaviour_T, advantage_T, mask_T, rows, delta=delta).tolist()

    assert left_out(0.34) == [True, True, False, False]
    assert left_out(0.35) == [False, False, False, False]


def test_effective_sample_size_of_unequal_weights():
    # (1 + 1 + 2)^2 / (3 * (1 + 1 + 4)) = 16 / 18
    assert effective_sample_size(4.0, 6.0, 3.0) == pytest.approx(16 / 18)
    assert math.isnan(effective_sample_size(0.0, 0.0, 0.0))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_effective_sample_size_lies_between_one_token_and_all(weights):
    share = effective_sample_size(sum(weights), sum(weight**2 for weight in weights), len(weights))
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9


def test_a_ratio_does_not_overflow():
    # cut at e^20 = 4.85e8, whose square is finite in float32
    assert ratio(torch.tensor([1e4])).item() == pytest.approx(math.e**20, rel=1e-5)
