"""--wandb-key: to the environment, and off every command line, before anything could write it down."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.training import ROOT
from vime.config.command_line import parse_command_line
from vime.types import ConfigError

SECRET = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = """
import json, os, sys
from pathlib import Path
from vime.ray.relaunch import Program
Program().hide_secrets()
shown = Path("/proc/self/cmdline").read_bytes().decode().split("\\0")[3:-1]
print(json.dumps([os.getpid(), sys.argv[1:], shown, os.environ.get("WANDB_API_KEY")]))
"""


@pytest.mark.parametrize("given", [["--wandb-key", SECRET], [f"--wandb-key={SECRET}"]])
def test_the_key_leaves_the_command_line_and_the_process_stays_the_same(given: list[str]) -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--lr", "1", *given, "--use-wandb"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, said = started.communicate(timeout=60)
    assert json.loads(out) == [started.pid, ["--lr", "1", "--use-wandb"], ["--lr", "1", "--use-wandb"], SECRET], said
    assert "--wandb-key: taken as WANDB_API_KEY" in said
    assert SECRET not in said


def test_a_refusal_beside_it_does_not_repeat_the_key() -> None:
    flags = ["--wandb-key", SECRET, "--wandb-team", "ours", "--no-such-flag", "1"]
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "unknown flag --no-such-flag" in done.stderr
    assert SECRET not in done.stderr + done.stdout


def test_team_and_host_are_wandb_s_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_ENTITY", "WANDB_BASE_URL", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "former")
    flags = ["--wandb-team", "ours", "--wandb-host", "https://wandb.example/", "--wandb-key", SECRET]
    with pytest.raises(ConfigError) as refusal:  # nothing else is given
        parse_command_line(flags)
    assert "wandb" not in str(refusal.value)
    assert (os.environ["WANDB_ENTITY"], os.environ["WANDB_BASE_URL"]) == ("ours", "https://wandb.example/")
    assert os.environ["WANDB_API_KEY"] == SECRET


def test_wandb_s_own_pages_are_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slime's default, which wandb refuses when it is said."""
    monkeypatch.setenv("WANDB_BASE_URL", "former")
    with pytest.raises(ConfigError):
        parse_command_line(["--wandb-host", "https://wandb.ai/"])
    assert os.environ["WANDB_BASE_URL"] == "former"


def test_a_key_that_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="--wandb-key: expected one value after it"):
        parse_command_line(["--wandb-key", "--use-wandb"])
