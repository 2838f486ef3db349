import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.kl import kl_estimate, unbiased_kl
from vime.algo.losses import cispo_loss, policy_loss, sequence_log_ratio, sft_loss


def _loss(
    ratio: float, advantage: float, low: float = 0.2, high: float = 0.3, dual: float | None = None
) -> tuple[float, bool]:
    log_ratio_T = torch.tensor([math.log(ratio)], dtype=torch.float64)
    advantage_T = torch.tensor([advantage], dtype=torch.float64)
    loss_T, is_clipped_T = policy_loss(log_ratio_T, advantage_T, eps_clip=low, eps_clip_high=high, eps_clip_c=dual)
    return round(loss_T.item(), 9), bool(is_clipped_T.item())


def test_inside_the_range_the_loss_is_minus_ratio_times_advantage():
    assert _loss(1.1, 2.0) == (-2.2, False)


def test_a_good_token_above_the_range_counts_as_its_upper_end():
    # max(-1.5 * 1, -1.3 * 1) = -1.3: clip-higher uses 0.3, not 0.2
    assert _loss(1.5, 1.0) == (-1.3, True)


def test_a_bad_token_below_the_range_counts_as_its_lower_end():
    # max(-0.5 * -1, -0.8 * -1) = 0.8
    assert _loss(0.5, -1.0) == (0.8, True)


def test_the_pessimistic_side_is_never_clipped():
    # a bad token that became likelier: max(1.5, 1.3) = 1.5; a good one that became rarer: max(-0.5, -0.8) = -0.5
    assert _loss(1.5, -1.0) == (1.5, False)
    assert _loss(0.5, 1.0) == (-0.5, False)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_minus_ratio_times_advantage():
    # d/dlogp of -exp(logp - old) A = -ratio A: -2 for the second token (ratio 1, A 2)
    logp_T = torch.tensor([math.log(2.0), 0.0], requires_grad=True)
    loss_T, _ = policy_loss(logp_T, torch.tensor([1.0, 2.0]), eps_clip=0.2, eps_clip_high=0.2)
    loss_T.sum().backward()
    torch.testing.assert_close(logp_T.grad, torch.tensor([0.0, -2.0]))


@given(st.floats(-2, 2), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 2))
def test_the_loss_is_never_below_the_unclipped_loss(log_ratio, advantage, low, high):
    ratio = math.exp(log_ratio)
    loss, is_clipped = _loss(ratio, advantage, low, high)
    assert loss >= -ratio * advantage - 1e-5
    if is_clipped:
        assert ratio > 1 + high - 1e-6 or ratio < 1 - low + 1e-6


def test_the_dual_clip_bounds_a_bad_token_that_became_likelier():
    # Ye et al.: A = -2, r = 5 costs 10; bounded at c = 3: 6. At r = 1.2 it costs 2.4 < 6 and is not touched
    assert _loss(5.0, -2.0, dual=3.0) == (6.0, True)
    assert _loss(1.2, -2.0, dual=3.0) == (2.4, False)
    assert _loss(5.0, 2.0, dual=3.0) == _loss(5.0, 2.0)


@given(st.floats(-2, 3), st.floats(-3, 3), st.floats(1.01, 5))
def test_the_dual_clip_never_raises_a_loss_and_touches_negative_advantages_only(log_ratio, advantage, dual):
    plain, _ = _loss(math.exp(log_ratio), advantage)
    bounded, _ = _loss(math.exp(log_ratio), advantage, dual=dual)
    assert bounded <= plain
    assert bounded == plain or (advantage < 0 and bounded == round(-dual * advantage, 9))


def test_a_dual_clipped_token_has_no_gradient():
    log_ratio_T = torch.tensor([math.log(5.0)], requires_grad=True)
    policy_loss(log_ratio_T, torch.tensor([-1.0]), eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=3.0)[0].sum().backward()
    assert log_ratio_T.grad.tolist() == [0.0]


ROWS = [slice(0, 3), slice(4, 5)]  # position 3 belongs to no row
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])


def test_a_sequence_ratio_is_the_geometric_mean_of_its_trainable_tokens():
    # row 0: ratios 2 and 8 (the middle one is masked) -> 4 at all three; row 1: 3
    log_ratio_T = torch.tensor([2.0, 100.0, 8.0, 7.0, 3.0]).log()
    answer_T = sequence_log_ratio(log_ratio_T, MASK, ROWS).exp()
    torch.testing.assert_close(answer_T, torch.tensor([4.0, 4.0, 4.0, 1.0, 3.0]))


def test_gspo_spreads_its_gradient_evenly_over_the_trainable_tokens_of_an_answer():
    # mean over tokens of -s A with s = exp(mean x): d/dx_t = -s A / 2 for each of the two tokens; s = 1, A = 3
    log_ratio_T = torch.zeros(5, requires_grad=True)
    ratio_T = sequence_log_ratio(log_ratio_T, MASK, ROWS)
    loss_T, _ = policy_loss(ratio_T, torch.full((5,), 3.0), eps_clip=0.2, eps_clip_high=0.2)
    (loss_T[:3] * MASK[:3] / 2).sum().backward()
    torch.testing.assert_close(log_ratio_T.grad, torch.tensor([-1.5, 0.0, -1.5, 0.0, 0.0]))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.floats(-3, 3))
def test_equal_ratios_make_gspo_and_ppo_the_same(advantages, log_ratio):
    log_ratio_T, advantage_T = torch.full((len(advantages),), log_ratio).double(), torch.tensor(advantages).double()
    rows, mask_T = [slice(0, len(advantages))], torch.ones(len(advantages))
    clips = {"eps_clip": 0.2, "eps_clip_high": 0.2}
    sequence, _ = policy_loss(sequence_log_ratio(log_ratio_T, mask_T, rows), advantage_T, **clips)
    token, _ = policy_loss(log_ratio_T, advantage_T, **clips)
    torch.testing.assert_close(sequence, token)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    # r = 1.5 cut to 1.3: loss -1.3 * 2 * -1 = 2.6, gradient -2.6; r = .5 cut to .8, A = -1: .8 * -2 = -1.6
    logp_T = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    log_ratio_T = torch.tensor([1.5, 0.5, 1.0]).log()
    loss_T, is_clipped_T = cispo_loss(
        log_ratio_T, logp_T, torch.tensor([2.0, -1.0, 1.0]), eps_clip=0.2, eps_clip_high=0.3
    )
    torch.testing.assert_close(loss_T.detach(), torch.tensor([2.6, -1.6, 1.0]))
    assert is_clipped_T.tolist() == [True, True, False]
    loss_T.sum().backward()
    torch.testing.assert_close(logp_T.grad, torch.tensor([-2.6, 0.8, -1.0]))


@given(st.floats(-4, 4), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 2))
def test_a_cispo_gradient_is_minus_a_weight_inside_the_range_times_the_advantage(log_ratio, advantage, low, high):
    logp_T = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    log_ratio_T = torch.tensor([log_ratio], dtype=torch.float64)
    loss_T, _ = cispo_loss(log_ratio_T, logp_T, torch.tensor([advantage]).double(), eps_clip=low, eps_clip_high=high)
    loss_T.sum().backward()
    bounds = sorted([-(1 - low) * advantage, -(1 + high) * advantage])
    assert bounds[0] - 1e-6 <= logp_T.grad.item() <= bounds[1] + 1e-6


def test_sft_is_minus_log_probability():
    assert sft_loss(torch.tensor([-1.5, -0.25])).tolist() == [1.5, 0.25]


@pytest.mark.parametrize("log_ratio", [100.0, 1e4, math.inf])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_a_ratio_that_overflows_has_finite_loss_and_gradient(log_ratio, advantage, dual):
    # e^100 is inf in float32; the ratio is cut at e^20, and beyond it a token has no gradient
    log_ratio_T = torch.tensor([log_ratio, 0.5], requires_grad=True)
    loss_T, _ = policy_loss(
        log_ratio_T, torch.tensor([advantage, -1.0]), eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=dual
    )
    loss_T.sum().backward()
    bad = dual if dual else math.exp(20)
    expected = {0.0: 0.0, 1.0: -1.2, -1.0: bad}[advantage]
    assert loss_T[0].item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(log_ratio_T.grad, torch.tensor([0.0, math.exp(0.5)]))


def test_ratios_up_to_the_cut_are_untouched():
    log_ratio_T = torch.tensor([-80.0, -1.0, 0.0, 19.9], requires_grad=True)
    loss_T, _ = policy_loss(log_ratio_T, -torch.ones(4), eps_clip=1.0, eps_clip_high=0.0)
    loss_T.sum().backward()
    assert torch.equal(loss_T, log_ratio_T.exp())
    assert torch.equal(log_ratio_T.grad, log_ratio_T.exp())


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_low_var_kl_far_from_the_reference_is_its_limit_without_a_gradient(difference):
    logp_T = torch.tensor([difference, 0.0], requires_grad=True)
    kl_T = kl_estimate(logp_T, torch.zeros(2), "low_var_kl")
    unbiased = unbiased_kl(kl_T, logp_T - logp_T.detach() + torch.tensor([500.0, 0.0]))
    kl_T.sum().backward(retain_graph=True)
    assert kl_T.tolist() == [10.0, 0.0]
    assert logp_T.grad.tolist() == [0.0, 0.0]
    unbiased.sum().backward()
    assert bool(unbiased.isfinite().all())
    assert bool(logp_T.grad.isfinite().all())
