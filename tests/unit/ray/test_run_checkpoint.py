"""A checkpoint of a run is visible when it is complete, and never before."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from vime.ray.checkpoint import LATEST, RunState, Start, find_latest, find_start, read_run_state, save_checkpoint
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


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def written_at(checkpoint: Path, second: int) -> None:
    os.utime(checkpoint / "run_state.json", (second, second))


def test_a_marker_with_nothing_in_it_names_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), write_model)
    (tmp_path / LATEST).write_text("")
    with pytest.raises(CheckpointError, match=r"names '', .*iter_0000001"):
        find_latest(tmp_path)


def test_one_checkpoint_can_be_named_itself(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, state(1), write_model)
    save_checkpoint(tmp_path, state(2), write_model)
    assert find_start(str(first)) == Start(rollout_id=2, checkpoint=first)
    assert find_start(str(tmp_path)).rollout_id == 3
    assert find_start(None) == Start(rollout_id=0, checkpoint=None)


def test_a_round_saved_again_takes_the_place_of_its_first_save(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), write_model)
    save_checkpoint(tmp_path, state(2), write_model)
    again = RunState(rollout_id=2, version=9, data_source={})
    path = save_checkpoint(tmp_path, again, write_model)
    assert find_latest(tmp_path) == path
    assert read_run_state(path) == again
    assert names(tmp_path) == ["iter_0000001", "iter_0000002.2", LATEST]
    assert save_checkpoint(tmp_path, state(2), write_model).name == "iter_0000002"
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", LATEST]


def test_all_are_kept_unless_a_number_is_given(tmp_path: Path) -> None:
    for rollout_id in range(5):
        save_checkpoint(tmp_path, state(rollout_id), write_model)
    assert len(list(tmp_path.glob("iter_*"))) == 5
    save_checkpoint(tmp_path, state(5), write_model, keep=2)
    assert names(tmp_path) == ["iter_0000004", "iter_0000005", LATEST]
    save_checkpoint(tmp_path, state(6), write_model, keep=1)
    assert names(tmp_path) == ["iter_0000006", LATEST]


def test_the_number_to_keep_holds_when_a_round_is_saved_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), write_model)
    save_checkpoint(tmp_path, state(2), write_model)
    save_checkpoint(tmp_path, state(2), write_model, keep=2)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002.2", LATEST]


@pytest.mark.parametrize("is_relative", [False, True])
def test_the_checkpoint_a_run_was_loaded_from_stays(
    is_relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = save_checkpoint(tmp_path, state(1), write_model)
    if is_relative:
        monkeypatch.chdir(tmp_path)
        loaded = Path(loaded.name)
    for rollout_id in range(2, 5):
        save_checkpoint(tmp_path, state(rollout_id), write_model, keep=1, protected=loaded)
    assert names(tmp_path) == ["iter_0000001", "iter_0000004", LATEST]


def test_after_going_back_the_abandoned_rounds_are_the_older_ones(tmp_path: Path) -> None:
    for rollout_id in (5, 10, 20):
        written_at(save_checkpoint(tmp_path, state(rollout_id), write_model), rollout_id)
    (tmp_path / LATEST).write_text("5\n")
    save_checkpoint(tmp_path, state(6), write_model, keep=3, protected=tmp_path / "iter_0000005")
    # the newest three are 6, 20 and 10 by time; 5 is what the run was loaded from
    assert names(tmp_path) == ["iter_0000005", "iter_0000006", "iter_0000010", "iter_0000020", LATEST]
    save_checkpoint(tmp_path, state(7), write_model, keep=2, protected=tmp_path / "iter_0000005")
    assert names(tmp_path) == ["iter_0000005", "iter_0000006", "iter_0000007", LATEST]


def test_what_is_not_a_complete_checkpoint_of_ours_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, state(1), write_model)
    shutil.copytree(first, tmp_path / "iter_0000001_best")
    (tmp_path / "iter_0000000").mkdir()
    save_checkpoint(tmp_path, state(2), write_model, keep=2)
    assert names(tmp_path) == ["iter_0000000", "iter_0000001", "iter_0000001_best", "iter_0000002", LATEST]


def test_a_checkpoint_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    save_checkpoint(tmp_path, state(1), write_model)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        second = save_checkpoint(tmp_path, state(2), write_model, keep=1)
    assert find_latest(tmp_path) == second
    assert "iter_0000001 could not be removed" in caplog.text
    assert names(tmp_path) == [".partial_iter_0000001", "iter_0000002", LATEST]
    save_checkpoint(tmp_path, state(3), write_model, keep=1)
    assert names(tmp_path) == ["iter_0000003", LATEST]


def test_leftovers_go_before_the_next_checkpoint_needs_their_room(tmp_path: Path) -> None:
    (tmp_path / ".partial_iter_0000007" / "model").mkdir(parents=True)
    (tmp_path / f".partial_{LATEST}").write_text("")
    seen = []
    save_checkpoint(tmp_path, state(8), lambda _: seen.append(names(tmp_path)))
    assert seen == [[".partial_iter_0000008", LATEST]]


def test_every_file_and_name_is_on_disk_before_what_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a power cut needs; a kill alone cannot show it."""
    save_checkpoint(tmp_path, state(1), write_model)
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        steps.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path.resolve()))

    def recorded_rename(source: Path, target: Path) -> None:
        rename(source, target)
        steps.append(f"rename to {Path(target).name}")

    def recorded_rmtree(path: Path) -> None:
        steps.append(f"remove {path.name}")

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    monkeypatch.setattr(shutil, "rmtree", recorded_rmtree)
    save_checkpoint(tmp_path, state(2), write_model, keep=1)
    partial = ".partial_iter_0000002"
    written = {f"sync {partial}", f"sync {partial}/model", f"sync {partial}/model/weights"}
    assert set(steps[:5]) == {*written, f"sync {partial}/run_state.json", f"sync {partial}/manifest.json"}
    assert steps[5:] == [
        *("rename to iter_0000002", "sync ."),
        *(f"sync .partial_{LATEST}", f"rename to {LATEST}", "sync ."),
        *("rename to .partial_iter_0000001", "sync .", "remove .partial_iter_0000001"),
    ]
