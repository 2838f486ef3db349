import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.losses import policy_loss


def _loss(ratio: float, advantage: float, low: float = 0.2, high: float = 0.3) -> tuple[float, bool]:
    logp_T = torch.tensor([math.log(ratio)], dtype=torch.float64)
    old_logp_T, advantage_T = torch.zeros(1).double(), torch.tensor([advantage], dtype=torch.float64)
    loss_T, is_clipped_T = policy_loss(logp_T, old_logp_T, advantage_T, eps_clip=low, eps_clip_high=high)
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
    loss_T, _ = policy_loss(logp_T, torch.zeros(2), torch.tensor([1.0, 2.0]), eps_clip=0.2, eps_clip_high=0.2)
    loss_T.sum().backward()
    torch.testing.assert_close(logp_T.grad, torch.tensor([0.0, -2.0]))


@given(st.floats(-2, 2), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 2))
def test_the_loss_is_never_below_the_unclipped_loss(log_ratio, advantage, low, high):
    ratio = math.exp(log_ratio)
    loss, is_clipped = _loss(ratio, advantage, low, high)
    assert loss >= -ratio * advantage - 1e-5
    if is_clipped:
        assert ratio > 1 + high - 1e-6 or ratio < 1 - low + 1e-6
