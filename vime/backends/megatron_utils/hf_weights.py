"""HF safetensors in and out of the model chunks of this rank, under any tensor x pipeline x expert layout.

Load reads each HF tensor that this rank needs, one at a time, and keeps its slice. Export is a generator of whole HF
tensors in buckets: its extra memory is about two buckets (or two times the largest tensor), whatever the model's size.
Measured on a 538 MB model: 32 MiB buckets cost 265 MB, one bucket 1,075 MB. Where a replica is one rank there is
nothing to gather, and exported tensors share the memory of the parameters: a caller that keeps them must copy them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from torch import Tensor

from vime.backends.megatron_utils.architecture import Architecture
from vime.backends.megatron_utils.hf_layout import (
    CRITIC_LAYER,
    OUTPUT_LAYER,
    from_shards,
    hf_names_and_kind,
    is_expert,
    is_stacked,
    rules_of,
    to_shard,
    with_expert_offset,
)
from vime.backends.megatron_utils.hf_tensors import EMBEDDING, HEAD, VALUE_HEAD, expected_tensors
from vime.backends.megatron_utils.value_head import ValueHead
from vime.config.model_files import check_tensors, read_headers
from vime.weights.plan import TensorMeta

BUCKET_BYTES = 64 << 20
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class _Shard:
    """One parameter of one pipeline stage, as every rank of the replica knows it."""

    name: str  # megatron name with the layer number of the whole model; experts numbered from 0 on each rank
    shape: tuple[int, ...]  # of one tensor-parallel shard
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def is_expert(self) -> bool:
        return is_expert(self.name)

    @property
    def position(self) -> float:
        """Layer number; the embedding stands before all layers, final norm and output layer after them."""
        found = _LAYER.match(self.name)
        return int(found[1]) if found else -1 if self.name.startswith("embedding.") else math.inf


class HFWeights:
    """The HF view of the chunks. Construction is collective over the pipeline group; so are `load` and `export`."""

    def __init__(self, chunks: Sequence[GPTModel], architecture: Architecture) -> None:
        self._architecture, self._shapes = architecture, expected_tensors(architecture)
        self._rules = rules_of(architecture)
        self._parameters = dict(_named_parameters(chunks))
        mine = [
            _Shard(name, tuple(parameter.shape), parameter.dtype)
            for name, parameter in self._parameters.items()
            if not (architecture.is_tied and name == OUTPUT_LAYER)  # a copy of the embedding on the last stage
        ]
        self._tensor_group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self._expert_tensor_group: dist.ProcessGroup = parallel_state.get_expert_tensor_parallel_group()
        self._expert_group = parallel_state.get_expert_model_parallel_group()
        self._pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        stages: list[list[_Shard]] = [[] for _ in range(self._pipeline_group.size())]
        dist.all_gather_object(stages, mine, group=self._pipeline_group)
        # By layer, on whatever rank: the order of the stream, and so its hash, is the same in every layout. Only the
        # experts of a layer come in another order for each expert-parallel size: one of every rank, then the next.
        self._order = sorted(
            ((stage, shard) for stage, shards in enumerate(stages) for shard in shards),
            key=lambda item: (item[1].position, item[1].is_expert),
        )

    def metadata(self) -> list[TensorMeta]:
        """Name, dtype and shape of every HF tensor in the order of `export`. Local."""
        metas = []
        for _, shard in self._order:
            dtype = str(shard.dtype).removeprefix("torch.")
            for name in self._names(shard):
                metas += [
                    TensorMeta(name=hf_name, dtype=dtype, shape=self._shapes[hf_name])
                    for hf_name in hf_names_and_kind(name, self._rules)[0]
                ]
        return metas

    def _cut_over(self, shard: _Shard) -> dist.ProcessGroup:
        """The tensor-parallel group whose ranks hold the pieces of one parameter."""
        return self._expert_tensor_group if shard.is_expert else self._tensor_group

    def _names(self, shard: _Shard) -> list[str]:
        """Return this parameter's names in the whole model, one for each rank of the expert group; one name if
        dense or if it holds all experts of a rank."""
        if not shard.is_expert or is_stacked(shard.name):
            return [shard.name]
        return [with_expert_offset(shard.name, offset) for offset in self._expert_offsets()]

    def _expert_offsets(self) -> list[int]:
        """Return the number of the first expert of each rank of the expert group."""
        size = self._expert_group.size()
        return [rank * (self._architecture.num_experts // size) for rank in range(size)]

    @torch.no_grad()
    def load(self, directory: str, *, flag: str = "--hf-checkpoint") -> None:
        """Fill the parameters from DIRECTORY/*.safetensors. Local after construction; every rank must call it.

        A missing, surplus or misshapen tensor is a ConfigError: a weight that is not loaded would train from noise. But
        a critic may begin as a language model, whose output layer it leaves, and keeps its own head as it is.
        """
        is_critic, is_tied = self._architecture.has_value_head, self._architecture.is_tied
        found = read_headers(directory, flag=flag)
        check_tensors(
            found,
            self._shapes,
            where=f"{flag} {directory}",
            may_miss={VALUE_HEAD} if is_critic else (),
            may_have={HEAD} if is_critic or is_tied else (),
        )
        path = Path(directory).expanduser()
        with contextlib.ExitStack() as stack:
            names = {header.file for header in found.values()}
            files = {name: stack.enter_context(safe_open(str(path / name), "pt")) for name in names}
            for name, parameter in self._parameters.items():
                if name == CRITIC_LAYER and VALUE_HEAD not in found:
                    continue
                group = self._tensor_group
                if is_expert(name):
                    name = with_expert_offset(name, self._expert_offsets()[self._expert_group.rank()])
                    group = self._expert_tensor_group
                hf_names, kind = hf_names_and_kind(name, self._rules)
                if is_tied and name == OUTPUT_LAYER:
                    hf_names = (EMBEDDING,)
                tensors = [files[found[hf_name].file].get_tensor(hf_name) for hf_name in hf_names]
                if is_stacked(name):
                    tensors = [tensor.chunk(self._expert_group.size())[self._expert_group.rank()] for tensor in tensors]
                shard = to_shard(
                    kind,
                    tensors,
                    architecture=self._architecture,
                    rank=group.rank(),
                    size=group.size(),
                    rows=parameter.size(0),
                )
                assert shard.shape == parameter.shape, name
                parameter.copy_(shard)

    @torch.no_grad()
    def export(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor), the same sequence on every rank of the replica.

        Collective over the replica's TP x PP ranks, and over the ranks that share its experts: each must exhaust the
        generator, because each bucket is one all-gather over the tensor group of the stage that owns it, one over the
        expert group if it holds experts, and one broadcast along the pipeline.
        """
        groups = self._tensor_group, self._pipeline_group, self._expert_tensor_group, self._expert_group
        if all(group.size() == 1 for group in groups):  # nothing to gather: the parameters, or parts of them
            for _, shard in self._order:
                yield from self._hf_tensors(shard.name, self._parameters[shard.name].detach().unsqueeze(0))
            return
        for (stage, holds_experts), items in itertools.groupby(self._order, lambda item: (item[0], item[1].is_expert)):
            pieces = self._tensor_group.size()
            if holds_experts:
                pieces = self._expert_tensor_group.size() * self._expert_group.size()
            for bucket in _buckets([shard for _, shard in items], bucket_bytes // pieces):
                yield from self._export_bucket(stage, bucket)

    def _export_bucket(self, stage: int, bucket: list[_Shard]) -> Iterator[tuple[str, Tensor]]:
        """`bucket` holds shards of experts only, or of dense parameters only."""
        tensor_group = self._cut_over(bucket[0])
        size, numel = tensor_group.size(), sum(shard.numel for shard in bucket)
        copies = self._expert_group.size() if bucket[0].is_expert else 1
        if stage == self._pipeline_group.rank():
            whole = torch.cat([self._parameters[shard.name].detach().reshape(-1) for shard in bucket])
            whole = _gathered(whole, tensor_group)
            if copies > 1:
                whole = _gathered(whole, self._expert_group)
        else:
            device = torch.cuda.current_device()
            whole = torch.empty(copies * size * numel, dtype=bucket[0].dtype, device=device)
        if self._pipeline_group.size() > 1:
            dist.broadcast(whole, dist.get_global_rank(self._pipeline_group, stage), group=self._pipeline_group)
        by_rank = whole.view(copies, size, numel)
        offset = 0
        for shard in bucket:
            held = by_rank[..., offset : offset + shard.numel].unflatten(-1, shard.shape)
            if is_stacked(shard.name):
                held = held.transpose(0, 1).flatten(1, 2).unsqueeze(0)  # the experts of all holders in one tensor
            for pieces, name in zip(held, self._names(shard), strict=True):
                yield from self._hf_tensors(name, pieces)
            offset += shard.numel

    def _hf_tensors(self, name: str, pieces: Tensor) -> Iterator[tuple[str, Tensor]]:
        """`pieces`: one of each tensor-parallel rank."""
        hf_names, kind = hf_names_and_kind(name, self._rules)
        yield from zip(hf_names, from_shards(kind, list(pieces), architecture=self._architecture), strict=True)


def _gathered(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `flat`, end to end in rank order. Collective over `group`."""
    if group.size() == 1:
        return flat
    whole = flat.new_empty(group.size() * flat.numel())
    dist.all_gather_into_tensor(whole, flat, group=group)
    return whole


def _named_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of this rank by megatron name, with the layer number of the whole model; and the biases by which
    experts are chosen, which no gradient moves."""
    for chunk in chunks:
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))
        for name, parameter in itertools.chain(chunk.named_parameters(), buffers):
            found = _LAYER.match(name)
            if found:
                layer = chunk.decoder.layers[int(found[1])].layer_number - 1
                yield f"decoder.layers.{layer}.{found[2]}", parameter
            elif name == OUTPUT_LAYER and isinstance(chunk.output_layer, ValueHead):
                yield CRITIC_LAYER, parameter
            else:
                yield name, parameter


def _buckets(shards: Sequence[_Shard], max_bytes: int) -> Iterator[list[_Shard]]:
    """Consecutive shards of one dtype, at most `max_bytes` together, or a single larger one."""
    bucket: list[_Shard] = []
    used = 0
    for shard in shards:
        num_bytes = shard.numel * shard.dtype.itemsize
        if bucket and (used + num_bytes > max_bytes or shard.dtype != bucket[0].dtype):
            yield bucket
            bucket, used = [], 0
        bucket.append(shard)
        used += num_bytes
    if bucket:
        yield bucket
