"""docs/data.md: each example loads with the flags above it. And the containers that it names."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from vime.config.parse import parse
from vime.rollout.data_check import data_faults
from vime.rollout.evaluate import eval_data_sets
from vime.rollout.prompts import Prompt, read_prompts
from vime.types import DataError

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples" / "quickstart" / "model"
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{{ tools }}"
EXAMPLE = re.compile(r"## (?P<title>[^\n]+)\n(?P<text>(?:(?!\n## ).)*?)```json\n(?P<record>[^\n]+)\n```", re.DOTALL)
EVALUATION = "Evaluation with keys of its own"
FLAGS = re.compile(r"Flags:\s+`([^`]+)`")


def examples() -> dict[str, tuple[list[str], dict[str, Any]]]:
    found = {}
    for match in EXAMPLE.finditer((ROOT / "docs" / "data.md").read_text()):
        [flags] = FLAGS.findall(match["text"])
        found[match["title"]] = (shlex.split(flags), json.loads(match["record"]))
    return found


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's tokenizer with a chat template."""
    model = tmp_path_factory.mktemp("model") / "chat"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@pytest.fixture(scope="module")
def load(chat_model: Path) -> Callable[..., list[Prompt]]:
    def loaded(path: object, *flags: str) -> list[Prompt]:
        args = parse(["--hf-checkpoint", str(chat_model), "--rollout-max-context-len", "4096", *flags]).flat
        return read_prompts(args, str(path), flag="--prompt-data")

    return loaded


def test_there_is_one_example_for_each_kind() -> None:
    kinds = ["Text", "Chat", "Tools", "Metadata", "A reward chosen by the record", "Keys of your own", EVALUATION]
    assert list(examples()) == kinds


def test_the_evaluation_set_loads_with_its_own_keys_beside_records_with_others(
    tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, record = examples()[EVALUATION]
    [text] = re.findall(rf"## {EVALUATION}\n.*?```toml\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    (tmp_path / "sets.toml").write_text(text)
    (tmp_path / "arithmetic.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "train.jsonl").write_text('{"input": "3 + 4 = ", "label": "7"}\n')
    monkeypatch.chdir(tmp_path)
    args = parse(["--hf-checkpoint", str(chat_model), "--prompt-data", "train.jsonl", *flags]).flat
    assert list(data_faults(args)) == []
    [(one, [prompt])] = eval_data_sets(args)
    assert (one.name, prompt.text, prompt.label) == ("arithmetic", record["question"], record["answer"])
    assert prompt.metadata == record["extra"]
    assert (one.config.reward.rm_type, one.config.eval.n_samples_per_eval_prompt) == ("boxed_exact_match", 4)
    assert read_prompts(args, "train.jsonl", flag="--prompt-data")[0].label == "7"


@pytest.mark.parametrize("title", [title for title in examples() if title != EVALUATION])
def test_the_example_loads(title: str, tmp_path: Path, load: Callable[..., list[Prompt]]) -> None:
    flags, record = examples()[title]
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    [prompt] = load(tmp_path / "data.jsonl", *flags)
    text = record.get("input", record.get("question"))
    assert (text if isinstance(text, str) else text[-1]["content"]) in prompt.text
    assert prompt.label == record.get("label", record.get("answer"))
    expected = record.get("metadata", record.get("extra", {}))
    expected |= {key: record[key] for key in ("tools", "data_source") if key in record}
    assert prompt.metadata == expected
    if title == "Chat":
        assert prompt.text.startswith("[system]Answer with a number.[user]3 + 4?")
    if title == "Tools":
        assert "Runs code." in prompt.text


ROWS = [{"input": f"q{number}", "label": str(number)} for number in range(6)]
READ = ("--label-key", "label")


def labels(prompts: list[Prompt]) -> list[str]:
    return [prompt.label for prompt in prompts]


def save_to_disk(directory: Path, rows: list[dict[str, Any]], num_files: int = 1) -> None:
    """As `datasets` 5.2 writes it: Arrow streams and state.json with their names."""
    directory.mkdir(parents=True)
    names = [f"data-{number:05}-of-{num_files:05}.arrow" for number in range(num_files)]
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(rows[number * len(rows) // num_files : (number + 1) * len(rows) // num_files])
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_a_saved_data_set_is_read_in_its_order(tmp_path: Path, load: Callable[..., list[Prompt]]) -> None:
    save_to_disk(tmp_path / "mine", ROWS, num_files=3)
    assert labels(load(tmp_path / "mine", *READ)) == list("012345")
    assert labels(load(f"{tmp_path}/mine@[1:3]", *READ)) == list("12")


def test_of_several_splits_one_must_be_named(tmp_path: Path, load: Callable[..., list[Prompt]]) -> None:
    save_to_disk(tmp_path / "mine" / "train", ROWS)
    (tmp_path / "mine" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert labels(load(tmp_path / "mine", *READ)) == list("012345")
    save_to_disk(tmp_path / "mine" / "test", ROWS[:2])
    (tmp_path / "mine" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"has the splits train, test\. Name one: .*mine/train"):
        load(tmp_path / "mine", *READ)
    assert labels(load(tmp_path / "mine" / "test", *READ)) == list("01")


def test_a_pattern_and_a_directory_of_parquet_files_are_read_by_name(
    tmp_path: Path, load: Callable[..., list[Prompt]]
) -> None:
    for number in (1, 0):
        table = pa.Table.from_pylist(ROWS[3 * number : 3 * number + 3])
        parquet.write_table(table, tmp_path / f"train-{number}.parquet")
    assert labels(load(tmp_path / "train-*.parquet", *READ)) == list("012345")
    assert labels(load(tmp_path, *READ)) == list("012345")
    assert labels(load(f"{tmp_path}/train-*.parquet@[4:]", *READ)) == list("45")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("mine/data.arrow", b"no arrow", "cannot be read as arrow"),
        ("mine/state.json", b"{", "cannot be read"),
        ("mine/readme.md", b"", "no data set in this directory"),
    ],
)
def test_a_directory_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes, said: str, load: Callable[..., list[Prompt]]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    if name.endswith("readme.md"):
        (tmp_path / "mine" / "state.json").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        load(tmp_path / "mine", *READ)


def test_a_pattern_without_files_is_refused(tmp_path: Path, load: Callable[..., list[Prompt]]) -> None:
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "train-*.parquet", *READ)
