"""Imports that leave out what a library loads besides and nobody here uses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

MODELS_OF_TRANSFORMERS = "transformers.models.auto.modeling_auto"
"""A configuration or a tokenizer loads the code of all model classes, only to write a docstring (2 CPU s); where that
fails, transformers goes on without."""


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
