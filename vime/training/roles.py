"""The models that a run needs, and where the weights of each come from."""

from __future__ import annotations

from pathlib import Path

from vime.config.algo_checks import needs_critic, needs_reference, needs_teacher
from vime.config.parse import Config
from vime.config.schedule import steps_of_round
from vime.types import EngineSpec, Role, RoundPlan

LEARNING = (Role.ACTOR, Role.CRITIC)
"""The roles whose state is saved and loaded."""


def needed_roles(config: Config) -> tuple[Role, ...]:
    """Return the roles of this run in the order of `Role`. Engines are built in this order, which is collective."""
    is_needed = {
        Role.ACTOR: True,
        Role.REFERENCE: needs_reference(config.algo) and not base_is_reference(config),
        Role.CRITIC: needs_critic(config.algo),
        Role.TEACHER: needs_teacher(config.algo),
    }
    return tuple(role for role in Role if is_needed.get(role, False))


def base_is_reference(config: Config) -> bool:
    """Return whether the reference is the policy without its adapter: no second model is held then."""
    is_base = config.model.ref_load in (None, config.model.hf_checkpoint)
    return config.lora.trains_adapter and is_base and needs_reference(config.algo)


def policy_moves(plan: RoundPlan, config: Config) -> bool:
    """Return whether the policy is trained: not in the first --num-critic-only-steps rounds."""
    return plan.rollout_id >= config.critic.num_critic_only_steps


def shared_roles(config: Config) -> tuple[Role, ...]:
    """Return the roles that run on the policy's ranks; each of the others has its own ranks."""
    return tuple(role for role in needed_roles(config) if role not in config.cluster.separate_roles)


def role_folder(directory: Path, role: Role) -> Path:
    """Return the directory of a role in a checkpoint: the policy is in DIRECTORY itself, as when it was the only role;
    the others are below it under their role's name."""
    return directory if role is Role.ACTOR else directory / role


def engine_spec(role: Role, config: Config, *, total_steps: int) -> EngineSpec:
    """Return what `TrainBackend.build` needs to know. `total_steps`: optimizer steps of the whole run, for the
    schedules; the policy has none in the rounds of the critic alone."""
    optimizer, critic = config.optimizer, config.critic
    waits = critic.num_critic_only_steps * steps_of_round(config)
    lr = optimizer.lr if critic.critic_lr is None else critic.critic_lr
    steps, lr, warmup = {
        Role.ACTOR: (total_steps - waits, optimizer.lr, optimizer.lr_warmup_iters),
        Role.CRITIC: (total_steps, lr, critic.critic_lr_warmup_iters),
    }.get(role, (0, 0.0, 0))
    named = {
        Role.REFERENCE: ("--ref-load", config.model.ref_load),
        Role.CRITIC: ("--critic-load", critic.critic_load),
        Role.TEACHER: ("--opd-teacher-load", config.algo.opd_teacher_load),
    }
    flag, checkpoint = named.get(role, ("", None))
    if not checkpoint:
        flag, checkpoint = "--hf-checkpoint", config.model.hf_checkpoint
    return EngineSpec(role=role, checkpoint=checkpoint, flag=flag, total_steps=steps, lr=lr, lr_warmup_iters=warmup)
