"""The weights of a cut model by the names of its Hugging Face files; an adapter is merged into them, or left out.

transformers stores some tensors in another form than its files do (all experts of a layer in one); its own inverse of
loading, applied to one tensor at a time, gives the files' tensors back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from vime.backends.adapters import FACTORS, is_adapter
from vime.weights.plan import TensorMeta


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the module, and the tensors of the files that it holds."""

    name: str
    metas: tuple[TensorMeta, ...]


class HFWeights:
    """Made of the model before it is cut; yields its values afterwards."""

    def __init__(self, family: PreTrainedModel, model: nn.Module, dtype: torch.dtype) -> None:
        """`model`: what is exported. `family`: a twin of it without storage that is never cut, because transformers
        finds names by class, and cutting changes the class. `dtype`: what floating-point tensors are exported as."""
        self._family, self._model, self._dtype = family, model, dtype
        # buffers stay as they are: the model computes with them in fp32, as engines do (the bias of a router)
        self._cast = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._entries = [
            Entry(name, tuple(TensorMeta.of(hf_name, part) for hf_name, part in self._split(name, tensor)))
            for name, tensor in distinct_tensors(model).items()
            if not is_adapter(name)
        ]

    def metadata(self) -> list[TensorMeta]:
        return [meta for entry in self._entries for meta in entry.metas]

    @torch.no_grad()
    def export(self, *, scale: float = 0.0) -> Iterator[tuple[str, Tensor]]:
        """(name in the files, whole tensor), one after the other. Collective over all ranks: each exhausts it.
        `scale`: of the adapter that is merged, W + scale B A; 0: none is."""
        held = distinct_tensors(self._model)
        for entry in self._entries:
            whole = _whole(held[entry.name])
            factors = [f"{entry.name.removesuffix('.weight')}.{factor}.weight" for factor in FACTORS]
            if scale and factors[0] in held:
                factor_a, factor_b = (_whole(held[name]) for name in factors)
                whole = whole + scale * factor_b @ factor_a
            yield from self._split(entry.name, whole)

    def _split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if tensor.is_floating_point() and name in self._cast:
            tensor = tensor.to(self._dtype)
        yield from revert_weight_conversion(self._family, {name: tensor}).items()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the adapter; {} of a model without one."""
    return {name: tensor for name, tensor in distinct_tensors(model).items() if is_adapter(name)}


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of the model, without a tied head, which is the embedding under a second
    name."""
    by_identity: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_identity.setdefault(id(tensor), (name, tensor.detach()))
    return dict(by_identity.values())
