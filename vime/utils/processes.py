"""Processes of this machine as /proc shows them. Without Linux the list is empty."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

STOPPED, TRACED = "T", "t"  # by SIGSTOP or Ctrl-Z; by a debugger
ON_DISK = "D"  # sleeps and cannot be woken until a device answers
GONE = "ZX"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """One line of /proc. A pid is used again; pid and `start` together name one process while the host runs."""

    pid: int
    parent: int
    state: str  # one letter, see `man proc_pid_stat`
    start: int  # clock ticks since the host started
    cpu_s: float  # user and system time, of all its threads


def read_process(pid: int) -> SeenProcess | None:
    """Return the process; None when there is none, or only a zombie."""
    try:
        # "pid (name) state ppid ...", where the name may itself hold blanks and brackets; fields count from the state
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in GONE:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return SeenProcess(pid=pid, parent=int(fields[1]), state=fields[0], start=int(fields[19]), cpu_s=cpu_s)


def read_processes() -> dict[int, SeenProcess]:
    """Return all processes by pid."""
    try:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return {}
    return {pid: seen for pid in pids if (seen := read_process(pid)) is not None}


def tree(root: int, table: Mapping[int, SeenProcess], *, without: Collection[int] = ()) -> list[SeenProcess]:
    """Return `root` and everything below it, without the processes `without` and their descendants."""
    children: dict[int, list[int]] = {}
    for seen in table.values():
        children.setdefault(seen.parent, []).append(seen.pid)
    found, open_pids = [], [root]
    while open_pids:
        pid = open_pids.pop()
        if pid in table and (pid == root or pid not in without):
            found.append(table[pid])
            open_pids += children.get(pid, [])
    return found


def title(pid: int) -> str:
    """Return its own short title: `VLLM::EngineCore`, `raylet`; empty when it is gone."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    first = arguments[0].split(" ")[0]
    return first if "::" in first else os.path.basename(first)


def place() -> str:
    """Name this place: processes with the same result see the same pids (same boot of a host, same container)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()
