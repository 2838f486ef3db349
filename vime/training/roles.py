"""Which models a run needs, and where the weights of each come from."""

from __future__ import annotations

from pathlib import Path

from vime.config.algo_checks import needs_critic, needs_reference, needs_teacher
from vime.config.parse import Config
from vime.config.schedule import steps_of_round
from vime.types import EngineSpec, Role, RoundPlan

LEARNING = (Role.ACTOR, Role.CRITIC)
"""The roles whose state is saved and loaded."""


def needed_roles(config: Config) -> tuple[Role, ...]:
    """The roles of this run in the order of `Role`: the order in which engines are built, which is collective."""
    is_needed = {
        Role.ACTOR: True,
        Role.REFERENCE: needs_reference(config.algo),
        Role.CRITIC: needs_critic(config.algo),
        Role.TEACHER: needs_teacher(config.algo),
    }
    return tuple(role for role in Role if is_needed.get(role, False))


def policy_moves(plan: RoundPlan, config: Config) -> bool:
    """Not in the first --num-critic-only-steps rounds."""
    return plan.rollout_id >= config.critic.num_critic_only_steps


def shared_roles(config: Config) -> tuple[Role, ...]:
    """Those that the policy's ranks play; each of the others has ranks of its own."""
    return tuple(role for role in needed_roles(config) if role not in config.cluster.separate_roles)


def role_folder(directory: Path, role: Role) -> Path:
    """Where a role lies in a checkpoint: the policy in DIRECTORY itself, as it did when it was alone; others below it
    under their role's name."""
    return directory if role is Role.ACTOR else directory / role


def engine_spec(role: Role, config: Config, *, total_steps: int) -> EngineSpec:
    """What `TrainBackend.build` needs to know. `total_steps`: optimizer steps of the whole run, for the schedules; the
    policy's has none in the rounds of the critic alone."""
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
