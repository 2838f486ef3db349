"""What a trainer rank's device says about itself, and how it computes under --reference-mode."""

from __future__ import annotations

import resource

import torch

GIB = 2**30


def device_name(device: torch.device) -> str:
    """As the vendor calls it; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def make_deterministic() -> None:
    """--reference-mode: one thread, and an operation that torch cannot repeat to the bit raises instead of running."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def peak_memory_gib(device: torch.device) -> float:
    """The most that this rank held: on a GPU what its tensors took since this was last asked, GiB; on the CPU what the
    process took since it began, imports included."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    peak = torch.cuda.max_memory_allocated(device) / GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak
