"""No flag of the algorithm is accepted where it does nothing, and stale tokens are never weighed without a bound."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vime.config.algo_checks import check_algo, check_critic, resolve_algo
from vime.config.parse import Config, parse
from vime.config.training import AlgoConfig
from vime.types import ConfigError


def resolved(*flags: str, max_staleness: int = 0, group_size: int = 4) -> AlgoConfig:
    config: Config = parse(flags)
    config = config.replace(**resolve_algo(config.algo, max_staleness=max_staleness))
    check_algo(config.algo, max_staleness=max_staleness, group_size=group_size)
    check_critic(config.critic, algo=config.algo, optimizer=config.optimizer, num_rollout=config.rollout.num_rollout)
    return config.algo


@pytest.mark.parametrize(
    ("flags", "max_staleness", "expected"),
    [
        ((), 0, "none"),
        ((), 1, "decoupled"),
        (("--off-policy-correction", "none"), 1, "none"),
        (("--off-policy-correction", "tis"), 1, "tis"),
        (("--use-rollout-logprobs",), 1, "none"),
        (("--loss-type", "sft_loss"), 1, "none"),
    ],
)
def test_stale_tokens_are_corrected_unless_told_otherwise(
    flags: tuple[str, ...], max_staleness: int, expected: str
) -> None:
    assert resolved(*flags, max_staleness=max_staleness).off_policy_correction == expected


@pytest.mark.parametrize(
    ("flags", "low", "high"),
    [
        (["tis"], 0, 2),
        (["mis"], 0, 2),
        (["mis", "--mis-level", "geometric"], 1 / 1.001, 1.001),  # a mean over an answer stays near 1
        (["mis", "--mis-level", "geometric", "--tis-clip", "1.25"], 0.8, 1.25),
        (["icepop"], 0.5, 5),  # alpha and beta of the paper
        (["icepop", "--tis-clip", "4"], 0.5, 4),
        (["decoupled"], 0, 5),  # AReaL's cap
    ],
)
def test_the_bounds_of_a_correction_are_those_of_its_authors(flags: list[str], low: float, high: float) -> None:
    algo = resolved("--off-policy-correction", *flags)
    assert (algo.tis_clip_low, algo.tis_clip) == (low, high)


@pytest.mark.parametrize(
    ("flags", "low", "high"),
    [
        (["grpo"], 0.2, 0.2),
        (["grpo", "--eps-clip", "0.1"], 0.1, 0.1),
        (["ppo", "--eps-clip-high", "0.28"], 0.2, 0.28),
        (["gspo"], 3e-4, 4e-4),
        (["gspo", "--eps-clip", "1e-3"], 1e-3, 1e-3),
        (["cispo"], 1.0, 0.2),  # no lower bound: the weight is at least 0
        (["cispo", "--eps-clip", "0.3"], 0.3, 0.2),
        (["cispo", "--eps-clip-high", "4"], 1.0, 4),
    ],
)
def test_the_clips_of_an_estimator_are_those_of_its_authors(flags: list[str], low: float, high: float) -> None:
    algo = resolved("--advantage-estimator", *flags)
    assert (algo.eps_clip, algo.eps_clip_high) == (low, high)
    assert algo.clip_range == (low, high)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), False),
        (("--advantage-estimator", "reinforce_plus_plus"), True),
        (("--advantage-estimator", "reinforce_plus_plus_baseline"), True),
        (("--advantage-estimator", "reinforce_plus_plus", "--no-normalize-advantages"), False),
        (("--advantage-estimator", "rloo", "--normalize-advantages"), True),
        (("--advantage-estimator", "ppo"), True),
    ],
)
def test_reinforce_plus_plus_and_ppo_whiten_by_default(flags: tuple[str, ...], expected: bool) -> None:
    assert resolved(*flags).normalize_advantages is expected


def test_a_group_of_one_needs_an_estimator_without_a_group() -> None:
    assert resolved("--advantage-estimator", "reinforce_plus_plus", group_size=1)
    assert resolved("--advantage-estimator", "ppo", group_size=1)
    assert resolved("--loss-type", "sft_loss", group_size=1)
    assert resolved("--use-opd", group_size=1)
    for name in ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"):
        with pytest.raises(ConfigError, match=f"--n-samples-per-prompt 1 with --advantage-estimator {name}"):
            resolved("--advantage-estimator", name, group_size=1)


REFUSALS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "unbounded weights on stale tokens": (
        {"max_staleness": 1}, ["--tis-clip", "inf"], ["--tis-clip inf", "--transferqueue-max-staleness 1"],
    ),
    "unbounded ratio on stale tokens": (
        {"max_staleness": 2}, ["--use-rollout-logprobs", "--eps-clip-high", "inf"], ["--eps-clip-high inf"],
    ),
    "weights that are all one": (
        {}, ["--off-policy-correction", "tis", "--use-rollout-logprobs"], ["tis", "--use-rollout-logprobs"],
    ),
    "a bound without a correction": ({}, ["--tis-clip", "3"], ["--tis-clip", "--off-policy-correction none"]),
    "a lower bound that decoupled has not": (
        {}, ["--off-policy-correction", "decoupled", "--tis-clip-low", "0.5"], ["--tis-clip-low", "decoupled"],
    ),
    "a level without mis": ({}, ["--mis-level", "token"], ["--mis-level", "mis read it"]),
    "a mode without mis": ({}, ["--mis-mode", "truncate"], ["--mis-mode", "mis read it"]),
    "a delta without opsm": ({}, ["--opsm-delta", "0.5"], ["--opsm-delta", "--use-opsm"]),
    "KL in the reward of a group": ({}, ["--kl-coef", "0.1"], ["--kl-coef", "grpo", "reinforce_plus_plus"]),
    "a discount of a group": ({}, ["--gamma", "0.9"], ["--gamma", "reinforce_plus_plus"]),
    "a lambda without a critic": (
        {}, ["--advantage-estimator", "reinforce_plus_plus", "--lambd", "0.9"], ["--lambd", "ppo"],
    ),
    "a critic's rate without a critic": ({}, ["--critic-lr", "1e-4"], ["--critic-lr", "grpo", "only ppo has a critic"]),
    "a critic's model without a critic": ({}, ["--critic-load", "a"], ["--critic-load"]),
    "a value clip without values": ({}, ["--value-clip", "inf"], ["--value-clip"]),
    "imitation with a critic": (
        {}, ["--loss-type", "sft_loss", "--critic-lr-warmup-iters", "2"], ["--critic-lr-warmup-iters"],
    ),
    "a policy that never moves": (
        {}, ["--advantage-estimator", "ppo", "--num-critic-only-steps", "3", "--num-rollout", "3"],
        ["--num-critic-only-steps 3", "--num-rollout 3"],
    ),
    "a critic's rate that rises as it decays": (
        {}, ["--advantage-estimator", "ppo", "--critic-lr", "1e-5", "--lr-decay-style", "cosine", "--min-lr", "1e-4"],
        ["--min-lr 0.0001", "--critic-lr 1e-05"],
    ),
    "a group's deviation without one": (
        {}, ["--advantage-estimator", "rloo", "--disable-grpo-std-normalization"],
        ["--disable-grpo-std-normalization", "rloo"],
    ),
    "dual clip of cispo": ({}, ["--advantage-estimator", "cispo", "--eps-clip-c", "3"], ["--eps-clip-c", "cispo"]),
    "dual clip at one": ({}, ["--eps-clip-c", "1"], ["--eps-clip-c 1"]),
    "a pull without a teacher": ({}, ["--opd-kl-coef", "2"], ["--opd-kl-coef", "--use-opd"]),
    "imitation with a teacher": ({}, ["--loss-type", "sft_loss", "--use-opd"], ["sft_loss", "--use-opd"]),
    "a KL term without an expected gradient": (
        {}, ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k1"],
        ["--kl-loss-type k1", "expected gradient is 0", "--use-unbiased-kl"],
    ),
    "a ratio for the estimate whose gradient needs none": (
        {}, ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k2", "--use-unbiased-kl"],
        ["--use-unbiased-kl", "--kl-loss-type k2", "Expected k1, k3 or low_var_kl"],
    ),
    "unbiased KL without KL": ({}, ["--use-unbiased-kl"], ["--use-unbiased-kl", "--use-kl-loss"]),
    "custom loss without path": ({}, ["--loss-type", "custom_loss"], ["--custom-loss-path"]),
    "path without custom loss": ({}, ["--custom-loss-path", "a.b"], ["--loss-type policy_loss", "a.b"]),
    "sft with an estimator": (
        {}, ["--loss-type", "sft_loss", "--advantage-estimator", "rloo"], ["--advantage-estimator"],
    ),
    "sft compared with an engine": (
        {}, ["--loss-type", "sft_loss", "--get-mismatch-metrics"], ["sft_loss", "--get-mismatch-metrics"],
    ),
    "sft with a discount": ({}, ["--loss-type", "sft_loss", "--gamma", "0.9"], ["sft_loss", "--gamma"]),
    "sft with a correction": (
        {}, ["--loss-type", "sft_loss", "--off-policy-correction", "tis"], ["--off-policy-correction"],
    ),
    "custom loss with a dual clip": (
        {}, ["--loss-type", "custom_loss", "--custom-loss-path", "a.b", "--eps-clip-c", "3"], ["--eps-clip-c"],
    ),
    "a gamma above one": ({}, ["--gamma", "1.5"], ["--gamma: got 1.5"]),
    "an upper bound below one": ({}, ["--off-policy-correction", "tis", "--tis-clip", "0.5"], ["--tis-clip: got 0.5"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_naming_the_flags(name: str) -> None:
    settings, flags, expected = REFUSALS[name]
    with pytest.raises(ConfigError) as refusal:
        resolved(*flags, **settings)
    for text in expected:
        assert text in str(refusal.value)


def test_a_k1_term_of_unbiased_gradient_is_accepted() -> None:
    flags = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k1", "--use-unbiased-kl")
    assert resolved(*flags).kl_loss_type == "k1"


def test_unbounded_weights_are_allowed_on_fresh_tokens() -> None:
    assert resolved("--off-policy-correction", "tis", "--tis-clip", "inf").tis_clip == math.inf


def test_a_custom_loss_may_read_any_advantage() -> None:
    flags = ("--loss-type", "custom_loss", "--custom-loss-path", "a.b", "--normalize-advantages")
    assert resolved(*flags, "--advantage-estimator", "ppo", "--lambd", "0.9", "--critic-lr", "1e-4").lambd == 0.9
    assert resolved(*flags, max_staleness=1).off_policy_correction == "none"
