"""Whether this machine has a CUDA device, without importing torch."""

from __future__ import annotations

import os
from pathlib import Path


def has_cuda() -> bool:
    """True when an NVIDIA device node is there and not hidden by CUDA_VISIBLE_DEVICES."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
