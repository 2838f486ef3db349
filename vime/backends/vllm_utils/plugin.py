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
        parent = multiprocessing.parent_process()
        die_with_parent(os.getppid() if parent is None else parent.pid or os.getppid())
