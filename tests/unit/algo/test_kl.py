import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.kl import KL_KINDS, kl_estimate, unbiased_kl
from vime.types import ConfigError


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),  # exp(-ln 2) = 1/2
        ("low_var_kl", 0.5 - 1 + math.log(2)),
    ],
)
def test_a_token_twice_as_likely_as_under_the_reference(kind, expected):
    answer_T = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)]), kind)
    torch.testing.assert_close(answer_T, torch.tensor([expected]))


def test_low_var_kl_is_clamped_at_ten_and_k3_is_not():
    # x = -4: e^4 - 1 - 4 = 49.598
    logp_T, ref_logp_T = torch.tensor([-5.0]), torch.tensor([-1.0])
    assert kl_estimate(logp_T, ref_logp_T, "k3").item() == pytest.approx(math.e**4 - 5, rel=1e-5)
    assert kl_estimate(logp_T, ref_logp_T, "low_var_kl").item() == 10.0


def test_an_unknown_kind_is_refused_naming_the_flag():
    with pytest.raises(ConfigError, match="--kl-loss-type"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("kind", KL_KINDS)
def test_equal_policies_have_zero_divergence(kind):
    assert kl_estimate(torch.tensor([-3.0]), torch.tensor([-3.0]), kind).item() == 0.0


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.lists(st.floats(0.05, 1), min_size=5, max_size=5))
def test_k1_and_k3_have_the_true_divergence_as_their_mean_under_the_policy(weights, ref_weights):
    policy = torch.tensor(weights, dtype=torch.float64)
    reference = torch.tensor(ref_weights[: len(weights)], dtype=torch.float64)
    policy, reference = policy / policy.sum(), reference / reference.sum()
    true_divergence = (policy * (policy.log() - reference.log())).sum().item()
    for kind in ("k1", "k3"):
        mean = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum().item()
        assert mean == pytest.approx(true_divergence, abs=1e-9)
    assert kl_estimate(policy.log(), reference.log(), "k3").min() >= 0


def test_the_unbiased_term_is_the_estimate_times_the_ratio():
    # k3 at x = ln 2 is 0.1931; ratio 1.5
    k3_T = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)]), "k3")
    answer_T = unbiased_kl(k3_T, torch.tensor([1.5]).log())
    torch.testing.assert_close(answer_T, torch.tensor([1.5 * (0.5 - 1 + math.log(2))]))


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=5), st.lists(st.floats(-2, 2), min_size=5, max_size=5))
def test_the_unbiased_gradient_is_that_of_the_true_divergence(logits, ref_logits):
    # expectation over tokens sampled from the policy itself (ratio 1), gradient towards its logits
    def gradient(term):
        logits_V = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        logp_V = logits_V.log_softmax(-1)
        ref_logp_V = torch.tensor(ref_logits[: len(logits)], dtype=torch.float64).log_softmax(-1)
        term(logp_V, ref_logp_V).sum().backward()
        return logits_V.grad

    true = gradient(lambda logp, ref: logp.exp() * (logp - ref))
    unbiased = gradient(
        lambda logp, ref: logp.detach().exp() * unbiased_kl(kl_estimate(logp, ref, "k3"), logp - logp.detach())
    )
    torch.testing.assert_close(unbiased, true, atol=1e-9, rtol=1e-7)


# One state, three tokens. What training adds up over tokens sampled from the policy, gradients towards its logits.
LOGITS, REF_LOGITS = (0.3, -0.2, 0.5), (0.1, 0.2, 0.1)


def expected_gradient(term):
    logits_V = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp_V = logits_V.log_softmax(-1)
    ref_logp_V = torch.tensor(REF_LOGITS, dtype=torch.float64).log_softmax(-1)
    (logp_V.detach().exp() * term(logp_V, ref_logp_V)).sum().backward()
    return logits_V.grad


def in_the_reward(kind):
    """REINFORCE on a reward of -penalty: penalty (a constant) * grad logp."""
    return expected_gradient(lambda logp, ref: kl_estimate(logp.detach(), ref, kind) * logp)


def true_gradient():
    """Of KL(policy || reference) itself, summed over the three tokens."""
    logits_V = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp_V = logits_V.log_softmax(-1)
    (logp_V.exp() * (logp_V - torch.tensor(REF_LOGITS, dtype=torch.float64).log_softmax(-1))).sum().backward()
    return logits_V.grad


def test_in_the_reward_k1_alone_exerts_the_gradient_of_the_divergence():
    torch.testing.assert_close(in_the_reward("k1"), true_gradient(), rtol=1e-9, atol=0)
    for kind in ("k2", "k3", "low_var_kl"):
        share = in_the_reward(kind).norm() / true_gradient().norm()
        assert share < 0.3, kind


def test_as_a_loss_term_k1_has_no_expected_gradient_and_k2_that_of_the_divergence():
    assert expected_gradient(lambda logp, ref: kl_estimate(logp, ref, "k1")).norm() < 1e-12
    as_loss = expected_gradient(lambda logp, ref: kl_estimate(logp, ref, "k2"))
    torch.testing.assert_close(as_loss, true_gradient(), rtol=1e-9, atol=0)
