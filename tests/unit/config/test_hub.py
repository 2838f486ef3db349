"""Names on the hub: told from paths, fetched from a hub that answers, and what is said when none does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vime.config.hub import fetch_data, fetch_model, files_of_split, hub_name, with_local_copies
from vime.config.parse import parse
from vime.types import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "models/team/tiny": {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": b"weights", "big.bin": b"no"},
    "datasets/team/sums": {
        "data/train-00000-of-00002.parquet": b"a", "data/train-00001-of-00002.parquet": b"b",
        "data/test-00000-of-00001.parquet": b"c", "README.md": b"",
    },
    "datasets/team/many": {"algebra/train-0.parquet": b"a", "geometry/train-0.parquet": b"b"},
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """The routes of the hub that are asked: what a repository has, its tree, a file's facts, a file."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.split("?")[0].strip("/")
        if path.startswith("api/"):
            kind, owner, name = path.split("/")[1:4]
            files = FILES.get(f"{kind}/{owner}/{name}")
            siblings = [{"rfilename": file} for file in files or ()]
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in (files or {}).items()
            ]
            record: object = (
                tree
                if "/tree/" in path
                else {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            )
            self._send(404 if files is None else 200, json.dumps(record).encode())
            return
        repository, _, rest = path.partition("/resolve/")
        kind = repository if repository.startswith("datasets/") else f"models/{repository}"
        content = FILES.get(kind, {}).get(rest.partition("/")[2])
        self._send(404 if content is None else 200, content or b"")

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", "")),
        ("openai/gsm8k:test", ("openai/gsm8k", "test")),
        ("model", None),
        ("/data/model", None),
        ("a/b/c", None),
        ("~/model", None),
        ("../model", None),
        ("here/model", None),  # `here` is a directory: a slip of the pen
        ("here", None),
    ],
)
def test_a_name_is_what_can_be_no_path(
    value: str, expected: tuple[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_name(value) == expected


@pytest.mark.usefixtures("hub")
def test_a_model_is_fetched_without_what_nobody_reads() -> None:
    directory = Path(fetch_model("team/tiny", flag="--hf-checkpoint"))
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert (directory / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.usefixtures("hub")
def test_names_become_paths_and_paths_stay(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("{}")
    flags = ["--hf-checkpoint", "team/tiny", "--prompt-data", "team/sums@[0:5]", "--eval-prompt-data"]
    config = with_local_copies(parse([*flags, "one", "team/sums:test", "two", "own.jsonl"]))
    assert (Path(config.model.hf_checkpoint) / "config.json").is_file()
    assert config.data.prompt_data is not None
    path, _, part = config.data.prompt_data.partition("@")
    assert part == "[0:5]"
    assert [file.read_bytes() for file in sorted(Path(path).parent.glob(Path(path).name))] == [b"a", b"b"]
    name, test, other, own = config.eval.eval_prompt_data
    assert (name, Path(test).read_bytes(), other, own) == ("one", b"c", "two", "own.jsonl")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "split", "said"),
    [
        ("team/nothing", "", r"the hub has nothing of this name, or does not show it to you \(404\)"),
        ("team/sums", "dev", "no parquet or jsonl files of the split 'dev'.*data/test-00000"),
        ("team/many", "", "lies in several places: algebra, geometry"),
    ],
)
def test_what_the_hub_has_not_is_said(name: str, split: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fetch_data(name, split, flag="--prompt-data")


def test_without_a_hub_the_message_says_how_to_fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(
        ConfigError, match=r"does not respond here .*hf download team/tiny --local-dir DIR.*--ref-load DIR"
    ):
        fetch_model("team/tiny", flag="--ref-load")
    with pytest.raises(ConfigError, match=r"hf download team/sums --repo-type dataset --local-dir DIR"):
        fetch_data("team/sums", "", flag="--prompt-data")


def test_splits_are_found_in_the_layouts_of_the_hub() -> None:
    files = [
        "README.md",
        "train.jsonl",
        "data/test-00000-of-00001.parquet",
        "main/train/0000.parquet",
        "trainer.parquet",
    ]
    assert files_of_split(files, "train") == ["main/train/0000.parquet"]  # parquet before jsonl
    assert files_of_split(files, "test") == ["data/test-00000-of-00001.parquet"]
    assert files_of_split(["train.jsonl", "train_2.jsonl"], "train") == ["train.jsonl", "train_2.jsonl"]
