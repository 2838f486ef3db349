"""The code keeps the project's rules: modules import on a bare laptop, and shape_check of lint.sh finds faults."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.shape_check import (
    BACKENDS,
    HEAVY,
    LAYER,
    check_circles,
    check_imports,
    check_sizes,
    clone_files,
    import_circles,
    package_of,
)

ROOT = Path(__file__).resolve().parents[3]
# Packages that must not be loaded by importing a module of another package than HEAVY allows.
COLD = ("ray", "vllm", "megatron", "transfer_queue", "wandb", "torch", "transformers")


def run(*command: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_the_shape_check_finds_an_import_from_a_higher_floor() -> None:
    tree = ast.parse("from vime.ray.components import Components")
    assert [message for _, message in check_imports(tree, "vime", "algo")] == [
        "package 'algo' (layer 4) imports 'ray' (layer 6)"
    ]


def test_the_shape_check_finds_a_function_over_its_budget() -> None:
    body = "\n".join("    value = 1" for _ in range(80))
    source = f"def long():\n{body}\n"
    assert [message for _, message in check_sizes(ast.parse(source), source)] == [
        "long: 81 lines, 1 branches; budget 80/15"
    ]


def _made_package(root: Path, **sources: str) -> Path:
    package = root / "made"
    package.mkdir()
    for name, source in {"__init__": "", **sources}.items():
        (package / f"{name}.py").write_text(source)
    return package


def test_the_shape_check_finds_a_circle_of_three_files(tmp_path: Path) -> None:
    package = _made_package(
        tmp_path,
        first="from made.second import x\n",
        second="import made.third\n",
        third="try:\n    from made import first\nexcept ImportError:\n    pass\n",
        outside="from made.first import x\n",  # reaches the circle, and nothing in it reaches this file
    )
    circle = ("made/first.py", "made/second.py", "made/third.py")
    assert import_circles(package) == [circle]
    (message,) = check_circles(package)
    assert message.startswith(f"{package / 'first.py'}:1: these files import each other: {', '.join(circle)}.")


@pytest.mark.parametrize(
    "late",
    [
        "def later():\n    from made.first import x\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.first import x\n",
    ],
)
def test_an_import_that_does_not_run_at_loading_closes_a_circle_too(tmp_path: Path, late: str) -> None:
    package = _made_package(tmp_path, first="from made.second import x\n", second=late)
    assert import_circles(package) == [("made/first.py", "made/second.py")]


def test_the_version_pins_of_the_spine_are_exact() -> None:
    source = (ROOT / "setup.py").read_text()
    for package in ("megatron-core", "TransferQueue", "ray[default]", "vllm"):
        assert f'"{package}==' in source, package


def test_no_script_pipes_into_head() -> None:
    """It ends after its lines, the writer gets SIGPIPE, and under `pipefail` the script ends without a word: when, the
    machine's speed decides. `sed -n 1p` reads to the end."""
    scripts = [*clone_files(ROOT / "scripts", "*.sh"), *clone_files(ROOT / "examples", "*.sh"), ROOT / ".ci/run"]
    assert len(scripts) > 10
    assert [path.name for path in scripts if re.search(r"\|\s*head\b", path.read_text())] == []


def _modules(package: str) -> list[str]:
    files = [path.relative_to(ROOT).with_suffix("") for path in clone_files(ROOT / "vime", "*.py")]
    inside = [file for file in files if package_of(file.parts[1:]) == package and file.name != "__main__"]
    return [".".join(file.parts).removesuffix(".__init__") for file in inside]


def _packages_by_forbidden() -> dict[tuple[str, ...], list[str]]:
    """Packages that must stay free of the same packages share one process."""
    groups: dict[tuple[str, ...], list[str]] = {}
    # The actors in ray/ and the backends exist to load their heavy package.
    for package in sorted(set(LAYER) - BACKENDS - {"ray"}):
        groups.setdefault(tuple(name for name in COLD if package not in HEAVY[name]), []).append(package)
    return groups


@pytest.mark.parametrize(("forbidden", "packages"), _packages_by_forbidden().items(), ids=lambda names: ",".join(names))
def test_no_module_loads_a_heavy_package_of_others(forbidden: tuple[str, ...], packages: list[str]) -> None:
    modules = [module for name in packages for module in _modules(name)]
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {list(forbidden)!r} if name in sys.modules]))"
    )
    done = run(sys.executable, "-c", code, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
