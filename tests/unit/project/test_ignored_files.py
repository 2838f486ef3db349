"""What git ignores changes no answer: a run, a model, a virtual environment, anything else that lies in the clone."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.shape_check import clone_files, imported_modules

ROOT = Path(__file__).resolve().parents[3]
PYTHON_FILES_OF_MYPY = (
    "from mypy.main import process_options\nprint(*sorted(source.path for source in process_options([])[0]), sep='\\n')"
)
COMMANDS = {
    "lint": ["-m", "ruff", "check", "--no-cache", "."],
    "format": ["-m", "ruff", "format", "--no-cache", "--check", "."],
    "linted files": ["-m", "ruff", "check", "--show-files", "."],
    "typed files": ["-c", PYTHON_FILES_OF_MYPY],
    "shape": ["tests/helpers/shape_check.py", "vime"],
    "flags": ["scripts/make_flags_doc.py", "--check"],
}
PAGES = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/project/test_project_pages.py"]
# Broken for every tool that would read them: Python, a page, a shell script, a test with the name of another one.
LITTER = {
    "broken.py": "def (:\nimport vime.ray\nprint( 'x' )\n",
    "page.md": "[nowhere](nowhere.md) " + "long " * 50,
    "lax.sh": "false\n",
    "test_project_pages.py": "def test_nothing(): assert False\n",
    "file with a space, and an \N{LATIN SMALL LETTER E WITH ACUTE}": "",
}


def copy_of_the_clone(directory: Path) -> Path:
    for path in clone_files(ROOT):
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    return directory


def litter(clone: Path) -> None:
    """Leave behind what runs, tools and environments leave, and a directory with the name of every imported package."""
    imported = {
        name.split(".")[0]
        for path in clone_files(clone, "*.py")
        for name, _ in imported_modules(ast.parse(path.read_text()))
    }
    assert {"runs", "torch", "ray", "wandb"} <= imported
    places = [".venv/lib/python3.11/site-packages/package", "vime.egg-info", "wandb/run-1/files/code"]
    places += ["runs/20260101-000000", "runs/20260101-000000/checkpoints/iter_0000001/model", "models/m", "data/d"]
    places += [
        f"{room}/__pycache__" for room in ("vime", "vime/config", "tests", "tests/unit/project", "scripts", "docs")
    ]
    places += [f"{name}/__pycache__" for name in sorted(imported)]
    for place in places:
        (clone / place).mkdir(parents=True, exist_ok=True)
        for name, text in LITTER.items():
            (clone / place / name).write_text(text)


def ask(clone: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    return subprocess.run(
        [sys.executable, *command], cwd=clone, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def answers(clone: Path) -> dict[str, tuple[int, str]]:
    asked = {name: ask(clone, command) for name, command in COMMANDS.items()}
    return {name: (done.returncode, done.stdout + done.stderr) for name, done in asked.items()}


def test_what_git_ignores_changes_no_answer(tmp_path: Path) -> None:
    """In a clone, and in an unpacked archive, which git cannot be asked about."""
    clone = copy_of_the_clone(tmp_path / "data" / "vime")  # a directory above may be called anything
    subprocess.run(["git", "init", "--quiet", clone], check=True, timeout=60)
    before = answers(clone)
    assert {name: output for name, (code, output) in before.items() if code} == {}
    litter(clone)
    assert answers(clone) == before
    shutil.rmtree(clone / ".git")
    assert answers(clone) == before
    pages = ask(clone, PAGES)
    assert pages.returncode == 0, pages.stdout
