"""The pages of the project are true: walk, flags, and no trace of the machine that they were written on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.shape_check import clone_files
from tests.helpers.walk import read_page
from vime.config.parse import build_parser, iter_flags, parse

ROOT = Path(__file__).resolve().parents[3]
STATION = re.compile(r"`([\w./-]+\.py)::([\w.]+)`")
MAX_AGENTS_LINES = 80


def defined_names(source: str) -> set[str]:
    """Functions, classes, `Class.method`s and module constants of a file."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            if isinstance(node, ast.ClassDef):
                members = [inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
                names |= {f"{node.name}.{inner.name}" for inner in members}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def find_source(file: str) -> Path | None:
    """A path of the walk is written from the root or from vime/."""
    return next((path for path in (ROOT / file, ROOT / "vime" / file) if path.is_file()), None)


WALKS = ("walk.md", "walk-off.md", "walk-streaming.md")


@pytest.mark.parametrize("page", WALKS)
def test_every_step_of_the_walk_exists(page: str) -> None:
    stations = STATION.findall((ROOT / "docs" / page).read_text())
    assert len(stations) >= 10, f"docs/{page} names its steps as `file.py::name`"
    missing = []
    for file, name in stations:
        source = find_source(file)
        if source is None or name not in defined_names(source.read_text()):
            missing.append(f"{file}::{name}")
    assert missing == []


@pytest.mark.parametrize("page", WALKS[1:])
def test_a_page_of_the_walk_counts_its_steps_and_changes_the_file_with_each(page: str) -> None:
    walk = read_page(ROOT / "docs" / page)
    assert [step.number for step in walk.steps] == list(range(1, len(walk.steps) + 1))
    assert (len(walk.steps), len(walk.files)) == walk.said
    assert [step for before, step in pairwise(walk.steps) if before.file == step.file] == []


def test_the_walk_check_sees_methods_and_not_strangers() -> None:
    names = defined_names("LIMIT = 3\nclass Queue:\n    def put(self): ...\n")
    assert {"LIMIT", "Queue", "Queue.put"} == names


def test_every_flag_has_help_and_a_documented_default() -> None:
    actions = {option: action for action in build_parser()._actions for option in action.option_strings}
    vague = [flag for _, flag, spec in iter_flags() if len(spec.metadata["help"]) < 10]
    undocumented = [flag for _, flag, _ in iter_flags() if "(default: " not in (actions[flag].help or "")]
    assert (vague, undocumented) == ([], [])


def test_no_file_names_a_machine_path_or_a_package_host() -> None:
    # Put together here, so that this file does not find itself.
    slash = "/"
    homes = [slash + name + slash for name in ("root", "work")] + [slash + "opt" + slash + "wheels"]
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org", "local" + "host:3141"]
    pattern = re.compile(
        r"(?<![\w.}\])-])(?:" + "|".join(re.escape(home) for home in homes) + ")|" + "|".join(map(re.escape, hosts))
    )
    found = []
    for path in clone_files(ROOT):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), start=1)
            if pattern.search(line)
        ]
    assert found == []


def test_lines_of_prose_are_at_most_160_characters_long() -> None:
    """A row of a table cannot be broken."""
    long = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)}"
        for path in clone_files(ROOT, "*.md")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 160 and not line.startswith("|")
    ]
    assert long == []


def test_the_page_for_agents_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= MAX_AGENTS_LINES


def test_a_newcomer_finds_every_page_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = sorted(path.name for path in clone_files(ROOT / "docs", "*.md") if path.parent.name == "docs")
    assert [page for page in pages if f"docs/{page}" not in readme] == []


def test_every_link_between_pages_leads_somewhere() -> None:
    links = re.compile(r"\]\((?!https?:)([^)#]+)")
    dead = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in clone_files(ROOT, "*.md")
        for target in links.findall(path.read_text())
        if not (path.parent / target).exists()
    ]
    assert dead == []


def test_every_shell_script_stops_at_its_first_error() -> None:
    entry_points = [path for path in clone_files(ROOT / "scripts", "*.sh") if path.parent.name == "scripts"]
    entry_points.append(ROOT / ".ci" / "run")
    lax = [path.name for path in entry_points if not re.search(r"^set -\w*e", path.read_text(), re.MULTILINE)]
    assert lax == []


def test_test_file_names_are_unique() -> None:
    names = [path.name for path in clone_files(ROOT / "tests", "test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", ["run-qwen3-4B.sh", "run-qwen3-4B-async-streaming.sh", "run-qwen3-30B-A3B.sh"])
def test_a_gpu_launch_submits_known_flags_and_absolute_paths_from_a_clone(tmp_path: Path, name: str) -> None:
    """`ray` is replaced by a script that writes down what it was given; only files that a clone has are there."""
    for path in clone_files(ROOT / "scripts"):
        copy = tmp_path / "clone" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o755)
    (tmp_path / "ray").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/submitted\n")
    (tmp_path / "ray").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "MODEL_DIR": "models"}
    script = tmp_path / "clone" / "scripts" / name
    ran = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    submitted = (tmp_path / "submitted").read_text().splitlines()
    program = "train_async.py" if "async" in name else "train.py"
    config = parse(submitted[submitted.index(program) + 1 :])  # refuses a flag that it does not know
    paths = [config.model.hf_checkpoint, config.model.save, config.model.load, config.tracking.run_dir]
    paths += [config.data.prompt_data, config.eval.eval_prompt_data[1]]
    assert [path for path in paths if path is None or not Path(path).is_absolute()] == []
