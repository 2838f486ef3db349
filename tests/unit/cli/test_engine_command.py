"""`vime engine`: what it refuses before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.backends.vllm_utils.access import EngineKeys
from vime.cli.engine import address_of, keys_in, read_flags
from vime.cli.main import main
from vime.types import ConfigError


@pytest.mark.parametrize("listen", ["8100", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:x", "127.0.0.1:70000", ":8100"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        address_of(listen)


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be listened on"):
            address_of(f"127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(ConfigError, match="cannot be listened on"):
        address_of("192.0.2.1:8100")  # of RFC 5737: nobody's


def test_engines_share_a_file_of_keys_which_the_first_makes(tmp_path: Path) -> None:
    keys = keys_in(tmp_path / "keys")
    assert keys_in(tmp_path / "keys") == keys == EngineKeys.read(tmp_path / "keys", flag="--keys")
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="cannot be made"):
        keys_in(tmp_path / "nowhere" / "keys")


def test_flags_of_training_are_read_and_a_wrong_one_is_refused(tmp_path: Path, capsys) -> None:
    model = str(write_model_directory(tmp_path / "model"))
    config = read_flags(["--hf-checkpoint", model, "--device", "cpu", "--lr", "1", "--prompt-data", "nowhere.jsonl"])
    assert config.engine.vllm_server_concurrency > 0
    words = ["engine", "--listen", "127.0.0.1:8199", "--keys", str(tmp_path / "keys"), "--hf-checkpoint", model]
    assert main([*words, "--no-such-flag"]) == 2
    assert "--no-such-flag" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()
