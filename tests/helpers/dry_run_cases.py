"""What trainer ranks hold: counted by a dry run, and in real ranks on gloo whose every storage is counted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.helpers.dist_launch import Ranks
from vime.config.parse import Config
from vime.types import Role

PASSES = 5
"""Of which the one that needs least counts: gloo's thread keeps a tensor for a moment after its collective has been
waited for, longer on a busy machine."""
ROWS = (40, 40, 17)  # tokens of each row of a pack; the padded vocabulary of 100 makes logits the largest tensors

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "rms_norm_eps": 1e-6}
LARGE = {
    "qwen3-4b": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **ROPE}
    | {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    | {"tie_word_embeddings": True, "hidden_act": "silu"},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **ROPE}
    | {"num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    | {"tie_word_embeddings": False, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
}
"""config.json of models by name, as their makers publish them; nobody has their weights here."""


def write_large(directory: Path) -> Path:
    for name, record in LARGE.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "config.json").write_text(json.dumps(record))
    return directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    name: str
    world: int
    kind: str = "qwen3"
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHARDED = {"use_distributed_optimizer": True}
HOST = {"optimizer_cpu_offload": True}
NARROW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
LAYOUTS = (
    Layout(name="single", world=1),
    Layout(name="dp2-bf16", world=2, flags={"bf16": True}),
    Layout(name="tp2-recompute", world=2, flags={"tensor_model_parallel_size": 2, **FULL}),
    Layout(name="cp2-tied", world=2, kind="llama_tied", flags={"context_parallel_size": 2}),
    Layout(
        name="tp2-pp2",
        world=4,
        flags={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    Layout(name="tp2-dp2-sharded-bf16", world=4, flags={"tensor_model_parallel_size": 2, "bf16": True, **SHARDED}),
    Layout(
        name="pp2-vpp2-dp2-sharded",
        world=4,
        flags={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **SHARDED},
    ),
    Layout(name="moe-ep2", world=2, kind="qwen3_moe", flags={"expert_model_parallel_size": 2, **SHARDED}),
    Layout(
        name="moe-ep2-tp2",
        world=4,
        kind="qwen3_moe",
        flags={"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    Layout(name="dp2-bf16-host", world=2, flags={"bf16": True, **HOST}),
    Layout(
        name="tp2-dp2-sharded-bf16-host",
        world=4,
        flags={"tensor_model_parallel_size": 2, "bf16": True, **SHARDED, **HOST},
    ),
    Layout(
        name="moe-ep2-bf16-half-host",
        world=2,
        kind="qwen3_moe",
        flags={"expert_model_parallel_size": 2, "bf16": True, **SHARDED, **HOST, "optimizer_offload_fraction": 0.5},
    ),
    Layout(name="narrow-host", world=1, flags={"bf16": True, **HOST, **NARROW}),
    Layout(name="narrow-sharded", world=2, flags={**NARROW, **SHARDED}),
    Layout(name="latent", world=1, kind="deepseek"),  # one rank has all experts, however the router fills them
    Layout(name="sinks", world=1, kind="gpt_oss"),
    Layout(name="windows-tp2", world=2, kind="gemma3", flags={"tensor_model_parallel_size": 2}),
)


def config_of(layout: Layout, models: Path) -> Config:
    return Config().replace(
        device="cpu",
        distributed_backend="gloo",
        distributed_timeout_minutes=1.0,
        hf_checkpoint=str(models / layout.kind),
        rollout_max_response_len=max(ROWS) - 3,
        **layout.flags,
    )


def dry(_: Ranks, models: Path) -> dict[str, list[dict[str, int]]]:
    """By layout, what the dry run of each rank counts."""
    from vime.backends.megatron_utils.dry_run import DryModel, fake_rank, prepare_process
    from vime.training.dry_run import step_inputs
    from vime.training.roles import engine_spec

    prepare_process("cpu")
    found = {}
    for layout in LAYOUTS:
        config = config_of(layout, models)
        spec = engine_spec(Role.ACTOR, config, total_steps=1)
        found[layout.name] = []
        for rank in range(layout.world):
            with fake_rank(config.parallel, rank=rank, world_size=layout.world):
                model = DryModel(spec, config)
                most = model.activations(*step_inputs(config, spec, ROWS), has_logits=True)
                found[layout.name].append(dataclasses.asdict(dataclasses.replace(model.bytes(), activations=most)))
    return found


def real(ranks: Ranks, models: Path) -> dict[str, dict[str, int]]:
    """By layout, what this rank holds after an optimizer step that was made, and held while it was."""
    import torch

    from tests.helpers.megatron_worker import Bench, Case
    from vime.backends.live_bytes import LiveBytes, storage_bytes, storages
    from vime.backends.megatron_utils import step
    from vime.backends.megatron_utils.dry_run import packs_in_progress
    from vime.training.dry_run import step_inputs
    from vime.training.roles import engine_spec

    torch.set_num_threads(1)
    step._tokens_per_call = lambda _chunks: None  # every copy of a prompt is computed, as on a GPU
    found = {}
    for layout in LAYOUTS:
        if ranks.rank >= layout.world:
            continue
        config = config_of(layout, models)
        _, backend = Bench(ranks, Case(name=layout.name, do="", world=layout.world)).backend(
            **{name: getattr(config.flat, name) for name in ("hf_checkpoint", *layout.flags)}
        )
        spec = engine_spec(Role.ACTOR, config, total_steps=1)
        engine = backend.build(spec)
        rows, columns, loss = step_inputs(config, spec, ROWS)
        count = packs_in_progress(config.parallel)
        given = columns if backend.place.holds_tokens else {}
        engine.accumulate([rows] * count, [given] * count, loss)
        engine.apply_gradients()  # makes the moments
        parameters = [parameter for chunk in engine._core for parameter in chunk.parameters()]
        learning, scratch = engine._optimizer.tensors()
        held, kept = storages(parameters), storages(learning)
        inner = [part.optimizer for part in engine._optimizer.parts if part.optimizer is not None]
        every = [parameter for one in inner for group in one.param_groups for parameter in group["params"]]
        every += [value for one in inner for state in one.state.values() for value in state.values()]
        on_host = {key: size for key, size in storages(every).items() if key not in held and key not in kept}
        with LiveBytes() as live:
            live.ignore([*parameters, *learning, *scratch, *every])
            engine.apply_gradients()
        step = live.peak
        peaks = []
        for _ in range(PASSES):
            with LiveBytes() as live:
                live.ignore([*parameters, *learning, *scratch])
                engine.accumulate([rows] * count, [given] * count, loss)
            peaks.append(live.peak)
        found[layout.name] = {
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "parameters": sum(held.values()),
            "gradients": storage_bytes(scratch),
            "optimizer": sum(size for key, size in kept.items() if key not in held),
            "activations": min(peaks),
            "host": sum(on_host.values()),
            "step": step,
        }
        backend.close()
    return found


def shards(_: Ranks, cases: dict[str, Config], all_ranks: bool = False) -> dict[str, tuple[int, int]]:
    """By case, (parameters that the ranks hold together, each once; those of the same model in transformers)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vime.backends.megatron_utils.dry_run import distinct_ranks, prepare_process
    from vime.ray.dry_run import world_size
    from vime.training.roles import engine_spec

    prepare_process("cuda")
    found = {}
    for name, config in cases.items():
        spec, world, total = engine_spec(Role.REFERENCE, config, total_steps=0), world_size(config), 0
        kinds = distinct_ranks(config.parallel, world)
        if all_ranks:  # each alone: what `distinct_ranks` takes for equal is looked at
            per_stage = world // config.parallel.pipeline_model_parallel_size
            counted = [_held(config, spec, rank, world) for rank in range(world)]
            for stage in range(config.parallel.pipeline_model_parallel_size):
                assert len({counted[stage * per_stage + rank] for rank in range(per_stage)}) == 1
            total = sum(counted[rank][1] for rank in range(0, world, per_stage))
        else:
            total = sum(len(stages) * _held(config, spec, rank, world)[1] for rank, stages, _ in kinds)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.hf_checkpoint))
        found[name] = total, sum(parameter.numel() for parameter in model.parameters())
    return found


def _held(config: Config, spec: Any, rank: int, world: int) -> tuple[int, int]:
    """(parameters on the rank, parameters of its stage over all ranks that cut it)."""
    from vime.backends.megatron_utils.dry_run import DryModel, fake_rank
    from vime.backends.megatron_utils.hf_layout import is_expert

    parallel, on_rank, of_stage = config.parallel, 0, 0
    with fake_rank(parallel, rank=rank, world_size=world):
        for chunk in DryModel(spec, config).core:
            for name, parameter in chunk.named_parameters():
                cut = parallel.tensor_model_parallel_size
                if is_expert(name):
                    cut = parallel.expert_tensor_parallel_size or cut
                copies = cut if getattr(parameter, "tensor_model_parallel", False) else 1
                copies *= parallel.expert_model_parallel_size if is_expert(name) else 1
                on_rank += parameter.numel()
                of_stage += parameter.numel() * copies
    return on_rank, of_stage
