"""Small configurations, tokenizer and prompt files for rollout tests; no weights are needed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from vime.config.parse import Args, parse

EXAMPLES = Path(__file__).parents[2] / "examples"


def example_module(path: str) -> ModuleType:
    """An example script as a module, for example `quickstart/prepare.py`; executed once per process."""
    name = "example_" + path.replace("/", "_")[:-3]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


def write_model_directory(directory: Path, *, positions: int = 64) -> Path:
    """config.json and the quick-start's character tokenizer, with `<bos>` in front of every prompt."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
    ):  # copied: building it imports transformers' models, 8 CPU s
        shutil.copy(EXAMPLES / "quickstart/model" / name, directory)
    shape = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": positions,
    }
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_args(*flags: object) -> Args:
    """`args` as a plug-in sees it, from command-line flags."""
    return parse([str(flag) for flag in flags]).flat
