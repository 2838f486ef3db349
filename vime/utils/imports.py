"""Imports without parts that a library loads and that are not used here."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

MODELS_OF_TRANSFORMERS = "transformers.models.auto.modeling_auto"
"""A configuration or a tokenizer loads the code of all model classes, only to write a docstring (2 CPU s); where that
fails, transformers continues without it."""


@contextlib.contextmanager
def without(*modules: str) -> Iterator[None]:
    """Let imports in the block find that `modules` are not installed; afterwards they can be imported again.

    For a process's start: other threads that import meanwhile see the same.
    """
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: importing it raises ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Import in the block without the garbage collector, which would scan everything imported again and again: a fifth
    of the time. Objects that exist at the end are never scanned again, so use it for imports only: cycles left by other
    work would stay.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


def is_compiler_off() -> bool:
    """Whether the environment tells torch that nothing is compiled, so that `torch.compile` does not import the
    compiler. TORCH_COMPILE_DISABLE is not enough: with it `torch.compile` still reads the compiler's settings."""
    return os.environ.get("TORCHDYNAMO_DISABLE") == "1"
