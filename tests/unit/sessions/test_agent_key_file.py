"""The file with the key of agents that run elsewhere."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from vime.config.parse import parse
from vime.sessions.key_file import agent_key, key_path
from vime.types import ConfigError


def test_a_missing_file_is_made_for_its_owner_alone_and_keeps_its_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = agent_key(path)
    assert (agent_key(path), path.read_text()) == (key, f"{key}\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["key"]
    assert agent_key(tmp_path / "other") != key


def test_a_key_of_the_user_s_own_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text("k" * 32)
    assert agent_key(path) == "k" * 32


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"k" * 32, 0o640, "others may read it .mode 640"),
        (b"k" * 31, 0o600, "holds no key .31 characters"),
        (b"", 0o600, "holds no key .0 characters"),
        (b"k k" * 32, 0o600, "holds no key"),
        (b"k\nk" * 32, 0o600, "holds no key"),
        (b"\xff" * 32, 0o600, "cannot be read"),
    ],
)
def test_what_is_no_key_or_is_open_to_others_is_refused_with_the_flag(
    tmp_path: Path, content: bytes, mode: int, message: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"--agent-key-file .*{message}.*it is made"):
        agent_key(path)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--agent-key-file .*nowhere/key: cannot be read"):
        agent_key(tmp_path / "nowhere" / "key")


def test_the_file_is_in_the_run_directory_unless_a_flag_names_another(tmp_path: Path) -> None:
    assert key_path(parse([]), tmp_path) == tmp_path / "agent-key"
    assert key_path(parse(["--agent-key-file", str(tmp_path / "k")]), Path("run")) == tmp_path / "k"
