"""Every command of the pages has a test that executes it: seen here in a second, executed in tests/e2e."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.helpers.documented_commands import EXECUTED_BY, HERE, canonical, commands_of, documented_commands, merged
from tests.unit.project.test_project_pages import defined_names

ROOT = Path(__file__).resolve().parents[3]
TABLE = {command: test for test, commands in EXECUTED_BY.items() for command in commands}


def test_every_command_has_a_test_or_says_that_it_needs_a_gpu() -> None:
    found = documented_commands()
    assert len(found) > 40
    needs_test = {command.text: command.where for command in found if not command.needs_gpu}
    assert {text: where for text, where in needs_test.items() if text not in TABLE} == {}, "no test executes these"
    assert sorted(set(TABLE) - set(needs_test)) == [], "no page has these"


def test_the_named_tests_exist_and_have_the_commands_in_their_text() -> None:
    for test, commands in EXECUTED_BY.items():
        file, name = test.split("::")
        assert (ROOT / file).is_file(), test
        tree = ast.parse((ROOT / file).read_text())
        assert name in defined_names(ast.unparse(tree)), test
        if file == HERE:
            [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
            texts = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
            assert set(commands) <= texts, test


def test_commands_are_found_in_blocks_and_spans_and_nothing_else_is() -> None:
    page = """
A span: `vime report runs/<time>`, but `vime audit` and `train.py` are names. `ray start --head` (needs a GPU).
```
driver (`train.py`)   draws
```
Say:

    A=1 .venv/bin/python train.py ... \\
        --lr 1       # why
    cat what follows  # needs a GPU
```python
python = 1
```
1. an item
    `that.goes` on
"""
    assert [(command.text, command.needs_gpu) for command in commands_of(page)] == [
        ("A=1 python train.py ... --lr 1", False),
        ("cat what follows", True),
        ("vime report RUN", False),
        ("ray start --head", True),
    ]


def test_a_command_has_one_way_of_writing() -> None:
    assert canonical(".venv/bin/python  -m vime audit RUN") == "vime audit RUN"
    assert canonical("train.py --help") == canonical("python train.py --help") == "python train.py --help"


def test_merged_commands_keep_their_environment_and_flags() -> None:
    assert (
        merged("A=1 run.sh OUT --x 1", "run.sh OUT", "B=2 run.sh ... OUT --y '$z'")
        == "A=1 B=2 run.sh OUT --x 1 --y '$z'"
    )
