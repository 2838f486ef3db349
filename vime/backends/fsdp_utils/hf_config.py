"""config.json of a Hugging Face directory, or why this backend cannot train it. Needs no trainer process."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from vime.types import ConfigError, describe


def read_config(directory: str, *, flag: str = "--hf-checkpoint") -> PretrainedConfig:
    """The configuration of a causal language model, with every dropout off: the probability ratio must compare like
    with like."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(str(Path(directory).expanduser()), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{flag} {directory}: config.json cannot be read: {describe(error)}.") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{flag} {directory}: model_type {config.model_type!r} is no causal language model of the installed "
            "transformers. Choose another model."
        )
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config
