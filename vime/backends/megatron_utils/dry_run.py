"""One rank of a layout without its peers and without data: what it holds, and what a step needs beside it.

Tensors are on torch's `meta` device, which has shapes and no memory; collectives go to torch's fake process group of
the whole world, which returns at once. Everything else is what a trainer rank does: the same configuration, chunks,
optimizer and schedule. Only for a process of its own: what megatron knows of the world is global.

Where a value would decide a shape there is no value: experts get equally many tokens (`_even_counts`). Attention
counts as a fused kernel (`_FusedAttention`).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vime.backends import logprobs
from vime.backends.live_bytes import LiveBytes, storage_bytes, storages
from vime.backends.megatron_utils import cpu_device, initialize
from vime.backends.memory import ModelBytes
from vime.config.cluster import ParallelConfig
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.protocols import PackLoss
from vime.types import EngineSpec

META = torch.device("meta")


def prepare_process(device: str) -> None:
    """Make this process one for dry runs of trainers on `device`. The GPUs of this machine must be hidden."""
    initialize.prepare_process("cpu")
    cpu_device.install(META)
    from vime.backends.megatron_utils import layer_spec, model

    model.LOGIT_ENTRIES["meta"] = model.LOGIT_ENTRIES[device]
    logprobs.BLOCK_ENTRIES["meta"] = logprobs.BLOCK_ENTRIES[device]
    fused = _FusedAttention(takes_masks=device == "cpu")
    vars(layer_spec).update(F=fused, attend_end=fused.attend_end)
    vars(layer_spec)["masks_are_fused"] = lambda _query: device == "cpu"


class _FusedAttention(types.ModuleType):
    """`torch.nn.functional`, whose attention holds what a fused kernel holds. On the meta device torch would choose the
    formula, with all scores of a sequence."""

    def __init__(self, *, takes_masks: bool) -> None:
        """`takes_masks`: that of the CPU takes them with grouped queries."""
        super().__init__("torch.nn.functional")
        self.takes_masks = takes_masks

    def __getattr__(self, name: str) -> object:
        return getattr(F, name)

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None,
        scale: float,
        **options: bool,
    ) -> Tensor:
        is_latent = query.size(-1) != value.size(-1)  # flash attention takes neither that nor, on a GPU, a mask
        if attn_mask is None and not is_latent:
            flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001  what torch itself would call
            out: Tensor = flash(query, key, value, 0.0, True, False, scale=scale)[0]
        elif not self.takes_masks:
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
            bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:2], -1, -1)
            out = efficient(query, key, value, bias, True, 0.0, attn_mask is None, scale=scale)[0]
        elif attn_mask is not None and not is_latent:
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
            out = fused(query, key, value, 0.0, attn_mask=attn_mask.to(query.dtype), scale=scale)[0]
        else:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=scale, **options)
        return out

    def attend_end(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, enable_gqa: bool) -> Tensor:
        options = {"is_causal": True, "enable_gqa": enable_gqa}
        return self.scaled_dot_product_attention(query, key, value, attn_mask=None, scale=scale, **options)


@contextlib.contextmanager
def fake_rank(parallel: ParallelConfig, *, rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is that rank of the world."""
    from megatron.core import tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        initialize.cut_world(parallel, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        initialize.shut_down()


class DryModel:
    """A model on the rank that this process is. `spec`: its role; a model that learns has an optimizer whose moments
    are there, as after the first step."""

    def __init__(self, spec: EngineSpec, config: Config) -> None:
        from vime.backends.megatron_utils import checkpoint
        from vime.backends.megatron_utils.architecture import as_critic, read_architecture
        from vime.backends.megatron_utils.lora import add_adapter
        from vime.backends.megatron_utils.model import build_chunks, transformer_config, with_precision
        from vime.backends.megatron_utils.optimizer import PolicyOptimizer

        self.parallel = config.parallel
        architecture = read_architecture(spec.checkpoint, flag=spec.flag)
        self.architecture = as_critic(architecture) if spec.has_value_head else architecture
        self.temperature = config.rollout.rollout_temperature
        model_config = transformer_config(self.architecture, self.parallel)
        self.core = build_chunks(self.architecture, model_config, self.parallel)
        add_adapter(self.core, model_config, self.architecture, spec, config)
        # every pack of a dry run is as long as the first: no rank has to be told
        model_config.variable_seq_lengths = False
        wrapped = with_precision(self.core, model_config)
        self.optimizer: PolicyOptimizer | None = None
        if spec.is_trainable:
            self.optimizer = PolicyOptimizer(
                wrapped, model_config, optimizer=config.optimizer, parallel=self.parallel, total_steps=1
            )
            checkpoint.prepare_states(self.optimizer)

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for chunk in self.core for parameter in chunk.parameters()]

    def bytes(self) -> ModelBytes:
        """What is held between two steps."""
        held = storages(self.parameters)
        gradients = optimizer = step = host = 0
        if self.optimizer is not None:
            learning, scratch = self.optimizer.tensors()
            kept = storages(learning)
            # under the distributed optimizer a parameter is a view of a buffer, which `kept` has too
            optimizer = sum(size for key, size in kept.items() if key not in held)
            gradients = storage_bytes(scratch)
            step, host = self.optimizer.step_bytes, storage_bytes(self.optimizer.host_tensors())
        return ModelBytes(
            num_parameters=sum(parameter.numel() for parameter in self.parameters),
            parameters=sum(held.values()),
            gradients=gradients,
            optimizer=optimizer,
            step=step,
            host=host,
        )

    def activations(
        self, rows: Sequence[TrainRow], columns: Mapping[str, Sequence[Tensor]], loss: PackLoss, *, has_logits: bool
    ) -> int:
        """The most bytes that forward and backward over packs of `rows` hold beside `bytes()`, with as many packs in
        progress as the pipeline has."""
        from vime.backends.megatron_utils import step

        assert self.optimizer is not None, "a frozen model has no backward pass"
        learning, scratch = self.optimizer.tensors()
        sampling = step.Sampling(vocab_size=self.architecture.vocab_size, temperature=self.temperature)
        live = _MetaBytes(self.architecture.num_experts_per_token / max(1, self.architecture.num_experts))
        with _even_experts(), live, self.optimizer.unfinished():  # the last reduction has no kernel for meta
            live.ignore([*self.parameters, *learning, *scratch])
            packs = [
                step.pack_rows(rows, self.parallel, extra=columns) for _ in range(packs_in_progress(self.parallel))
            ]
            step.forward_backward(self.optimizer.chunks, packs, sampling if has_logits else None, loss)
        return live.peak


def packs_in_progress(parallel: ParallelConfig) -> int:
    """Micro-batches that fill the pipeline: one for each stage; an interleaved one begins twice as many."""
    stages = parallel.pipeline_model_parallel_size
    return stages if parallel.virtual_pipeline_model_parallel_size is None else 2 * stages


class _MetaBytes(LiveBytes):
    """Counts, and stands in for the one operation of the model whose shape depends on values: a token goes to `share`
    of the experts."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def call(self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        if function is torch.ops.aten.masked_select.default:
            chosen, mask = args
            assert isinstance(chosen, Tensor)
            assert isinstance(mask, Tensor)
            return chosen.new_empty(round(mask.numel() * self._share))
        return function(*args, **kwargs)


@contextlib.contextmanager
def _even_experts() -> Iterator[None]:
    """Inside, megatron's dispatcher is told that every expert got as many tokens as the others, on every rank."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.preprocess
    MoEAlltoAllTokenDispatcher.preprocess = _even_counts
    try:
        yield
    finally:
        MoEAlltoAllTokenDispatcher.preprocess = original


def _even_counts(dispatcher: types.SimpleNamespace, routing_map: Tensor) -> Tensor:
    """Return the tokens of each local expert, and set what megatron's `preprocess` sets. Counts are on the host."""
    num_out = routing_map.size(0) * dispatcher.config.moe_router_topk
    each, rest = divmod(num_out, dispatcher.num_experts)
    count_E = torch.tensor([each + (expert < rest) for expert in range(dispatcher.num_experts)])
    ranks, cut = dispatcher.ep_size, dispatcher.tp_size
    local = count_E[dispatcher.local_expert_indices[0] : dispatcher.local_expert_indices[-1] + 1]
    dispatcher.num_out_tokens = num_out
    if ranks > 1 or cut > 1:
        dispatcher.input_splits = count_E.reshape(ranks, -1).sum(1).numpy()
        dispatcher.output_splits = local.sum().expand(ranks).numpy()
        dispatcher.output_splits_tp = (local.sum() * ranks).expand(cut).numpy()
    if dispatcher.num_local_experts > 1:
        dispatcher.num_global_tokens_per_local_expert = local.expand(ranks * cut, -1).contiguous()
    tokens: Tensor = local * (ranks * cut)
    return tokens


def distinct_ranks(parallel: ParallelConfig, world_size: int) -> list[tuple[int, tuple[int, ...], int]]:
    """(rank, its stages, how many ranks are like it). All ranks of a stage have tensors of one shape, because heads,
    columns, experts and the padded vocabulary divide; of the distributed optimizer's buffers each has an equal part. So
    have the stages between the first, with the embedding, and the last, with the head."""
    stages = parallel.pipeline_model_parallel_size
    per_stage = world_size // stages
    between = range(1, stages - 1)
    kinds = [group for group in ((0,), tuple(between), (stages - 1,) if stages > 1 else ()) if group]
    return [(group[0] * per_stage, group, len(group) * per_stage) for group in kinds]
