"""Properties of a trainer rank's device, and how it computes under --reference-mode."""

from __future__ import annotations

import resource

import torch

GIB = 2**30


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def make_deterministic() -> None:
    """For --reference-mode: use one thread, and make torch raise for an operation that it cannot repeat to the bit."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory that this rank held, GiB: on a GPU that of its tensors since the last call; on the CPU
    that of the process since its start, imports included."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    peak = torch.cuda.max_memory_allocated(device) / GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak
