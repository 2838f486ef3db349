"""`vime train`, `vime train-async` and `vime --version`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vime
from vime.cli.main import main


@pytest.mark.parametrize("command", ["train", "train-async"])
def test_a_refused_flag_ends_it_like_the_files_of_a_clone(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--lr", "fast"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("refused: ")
    assert "--lr: invalid float value: 'fast'" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--config", "~nobody-here/run.toml"], "--config ~nobody-here/run.toml: cannot be read"),
        (["train", "--hf-checkpoint", "~nobody-here/model"], "~nobody-here/model: no config.json there"),
        (["train", "--eval-config", "sets.toml"], "no such file: {here}/~nobody-here/x.jsonl (set a)"),
        (["doctor", "--no-ray", "--hf-checkpoint", "~nobody-here/model"], "~nobody-here/model: no config.json there"),
        (["doctor", "--no-ray", "--run-dir", "~nobody-here/run", "--hf-checkpoint", "none"], "none: no config.json"),
    ],
)
def test_a_path_in_a_home_that_is_not_there_is_a_path_like_any_other(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sets.toml").write_text('[[datasets]]\nname = "a"\npath = "~nobody-here/x.jsonl"\n')
    assert main(words) == 2
    assert said.format(here=tmp_path) in "".join(capsys.readouterr())


def test_its_help_is_of_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith("usage: vime train ")
    assert "--rollout-batch-size" in said


def test_only_the_overlapped_rhythm_demands_staleness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checks are reached with the schedule's own demand, so the command runs the schedule that its name says."""
    seen: list[bool] = []

    def stop(argv: object, *, is_async: bool, program: str) -> None:
        from vime.types import ConfigError

        seen.append(is_async)
        raise ConfigError("far enough")

    monkeypatch.setattr("vime.ray.launch.read_command_line", stop)
    assert [main(["train", "x"]), main(["train-async", "x"])] == [2, 2]
    assert seen == [False, True]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(r"vime (\d+\.\d+\.\d+|of a clone that is not installed)\n", capsys.readouterr().out)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(vime.__path__[0]) / "py.typed").is_file()
