"""Seven launch scripts of slime, after one edit of paths and engine name, get through in at most two starts: what the
first one refuses, it names all at once."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.slime_scripts import SCRIPTS, Script
from vime.config.command_line import parse_command_line
from vime.config.migration import SECRETS, TO_ENVIRONMENT
from vime.ray.preflight import preflight
from vime.types import ConfigError

PLUGIN = """
async def generate(args, sample, sampling_params): ...
async def reward_func(args, sample, **kwargs): ...
"""


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    for name in (*TO_ENVIRONMENT.values(), *SECRETS.values()):
        monkeypatch.setenv(name, "as it was")  # a script sets it, for the tests behind this one too
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "messages": "1", "label": "1", "reward_model": "1"}\n')
    (tmp_path / "model.safetensors").write_bytes(b"")
    data = tmp_path / "train.jsonl"
    return {"model": tmp_path, "data": data, "eval": data, "out": tmp_path / "out", "plugin": tmp_path / "plugin.py"}


def start(script: Script, words: list[str]) -> str | None:
    """What the first second of a start says; None when it goes on to start processes."""
    try:
        preflight(parse_command_line(words), is_async=script.program == "train_async.py")
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_slime_is_through_in_two_starts(
    name: str, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.config.checks.has_cuda", lambda: True)
    node = SimpleNamespace(total=2 << 40)  # 2 TiB, as nodes with eight GPUs have it: optimizer state is locked there
    monkeypatch.setattr("vime.ray.preflight.psutil.virtual_memory", lambda: node)
    script = SCRIPTS[name]
    (paths["model"] / "config.json").write_text(json.dumps(script.shape))
    words = script.edited(paths)
    starts, said = 1, start(script, words)
    if said is not None:
        assert all(flag in said for flag in script.then), said  # the answer names all that is to be changed
        starts, said = 2, start(script, script.as_told(words))
    assert said is None
    assert starts == (2 if script.then else 1)
