"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes. Nothing is patched."""

from __future__ import annotations

import contextlib
import multiprocessing
import os

from vime.backends.vllm_utils.guard import DIE_WITH_PARENT, die_with_parent

BACKEND = "vime"
"""Name for --weight-transfer-config. One backend for every transport: the trainer's first call says which."""


def register() -> None:
    """Make our weight-transfer engine known. May be called again.

    In an engine that Vime started it also ties this process to its parent: EngineCore does not notice by itself that
    the API server is gone.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "vime.backends.vllm_utils.weight_transfer", "VimeEngine")
    if os.environ.get(DIE_WITH_PARENT):
        die_with_parent(_parent())


def _parent() -> int:
    """Return the pid of the process that started this one: as that said itself, because it may have ended. What a
    forkserver started, which vLLM can be told to use, has that as its parent and hears of another process."""
    said = multiprocessing.parent_process()
    if said is None or said.pid is None or multiprocessing.get_start_method(allow_none=True) == "forkserver":
        return os.getppid()
    return said.pid
