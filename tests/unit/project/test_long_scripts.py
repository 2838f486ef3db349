"""scripts/lint.sh, nightly.sh and gpu_day.sh go on behind a part that fails, name it, and fail."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from vime.config.parse import Config, parse

ROOT = Path(__file__).resolve().parents[3]
FLEET = "engine router worker queue ledger gateway manager trainer ray driver"
# Stands for python, install.sh, test.sh and chaos.sh: fails when FAILS is on its command line, hangs when HANGS is;
# with SKIPS there it speaks as pytest does of tests that are all skipped.
STAND_IN = """#!/usr/bin/env bash
echo "${0##*/} $*"
case "$0 $*" in *"${FAILS:-nothing}"*) exit 1 ;; *"${HANGS:-nothing}"*) exec sleep 300 ;; esac
case "$*" in *"${SKIPS:-nothing}"*) echo "1 skipped in 0.01s" ;; esac
"""
NVIDIA_SMI = """#!/usr/bin/env bash
[ "$1" = -L ] || exec echo "NVIDIA H100 80GB HBM3"
for ((gpu = 0; gpu < GPUS; gpu++)); do echo "GPU $gpu: NVIDIA H100 80GB HBM3 (UUID: GPU-$gpu)"; done
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the three scripts, whose parts are stand-ins."""
    parts = ("install.sh", "test.sh", "chaos.sh", "agents_chaos.sh", "quickstart.sh")
    texts = {**{f"scripts/{part}": STAND_IN for part in parts}, ".venv/bin/python": STAND_IN, "nvidia-smi": NVIDIA_SMI}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for name in ("lint.sh", "nightly.sh", "gpu_day.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    return tmp_path


def run(place: Path, *command: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code and lines of output."""
    done = subprocess.run(
        [place / "scripts" / command[0], *command[1:]],
        env={"PATH": f"{place}:/usr/bin:/bin", "GPUS": "0", **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_lint_passes_when_every_check_does(place: Path) -> None:
    code, lines = run(place, "lint.sh")
    assert (code, lines[-1]) == (0, "lint: passed")


@pytest.mark.parametrize(
    ("fails", "name"),
    [("ruff check", "ruff"), ("ruff format", "format"), ("shape_check", "shape"),
     ("--check", "format, flags page, families"), ("-m mypy", "mypy")],
)  # fmt: skip
def test_lint_runs_every_check_and_names_those_that_failed(place: Path, fails: str, name: str) -> None:
    code, lines = run(place, "lint.sh", FAILS=fails)
    assert (code, lines[-1]) == (1, f"lint: FAILED: {name}")
    assert sum(line.startswith("lint: ") for line in lines[:-1]) == 6


def test_the_night_runs_every_part_and_says_which_failed(place: Path) -> None:
    code, lines = run(place, "nightly.sh", "out", SEED="7", KILLS="15", DEADLINE="1", FAILS="run_flips")
    table = lines[lines.index("| part (seed 7) | outcome | took | its last line |") + 2 :]
    rows = [tuple(cell.strip() for cell in row.split("|")[1:5]) for row in table]
    out = place / "out"
    assert [(part, outcome, last) for part, outcome, _, last in rows] == [
        ("tests", "passed", "test.sh -m nightly and not gpu"),
        ("matrix", "passed", f"chaos.sh {out}/matrix"),
        ("random", "passed", f"chaos.sh {out}/random --random 15 --seed 7"),
        ("workers", "passed", f"chaos.sh {out}/workers --random 15 --seed 7"),
        ("vllm", "passed", f"chaos.sh {out}/vllm --random 2 --seed 7"),
        ("fleet", "passed", f"python benchmarks/fleet.py --part {FLEET} --kills 1 --seed 7"),
        ("agents", "passed", f"agents_chaos.sh {out}/agents 150 15 7"),
        (
            "fuzz",
            "passed",
            "test.sh tests/contract/gateway/test_gateway_fuzz.py tests/contract/sessions/test_session_fuzz.py",
        ),
        ("flips", "FAILED: exit code 1", f"python -m tests.helpers.run_flips {out}/flips --seed 7"),
        ("figures", "passed", "python benchmarks/forecast.py"),
        ("inputs", "passed", "python -m tests.helpers.broken_inputs"),
    ]
    assert code == 1


def test_a_goal_that_the_night_misses_is_named_though_the_figure_after_it_is_met(place: Path) -> None:
    code, lines = run(place, "nightly.sh", "out", "figures", SEED="7", FAILS="at-most")
    assert code == 1
    assert lines[-1].startswith("| figures | FAILED: exit code 1 |")


def test_a_part_of_the_night_has_a_deadline(place: Path) -> None:
    code, lines = run(place, "nightly.sh", "out", "inputs", DEADLINE="1", HANGS="broken_inputs")
    assert lines[-1].startswith("| inputs | FAILED: not done in 1 s |")
    assert code == 1


def test_some_parts_of_the_night_alone(place: Path) -> None:
    code, lines = run(place, "nightly.sh", "out", "inputs", "tests")
    assert [line.split()[1] for line in lines[-2:]] == ["inputs", "tests"]
    assert code == 0
    assert run(place, "nightly.sh", "out", "input")[0] == 2


def day(lines: list[str]) -> dict[str, tuple[str, str]]:
    """Step -> (outcome, what its line says behind the seconds), of the lines of gpu_day.sh."""
    words = [line.split(maxsplit=4) for line in lines[1:]]
    return {step: (outcome, said) for outcome, _, _, step, said in words}


def quickstart_flags(out: Path) -> Config:
    """The flags of its first line of output; unknown ones are refused."""
    return parse(shlex.split((out / "quickstart.log").read_text().splitlines()[0])[1:])


def test_a_day_with_two_gpus_takes_every_step_and_says_which_failed(place: Path) -> None:
    steps = ("trainer", "speed", "run", "layouts", "weights", "colocated", "quickstart", "run-bf16", "hash", "rest")
    code, lines = run(place, "gpu_day.sh", "out", GPUS="2", FAILS="layouts_gpu", SKIPS="test_nccl_weights")
    assert lines[0] == f"gpu_day: 2 GPU(s), NVIDIA H100 80GB HBM3; 600 s; output in {place}/out"
    told = day(lines)
    assert tuple(told) == steps
    assert {step: outcome for step, (outcome, _) in told.items() if outcome != "ok"} == {
        "layouts": "FAILED", "weights": "skipped",
    }  # fmt: skip
    assert told["layouts"][1].startswith("exit code 1: python -m pytest")
    assert told["speed"][1] == "python benchmarks/gpu_trainer.py --size 0.5b --plain"
    assert code == 1
    cluster = quickstart_flags(place / "out").cluster
    assert (cluster.device, cluster.actor_num_gpus_per_node, cluster.rollout_num_gpus) == ("cuda", 1, 1)


def test_a_day_with_one_gpu_leaves_out_what_needs_two_and_what_comes_too_late(place: Path) -> None:
    code, lines = run(place, "gpu_day.sh", "out", "layouts", "quickstart", GPUS="1")
    assert day(lines)["layouts"] == ("skipped", "needs 2 GPUs")
    assert quickstart_flags(place / "out").cluster.colocate
    assert code == 0
    code, lines = run(place, "gpu_day.sh", "out", "trainer", GPUS="1", BUDGET="4")
    assert day(lines)["trainer"][1].startswith("no time left of 4 s")
    assert code == 0


def test_a_step_of_the_day_has_a_limit(place: Path) -> None:
    code, lines = run(place, "gpu_day.sh", "out", "trainer", "speed", GPUS="1", BUDGET="8", HANGS="trainer_nccl")
    outcome, said = day(lines)["trainer"]
    assert (outcome, said.partition(" s: ")[2][:16]) == ("FAILED", "python -m pytest")
    assert said.startswith("not done in ")
    assert day(lines)["speed"][0] == "skipped"
    assert code == 1


def test_without_a_gpu_the_day_says_what_to_do(place: Path) -> None:
    code, [line] = run(place, "gpu_day.sh", GPUS="0")
    assert (code, line.partition(".")[0]) == (2, "gpu_day: nvidia-smi lists no GPU here")
    code, [line] = run(place, "gpu_day.sh", GPUS="1", FAILS="import sys, torch")
    assert (code, "sees no CUDA device" in line) == (2, True)
    (place / ".venv/bin/python").unlink()
    code, [line] = run(place, "gpu_day.sh", GPUS="1")
    assert (code, line) == (2, "gpu_day: no .venv/bin/python. Run ./scripts/install.sh first.")
    assert run(place, "gpu_day.sh", "out", "trainers", GPUS="1")[0] == 2
