"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes. Nothing is patched."""

from __future__ import annotations

import os

from vime.backends.vllm_utils.guard import DIE_WITH_PARENT, die_with_parent

TRANSPORTS = ("shm", "gloo", "nccl", "disk")


def register() -> None:
    """Make the transports known as weight-transfer backends `vime_shm`, `vime_gloo`, ... May be called again.

    In an engine that Vime started it also ties this process to its parent: EngineCore does not notice by itself that
    the API server is gone.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name in TRANSPORTS:
        backend = f"vime_{name}"
        # `_registry` is looked at only because register_engine refuses a second registration.
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                backend, "vime.backends.vllm_utils.weight_transfer", f"{name.capitalize()}Engine"
            )
    if os.environ.get(DIE_WITH_PARENT):
        die_with_parent()
