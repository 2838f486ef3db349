"""Which CUDA devices a process sees, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path


def has_cuda() -> bool:
    """True when an NVIDIA device node is there and not hidden by CUDA_VISIBLE_DEVICES."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")


def visible_device(assigned: Sequence[object], environment: Mapping[str, str] = os.environ) -> int:
    """Return torch's number of the first of the devices that Ray gave this process.

    Ray lets a process see only what it gave, so that it is number 0. Where the cluster was started with
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES the process sees what the node sees.
    """
    first, visible = str(assigned[0]), environment.get("CUDA_VISIBLE_DEVICES")
    return int(first) if visible is None else visible.split(",").index(first)


def see_only(assigned: Sequence[object], environment: MutableMapping[str, str] = os.environ) -> None:
    """Let what this process starts see only the devices that Ray gave it; it has no say about torch in this process."""
    if assigned:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, assigned))
