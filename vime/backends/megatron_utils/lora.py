"""Low-rank adapters beside megatron's linear layers: an A and a B for each Hugging Face layer, cut as megatron cuts it.

megatron keeps query, key and value in one layer, gate and up in another. Each of them has factors of its own here, so
an adapter has the same numbers and names in every layout; their outputs are put into the order of the fused layer.

Tensor parallelism: a layer whose outputs are cut cuts B and has all of A on every rank, one whose inputs are cut cuts A
and has all of B. What ranks exchange is A x, which has as many channels as the adapter's rank. The gradient of a whole
factor is whole on every rank, or, under sequence parallelism, that of this rank's tokens: megatron sums those over the
ranks. In the gradient norm a whole factor counts on the first rank only.

L: tokens of this rank, R: rank of the adapter.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from vime.backends.adapters import PREFIX, identity, initial_factor
from vime.backends.megatron_utils.architecture import Architecture
from vime.backends.megatron_utils.hf_layout import Kind, hf_names_and_kind, is_expert, rules_of
from vime.backends.megatron_utils.hf_tensors import expected_tensors
from vime.backends.megatron_utils.lora_layers import adapted_layers, check_adapter
from vime.config.parse import Config
from vime.types import EngineSpec, Role
from vime.weights.plan import TensorMeta


class Factors(nn.Module):
    """B A x of one Hugging Face layer, as much of it as this rank computes."""

    def __init__(self, shape: Sequence[int], rank: int, kind: Kind, config: TransformerConfig) -> None:
        """`shape`: [outputs, inputs] of the whole layer. A and B have no values yet."""
        super().__init__()
        outputs, inputs = shape
        ranks = config.tensor_model_parallel_size
        self.cuts_inputs, self.is_sequence_parallel = kind is Kind.ROW, config.sequence_parallel
        self.num_outputs = outputs if self.cuts_inputs else outputs // ranks
        made = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.lora_A = nn.Parameter(torch.empty(rank, inputs // ranks if self.cuts_inputs else inputs, **made))
        self.lora_B = nn.Parameter(torch.empty(self.num_outputs, rank, **made))
        cut, whole = (self.lora_A, self.lora_B) if self.cuts_inputs else (self.lora_B, self.lora_A)
        set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=int(self.cuts_inputs), stride=1)
        whole.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] # as of `RMSNorm`

    def forward(self, x: Tensor) -> Tensor:
        """[L, 1, inputs] -> [L, 1, outputs], of which one is cut. Collective over the tensor-parallel group, and so is
        backward."""
        return F.linear(self._exchanged(F.linear(x, self.lora_A)), self.lora_B)

    def _exchanged(self, low_LR: Tensor) -> Tensor:
        if self.cuts_inputs:
            if self.is_sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(low_LR)  # type: ignore[no-any-return]
            return reduce_from_tensor_model_parallel_region(low_LR)  # type: ignore[no-any-return]
        if self.is_sequence_parallel:
            return gather_from_sequence_parallel_region(low_LR)  # type: ignore[no-any-return]
        return copy_to_tensor_model_parallel_region(low_LR)  # type: ignore[no-any-return]


class LayerAdapter(nn.Module):
    """What is added to the output of one of megatron's layers."""

    def __init__(
        self, factors: Mapping[str, Factors], widths: Mapping[str, int], num_groups: int, scale: float
    ) -> None:
        """`widths`: outputs on this rank by name of each Hugging Face layer in it, with factors or not. `num_groups`:
        query groups on this rank, whose parts take turns in the output; 1: nothing does."""
        super().__init__()
        self.factors = nn.ModuleDict(factors)
        self.widths, self.num_groups, self.scale, self.is_on = dict(widths), num_groups, scale, True

    def forward(self, x: Tensor) -> Tensor:
        made: dict[str, Tensor] = {name: self.scale * factors(x) for name, factors in self.factors.items()}
        some = next(iter(made.values()))
        parts = [
            made[name] if name in made else some.new_zeros(*some.shape[:-1], width)
            for name, width in self.widths.items()
        ]
        if len(parts) == 1:
            return parts[0]
        grouped = [part.unflatten(-1, (self.num_groups, -1)) for part in parts]
        return torch.cat(grouped, -1).flatten(-2)


def _add(layer: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Forward hook of a layer that has an adapter; its own output when the adapter is off."""
    adapter = layer.adapter
    assert isinstance(adapter, LayerAdapter)
    return (output[0] + adapter(inputs[0]), output[1]) if adapter.is_on else output


def _learning(embedding: nn.Module, _inputs: object, output: Tensor) -> Tensor:  # noqa: ARG001  a forward hook
    """Make a frozen embedding's output one that gradients go to: a layer that is recomputed has none otherwise."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of one factor."""

    parameter: nn.Parameter
    cut_dimension: int | None  # None: all of it

    def of(self, whole: Tensor) -> Tensor:
        """View this rank's part of a tensor that is as large as the whole factor."""
        if self.cut_dimension is None:
            return whole
        group = parallel_state.get_tensor_model_parallel_group()
        rank: int = group.rank()
        return whole.chunk(group.size(), self.cut_dimension)[rank]


class Adapter:
    """The adapter of the chunks of this rank, by the names of Hugging Face files."""

    def __init__(
        self,
        core: Sequence[GPTModel],
        model_config: TransformerConfig,
        architecture: Architecture,
        spec: EngineSpec,
        config: Config,
    ) -> None:
        """Put it into the chunks, without values, and freeze everything else. Local; before they are wrapped."""
        check_adapter(config.lora, config.parallel, architecture, f"{spec.flag} {spec.checkpoint}")
        self._lora, self._spec = config.lora, spec
        self._layers = adapted_layers(architecture, config.lora)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs) in self._layers.items():
            self._shapes[f"{name}.lora_A.weight"] = (config.lora.lora_rank, inputs)
            self._shapes[f"{name}.lora_B.weight"] = (outputs, config.lora.lora_rank)
        self._pieces: dict[str, Piece] = {}
        self._here: list[LayerAdapter] = []
        self._identity: dict[str, str] | None = None
        for chunk in core:
            chunk.requires_grad_(False)
            for layer in chunk.decoder.layers:
                for name, linear in list(layer.named_modules()):
                    full_name = f"decoder.layers.{layer.layer_number - 1}.{name}.weight"
                    if isinstance(linear, ColumnParallelLinear | RowParallelLinear) and not is_expert(full_name):
                        self._adapt(linear, full_name, architecture, model_config)
            if chunk.pre_process and model_config.recompute_granularity == "full":
                chunk.embedding.register_forward_hook(_learning)

    def _adapt(self, linear: nn.Module, name: str, architecture: Architecture, model_config: TransformerConfig) -> None:
        """Give this layer of megatron, whose weight is called `name`, the factors of the layers that it stands for."""
        hf_names, kind = hf_names_and_kind(name, rules_of(architecture))
        shapes = expected_tensors(architecture)
        factors: dict[str, Factors] = {}
        widths: dict[str, int] = {}
        ranks = model_config.tensor_model_parallel_size
        for hf_name in hf_names:
            layer = hf_name.removesuffix(".weight")
            last = layer.rpartition(".")[2]
            widths[last] = shapes[hf_name][0] if kind is Kind.ROW else shapes[hf_name][0] // ranks
            if layer in self._layers:
                factors[last] = made = Factors(shapes[hf_name], self._lora.lora_rank, kind, model_config)
                cut_a, cut_b = (1, None) if kind is Kind.ROW else (None, 0)
                self._pieces[f"{layer}.lora_A.weight"] = Piece(made.lora_A, cut_a)
                self._pieces[f"{layer}.lora_B.weight"] = Piece(made.lora_B, cut_b)
        if factors:
            num_groups = architecture.num_key_value_heads // ranks if kind is Kind.QKV else 1
            linear.adapter = LayerAdapter(factors, widths, num_groups, self._lora.lora_scale)
            linear.register_forward_hook(_add)
            self._here.append(linear.adapter)

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Give A and B the values that training begins with. Local."""
        for name, piece in self._pieces.items():
            piece.parameter.copy_(piece.of(initial_factor(name, self._shapes[name], seed)))

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is its base. Local."""
        for layer in self._here:
            layer.is_on = False
        try:
            yield
        finally:
            for layer in self._here:
                layer.is_on = True

    def metadata(self) -> list[TensorMeta]:
        """Return what `export` yields. Local."""
        return [TensorMeta(name=PREFIX + name, dtype="float32", shape=shape) for name, shape in self._shapes.items()]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (PEFT's name, whole tensor in fp32). Collective over the replica's TP x PP ranks: each exhausts it."""
        for name, whole in self._whole():
            yield PREFIX + name, whole

    def merged(self, base: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `base` with the adapter added: W + scale B A. Collective as `export`, and as `base`."""
        factors = dict(self._whole())
        for hf_name, weight in base:
            name = hf_name.removesuffix(".weight")
            if name in self._layers:
                factor_a, factor_b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
                merged = weight.float() + self._lora.lora_scale * factor_b @ factor_a
                yield hf_name, merged.to(weight.dtype)
            else:
                yield hf_name, weight

    @torch.no_grad()
    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole factors, of a decoder layer at a time: what lies elsewhere is 0 here, and the ranks' sum is
        exact."""
        group: dist.ProcessGroup = parallel_state.get_model_parallel_group()
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        for _, items in itertools.groupby(self._shapes.items(), lambda item: item[0].split(".")[2]):
            shapes = dict(items)
            sizes = [math.prod(shape) for shape in shapes.values()]
            flat = torch.zeros(sum(sizes), device=torch.cuda.current_device())
            wholes = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes.values(), strict=True)]
            for name, whole in zip(shapes, wholes, strict=True):
                piece = self._pieces.get(name)
                if piece is not None and (is_first or piece.cut_dimension is not None):
                    piece.of(whole).copy_(piece.parameter)
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
            yield from zip(shapes, wholes, strict=True)

    def sharded_state(self) -> dict[str, object]:
        """Return what a checkpoint holds of the model: the factors, which any layout cuts anew."""
        cuts = {name: piece.cut_dimension for name, piece in self._pieces.items() if piece.cut_dimension is not None}
        state: dict[str, object] = make_sharded_tensors_for_checkpoint(
            {name: piece.parameter for name, piece in self._pieces.items()}, "", cuts
        )
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, piece in self._pieces.items():
            piece.parameter.copy_(state[name])

    def identity(self) -> dict[str, str]:
        """Return what a checkpoint of it belongs to. Collective over all trainer ranks the first time, when the first
        reads the base's files."""
        if self._identity is None:
            found = [identity(self._lora, self._spec.checkpoint) if dist.get_rank() == 0 else {}]
            dist.broadcast_object_list(found, src=0)
            [self._identity] = found
        return self._identity


def add_adapter(
    core: Sequence[GPTModel],
    model_config: TransformerConfig,
    architecture: Architecture,
    spec: EngineSpec,
    config: Config,
) -> Adapter | None:
    """Return the adapter of this model, which is put into it, or None if it trains none. Local."""
    if not config.lora.trains_adapter or spec.role is not Role.ACTOR:
        return None
    return Adapter(core, model_config, architecture, spec, config)
