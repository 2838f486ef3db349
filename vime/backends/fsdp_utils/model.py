"""A Hugging Face directory -> the model of this rank, each parameter cut over all trainer ranks.

No rank but 0 reads weights, and no rank but 0 ever holds the whole model, on the host and in fp32: the others build it
without storage, cut it, and receive their shards tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_flash_attn_2_available

from vime.backends.fsdp_utils import attention
from vime.backends.fsdp_utils.vision import attention_of, has_images
from vime.batching.pack import PackedBatch
from vime.config.cluster import ParallelConfig
from vime.config.model_files import read_headers
from vime.types import ConfigError, EngineSpec, describe

FLASH = "flash_attention_2"
VALUE_HEAD = "score.weight"


class ValueModel(nn.Module):
    """The decoder of a language model with one output a token, the predicted return, in fp32.

    Parameters are named as in transformers' reward models: `score.weight` beside the decoder's own names. The head
    begins at zero unless the checkpoint brings one: every value of the first round is then exactly 0, so its advantages
    are plain returns and not noise; the decoder below it learns from the second step on.
    """

    def __init__(self, causal: PreTrainedModel) -> None:
        super().__init__()
        setattr(self, causal.base_model_prefix, causal.base_model)
        self._prefix = causal.base_model_prefix
        hidden_size = causal.config.get_text_config().hidden_size
        self.score = nn.Linear(hidden_size, 1, bias=False, device="meta", dtype=torch.float32)

    def forward(self, **inputs: object) -> Tensor:
        value: Tensor = self.score(getattr(self, self._prefix)(**inputs).last_hidden_state)
        return value


def bare_model(spec: EngineSpec, config: PretrainedConfig, *, implementation: str) -> PreTrainedModel:
    """The model in fp32 without storage.

    Every token of a row is learned, the padding token of config.json too: no row is padded, so where its id occurs it
    was sampled or is part of a prompt, and the other backend learns it. An embedding with a `padding_idx` would drop
    its gradient.
    """
    attention.register()
    model: PreTrainedModel
    try:
        with torch.device("meta"):
            model = _family_of(config).from_config(
                config, dtype=torch.float32, attn_implementation=attention_of(config, implementation)
            )
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"{spec.flag} {spec.checkpoint}: model_type {config.model_type!r} cannot be trained on packed sequences: "
            f"{describe(error)}. Use a causal language model whose attention transformers lets one replace."
        ) from error
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def _family_of(config: PretrainedConfig) -> type[AutoModelForCausalLM]:
    """Return the class of transformers that knows the model; all of them have the same functions."""
    vision = cast("type[AutoModelForCausalLM]", AutoModelForImageTextToText)
    return vision if has_images(config) else AutoModelForCausalLM


def attention_for(device: torch.device, parallel: ParallelConfig) -> str:
    """Flash attention's own variable-length kernel where it is installed and can be used, else ours."""
    return FLASH if device.type == "cuda" and parallel.bf16 and is_flash_attn_2_available() else attention.NAME


def shard(model: nn.Module, mesh: DeviceMesh, parallel: ParallelConfig) -> FSDPModule:
    """Cut every parameter over the mesh: one unit a decoder layer, one for the rest. Local.

    Gradients are summed over the ranks, not averaged: losses are shares of global denominators already. The sum is a
    plain one, because for a divisor that is not the number of ranks FSDP asks for PREMUL_SUM, which gloo does not have.
    """
    dtype = torch.bfloat16 if parallel.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in reversed(list(model.modules())):
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            # a layer reads only its own flag, so that recomputing does not switch anything else to training
            module.training = parallel.recompute_granularity is not None
    if isinstance(model, ValueModel):
        whole = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        fully_shard(model.score, mesh=mesh, mp_policy=whole, reshard_after_forward=True)
    root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root.set_reduce_scatter_unused_params(True)  # ranks may use different experts
    return root


def read_weights(spec: EngineSpec, config: PretrainedConfig) -> dict[str, Tensor]:
    """Every parameter and buffer of the directory's model by name, fp32, on the host. Rank 0 alone calls it.

    A missing, surplus or misshapen tensor is a ConfigError: a weight that is not loaded would train from noise. But a
    critic may begin as a language model, whose head it leaves.
    """
    transformers_logging.disable_progress_bar()
    try:
        loaded: object = _family_of(config).from_pretrained(
            str(Path(spec.checkpoint).expanduser()),
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported like the others
        )
        model, report = cast("tuple[PreTrainedModel, Mapping[str, Iterable[object]]]", loaded)
        head = _read_value_head(spec, config.get_text_config().hidden_size) if spec.has_value_head else None
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{spec.flag} {spec.checkpoint}: the weights cannot be read: {describe(error)}.") from error
    allowed = {VALUE_HEAD, "lm_head.weight"} if spec.has_value_head else set()
    faults = {
        kind: sorted(map(str, set(found) - allowed))[:5] for kind, found in report.items() if set(found) - allowed
    }
    if faults:
        raise ConfigError(
            f"{spec.flag} {spec.checkpoint}: the weights do not belong to this config.json: {faults}. Use the files "
            "that belong together."
        )
    weights = {**model.state_dict(), **dict(model.named_buffers())}
    return weights if head is None else {**weights, VALUE_HEAD: head}


def _read_value_head(spec: EngineSpec, hidden_size: int) -> Tensor:
    header = read_headers(spec.checkpoint, flag=spec.flag).get(VALUE_HEAD)
    if header is None:
        return torch.zeros(1, hidden_size)
    if header.shape != (1, hidden_size):
        raise ConfigError(
            f"{spec.flag} {spec.checkpoint}: {VALUE_HEAD} is {header.shape}, expected {(1, hidden_size)}: a critic has "
            "one value a token. Use a reward model with one label, or a language model."
        )
    with safe_open(str(Path(spec.checkpoint).expanduser() / header.file), "pt") as file:
        head: Tensor = file.get_tensor(VALUE_HEAD)
        return head.float()


@torch.no_grad()
def fill(model: FSDPModule, weights: Mapping[str, Tensor] | None, mesh: DeviceMesh, device: torch.device) -> None:
    """Give the cut model its storage and values: rank 0 has `weights`, the others None. Collective over the mesh."""
    assert isinstance(model, nn.Module)
    model.to_empty(device=device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if weights is not None:
            whole.copy_(weights[name])
        if isinstance(tensor, DTensor):
            tensor.copy_(distribute_tensor(whole, mesh, tensor.placements))
        else:
            dist.broadcast(whole, 0)
            tensor.copy_(whole)


def model_inputs(batch: PackedBatch, implementation: str) -> dict[str, object]:
    """Return the arguments of a Hugging Face model for one pack."""
    inputs: dict[str, object] = {
        "input_ids": batch.tokens_T.unsqueeze(0),
        "position_ids": batch.position_T.unsqueeze(0),
        "use_cache": False,
    }
    if implementation != FLASH:
        return {**inputs, "pack_starts": tuple(batch.cu_seqlens)}
    starts = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=batch.tokens_T.device)
    lengths = {"max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
    return {**inputs, **lengths, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}


def answer_positions(batch: PackedBatch) -> Tensor:
    """[A] where a response token is predicted; at least one position, so that nothing is empty."""
    positions = [torch.arange(positions.start, positions.stop) for positions in batch.row_slices]
    answer_A = torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64)
    return (answer_A if len(answer_A) else torch.zeros(1, dtype=torch.int64)).to(batch.tokens_T.device)
