"""Loaded by every Python process of a run whose PYTHONPATH begins with this directory: writes down which functions of
vime/ are entered, and when. VIME_WALK names a directory, in which each process has a file of its own.

A line is `seconds file:qualified name`, the seconds of the machine's monotonic clock, which all processes share. What
is entered again within RESOLUTION_S is not written again (some call a function for each tensor).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType

RESOLUTION_S = 0.001
ACTORS = "ray._private.function_manager"


class Patch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Ray calls an actor's methods in threads of its C++ code, which `threading.setprofile` does not know."""

    def __init__(self, profile: Callable[[FrameType, str, object], None]) -> None:
        self._profile = profile

    def find_spec(self, name, path=None, target=None):
        if name != ACTORS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        manager, profile = module.FunctionActorManager, self._profile
        make = manager._make_actor_method_executor

        def make_profiled(self, name, method, *more):
            execute = make(self, name, method, *more)

            def profiled(*arguments, **options):
                sys.setprofile(profile)
                return execute(*arguments, **options)

            for attribute in ("name", "method"):
                if hasattr(execute, attribute):
                    setattr(profiled, attribute, getattr(execute, attribute))
            return profiled

        manager._make_actor_method_executor = make_profiled


def begin(directory: str) -> None:
    root = os.path.join(os.environ["VIME_WALK_ROOT"], "vime") + os.sep
    file = open(os.path.join(directory, f"{os.getpid()}.txt"), "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    last: dict[CodeType, float] = {}

    def enter(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root):
            return
        now = time.monotonic()
        if now - last.get(code, 0.0) >= RESOLUTION_S:
            last[code] = now
            file.write(f"{now:.6f} {code.co_filename[len(root) :]}:{code.co_qualname}\n")

    sys.setprofile(enter)
    threading.setprofile(enter)
    sys.meta_path.insert(0, Patch(enter))


if "VIME_WALK" in os.environ:
    begin(os.environ["VIME_WALK"])
