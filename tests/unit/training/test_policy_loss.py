"""The loss of one micro-batch, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers.rows import make_row
from vime.batching.pack import PackedBatch, pack
from vime.config.training import AlgoConfig
from vime.data.rows import TrainRow
from vime.training.columns import ADVANTAGE, OLD_LOGP, REF_LOGP, STALENESS, sample_token_columns
from vime.training.loss_statistics import SHARES, STATISTICS, to_metrics
from vime.training.policy_loss import PolicyLoss
from vime.types import PluginError, StepPlan


def row(reward: float, mask: list[int]) -> TrainRow:
    """One prompt token, then the response; every token had log-probability -1."""
    length = len(mask)
    return make_row(prompt=[1], response=[1] * length, loss_mask=mask, log_probs=[-1.0] * length, reward=reward)


# Rows of 2 and 1 response tokens after 1 prompt token: a pack of 5; positions 0, 1 and 3 predict response tokens.
ROWS = [row(1.0, [1, 1]), row(-2.0, [1])]
STEP = StepPlan(micro_batches=(((0, 1),),), num_samples=2, num_tokens=3)
LOGP = torch.tensor([math.log(0.6), math.log(0.5), 0.0, math.log(0.2), 0.0])


def packed(**columns: list[list[float]]) -> PackedBatch:
    return pack(ROWS, extra={name: [torch.tensor(column) for column in rows] for name, rows in columns.items()})


def statistics(batch: PackedBatch, **algo: Any) -> dict[str, float]:
    loss, numbers = PolicyLoss(AlgoConfig(**algo), STEP)(LOGP, torch.full((5,), 0.5), batch)
    assert float(loss) == pytest.approx(numbers[0].item())
    return dict(zip(STATISTICS, numbers.tolist(), strict=True))


def test_without_an_old_policy_the_ratio_is_one() -> None:
    # loss = (-1 + 2) / 2
    found = statistics(packed())
    assert found["loss"] == pytest.approx(0.5)
    assert found["ppo_kl"] == 0
    assert found["pg_clipfrac"] == 0


def test_old_policy_gives_ratio_clip_and_difference() -> None:
    # old probabilities .4 .5 | .4: ratios 1.5 (A=1, clipped at 1.2), 1, 0.5 (A=-2, clipped at 0.8)
    # loss = ((-1.2 - 1) / 2 + 1.6) / 2 = 0.25; 2 of 3 tokens clipped; mean of old - new log-probability
    old = [[math.log(0.4), math.log(0.5)], [math.log(0.4)]]
    found = statistics(packed(**{OLD_LOGP: old}))
    assert found["loss"] == pytest.approx(0.25)
    assert found["pg_clipfrac"] == pytest.approx(2 / 3)
    assert found["ppo_kl"] == pytest.approx((math.log(0.4 / 0.6) + 0 + math.log(0.4 / 0.2)) / 3)


def test_clip_higher_moves_the_upper_bound_only() -> None:
    # as above with the upper bound at 1.4: loss = ((-1.4 - 1) / 2 + 1.6) / 2 = 0.2
    old = [[math.log(0.4), math.log(0.5)], [math.log(0.4)]]
    assert statistics(packed(**{OLD_LOGP: old}), eps_clip_high=0.4)["loss"] == pytest.approx(0.2)


def test_loss_is_policy_plus_kl_minus_entropy_all_reduced_alike() -> None:
    # k1: logp - ref; per row means: ln(.6/.3) and ln(.5/.5) -> ln 2 / 2; ln(.2/.1) = ln 2; reduced 0.75 ln 2
    reference = [[math.log(0.3), math.log(0.5)], [math.log(0.1)]]
    found = statistics(
        packed(**{REF_LOGP: reference}), use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1", entropy_coef=0.2
    )
    assert found["kl_loss"] == pytest.approx(0.75 * math.log(2))
    assert found["entropy"] == pytest.approx(0.5)
    assert found["loss"] == pytest.approx(0.5 + 0.1 * 0.75 * math.log(2) - 0.2 * 0.5)


def test_the_unbiased_kl_is_weighed_by_the_ratio_to_the_old_policy() -> None:
    # k1: ln 2, 0 | ln 2; ratios 1.5, 1 | 0.5: (0.75 ln 2 + 0.5 ln 2) / 2
    columns = {
        OLD_LOGP: [[math.log(0.4), math.log(0.5)], [math.log(0.4)]],
        REF_LOGP: [[math.log(0.3), math.log(0.5)], [math.log(0.1)]],
    }
    found = statistics(packed(**columns), use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1", use_unbiased_kl=True)
    assert found["kl_loss"] == pytest.approx(0.625 * math.log(2))
    assert found["loss"] == pytest.approx(0.25 + 0.1 * 0.625 * math.log(2))  # 0.25: the clipped term alone


# One state, four tokens. The engine's weights (mu) are older than the round's, which are the policy in training.
LOGITS, ENGINE_LOGITS, REF_LOGITS = (0.3, -0.2, 0.5, 0.0), (1.2, -0.5, -0.3, 0.1), (-0.4, 0.9, 0.0, 0.2)


def gradient_of_the_kl_term(**algo: Any) -> torch.Tensor:
    """Return the mean over tokens that mu samples, each a row of one token, of the gradient towards the logits."""
    logits_V = torch.tensor(LOGITS, requires_grad=True)
    logp_V, engine_V, ref_V = (torch.as_tensor(x).log_softmax(0) for x in (logits_V, ENGINE_LOGITS, REF_LOGITS))
    step, mean = StepPlan(micro_batches=(), num_samples=1, num_tokens=1), torch.zeros(())
    for token in range(4):
        one = make_row(prompt=[1], response=[token], log_probs=[engine_V[token].item()], reward=0.0)
        batch = pack([one], extra={REF_LOGP: [ref_V[token : token + 1]]})
        logp_T = torch.stack([logp_V[token], torch.zeros(())])
        loss, _ = PolicyLoss(AlgoConfig(use_kl_loss=True, kl_loss_coef=1.0, **algo), step)(
            logp_T, torch.zeros(2), batch
        )
        mean = mean + engine_V[token].exp() * loss
    return torch.autograd.grad(mean, logits_V)[0]


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
@pytest.mark.parametrize(
    "correction",
    [
        {"off_policy_correction": "decoupled", "tis_clip": 100.0},  # no weight is as large
        {"off_policy_correction": "tis", "tis_clip": 100.0, "tis_clip_low": 0.0},
        {"use_rollout_logprobs": True},
    ],
)
def test_the_unbiased_kl_of_stale_tokens_has_the_gradient_of_the_divergence(
    kind: str, correction: dict[str, Any]
) -> None:
    logits_V = torch.tensor(LOGITS, requires_grad=True)
    logp_V, ref_V = logits_V.log_softmax(0), torch.tensor(REF_LOGITS).log_softmax(0)
    [true] = torch.autograd.grad((logp_V.exp() * (logp_V - ref_V)).sum(), logits_V)
    found = gradient_of_the_kl_term(kl_loss_type=kind, use_unbiased_kl=True, **correction)
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)


def test_the_unbiased_kl_is_truncated_as_the_policy_term_is() -> None:
    # The engine says e^-1: weights .6e = 1.631 (dropped above 1.5), .5e = 1.359 | .2e = 0.5437; k1: ln 2, 0 | ln 2
    columns = {REF_LOGP: [[math.log(0.3), math.log(0.5)], [math.log(0.1)]]}
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1", "use_unbiased_kl": True}
    found = statistics(packed(**columns), off_policy_correction="decoupled", tis_clip=1.5, **flags)
    assert found["kl_loss"] == pytest.approx(0.2 * math.e * math.log(2) / 2)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_a_reference_far_away_at_an_untrained_token_leaves_the_gradient_finite(kind: str) -> None:
    # ref - logp = 100 at the token that is not trained: exp of it is inf, and 0 times its gradient nan
    batch = pack([row(1.0, [1, 0])], extra={REF_LOGP: [torch.tensor([-1.0, -1.0])]})
    logp_T = torch.tensor([-2.0, -101.0, 0.0], requires_grad=True)
    algo = AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kind)
    loss, _ = PolicyLoss(algo, STEP)(logp_T, torch.zeros(3), batch)
    loss.backward()
    assert logp_T.grad is not None
    assert bool(logp_T.grad.isfinite().all())
    assert logp_T.grad[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_an_empty_pack_is_zero_and_can_be_differentiated(estimator: str) -> None:
    batch = pack([])
    logp = torch.full((batch.num_tokens,), float("nan"), requires_grad=True)
    loss, numbers = PolicyLoss(AlgoConfig(advantage_estimator=estimator), STEP)(
        logp, torch.zeros(batch.num_tokens), batch
    )
    loss.backward()
    assert float(loss.detach()) == 0
    assert numbers.tolist() == [0.0] * len(STATISTICS)


OLD = [[math.log(0.4), math.log(0.5)], [math.log(0.4)]]


def test_gspo_clips_the_ratio_of_the_answer() -> None:
    # answer 0: ratios 1.5, 1 -> sqrt 1.5 = 1.2247, cut at 1.2 (A 1); answer 1: 0.5, cut at 0.8 (A -2)
    # loss = (-1.2 + 1.6) / 2; every one of the 3 tokens is clipped
    found = statistics(packed(**{OLD_LOGP: OLD}), advantage_estimator="gspo", eps_clip=0.2)
    assert found["loss"] == pytest.approx(0.2)
    assert found["pg_clipfrac"] == 1


def test_cispo_weighs_log_probabilities() -> None:
    # weights 1.2, 1 | 0.8: (-(1.2 ln .6 + ln .5) / 2 + 2 * 0.8 ln .2) / 2
    expected = (-(1.2 * math.log(0.6) + math.log(0.5)) / 2 + 1.6 * math.log(0.2)) / 2
    found = statistics(packed(**{OLD_LOGP: OLD}), advantage_estimator="cispo", eps_clip=0.2)
    assert found["loss"] == pytest.approx(expected)
    # without a lower bound the weight of answer 1 is its ratio, 0.5
    expected = (-(1.2 * math.log(0.6) + math.log(0.5)) / 2 + 2 * 0.5 * math.log(0.2)) / 2
    assert statistics(packed(**{OLD_LOGP: OLD}), advantage_estimator="cispo")["loss"] == pytest.approx(expected)


def test_token_advantages_replace_those_of_the_rows() -> None:
    # one step: ratio 1, loss = (-(3 + 5) / 2 - 1) / 2
    found = statistics(packed(**{ADVANTAGE: [[3.0, 5.0], [1.0]]}))
    assert found["loss"] == pytest.approx(-2.5)


@pytest.mark.parametrize(
    ("correction", "expected", "changed"),
    [
        # the engine says e^-1 everywhere: weights .6e = 1.631, .5e = 1.359 | .2e = 0.5437; A 1 1 | -2
        ("tis", (-(1.5 + math.e / 2) / 2 + 2 * 0.6) / 2, 2 / 3),
        ("icepop", (-(0 + math.e / 2) / 2 + 0) / 2, 2 / 3),
        ("decoupled", (-(0 + math.e / 2) / 2 + 0.4 * math.e) / 2, 1 / 3),
    ],
)
def test_a_correction_multiplies_the_policy_term_and_not_the_kl_term(
    correction: str, expected: float, changed: float
) -> None:
    found = statistics(
        packed(**{REF_LOGP: [[math.log(0.3), math.log(0.5)], [math.log(0.1)]]}),
        off_policy_correction=correction,
        tis_clip=1.5,
        tis_clip_low=0.6,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k1",
    )
    assert found["loss"] == pytest.approx(expected + 0.1 * 0.75 * math.log(2), abs=1e-6)  # terms near 1 in fp32
    assert found["tis_clipfrac"] == pytest.approx(changed)


def test_mis_drops_an_answer_by_its_sequence_ratio() -> None:
    # answer 0: .6 * .5 * e^2 = 2.217 above 2: dropped; answer 1: .2e, kept: loss = 2 * .2e / 2
    found = statistics(packed(), off_policy_correction="mis", mis_level="sequence", mis_mode="mask", tis_clip=2.0)
    assert found["loss"] == pytest.approx(0.2 * math.e)


def test_the_engine_can_be_the_old_policy() -> None:
    # ratios 1.631 -> 1.2, 1.359 -> 1.2 | 0.5437 -> 0.8: loss = (-1.2 + 1.6) / 2; ppo_kl = mean of -1 - logp
    found = statistics(packed(), use_rollout_logprobs=True)
    assert found["loss"] == pytest.approx(0.2)
    assert found["ppo_kl"] == pytest.approx(-1 - (math.log(0.6) + math.log(0.5) + math.log(0.2)) / 3)


def test_opsm_leaves_out_the_bad_answer_that_drifted() -> None:
    # answer 1 (A -2): drift -1 - ln .2 = 0.609 nats; answer 0 is good. loss = -1 / 2; 1 of 3 tokens left out
    found = statistics(packed(), use_opsm=True, opsm_delta=0.6)
    assert (found["loss"], found["opsm_maskfrac"]) == pytest.approx((-0.5, 1 / 3))
    assert statistics(packed(), use_opsm=True, opsm_delta=0.61)["opsm_maskfrac"] == 0


def test_sft_is_the_mean_of_minus_log_probability() -> None:
    per_answer = -((math.log(0.6) + math.log(0.5)) / 2 + math.log(0.2)) / 2
    assert statistics(packed(), loss_type="sft_loss")["loss"] == pytest.approx(per_answer)
    per_token = -(math.log(0.6) + math.log(0.5) + math.log(0.2)) / 3
    found = statistics(packed(), loss_type="sft_loss", calculate_per_token_loss=True)
    assert found["loss"] == pytest.approx(per_token)


def test_a_custom_loss_sees_constants_and_answers_every_token() -> None:
    seen: dict[str, torch.Tensor] = {}

    def custom(logp_T: torch.Tensor, entropy_T: torch.Tensor, columns: Any) -> torch.Tensor:
        seen.update(columns)
        return columns["advantage"] * 3 + 0 * logp_T

    loss, _ = PolicyLoss(AlgoConfig(loss_type="custom_loss"), STEP, custom)(LOGP, torch.zeros(5), packed())
    assert float(loss) == pytest.approx((3 - 6) / 2)
    assert set(seen) == {"advantage", "old_logp", "rollout_logp", "mask"}
    with pytest.raises(PluginError, match=r"returned \(\), expected a tensor of shape \(5,\)"):
        PolicyLoss(AlgoConfig(loss_type="custom_loss"), STEP, lambda *_: LOGP.sum())(LOGP, torch.zeros(5), packed())


def test_metrics_tell_staleness_apart() -> None:
    # answer 0 is fresh, answer 1 two versions behind; policy / engine weights 1.631, 1.359 | 0.5437
    batch = packed(**{OLD_LOGP: OLD, STALENESS: [[0.0, 0.0], [2.0]]})
    found = to_metrics(list(statistics(batch).values()), with_mismatch=False)
    first, second, third = 0.6 * math.e, 0.5 * math.e, 0.2 * math.e
    assert found["train/ess/staleness_0"] == pytest.approx((first + second) ** 2 / 2 / (first**2 + second**2))
    assert found["train/ess/staleness_2"] == pytest.approx(1.0)
    total = first + second + third
    assert found["train/ess"] == pytest.approx(total**2 / 3 / (first**2 + second**2 + third**2))
    assert found["train/pg_clipfrac/staleness_0"] == pytest.approx(1 / 2)
    assert found["train/pg_clipfrac/staleness_2"] == pytest.approx(1.0)
    assert found["train/token_share/staleness_2"] == pytest.approx(1 / 3)
    # k3 of KL(engine || policy) at weight w: w - 1 - ln w
    assert found["train/rollout_kl/staleness_2"] == pytest.approx(third - 1 - math.log(third))
    assert "train/ess/staleness_1" not in found
    alone = to_metrics(list(statistics(packed()).values()), with_mismatch=False)
    assert not [name for name in alone if "staleness" in name]


def test_imitation_has_no_metric_that_compares_with_an_engine() -> None:
    batch = packed(**{STALENESS: [[0.0, 0.0], [2.0]]})
    found = to_metrics(list(statistics(batch, loss_type="sft_loss").values()), with_mismatch=False, is_sampled=False)
    assert sorted(found) == sorted(f"train/{name}" for name in SHARES)


@pytest.mark.parametrize(
    ("staleness", "bucket"), [(0, "0"), (1, "1"), (3, "3"), (4, "4_7"), (7, "4_7"), (8, "8_up"), (99, "8_up")]
)
def test_a_row_counts_in_the_bucket_of_its_staleness(staleness: int, bucket: str) -> None:
    values = statistics(packed(**{STALENESS: [[float(staleness)] * 2, [float(staleness)]]}))
    assert {name: value for name, value in values.items() if name.startswith("count/") and value} == {
        f"count/{bucket}": 3.0
    }


def test_mismatch_metrics_compare_trainer_and_engine() -> None:
    # the engine says -1 everywhere, the trainer's policy at the start of the round OLD: .4 .5 | .4
    found = to_metrics(list(statistics(packed(**{OLD_LOGP: OLD})).values()), with_mismatch=True)
    logs = [math.log(0.4), math.log(0.5), math.log(0.4)]
    nll = -sum(logs) / 3
    assert found["train/mismatch_kl"] == pytest.approx(-1 + nll)
    assert found["train/mismatch_k3_kl"] == pytest.approx(sum(math.exp(x + 1) - 1 - (x + 1) for x in logs) / 3)
    assert found["train/mismatch_chi2"] == pytest.approx(sum(math.exp(2 * (x + 1)) for x in logs) / 3 - 1)
    assert (found["train/mismatch_train_nll"], found["train/mismatch_rollout_nll"]) == pytest.approx((nll, 1.0))
    assert found["train/mismatch_ppl_ratio"] == pytest.approx(math.exp(nll - 1))


def test_a_custom_loss_that_is_constant_can_be_differentiated_too() -> None:
    loss_of = PolicyLoss(AlgoConfig(loss_type="custom_loss"), STEP, lambda logp_T, *_: torch.ones_like(logp_T))
    logp_T = LOGP.clone().requires_grad_()
    loss, _ = loss_of(logp_T, torch.zeros(5), packed())
    loss.backward()
    assert float(loss.detach()) == 1
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # ratios 1.5 (cut at 1.2) and 1 with A = 1, 0.5 (cut at 0.8) with A = -2: (-1.2 - 1 + 1.6) / 3
        ("grpo", -0.2),
        # each row has its own ratio: sqrt 1.5 (cut at 1.2) at both of its tokens, and 0.5 (0.8): (-1.2 x 2 + 1.6) / 3
        ("gspo", -0.8 / 3),
    ],
)
def test_two_rows_of_one_sample_are_averaged_over_the_tokens_of_both(estimator: str, expected: float) -> None:
    step = StepPlan(micro_batches=(((0,), (1,)),), num_samples=1, num_tokens=3, sample_tokens=((0, 3), (1, 3)))
    found = 0.0
    for number in (0, 1):  # a micro-batch each
        columns = {OLD_LOGP: {0: torch.tensor(OLD[0]), 1: torch.tensor(OLD[1])}}
        columns |= sample_token_columns(step, dict(enumerate(ROWS)), [number])
        batch = pack([ROWS[number]], extra={name: [column[number]] for name, column in columns.items()})
        logp_T = LOGP[:3] if number == 0 else LOGP[3:]
        loss, _ = PolicyLoss(AlgoConfig(advantage_estimator=estimator, eps_clip=0.2), step)(logp_T, 0 * logp_T, batch)
        found += float(loss)
    assert found == pytest.approx(expected)


def test_a_step_in_which_every_sample_is_one_row_has_no_column_of_tokens() -> None:
    assert sample_token_columns(STEP, dict(enumerate(ROWS)), [0, 1]) == {}


def test_a_sample_of_one_row_beside_one_of_several_divides_by_its_own_trainable_tokens() -> None:
    rows = {0: row(1.0, [1, 0]), 1: row(1.0, [1, 1, 0]), 2: row(1.0, [1])}
    step = StepPlan(micro_batches=(((0, 1, 2),),), num_samples=2, num_tokens=4, sample_tokens=((0, 2), (2, 2)))
    [column] = sample_token_columns(step, rows, [0, 1, 2]).values()
    assert {number: values.tolist() for number, values in column.items()} == {0: [2, 2], 1: [2, 2, 2], 2: [2]}
