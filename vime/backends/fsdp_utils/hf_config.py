"""config.json of a Hugging Face directory, or why this backend cannot train it. Needs no trainer process."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from vime.config.hf_config import VISION_FAMILIES
from vime.types import ConfigError, describe


def read_config(directory: str, *, flag: str = "--hf-checkpoint") -> PretrainedConfig:
    """Return the configuration of a causal language model, with every dropout off, so that the probability ratio
    compares the same computation."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(Path(directory).expanduser()), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{flag} {directory}: config.json cannot be read: {describe(error)}.") from error
    if config.model_type not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_FAMILIES):
        raise ConfigError(
            f"{flag} {directory}: model_type {config.model_type!r} is no causal language model of the installed "
            f"transformers, nor of the vision families {', '.join(VISION_FAMILIES)}. Choose another model."
        )
    _refuse_frequencies_of_a_pack(config.get_text_config(), f"{flag} {directory}")
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _refuse_frequencies_of_a_pack(text: PretrainedConfig, where: str) -> None:
    """Refuse rotary scalings that depend on the longest sequence of a forward pass: a short sequence in the same pack
    would get the scaling of the long one. vLLM chooses it once, by the longest sequence that it may ever get, so
    trainer and engine would disagree for every pack."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]  # one per kind of layer
    for kind in {str(each.get("rope_type")) for each in nested or [rope]}:
        if kind != "longrope" and "dynamic" not in kind:
            continue
        way_out = "Choose another model."
        if "dynamic" in kind:
            way_out = (
                f"Up to max_position_embeddings, {text.max_position_embeddings} tokens, the model is the same without "
                "its rope_scaling: remove that entry from config.json, or choose another model."
            )
        raise ConfigError(
            f"{where}: config.json has rope_type {kind!r}: transformers chooses its frequencies by the longest "
            "sequence of a pack, so the others would get wrong log-probabilities. No backend of Vime trains it. "
            f"{way_out}"
        )
