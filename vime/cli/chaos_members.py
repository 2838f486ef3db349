"""The processes of one chaos run: what each of them is. Nothing else is ever killed."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Mapping

import psutil

from vime.utils.processes import read_processes

MARK = "VIME_CHAOS_RUN"
"""In the environment of every process of a run, also of indirectly started ones."""
POLL_S = 0.05
TARGETS: Mapping[str, tuple[str, ...]] = {
    "driver": (),  # the process that was started
    "manager": ("ray::RolloutManager",),
    "worker": ("ray::RolloutWorkerActor",),
    "gateway": ("ray::GatewayActor",),
    "trainer": ("ray::TrainerActor",),
    "engine": ("-m", "--worker-extension-cls"),
    "engine-core": ("VLLM::EngineCore",),  # vLLM's own child; the scripted engine has none
    "engine-actor": ("ray::EngineActor",),
    "router": ("vllm::router",),
    "storage": ("ray::SimpleStorageUnit",),
    "controller": ("ray::TransferQueueController",),
    "ledger": ("ray::LedgerActor",),
    "raylet": ("raylet/raylet ",),
    "gcs": ("gcs/gcs_server ",),
}
"""What the command line of each target contains; Ray gives its workers the name of their actor, the router its own."""


class Members:
    """Return every process with this run's mark except the caller, and every child of one that was ever seen: the
    titles of Ray's agents overwrite their environment."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._seen: set[psutil.Process] = set()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that makes a process, and all that it starts, a member."""
        return {MARK: self._mark}

    def find(self, driver: int) -> dict[str, list[psutil.Process]]:
        """Return the live processes of each target, oldest first; `driver` is the driver's pid."""
        found: dict[str, list[psutil.Process]] = {}
        for member in sorted(self.all(), key=lambda process: process.pid):
            command = _command(member)
            for name, wanted in TARGETS.items():
                is_named = all(part in " ".join(command) for part in wanted) and not any(map(_is_guard, command))
                if is_named if wanted else member.pid == driver:
                    found.setdefault(name, []).append(member)
        return found

    def all(self) -> list[psutil.Process]:
        """List pids without `process_iter`, which once leaves out a process whose pid was reused."""
        members = []
        for pid in sorted(read_processes()):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                if self._is_member(process):
                    members.append(process)
                    self._seen.add(process)
        return members

    def _is_member(self, process: psutil.Process) -> bool:
        """Sort by pid: parents usually have lower pids, so they are looked at before their children."""
        if process.pid == os.getpid():
            return False
        is_marked = process in self._seen or process.environ().get(MARK) == self._mark
        return is_marked or process.parent() in self._seen

    def wait_until_gone(self, grace_s: float) -> list[str]:
        """Return what is still there after `grace_s`."""
        ends = time.monotonic() + grace_s
        while members := self.all():
            if time.monotonic() > ends:
                return [" ".join(_command(member)[:3])[:80] or str(member.pid) for member in members]
            time.sleep(POLL_S)
        return []

    def kill(self) -> None:
        for member in self.all():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def _is_guard(argument: str) -> bool:
    """Return the parent of a server, which has the server's command line in its own."""
    return argument.endswith("guard.py")


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
