"""docs/streaming.md names code, tests and chaos cases that exist, and its diagram is its table."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.project.test_project_pages import defined_names
from vime.cli.chaos import MATRIX, OF_GATEWAY, OF_WORKERS
from vime.handoff.ledger_types import State

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "streaming.md").read_text()
NAMED = re.compile(r"`([\w/]+\.py)::([\w.]+)`")
CASE = re.compile(r"`([a-z-]+@[\w./]+)`")
ARROW = re.compile(r"^    (\S+) --> (\S+)$", re.MULTILINE)


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables of a section, without their heads."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_function_and_test_that_the_page_names_exists() -> None:
    missing = [
        f"{file}::{name}"
        for file, name in NAMED.findall(PAGE)
        if not (ROOT / file).is_file() or name not in defined_names((ROOT / file).read_text())
    ]
    assert missing == []


def test_every_row_of_what_dies_names_a_test_or_a_case_of_the_matrix() -> None:
    matrix = {re.sub(r":\d+", "", case) for case in (*MATRIX, *OF_WORKERS, *OF_GATEWAY)}
    found = rows("What happens when X dies")
    assert len(found) > 20
    for row in found:
        tests, cases = NAMED.findall(row[-1]), CASE.findall(row[-1])
        assert tests or cases, row
        assert all(name.startswith("test_") for _, name in tests), row
        assert set(cases) <= matrix, row


def test_whatever_the_chaos_command_kills_has_a_row() -> None:
    of_cases = (case.partition("@")[0].split("+") for case in (*MATRIX, *OF_WORKERS, *OF_GATEWAY))
    killed = {part.removesuffix("-actor") for parts in of_cases for part in parts}
    cases = {case.partition("@")[0] for row in rows("What happens when X dies") for case in CASE.findall(row[-1])}
    assert killed - cases == {"move"}  # of the run's directory, which nobody kills


def test_the_diagram_and_the_table_of_transitions_are_the_same() -> None:
    drawn = {(source.replace("[*]", "(new)"), target) for source, target in ARROW.findall(PAGE) if target != "[*]"}
    listed = {
        (source, target)
        for sources, targets, *_ in rows("A group")
        for source in re.findall(r"\(new\)|\w+", sources)
        for target in re.findall(r"\w+", targets)
    }
    assert drawn == listed
    assert {name for arrow in drawn for name in arrow} == {"(new)", *State}
    ends = {source for source, target in ARROW.findall(PAGE) if target == "[*]"}
    assert ends == {State.DURABLE, State.DROPPED}
