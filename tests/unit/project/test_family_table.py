"""The table of model families in README.md is made of the cases that the tests run over."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.families import EXPORTS, EXPORTS_BY_NIGHT, MEGATRON, RUNS, RUNS_BY_DAY, shown_cases
from vime.backends.megatron_utils.architecture import SUPPORTED_MODEL_TYPES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_families_table", ROOT / "scripts" / "make_families_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_holds_what_the_cases_say(script: ModuleType) -> None:
    page = (ROOT / "README.md").read_text()
    assert page == script.written(page)
    for family in MEGATRON:
        assert f"| {family.title} | `megatron` | " in page


def test_a_layout_is_in_a_row_only_with_a_case_for_it(script: ModuleType) -> None:
    rows = {line.split(" | ")[0].lstrip("| "): line for line in script.table().splitlines() if "`megatron`" in line}
    for family in MEGATRON:
        layouts = [cell.strip("*") for cell in rows[family.title].split(" | ")[2].split(", ")]
        tried = [layout for _, model, layout, _ in shown_cases().values() if model == family.models[0]]
        assert layouts == [script.LABELS[layout] for layout in tried]


def test_what_is_tried_by_day_is_not_in_italics(script: ModuleType) -> None:
    rows = [line for line in script.table().splitlines() if line.startswith("| Mistral | `megatron`")]
    assert rows == [
        line for line in rows if "| TP2 + SP, PP2, *1 rank*" in line and line.endswith("| parity, export, *run* |")
    ]


def test_each_family_has_a_row_with_two_ways_to_cut_it() -> None:
    """That an export is of a model type of its row: test_hf_tensors.py."""
    assert sorted(kind for family in MEGATRON for kind in family.model_types) == sorted(SUPPORTED_MODEL_TYPES)
    for family in MEGATRON:
        assert len(family.day) >= 2
        has_experts = any(kind in ("deepseek_v3", "gpt_oss", "qwen3_moe") for kind in family.model_types)
        assert has_experts == any("ep2" in layout for layout in family.day)
    assert sorted(name for family in MEGATRON for name in family.exports) == sorted(EXPORTS)
    assert set(EXPORTS_BY_NIGHT) | set(RUNS) | set(RUNS_BY_DAY) <= set(EXPORTS)


def test_each_family_is_trained_in_a_run() -> None:
    assert all({*RUNS, *RUNS_BY_DAY} & set(family.exports) for family in MEGATRON)
