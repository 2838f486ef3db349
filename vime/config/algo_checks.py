"""Derived defaults and refusals of the algorithm's flags: no combination where a flag that was given does nothing."""

from __future__ import annotations

import dataclasses
import math

from vime.config.cluster import OptimizerConfig
from vime.config.problems import Problems
from vime.config.training import PLAIN_CLIP, AlgoConfig, CriticConfig
from vime.types import ConfigError

READERS = {
    "gamma": ("reinforce_plus_plus", "ppo"),
    "lambd": ("ppo",),
    "kl_coef": ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    "disable_grpo_std_normalization": ("grpo", "gspo", "cispo"),
    "eps_clip_c": ("grpo", "gspo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
}
"""Knob -> the estimators that read it."""
POLICY_ONLY = (
    *READERS, "advantage_estimator", "normalize_advantages", "use_opd", "opd_kl_coef", "opd_teacher_load", "eps_clip",
    "use_rollout_logprobs", "use_opsm", "opsm_delta", "tis_clip", "tis_clip_low", "mis_level", "mis_mode",
)  # fmt: skip
"""Knobs that only --loss-type policy_loss reads."""
ADVANTAGE_KNOBS = (
    "advantage_estimator", "gamma", "lambd", "kl_coef", "normalize_advantages", "disable_grpo_std_normalization",
    "use_opd", "opd_kl_coef", "opd_teacher_load",
)  # fmt: skip
"""Of these, the knobs that make advantages: a custom loss gets them too."""
DEFAULTS = AlgoConfig()


def resolve_algo(algo: AlgoConfig, *, max_staleness: int) -> dict[str, object]:
    """Values for knobs that were left empty."""
    is_policy = algo.loss_type == "policy_loss"
    correction = algo.off_policy_correction
    if correction is None:
        is_stale = max_staleness > 0 and is_policy and not algo.use_rollout_logprobs
        correction = "decoupled" if is_stale else "none"
    low, high = algo.tis_clip_low, algo.tis_clip
    if correction != "none":
        low, high = dataclasses.replace(algo, off_policy_correction=correction).weight_range
    clips: tuple[float, float | None] = algo.clip_range
    if not is_policy:  # a custom loss may read --eps-clip
        clips = PLAIN_CLIP if algo.eps_clip is None else algo.eps_clip, algo.eps_clip_high
    whiten = algo.normalize_advantages
    if whiten is None:
        whiten = algo.loss_type != "sft_loss" and algo.advantage_estimator in READERS["kl_coef"]  # token rewards
    return {
        "eps_clip": clips[0],
        "eps_clip_high": clips[1],
        "off_policy_correction": correction,
        "tis_clip": high,
        "tis_clip_low": low,
        "normalize_advantages": whiten,
    }


def needs_reference(algo: AlgoConfig) -> bool:
    """Whether any formula reads log-probabilities of the reference model."""
    return algo.use_kl_loss or algo.kl_coef > 0


def needs_teacher(algo: AlgoConfig) -> bool:
    """Whether the trainer runs the teacher itself."""
    return algo.use_opd and algo.opd_teacher_load is not None


def check_algo(algo: AlgoConfig, *, max_staleness: int, group_size: int) -> None:
    """Called after `resolve_algo`. ConfigError names everything that is wrong."""
    problems = Problems()
    with problems.gathering():
        _check_loss_type(algo)
    with problems.gathering():
        _check_kl(algo)
    if algo.loss_type != "sft_loss":
        with problems.gathering():
            _check_estimator(algo, group_size)
    if algo.loss_type == "policy_loss":
        with problems.gathering():
            _check_correction(algo, max_staleness)
    problems.raise_all()


def _check_loss_type(algo: AlgoConfig) -> None:
    if (algo.loss_type == "custom_loss") != (algo.custom_loss_path is not None):
        raise ConfigError(
            f"--loss-type {algo.loss_type} with --custom-loss-path {algo.custom_loss_path}: the two go together. Give "
            "both, --loss-type custom_loss and the path of a function, or none."
        )
    if algo.loss_type == "policy_loss":
        return
    ignored = [name for name in POLICY_ONLY if _is_given(algo, name)]
    if algo.off_policy_correction != "none":
        ignored.append("off_policy_correction")
    if algo.loss_type == "custom_loss":  # it reads the advantages, so what makes them is in force
        ignored = [name for name in ignored if name not in ADVANTAGE_KNOBS]
    elif algo.get_mismatch_metrics:  # no engine has sampled what is imitated
        ignored.append("get_mismatch_metrics")
    if ignored:
        raise ConfigError(
            f"--loss-type {algo.loss_type} does not read {', '.join(map(_flag, ignored))}. Remove them, or use "
            "--loss-type policy_loss."
        )


def _check_kl(algo: AlgoConfig) -> None:
    if algo.kl_loss_coef > 0 and not algo.use_kl_loss:
        raise ConfigError(
            f"--kl-loss-coef {algo.kl_loss_coef} has no effect without --use-kl-loss. Add the flag or remove this."
        )
    if algo.kl_loss_coef > 0 and algo.kl_loss_type == "k1" and not algo.use_unbiased_kl:
        raise ConfigError(
            "--use-kl-loss --kl-loss-type k1 without --use-unbiased-kl: the expected gradient is 0: that of logp - ref "
            "is the gradient of logp, whose mean over tokens of the policy is 0, so the term only adds noise. Add "
            "--use-unbiased-kl, or use k2, k3 or low_var_kl."
        )
    if algo.kl_loss_type == "k2" and algo.use_unbiased_kl:
        raise ConfigError(
            "--use-unbiased-kl with --kl-loss-type k2: got an estimate whose own gradient is that of the divergence "
            "already; with the ratio it is not. Expected k1, k3 or low_var_kl, whose value is unbiased. Remove "
            "--use-unbiased-kl, or use k3."
        )
    if algo.use_unbiased_kl and not algo.use_kl_loss:
        raise ConfigError("--use-unbiased-kl has no effect without --use-kl-loss. Add the flag or remove this one.")


def _check_estimator(algo: AlgoConfig, group_size: int) -> None:
    estimator = algo.advantage_estimator
    may_stand_alone = algo.use_opd or estimator in ("reinforce_plus_plus", "ppo")
    if algo.loss_type == "policy_loss" and group_size == 1 and not may_stand_alone:
        raise ConfigError(
            f"--n-samples-per-prompt 1 with --advantage-estimator {estimator}: a group of one has no advantage. Use at "
            "least 2, or reinforce_plus_plus or ppo."
        )
    for name in ("opd_kl_coef", "opd_teacher_load"):
        if _is_given(algo, name) and not algo.use_opd:
            raise ConfigError(f"{_flag(name)} has no effect without --use-opd. Add the flag or remove this one.")
    for name, estimators in READERS.items():
        if _is_given(algo, name) and estimator not in estimators:
            raise ConfigError(
                f"{_flag(name)} with --advantage-estimator {estimator} has no effect: {', '.join(estimators)} read it. "
                "Remove it, or change the estimator."
            )
    if algo.eps_clip_c is not None and algo.eps_clip_c <= 1:
        raise ConfigError(f"--eps-clip-c {algo.eps_clip_c}: expected more than 1. Ye et al. 2020 use 3.")


def _check_correction(algo: AlgoConfig, max_staleness: int) -> None:
    correction = algo.off_policy_correction
    if correction != "none" and algo.use_rollout_logprobs:
        raise ConfigError(
            f"--off-policy-correction {correction} with --use-rollout-logprobs: the ratio is then to the engine's "
            "policy already and every weight is 1. Keep one of the two."
        )
    readers = {
        "tis_clip": ("tis", "mis", "icepop", "decoupled"),
        "tis_clip_low": ("tis", "mis", "icepop"),
        "mis_level": ("mis",),
        "mis_mode": ("mis",),
    }
    for name, corrections in readers.items():
        is_derived = name == "tis_clip_low" and algo.tis_clip_low == 0
        if _is_given(algo, name) and not is_derived and correction not in corrections:
            raise ConfigError(
                f"{_flag(name)} with --off-policy-correction {correction} has no effect: {', '.join(corrections)} read "
                "it. Remove it, or choose one of these."
            )
    if _is_given(algo, "opsm_delta") and not algo.use_opsm:
        raise ConfigError(
            f"--opsm-delta {algo.opsm_delta} has no effect without --use-opsm. Add the flag or remove this one."
        )
    if max_staleness == 0:
        return
    unclipped = "--tis-clip" if correction != "none" and not math.isfinite(algo.weight_range[1]) else None
    if not math.isfinite(algo.clip_range[1]):
        unclipped = "--eps-clip-high"
    if unclipped is not None:
        raise ConfigError(
            f"{unclipped} inf with --transferqueue-max-staleness {max_staleness}: unclipped importance sampling on "
            "stale tokens collapses. Give a finite bound (--tis-clip 2, --eps-clip-high 0.2)."
        )


def check_critic(
    critic: CriticConfig, *, algo: AlgoConfig, optimizer: OptimizerConfig, num_rollout: int | None
) -> None:
    """Flags of a critic want one, and a policy that moves some day."""
    given = [spec.name for spec in dataclasses.fields(critic) if getattr(critic, spec.name) != spec.default]
    if given and not needs_critic(algo):
        raise ConfigError(
            f"{', '.join(map(_flag, given))} with --advantage-estimator {algo.advantage_estimator} has no effect: only "
            "ppo has a critic. Remove it, or change the estimator."
        )
    if num_rollout is not None:
        check_policy_moves(critic, num_rollout, said_by=f"--num-rollout {num_rollout}")
    if critic.critic_lr is not None and optimizer.lr_decay_style != "constant" and optimizer.min_lr > critic.critic_lr:
        raise ConfigError(f"--min-lr {optimizer.min_lr} is above --critic-lr {critic.critic_lr}. Lower it.")


def check_policy_moves(critic: CriticConfig, num_rollout: int, *, said_by: str) -> None:
    """The critic's own rounds must not be all there are."""
    if 0 < num_rollout <= critic.num_critic_only_steps:
        raise ConfigError(
            f"--num-critic-only-steps {critic.num_critic_only_steps} with {said_by}: the policy would never move. "
            "Train for more rounds, or warm the critic up in fewer."
        )


def needs_critic(algo: AlgoConfig) -> bool:
    """Whether advantages come from predicted returns."""
    return algo.advantage_estimator == "ppo" and algo.loss_type != "sft_loss"


def _is_given(algo: AlgoConfig, name: str) -> bool:
    values = {"normalize_advantages": (None, False), "eps_clip": (None, PLAIN_CLIP)}.get(
        name, (_value(DEFAULTS, name),)
    )
    return _value(algo, name) not in values


def _value(algo: AlgoConfig, name: str) -> object:
    return getattr(algo, name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
