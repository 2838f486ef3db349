"""Imports of TransferQueue for every process of a run: with our settings, and without parts that are not used here.

The import is most of the start time of TransferQueue's actors: torch, and tensordict, whose objects its columns are.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import TypeVar

from vime.utils.imports import is_compiler_off, without_collector

QUEUE_ENVIRONMENT = {
    "TQ_NUM_THREADS": "2",  # stock: 8 per process
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",  # stock: 8 per client
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "20",  # stock: 200 s, so a dead storage unit is noticed after ten minutes
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "2",
    "TQ_STORAGE_HANDSHAKE_MAX_RETRIES": "25",  # one a second; stock: 3, too few on a busy machine at start-up
    "TQ_STORAGE_HANDSHAKE_TIMEOUT": "30",  # must be longer than the retries, or a failed handshake counts as a success
}
MARKS_FOR_COMPILER = ("allow_in_graph", "assume_constant_result")
"""Functions of `torch.compiler` that take a function, and load the compiler only to mark it."""
Function = TypeVar("Function")


def load_modules(*names: str) -> list[ModuleType]:
    """Import and return these modules of TransferQueue.

    The settings are made here, not by Ray: a worker with an environment of its own is started twice, which takes a CPU
    second. The user's environment has priority.
    """
    os.environ.update(QUEUE_ENVIRONMENT | os.environ)
    with without_collector(), _without_compiler():
        return [importlib.import_module(name) for name in names]


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Import in the block without torch's compiler (1.4 CPU s), since nothing is compiled here: tensordict loads it
    only to mark functions, and without it the mark does nothing."""
    if not is_compiler_off():
        yield
        return
    import torch.compiler

    marks = {name: getattr(torch.compiler, name) for name in MARKS_FOR_COMPILER}
    for name in marks:
        setattr(torch.compiler, name, _leave_as_it_is)
    try:
        yield
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)


def _leave_as_it_is(function: Function) -> Function:
    return function
