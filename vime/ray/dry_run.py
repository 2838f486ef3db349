"""What the trainer ranks of a configuration hold, counted before anything starts, in a process of its own.

`dry_run` starts `python -m vime.ray.dry_run`, which builds one rank of each kind without data. It needs no GPU, no Ray
and no weights: config.json of the models is enough.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import msgspec

from vime.backends.memory import ModelBytes, RankBytes
from vime.config.parse import Config
from vime.training.roles import engine_spec, needed_roles, shared_roles
from vime.types import ConfigError, EngineSpec, Role, VimeError

DEADLINE_S = 900.0
MARK = "dry-run: "
"""Begins the line of the result on stdout, which libraries write to as well."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Models that share their ranks: those of the policy, or one of --separate-roles."""

    roles: tuple[Role, ...]
    ranks: tuple[RankBytes, ...]

    @property
    def name(self) -> str:
        return " + ".join(self.roles)

    @property
    def heaviest(self) -> RankBytes:
        """By its peak, which without passes is what it holds between two steps."""
        return max(self.ranks, key=lambda rank: rank.peak)


class _Answer(msgspec.Struct):
    """What the child says: the parts, or why the model is refused."""

    parts: list[Part] = []
    refused: str = ""


def dry_run(config: Config, *, with_passes: bool, deadline_s: float = DEADLINE_S) -> list[Part]:
    """Return what each kind of rank holds, with forward and backward passes or without. VimeError when it cannot be
    told; ConfigError when the child refuses the model. Layers are megatron's own: those of Transformer Engine cannot be
    made without a GPU, and their parameters are the same."""
    job = json.dumps({"config": config.replace(transformer_impl="local").to_dict(), "with_passes": with_passes})
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vime.ray.dry_run"],
            input=job,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise VimeError(f"the dry run of the trainer ranks was not done in {deadline_s:g} s.") from error
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            answer = msgspec.json.decode(line.removeprefix(MARK), type=_Answer)
            if answer.refused:
                raise ConfigError(answer.refused)
            return answer.parts
    last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
    raise VimeError(f"the dry run of the trainer ranks failed with code {done.returncode}: {last[:400]}")


def parts_of(config: Config) -> list[tuple[Role, ...]]:
    shared = shared_roles(config)
    return [shared, *((role,) for role in needed_roles(config) if role not in shared)]


def world_size(config: Config) -> int:
    """Return the trainer ranks of the policy; a separate role has as many of its own."""
    return config.cluster.actor_num_nodes * ranks_per_node(config)


def ranks_per_node(config: Config) -> int:
    return config.cluster.actor_num_gpus_per_node or 1


def longest_row(config: Config) -> int:
    """Return the tokens of the longest sequence. A prompt without --rollout-max-prompt-len counts as one token."""
    rollout = config.rollout
    longest = rollout.rollout_max_response_len + (rollout.rollout_max_prompt_len or 1)
    return min(longest, rollout.rollout_max_context_len or longest)


def pack_lengths(config: Config) -> list[int]:
    """Return the tokens of each row of the largest micro-batch: sequences of the greatest length, and a rest."""
    longest, batch = longest_row(config), config.batch
    if not batch.use_dynamic_batch_size:
        return [longest] * batch.micro_batch_size
    limit = max(longest, (batch.max_tokens_per_gpu or 0) * config.parallel.context_parallel_size)
    count, rest = divmod(limit, longest)
    return [longest] * count + ([rest] if rest > 1 else [])


def count_ranks(config: Config, *, with_passes: bool) -> list[Part]:
    """The child's work."""
    specs = [[engine_spec(role, config, total_steps=1) for role in roles] for roles in parts_of(config)]
    count = _count_megatron if config.cluster.train_backend == "megatron" else _count_fsdp
    return [
        Part(tuple(spec.role for spec in part), tuple(count(part, config, with_passes=with_passes))) for part in specs
    ]


def _count_fsdp(specs: list[EngineSpec], config: Config, *, with_passes: bool) -> list[RankBytes]:  # noqa: ARG001
    from vime.backends.fsdp_utils.dry_run import shard_bytes

    world = world_size(config)
    models: dict[str, ModelBytes] = {spec.role: shard_bytes(spec, world_size=world) for spec in specs}
    return [RankBytes(rank=0, stages=(0,), count=world, models=models)]


def _count_megatron(specs: list[EngineSpec], config: Config, *, with_passes: bool) -> list[RankBytes]:
    from vime.backends.megatron_utils.dry_run import DryModel, distinct_ranks, fake_rank
    from vime.training.dry_run import step_inputs

    found = []
    for rank, stages, count in distinct_ranks(config.parallel, world_size(config)):
        with fake_rank(config.parallel, rank=rank, world_size=world_size(config)):
            models: dict[str, ModelBytes] = {}
            for spec in specs:
                model = DryModel(spec, config)
                models[spec.role] = model.bytes()
                if with_passes and spec.is_trainable:
                    rows, columns, loss = step_inputs(config, spec, pack_lengths(config))
                    most = model.activations(rows, columns, loss, has_logits=not spec.has_value_head)
                    models[spec.role] = dataclasses.replace(models[spec.role], activations=most)
        found.append(RankBytes(rank=rank, stages=stages, count=count, models=models))
    return found


def main() -> None:
    job = json.load(sys.stdin)
    config = Config.from_dict(job["config"])
    if config.cluster.train_backend == "megatron":
        from vime.backends.megatron_utils.dry_run import prepare_process

        prepare_process(config.cluster.device)
    try:
        answer = _Answer(parts=count_ranks(config, with_passes=job["with_passes"]))
    except ConfigError as error:
        answer = _Answer(refused=str(error))
    sys.stdout.write(f"\n{MARK}{msgspec.json.encode(answer).decode()}\n")


if __name__ == "__main__":
    main()
