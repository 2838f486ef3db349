"""What `vime chaos` does to a run: signals to its processes, and other faults: a full disk, a torn spool, a directory
that moves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

from vime.handoff.ledger_types import SPOOL_NAME
from vime.handoff.spool import SUFFIX
from vime.types import ConfigError

SMALL_DISK_BYTES = 1 << 30
BALLAST = "ballast"
CHUNK_BYTES = 1 << 16
TORN_BYTES = 11  # less than a record: cuts into the last one


def fill_disk(out: Path) -> Callable[[], None]:
    """Leave not one byte on the file system of `out`."""
    if shutil.disk_usage(out).free > SMALL_DISK_BYTES:
        raise ConfigError(
            f"target disk fills the file system of {out}, which has more than {SMALL_DISK_BYTES >> 20} MiB free. Mount "
            "a small one: mount -t tmpfs -o size=64m tmpfs DIRECTORY, and name OUT inside it."
        )
    ballast = out / BALLAST
    with ballast.open("wb", buffering=0) as file:
        size = CHUNK_BYTES
        while size:
            try:
                file.write(b"\0" * size)
                os.fsync(file.fileno())
            except OSError:
                size //= 2
    return lambda: ballast.unlink(missing_ok=True)


def tear_spool(run_dir: Path) -> Path | None:
    """Cut into the last record of a run's spool, which was acknowledged; None when there is none."""
    segments = sorted((run_dir / SPOOL_NAME).glob(f"segment-*{SUFFIX}"))
    if not segments or segments[-1].stat().st_size < 4 * TORN_BYTES:
        return None
    os.truncate(segments[-1], segments[-1].stat().st_size - TORN_BYTES)
    return run_dir


def move(run_dir: Path) -> Path | None:
    """Give a run's directory another name; None when there is none yet."""
    if not run_dir.exists():
        return None
    return run_dir.rename(run_dir.with_name(f"{run_dir.name}.moved"))


class How(StrEnum):
    """What is done to a target."""

    KILL = "kill"
    STOP = "stop"  # SIGSTOP, and SIGCONT after STOPPED_S: longer than a lease, shorter than most deadlines
    STOP_KILL = "stop-kill"  # SIGSTOP, and SIGKILL after HUNG_S: long enough to be missed


STOPPED_S, HUNG_S = 20.0, 5.0
BETWEEN_LIVES: Mapping[str, Callable[[Path], Path | None]] = {"spool": tear_spool, "move": move}
"""Targets for which the driver is killed, and what is done to the run's directory before the next start. Returns where
the run continues; None to do it before a later start."""
FAULTS: Mapping[str, str] = {
    "disk": "full for some seconds; OUT needs a disk of its own",
    "spool": "the driver is killed and the spool loses its end",
    "move": "the driver is killed and the run's directory gets another name",
}
