"""Which models a run needs, and where the weights of each come from."""

from __future__ import annotations

from vime.config.algo_checks import needs_reference, needs_teacher
from vime.config.parse import Config
from vime.types import EngineSpec, Role


def needed_roles(config: Config) -> tuple[Role, ...]:
    """The roles of this run in the order of `Role`: the order in which engines are built, which is collective."""
    is_needed = {
        Role.ACTOR: True,
        Role.REFERENCE: needs_reference(config.algo),
        Role.TEACHER: needs_teacher(config.algo),
    }
    return tuple(role for role in Role if is_needed.get(role, False))


def shared_roles(config: Config) -> tuple[Role, ...]:
    """Those that the policy's ranks play; each of the others has ranks of its own."""
    return tuple(role for role in needed_roles(config) if role not in config.cluster.separate_roles)


def engine_spec(role: Role, config: Config, *, total_steps: int) -> EngineSpec:
    """What `TrainBackend.build` needs to know. `total_steps`: optimizer steps of the whole run, for the schedule."""
    flag, checkpoint = "--hf-checkpoint", config.model.hf_checkpoint
    if role is Role.REFERENCE and config.model.ref_load:
        flag, checkpoint = "--ref-load", config.model.ref_load
    if role is Role.TEACHER:
        assert config.algo.opd_teacher_load is not None, "needs_teacher says who plays"
        flag, checkpoint = "--opd-teacher-load", config.algo.opd_teacher_load
    is_frozen = role in (Role.REFERENCE, Role.TEACHER)
    return EngineSpec(role=role, checkpoint=checkpoint, flag=flag, total_steps=0 if is_frozen else total_steps)
