"""Every broken input of the table is refused before any process starts, in words that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.helpers.broken_inputs import CASES, World
from vime.observability.run_dir import RunDir, claimed_checkpoints
from vime.ray.launch import main
from vime.ray.preflight import read_command_line
from vime.types import VimeError


def start(flags: list[str], root: Path) -> None:
    """What `main` does before it starts Ray."""
    config = read_command_line(["--run-dir", str(root / "run"), *flags], is_async=False)
    with claimed_checkpoints(config.model.save), RunDir.create(config.tracking.run_dir, "{}"):
        pass


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path).make()


def test_the_command_line_that_the_cases_break_would_run(world: World) -> None:
    start(world.flags(), world.root)


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_what_got_expected_and_the_next_action(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = list(CASES[name].breaks(world) or ())
    for variable, value in world.environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(VimeError) as refusal:
        start([*world.flags(), *broken], world.root)
    said = str(refusal.value)
    for text in CASES[name].says:
        assert text in said, said
    assert said.rstrip().endswith((".", "?", ")")), said
    assert not (world.root / "run").exists()


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 90


@pytest.mark.parametrize("name", ["a missing tokenizer", "a line that is not JSON", "--load of a damaged checkpoint"])
def test_train_py_answers_with_exit_code_2_and_starts_nothing(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = list(CASES[name].breaks(world) or ())
    monkeypatch.setattr("sys.argv", ["train.py", "--run-dir", str(world.root / "run"), *world.flags(), *broken])
    assert main(lambda _: pytest.fail("the run began")) == 2
    assert capsys.readouterr().err.startswith("refused: ")
    assert not ray.is_initialized()
