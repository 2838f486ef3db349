"""Check at start-up that a model keeps packed sequences apart, which no model family promises.

A recurrent layer, custom attention, custom position counts or frequencies chosen for a whole pack would let a sequence
see the one before it, and training would continue with wrong log-probabilities. `check_family` needs config.json alone
and runs before the start; `check_packing` runs on the model that trains.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from vime.backends.fsdp_utils import attention
from vime.backends.fsdp_utils.model import FLASH, ValueModel, bare_model, model_inputs
from vime.backends.fsdp_utils.vision import attention_of, has_images
from vime.batching.pack import pack
from vime.data.rows import TrainRow
from vime.types import ConfigError, EngineSpec, Role, describe

NUM_TOKENS = 6  # of each of the two sequences
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of the root mean square difference, as a share of the outputs' own. In bf16 kernels differ by about 0.01; a leak from
another sequence changes outputs by their own order of magnitude."""
ANOTHER = "Choose another model, or --train-backend megatron for the families that README.md lists under it."

NAMES_A_LENGTH = re.compile(
    r"(window|window_size|chunk_size|floor_scale|original_max_position_embeddings|local_attention|index_topk)$"
)
"""Entries of a config.json that are lengths beyond which attention or positions are computed in another way. The last
position is not one of them: no row is longer."""
SMALL_LENGTH, SMALL_WIDTH, SMALL_VOCABULARY = 8, 16, 96
NUM_KV_HEADS = 2


@torch.no_grad()
def check_family(
    settings: PretrainedConfig, *, flag: str, checkpoint: str, implementation: str = attention.NAME, device: str = "cpu"
) -> None:
    """Refuse a model whose packed sequences get other outputs than alone, by its config.json. Local; does not change
    any random state.

    A random copy of the model is small in every way that costs: layers until each kind is there, widths, vocabulary,
    and the named lengths themselves, which become 8, 16, ... in their order. So sequences of a few tokens lie on both
    sides of every one, in one pack, and each must get what transformers' own attention gives it alone. A model whose
    config names no length and whose copy cannot be made is left to `check_packing`.
    """
    spec = EngineSpec(role=Role.REFERENCE, checkpoint=checkpoint, flag=flag, total_steps=0, lr=0.0, lr_warmup_iters=0)
    bare_model(spec, settings, implementation=implementation)  # refuses an attention that cannot be replaced
    named = _named_lengths(settings.get_text_config())
    small = {length: SMALL_LENGTH * rank for rank, length in enumerate(sorted(set(named.values())), start=1)}
    sizes = {NUM_TOKENS, *(size + more for size in small.values() for more in (-1, 1, SMALL_LENGTH + 3))}
    lengths = [max(sizes), *sorted(sizes)]  # the longest before and after all others
    said = ", ".join(f"{name} {length}" for name, length in named.items())
    where = f"{flag} {checkpoint}: model_type {settings.model_type!r}" + (f" with {said}" if said else "")
    try:
        with _without_warnings():  # they would be about the copy
            text = settings.get_text_config() if has_images(settings) else settings
            model = _small_copy(text, small, implementation=implementation, device=device)
            pairs = _packed_and_alone(model, lengths, implementation=implementation)
    except Exception as error:  # boundary: code of any family, with an unusual config
        if not named:
            return
        raise ConfigError(
            f"{where}: it cannot be shown that packed sequences stay apart on both sides of these lengths: "
            f"{describe(error)}. {ANOTHER}"
        ) from error
    for length, (packed, alone) in zip(lengths, pairs, strict=True):
        difference, size = _rms(packed - alone), _rms(alone)
        if not difference <= TOLERANCE[packed.dtype] * size:
            raise ConfigError(
                f"{where} does not keep packed sequences apart: in a small copy "
                + (f"where these are {', '.join(str(small[each]) for each in named.values())} " if named else "")
                + f"a sequence of {length} tokens, packed with others of up to {max(lengths)}, gets outputs that "
                f"differ by {difference:.3g} of {size:.3g} from those it gets alone. {ANOTHER}"
            )


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _named_lengths(settings: PretrainedConfig | Mapping[str, object]) -> dict[str, int]:
    """Yield what NAMES_A_LENGTH finds in a config and the dicts in it."""
    found: dict[str, int] = {}
    for name, value in (settings if isinstance(settings, Mapping) else settings.to_dict()).items():
        if isinstance(value, Mapping):
            found |= _named_lengths(value)
        elif type(value) is int and value > 0 and NAMES_A_LENGTH.search(name):
            found[name] = value
    return found


def _small_copy(
    settings: PretrainedConfig, small: Mapping[int, int], *, implementation: str, device: str
) -> PreTrainedModel:
    """Make a small model with random weights large enough that attention distinguishes tokens."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if implementation == FLASH else torch.float32
    model: PreTrainedModel
    for has_small_width in (True, False):  # some families have further numbers that must fit the number of heads
        try:
            with torch.random.fork_rng(devices=[]):
                model = AutoModelForCausalLM.from_config(
                    _small_settings(settings, small, has_small_width=has_small_width),
                    dtype=torch.float32,
                    attn_implementation=implementation,
                )
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim > 1:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)
                else:
                    parameter.add_(noise * 0.1)
            model = model.to(device=device, dtype=dtype).eval()  # type: ignore[call-arg]  # wrapped by transformers
            _packed_and_alone(model, [NUM_TOKENS], implementation=implementation)
        except (ValueError, RuntimeError, TypeError, IndexError, AttributeError):
            if not has_small_width:
                raise
        else:
            return model
    raise AssertionError("the second pass returns or raises")


def _small_settings(settings: PretrainedConfig, small: Mapping[int, int], *, has_small_width: bool) -> PretrainedConfig:
    whole = copy.deepcopy(settings)
    text = whole.get_text_config()
    said = text.to_dict()
    num_layers = text.num_hidden_layers
    per_layer = {name: list(value) for name, value in said.items() if _is_list(value) and len(value) == num_layers}
    kinds = [value for value in per_layer.values() if all(isinstance(kind, str) or kind in (0, 1) for kind in value)]
    kept = min(2, num_layers)
    while any(set(value[:kept]) != set(value) for value in kinds):
        kept += 1
    text.num_hidden_layers = kept
    for name, value in per_layer.items():
        setattr(text, name, value[:kept])
    for name, value in said.items():
        if name.endswith("_token_id") and value is not None:
            setattr(text, name, 0)
        elif type(value) is int and "vocab_size" in name:
            setattr(text, name, SMALL_VOCABULARY)
        elif type(value) is int and ("intermediate_size" in name or name in ("ffn_dim", "n_inner", "ffn_hidden_size")):
            setattr(text, name, min(value, SMALL_WIDTH))
    if has_small_width:
        _make_narrow(text)
    _replace_lengths(text, said, small)
    return whole


def _make_narrow(text: PretrainedConfig) -> None:
    """Reduce the number of heads; size and kind stay."""
    heads = getattr(text, "num_attention_heads", None) or 1
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    fewer = min(kv_heads, NUM_KV_HEADS) * heads // kv_heads
    if heads % kv_heads or text.hidden_size % heads or fewer >= heads:
        return
    text.hidden_size, text.num_attention_heads = text.hidden_size // heads * fewer, fewer
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = min(kv_heads, NUM_KV_HEADS)


def _replace_lengths(text: PretrainedConfig, said: Mapping[str, object], small: Mapping[int, int]) -> None:
    for name, value in said.items():
        if isinstance(value, Mapping) and isinstance(inner := getattr(text, name, None), dict):
            setattr(text, name, _with_small_lengths(inner, small))
        elif type(value) is int and value in small and NAMES_A_LENGTH.search(name):
            setattr(text, name, small[value])


def _with_small_lengths(said: Mapping[str, object], small: Mapping[int, int]) -> dict[str, object]:
    return {
        name: _with_small_lengths(value, small)
        if isinstance(value, Mapping)
        else small.get(value, value)
        if type(value) is int and NAMES_A_LENGTH.search(name)
        else value
        for name, value in said.items()
    }


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _packed_and_alone(
    model: PreTrainedModel, lengths: list[int], *, implementation: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return logits of each sequence of a pack, and of the same sequence alone with transformers' own attention."""
    device, vocabulary = model.device, SMALL_VOCABULARY
    sequences = [
        [(7 * at + 3 * number + 1) % vocabulary for at in range(length)] for number, length in enumerate(lengths)
    ]
    batch = pack([_row(tokens) for tokens in sequences], device=device)
    packed = model(**model_inputs(batch, implementation)).logits[0]
    model.set_attn_implementation("eager")
    alone = [model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0] for tokens in sequences]
    model.set_attn_implementation(implementation)
    return zip((packed[start:end] for start, end in itertools.pairwise(batch.cu_seqlens)), alone, strict=True)


def _rms(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


@torch.no_grad()
def check_packing(
    spec: EngineSpec, family: PreTrainedModel, model: nn.Module, *, implementation: str, device: torch.device
) -> None:
    """Check that a sequence behind another in a pack gets what it gets alone from transformers' own attention.
    Collective over all ranks, which all find the same."""
    vocabulary = family.config.get_text_config().vocab_size
    first, second = ([(7 * number + start) % vocabulary for number in range(NUM_TOKENS)] for start in (1, 3))

    def outputs(sequences: list[list[int]], chosen: str) -> Tensor:
        batch = pack([_row(tokens) for tokens in sequences], device=device)
        inputs = model_inputs(batch, chosen)
        if chosen == "eager":
            del inputs["pack_starts"]
        output = model(**inputs)
        whole: Tensor = output if isinstance(model, ValueModel) else output.logits
        return whole[0, -NUM_TOKENS:]

    try:
        packed = outputs([first, second], implementation)
    except (NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"{spec.flag} {spec.checkpoint}: cannot be trained on packed sequences: {error}. {ANOTHER}"
        ) from error
    family.set_attn_implementation(attention_of(family.config, "eager"))
    alone = outputs([second], "eager")
    family.set_attn_implementation(attention_of(family.config, implementation))
    difference, size = _rms(packed - alone), _rms(alone)
    if not difference <= TOLERANCE[packed.dtype] * size:
        raise ConfigError(
            f"{spec.flag} {spec.checkpoint}: the outputs of a sequence change by {difference:.3g} of {size:.3g} when "
            f"another one stands before it in a pack: model_type {family.config.model_type!r} does not keep packed "
            f"sequences apart. {ANOTHER}"
        )


def _row(tokens: list[int]) -> TrainRow:
    return TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=np.asarray(tokens, dtype=np.int32),
        response_length=0,
        loss_mask=np.zeros(0, dtype=np.uint8),
        rollout_log_probs=np.zeros(0, dtype=np.float32),
        token_policy_versions=(),
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
    )
