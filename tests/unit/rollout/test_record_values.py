"""Values of records that a sample cannot carry are refused with file, line and field, before anything starts."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.helpers.rollout_setup import write_model_directory
from vime.config.parse import parse
from vime.data.json_values import json_fault
from vime.rollout import data_check
from vime.rollout.data_check import data_faults
from vime.rollout.prompts import read_prompts
from vime.types import DataError

READ = ("--label-key", "label", "--rm-type", "f1")


def faults(path: object, *flags: str) -> list[str]:
    return list(data_faults(parse(["--prompt-data", str(path), *READ, *flags]).flat))


def written(path: Path, *records: dict[str, Any]) -> Path:
    """JSON as Python writes it: with NaN, and with half of a pair as an escape."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


GOOD = {"input": "a=", "label": "A"}
TO_TEXT = "Convert it to text."


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metadata": {"a": [{"b": float("nan")}]}}, "metadata.a[0].b is float nan, which JSON cannot carry"),
        ({"metadata": {"x": float("inf")}}, "Write a finite number or null."),
        ({"label": {"x": float("nan")}}, "label.x is float nan"),
        ({"data_source": float("nan")}, "data_source is float nan"),
        ({"tools": [{"x": float("nan")}]}, "tools[0].x is float nan"),
        ({"input": "a\ud83d="}, r"input has '\ud83d', which is half of a UTF-16 pair and no character"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}]}, r"input has '\udc00'"),
        ({"tools": [{"name": "\ud83d"}]}, r"tools has '\ud83d'"),
        ({"label": "\ud83d"}, r"label has '\ud83d'"),
    ],
)
def test_what_jsonl_can_hold_and_a_sample_cannot_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    data = written(tmp_path / "data.jsonl", {**GOOD, "tools": []}, {**GOOD, "tools": [], **changes})
    flags = ["--tool-key", "tools"] if "tools" in changes else []
    flags += ["--apply-chat-template"] if isinstance(changes.get("input"), list) else []
    [found] = [fault for fault in faults(data, *flags) if not fault.startswith("--apply-chat-template")]
    assert found.startswith(f"{data}:2: ")
    assert said in found


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (datetime.datetime(2024, 1, 2), f"datetime datetime.datetime(2024, 1, 2, 0, 0), which JSON cannot carry. "
         f"Expected text, finite numbers, true, false, null, and lists or objects of these. {TO_TEXT}"),
        (datetime.date(2024, 1, 2), TO_TEXT),
        (b"\xff", TO_TEXT),
        (decimal.Decimal("0.30"), TO_TEXT),
    ],
)  # fmt: skip
def test_types_of_parquet_that_json_has_not_are_refused_with_what_to_do(tmp_path: Path, value: Any, said: str) -> None:
    path = tmp_path / "data.parquet"
    for field, record in (("metadata.when", {**GOOD, "metadata": {"when": value}}), ("label", GOOD | {"label": value})):
        parquet.write_table(pa.Table.from_pylist([record]), path)
        [found] = faults(path)
        assert found.startswith(f"{path}:1: {field} is {type(value).__name__} ")
        assert said in found


def test_a_map_of_parquet_is_to_be_an_object(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    maps = pa.array([{"m": [("k", "v")]}], pa.struct([("m", pa.map_(pa.string(), pa.string()))]))
    parquet.write_table(pa.table({"input": ["a="], "label": ["A"], "metadata": maps}), path)
    [found] = faults(path)
    assert "metadata.m[0] is tuple ('k', 'v'), which JSON cannot carry" in found
    assert found.endswith("Make it an object.")


def test_whole_characters_and_plain_values_pass(tmp_path: Path) -> None:
    metadata = {"n": 0.5, "deep": [[{"a": None, "b": True, "c": 10**30}]], "half": "\ud83d"}  # JSON escapes it
    assert faults(written(tmp_path / "data.jsonl", {"input": "😀=", "label": "é", "metadata": metadata})) == []


def test_of_a_file_that_is_read_in_part_the_slice_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines 5 to 7 have no label. The limit ends the reading at line 6."""
    data = written(tmp_path / "data.jsonl", *[GOOD] * 4, *[{"input": "a="}] * 3)
    _stop_after(monkeypatch, 6)
    assert faults(f"{data}@[0:4]") == []
    _stop_after(monkeypatch, 6)
    assert [fault.partition(": ")[0] for fault in faults(f"{data}@[3:5]")] == [f"{data}:5"]
    _stop_after(monkeypatch, 6)
    assert faults(f"{data}@[6:]") == []  # not reached
    for part in ("[-7:4]", "[:-3]"):  # where these begin or end is known at the end of the file
        _stop_after(monkeypatch, 6)
        assert faults(f"{data}@{part}") == []


def _stop_after(monkeypatch: pytest.MonkeyPatch, num_records: int) -> None:
    """Let LIMIT_S pass when so many records are read: one look at the clock before the first, one after each."""

    def clock() -> Iterator[float]:
        yield from itertools.repeat(0.0, num_records)
        yield from itertools.repeat(2 * data_check.LIMIT_S)

    monkeypatch.setattr(data_check.time, "monotonic", clock().__next__)


def test_a_fault_in_a_pattern_or_a_directory_names_its_file_and_its_line(tmp_path: Path) -> None:
    """The bad record is the 3rd of all and the 1st of its file."""
    model = write_model_directory(tmp_path / "model")
    (tmp_path / "set").mkdir()
    written(tmp_path / "set" / "a.jsonl", GOOD, GOOD)
    bad = written(tmp_path / "set" / "b.jsonl", {"input": "a="})
    for given in (tmp_path / "set", tmp_path / "set" / "*.jsonl"):
        [found] = faults(given)
        assert found.startswith(f"{bad}:1: no key 'label'")
        args = parse(["--hf-checkpoint", str(model), *READ]).flat
        with pytest.raises(DataError, match=f"^{bad}:1: no key 'label'"):
            read_prompts(args, str(given), flag="--prompt-data")


def test_paths_of_images_begin_at_the_file_of_the_record_also_in_a_directory(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from tests.helpers import tiny_images

    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "red.png").write_bytes(tiny_images.png("red"))
    written(tmp_path / "set" / "a.jsonl", {**GOOD, "images": "red.png"})
    assert faults(tmp_path / "set", "--multimodal-keys", '{"image": "images"}') == []


def test_a_key_that_json_would_make_text_of_is_named() -> None:
    assert json_fault("metadata", {"a": {7: "b"}}).startswith("metadata.a has the key 7, which JSON makes text of.")
