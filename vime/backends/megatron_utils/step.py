"""Forward and backward over packed micro-batches through megatron's schedules (with or without a pipeline).

T: packed tokens of a micro-batch, L: those of this context-parallel rank (all T without), U: those that are computed
(all L but for prompts that several sequences share), A: those of L that predict a
response token, V: vocabulary columns of this tensor-parallel rank, R: response tokens of a row.
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
from megatron.core.utils import get_model_config
from torch import Tensor

from vime.algo.sampling import CHUNK, log_probs_under
from vime.backends.logprobs import logprobs_and_entropy
from vime.backends.megatron_utils.context_parallel import ContextCut, context_cut
from vime.batching.pack import PackedBatch, SharedPrompts, pack, share_prompts
from vime.config.cluster import ParallelConfig
from vime.data.rows import TrainRow
from vime.protocols import PackLoss
from vime.types import SamplingRule

CALL_OPERATIONS = 1e7
"""That a CPU's core does in the time of a call of attention, forward and backward: 0.15 ms, measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the engine turned logits into probabilities; training must do the same. None stands for a value head."""

    vocab_size: int
    temperature: float


def pack_rows(
    rows: Sequence[TrainRow], parallel: ParallelConfig, *, extra: Mapping[str, Sequence[Tensor]] | None = None
) -> PackedBatch:
    """One micro-batch on this rank's device, of whole sequences."""
    return pack(
        rows,
        pad_to_multiple=parallel.pack_multiple,
        sequence_multiple=parallel.sequence_multiple,
        device=torch.device(torch.cuda.current_device()),
        extra=extra,
    )


def forward_backward(
    chunks: Sequence[MegatronModule], packs: Sequence[PackedBatch], sampling: Sampling | None, loss_function: PackLoss
) -> list[Tensor]:
    """Accumulate the gradients of one optimizer step. Returns the statistics of each pack (last stage), else [].

    Collective over all trainer ranks: every rank passes the same number of packs, of which some may be empty.

    Scale: megatron multiplies a loss by the context-parallel size and divides it by the number of micro-batches, and
    DDP divides by data- times context-parallel size. Ours is divided by global denominators already, so all of it is
    undone here; then every layout gives the same gradient. (Context-parallel ranks compute the same loss, but each
    sends back only the gradient of its own tokens: DDP's sum over them counts every token once.)
    """
    scale = len(packs) * parallel_state.get_data_parallel_world_size()

    def on_output(output: ModelOutput, part: BatchPart) -> tuple[Tensor, Tensor]:
        loss, statistics_S = loss_function(*_token_values(output, part), part.batch)
        return loss * scale, statistics_S.detach()

    return _run(chunks, packs, on_output, forward_only=False, sampling=sampling)


@torch.no_grad()
def forward_values(
    chunks: Sequence[MegatronModule],
    packs: Sequence[PackedBatch],
    sampling: Sampling | None,
    rule: SamplingRule | None = None,
) -> list[Tensor]:
    """log p of every response token (0 elsewhere), or the return predicted at each token; [T] fp32 per pack on the last
    pipeline stage, else []. `rule` replaces the run's way of sampling.

    Collective over the model-parallel group of this data-parallel index.
    """

    def on_output(output: ModelOutput, part: BatchPart) -> Tensor:
        return _token_values(output, part)[0]

    return _run(chunks, packs, on_output, forward_only=True, sampling=sampling, rule=rule)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What of a pack this rank computes."""

    batch: PackedBatch
    cut: ContextCut | None
    answer_A: Tensor | None  # of its L tokens, those that predict a response token; at least one, so that nothing is
    # empty. None with a value head, which returns all
    shared: SharedPrompts | None = None

    def computed(self, values_T: Tensor) -> Tensor:
        """[U] of what the pack holds."""
        return self.part(values_T) if self.shared is None else values_T[self.shared.kept_U]

    @property
    def answer_U(self) -> Tensor | None:
        """[A]: the places among the computed tokens of those that predict; of a shared one as often as it does."""
        if self.answer_A is None or self.shared is None:
            return self.answer_A
        return self.shared.place_T[self.answer_A]

    def part(self, values_T: Tensor) -> Tensor:
        return values_T if self.cut is None else self.cut.part(values_T)


def _batch_part(batch: PackedBatch, *, has_logits: bool, tokens_per_call: float | None) -> BatchPart:
    """`tokens_per_call`: of `share_prompts`; None where every copy of a prompt is computed."""
    device = batch.tokens_T.device
    cut = context_cut(batch.cu_seqlens, device)
    if not has_logits:
        return BatchPart(batch, cut, None)
    is_answer_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for positions in batch.row_slices:
        is_answer_T[positions] = True
    is_answer_L = is_answer_T if cut is None else is_answer_T[cut.here_on_host_L]
    answer_A = is_answer_L.nonzero().squeeze(1)
    answer_A = (answer_A if len(answer_A) else torch.zeros(1, dtype=torch.int64)).to(device)
    if tokens_per_call is None or cut is not None or batch.routed_experts_TW is not None:  # routes differ by copy
        return BatchPart(batch, cut, answer_A)
    return BatchPart(batch, cut, answer_A, share_prompts(batch, tokens_per_call=tokens_per_call))


def _tokens_per_call(chunks: Sequence[MegatronModule]) -> float | None:
    """How many tokens of a layer cost as much as a call of attention. None where prompts are not shared: on a GPU, of
    which nothing is known yet; where tokens are cut over ranks; in a pipeline, of which each stage would have to know.
    """
    config = get_model_config(chunks[0])
    is_cut = config.sequence_parallel or parallel_state.get_pipeline_model_parallel_world_size() > 1
    if is_cut or next(chunks[0].parameters()).device.type != "cpu":
        return None
    weights: int = config.hidden_size * (4 * config.hidden_size + 3 * config.ffn_hidden_size)  # of a layer, about
    return CALL_OPERATIONS / (6 * weights)  # forward and backward: 6 operations a weight


ModelOutput = Tensor | tuple[Tensor, ...]
"""Of the last stage: (logp [A], entropy [A]), only the first under a `SamplingRule`; of a value head [1, L, 1]."""


def _read_logits(
    part: BatchPart, sampling: Sampling, rule: SamplingRule | None
) -> Callable[[Tensor, slice], tuple[Tensor, ...]]:
    """Read what the loss needs from the logits [A, V] of each chunk of response tokens. The logits are overwritten."""
    assert part.answer_A is not None
    group = parallel_state.get_tensor_model_parallel_group()
    label_A = part.part(part.batch.labels_T)[part.answer_A]

    def read(logits_AV: Tensor, rows: slice) -> tuple[Tensor, ...]:
        if rule is not None:
            return (_log_probs_under(logits_AV, label_A[rows], sampling.vocab_size, rule, group),)
        return logprobs_and_entropy(
            logits_AV,
            label_A[rows],
            temperature=sampling.temperature,
            vocab_size=sampling.vocab_size,
            group=group,
        )

    return read


def _token_values(output: ModelOutput, part: BatchPart) -> tuple[Tensor, Tensor]:
    """(logp [T], entropy [T]) of the whole pack; 0 where no response token is predicted, and of what the model does not
    say. (return [T], zeros) from a value head."""
    if isinstance(output, Tensor):
        value_NL = output[..., 0].float()
        value_T = value_NL[0] if part.cut is None else part.cut.whole(value_NL)[0]
        return value_T, torch.zeros_like(value_T)
    assert part.answer_A is not None
    num_here = part.batch.num_tokens if part.cut is None else len(part.cut.here_L)
    # one by one: without an entropy term in the loss no gradient of the entropy is asked for
    values_L = [value_A.new_zeros(num_here).index_copy(0, part.answer_A, value_A) for value_A in output]
    if part.cut is not None:
        values_L = list(part.cut.whole(torch.stack(values_L)).unbind())
    logp_T, entropy_T = values_L if len(values_L) > 1 else (values_L[0], torch.zeros_like(values_L[0]))
    return logp_T, entropy_T


def _log_probs_under(
    logits_AV: Tensor, label_A: Tensor, vocab_size: int, rule: SamplingRule, group: dist.ProcessGroup
) -> Tensor:
    """[A]. Truncation looks at the whole vocabulary, so it is gathered, a few tokens at a time."""

    def whole(part_CV: Tensor) -> Tensor:
        columns = [torch.empty_like(part_CV) for _ in range(group.size())]
        dist.all_gather(columns, part_CV.contiguous(), group=group)
        return torch.cat(columns, dim=-1)[:, :vocab_size]

    return torch.cat(
        [
            log_probs_under(whole(part_CV), label_C, rule)
            for part_CV, label_C in zip(logits_AV.split(CHUNK), label_A.split(CHUNK), strict=True)
        ]
    )


def _run(
    chunks: Sequence[MegatronModule],
    packs: Sequence[PackedBatch],
    on_output: Callable[[ModelOutput, BatchPart], object],
    *,
    forward_only: bool,
    sampling: Sampling | None,
    rule: SamplingRule | None = None,
) -> list[Tensor]:
    """Run megatron's schedule. Returns the result of `on_output` (its second value when training) per pack."""

    tokens_per_call = _tokens_per_call(chunks)

    def forward_step(iterator: Iterator[PackedBatch], model: MegatronModule) -> tuple[Tensor, Callable[..., object]]:
        part = _batch_part(next(iterator), has_logits=sampling is not None, tokens_per_call=tokens_per_call)
        tokens_U, positions_U = part.computed(part.batch.tokens_T), part.computed(part.batch.position_T)
        params = packed_params(part)
        if sampling is not None:
            params.read_logits = _read_logits(part, sampling, rule)  # for CompletionModel
        output = model(tokens_U.unsqueeze(0), positions_U.unsqueeze(0), None, packed_seq_params=params)

        def use(output: Tensor, non_loss_data: bool = False) -> object:  # noqa: ARG001  megatron names it
            # taken out: what backward computes anew holds `params`, which would hold itself by them
            return on_output(vars(params).pop("values", output), part)

        return output, use

    for chunk in chunks:
        chunk.train(not forward_only)
    iterators = [iter(packs) for _ in chunks]
    values: list[Tensor] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(packs),
        seq_length=packs[0].num_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return values


def packed_params(part: BatchPart) -> PackedSeqParams:
    """megatron's description of a pack, of whole sequences under context parallelism too. `max_seqlen` is the longest
    sequence: with the total, rotary positions would run on from one sequence into the next."""
    batch = part.batch
    starts = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=batch.tokens_T.device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
    params.cu_seqlens_host = batch.cu_seqlens  # python ints for PackedAttention
    params.context_cut = part.cut
    params.shared_prompts = part.shared
    params.answer_U = part.answer_U  # for CompletionModel
    experts_TW = batch.routed_experts_TW
    params.routed_experts = None if experts_TW is None else part.part(experts_TW)  # for ReplayLayer
    return params
