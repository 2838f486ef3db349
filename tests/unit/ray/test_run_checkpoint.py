"""A checkpoint of a run is visible when it is complete, and never before."""

import json
from pathlib import Path

import pytest

from vime.ray.checkpoint import LATEST, RunState, find_latest, read_run_state, save_checkpoint
from vime.types import CheckpointError


def state(rollout_id: int) -> RunState:
    return RunState(rollout_id=rollout_id, version=rollout_id + 1, data_source={"cursor": rollout_id * 4})


def write_model(directory: Path) -> None:
    (directory / "weights").write_text("w")


def test_what_was_saved_is_found_and_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(3), write_model)
    assert find_latest(tmp_path) == path
    assert read_run_state(path) == state(3)
    assert (path / "model" / "weights").read_text() == "w"


def test_a_missing_or_empty_directory_starts_fresh(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None


def test_a_save_that_fails_leaves_the_one_before_in_force(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), write_model)

    def disk_full(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path, state(2), disk_full)
    latest = find_latest(tmp_path)
    assert latest is not None
    assert read_run_state(latest) == state(1)
    # and the next save, on a disk with room again, is not hindered by what the failed one left
    assert save_checkpoint(tmp_path, state(2), write_model) == find_latest(tmp_path)


def test_the_newest_marker_wins_over_what_else_lies_there(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, state(1), write_model)
    save_checkpoint(tmp_path, state(2), write_model)
    (tmp_path / LATEST).write_text("1\n")
    assert find_latest(tmp_path) == first


def test_a_marker_that_names_nothing_complete_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), write_model)
    (tmp_path / LATEST).write_text("7\n")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        find_latest(tmp_path)


def test_checkpoints_without_a_marker_are_not_guessed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), write_model)
    (tmp_path / LATEST).unlink()
    with pytest.raises(CheckpointError, match="iter_0000001"):
        find_latest(tmp_path)


def test_a_damaged_run_state_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(1), write_model)
    (path / "run_state.json").write_text(json.dumps({"rollout_id": 1}))
    with pytest.raises(CheckpointError, match="run_state"):
        read_run_state(path)
