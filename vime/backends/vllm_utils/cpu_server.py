"""vLLM's API server as it starts on a machine without a GPU: `python -m vime.backends.vllm_utils.cpu_server FLAGS`.

Most of an engine's start is imports, and vLLM makes them twice: in the API server, and again in EngineCore, which it
spawns as a fresh interpreter. Here the API server imports what EngineCore needs too, and EngineCore is forked from it,
which takes half of the CPU seconds and half of the wall time (docs/log.md). Safe on the CPU only: nothing has started a
thread of OpenMP or touched a device by then. vLLM itself forks by default, but its CPU platform always asks for
`spawn`, and no setting of vLLM changes that; so the one function that it asks is replaced in this process. So is gloo's
process group, of which vLLM makes a dozen for one worker: they share an event loop.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
from types import ModuleType

from vime.backends.vllm_utils.guard import DIE_WITH_PARENT, die_with_parent
from vime.utils.imports import is_compiler_off, without, without_collector
from vime.weights.event_loop import one_event_loop

SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
NEEDED_BY_ENGINE_CORE = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")

NEEDED_BY_SERVER = ("vllm.engine.arg_utils", "vllm.entrypoints.launchers.app")
COMPILER = ("torch._inductor.lowering", "torch._inductor.graph")
"""vLLM loads them to mend what compiles a model (1.5 CPU s), and goes on where they are not there."""


def import_engine() -> ModuleType:
    """Import what API server and EngineCore need; returns the module that chooses how EngineCore is started."""
    with without_collector():
        with without(*(COMPILER if is_compiler_off() else ())):
            from vllm.v1.engine import utils
        for name in (*NEEDED_BY_ENGINE_CORE, *NEEDED_BY_SERVER):
            importlib.import_module(name)
    return utils


def tie_forked_processes() -> None:
    """Let each process that is forked from this one, or from such a process, end with the one that forked it."""
    forking = os.getpid()

    def note() -> None:
        nonlocal forking
        forking = os.getpid()

    os.register_at_fork(before=note, after_in_child=lambda: die_with_parent(forking))


def main() -> None:
    vars(import_engine())["get_mp_context"] = lambda: multiprocessing.get_context("fork")
    from torch.distributed import distributed_c10d

    distributed_c10d.ProcessGroupGloo = one_event_loop(distributed_c10d.ProcessGroupGloo)  # type: ignore[misc]
    if os.environ.get(DIE_WITH_PARENT):
        # vLLM's plug-ins are loaded once: the forked process does not call plugin.register, which asks for this
        tie_forked_processes()
    runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
