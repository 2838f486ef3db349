"""Forward and backward over packed micro-batches through megatron's schedules (with or without a pipeline).

T: packed tokens of a micro-batch, L: those of this context-parallel rank (all T without), V: vocabulary columns of this
tensor-parallel rank, R: response tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime.algo.sampling import CHUNK, log_probs_under
from vime.backends.megatron_utils.context_parallel import ContextCut, context_cut, sequence_multiple
from vime.backends.megatron_utils.vocab_parallel import logprobs_and_entropy
from vime.batching.pack import PackedBatch, pack
from vime.seams import PackLoss
from vime.types import SamplingRule, TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the engine turned logits into probabilities; training must do the same. None stands for a value head."""

    vocab_size: int
    temperature: float


def pack_rows(
    rows: Sequence[TrainRow], *, multiple: int, extra: Mapping[str, Sequence[Tensor]] | None = None
) -> PackedBatch:
    """One micro-batch on this rank's device, of whole sequences. `multiple`: `engine.Packing.pad_multiple`."""
    return pack(
        rows,
        pad_to_multiple=multiple,
        sequence_multiple=sequence_multiple(),
        device=torch.cuda.current_device(),
        extra=extra,
    )


def forward_backward(
    chunks: Sequence[MegatronModule], packs: Sequence[PackedBatch], sampling: Sampling | None, loss_function: PackLoss
) -> list[Tensor]:
    """Accumulate the gradients of one optimizer step; answers the statistics of each pack (last stage), else [].

    Collective over all trainer ranks: every rank passes the same number of packs, of which some may be empty.

    Scale: megatron multiplies a loss by the context-parallel size and divides it by the number of micro-batches, and
    DDP divides by data- times context-parallel size. Ours is divided by global denominators already, so all of it is
    undone here; then every layout gives the same gradient. (Context-parallel ranks compute the same loss, but each
    sends back only the gradient of its own tokens: DDP's sum over them counts every token once.)
    """
    scale = len(packs) * parallel_state.get_data_parallel_world_size()

    def on_logits(logits_1LV: Tensor, batch: PackedBatch, cut: ContextCut | None) -> tuple[Tensor, Tensor]:
        loss, statistics_S = loss_function(*_token_values(logits_1LV, batch, cut, sampling), batch)
        return loss * scale, statistics_S.detach()

    return _run(chunks, packs, on_logits, forward_only=False)


@torch.no_grad()
def forward_values(
    chunks: Sequence[MegatronModule],
    packs: Sequence[PackedBatch],
    sampling: Sampling | None,
    rule: SamplingRule | None = None,
) -> list[Tensor]:
    """log p of every label, or the return predicted there; [T] fp32 per pack on the last pipeline stage, else [].
    `rule` replaces the run's way of sampling.

    Collective over the model-parallel group of this data-parallel index.
    """

    def on_logits(logits_1LV: Tensor, batch: PackedBatch, cut: ContextCut | None) -> Tensor:
        if rule is not None:
            return _log_probs_under(logits_1LV[0], batch, cut, sampling.vocab_size, rule)
        return _token_values(logits_1LV, batch, cut, sampling)[0]

    return _run(chunks, packs, on_logits, forward_only=True)


def _token_values(
    logits_1LV: Tensor, batch: PackedBatch, cut: ContextCut | None, sampling: Sampling | None
) -> tuple[Tensor, Tensor]:
    """(logp [T], entropy [T]) of the whole pack, from the logits of this rank's L tokens of it; (return [T], zeros)
    from the one column of a value head."""
    if sampling is None:
        value_NL = logits_1LV[..., 0].float()
        value_T = value_NL[0] if cut is None else cut.whole(value_NL)[0]
        return value_T, torch.zeros_like(value_T)
    values = logprobs_and_entropy(
        logits_1LV[0],
        batch.labels_T if cut is None else cut.part(batch.labels_T),
        group=parallel_state.get_tensor_model_parallel_group(),
        vocab_size=sampling.vocab_size,
        temperature=sampling.temperature,
    )
    if cut is None:
        return values
    logp_T, entropy_T = cut.whole(torch.stack(values)).unbind()
    return logp_T, entropy_T


def _log_probs_under(
    logits_LV: Tensor, batch: PackedBatch, cut: ContextCut | None, vocab_size: int, rule: SamplingRule
) -> Tensor:
    """[T] of the whole pack. Truncation looks at the whole vocabulary, so it is gathered, a few tokens at a time."""
    group = parallel_state.get_tensor_model_parallel_group()
    labels_L = batch.labels_T if cut is None else cut.part(batch.labels_T)

    def whole(part_CV: Tensor) -> Tensor:
        columns = [torch.empty_like(part_CV) for _ in range(group.size())]
        dist.all_gather(columns, part_CV.contiguous(), group=group)
        return torch.cat(columns, dim=-1)[:, :vocab_size]

    logp_L = torch.cat(
        [
            log_probs_under(whole(part_CV), label_C, rule)
            for part_CV, label_C in zip(logits_LV.split(CHUNK), labels_L.split(CHUNK), strict=True)
        ]
    )
    return logp_L if cut is None else cut.whole(logp_L.unsqueeze(0))[0]


def _run(
    chunks: Sequence[MegatronModule],
    packs: Sequence[PackedBatch],
    on_logits: Callable[[Tensor, PackedBatch, ContextCut | None], object],
    *,
    forward_only: bool,
) -> list[Tensor]:
    """Drive megatron's schedule; answers what `on_logits` said (its second value when training), per pack."""

    def forward_step(iterator: Iterator[PackedBatch], model: MegatronModule) -> tuple[Tensor, Callable[..., object]]:
        batch = next(iterator)
        cut = context_cut(batch.cu_seqlens, batch.tokens_T.device)
        tokens, positions = batch.tokens_T, batch.position_T
        if cut is not None:
            tokens, positions = cut.part(tokens), cut.part(positions)
        output = model(tokens.unsqueeze(0), positions.unsqueeze(0), None, packed_seq_params=packed_params(batch, cut))
        return output, lambda logits_1LV, non_loss_data=False: on_logits(logits_1LV, batch, cut)  # noqa: ARG005  megatron names it

    for chunk in chunks:
        chunk.train(not forward_only)
    iterators = [iter(packs) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(packs),
        seq_length=packs[0].num_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def packed_params(batch: PackedBatch, cut: ContextCut | None) -> PackedSeqParams:
    """megatron's description of a pack, of whole sequences under context parallelism too. `max_seqlen` is the longest
    sequence: with the total, rotary positions would run on from one sequence into the next."""
    starts = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=batch.tokens_T.device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
    params.cu_seqlens_host = batch.cu_seqlens  # type: ignore[attr-defined] # python ints for PackedAttention
    params.context_cut = cut  # type: ignore[attr-defined]
    experts_TW = batch.routed_experts_TW
    params.routed_experts = experts_TW if experts_TW is None or cut is None else cut.part(experts_TW)  # type: ignore[attr-defined] # for ReplayLayer
    return params
