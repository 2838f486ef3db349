"""A checkpoint that is not as it was written is refused by name: quickly before the start, and in whole before it is
loaded."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from vime.config.parse import parse
from vime.ray import checkpoint_damage, launch
from vime.ray.checkpoint import LATEST, RunState, save_checkpoint
from vime.ray.checkpoint_damage import doubts, refuse_any_damage, refuse_damage
from vime.ray.trainers import TrainerActor, Trainers
from vime.types import CheckpointError, EngineError
from vime.utils.manifest import MANIFEST, compare_hashes

NUM_FLIPS = 60


def write_model(directory: Path) -> None:
    (directory / "critic").mkdir()
    for name, size in (("__0_0.distcp", 5000), ("common.pt", 300), ("critic/__0_0.distcp", 40)):
        (directory / name).write_bytes(os.urandom(size))


def saved(root: Path, rollout_id: int) -> Path:
    state = RunState(rollout_id=rollout_id, version=rollout_id + 1, data_source={"cursor": 4})
    return save_checkpoint(root, state, write_model)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


class InProcess:
    """What `Trainers` asks of its ranks, and which of it would have touched a weight."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self.num_loads = num_ranks, 0

    def __len__(self) -> int:
        return self._num_ranks

    def call(self, method: Any, *arguments: Any) -> list[Any]:
        if method is TrainerActor.load:
            self.num_loads += 1
            return [None] * len(self)

        class Actor:
            _rank = 0

        answers = []
        for rank in range(len(self)):
            actor = Actor()
            actor._rank = rank
            answers.append(method(actor, *arguments))
        return answers


def trainers_of(ranks: InProcess) -> Trainers:
    trainers = Trainers.__new__(Trainers)
    trainers._policy, trainers._separate = ranks, {}  # type: ignore[assignment]
    return trainers


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_flipped_bit_in_any_file_reaches_a_weight(num_ranks: int, tmp_path: Path) -> None:
    checkpoint, seeded, ranks = saved(tmp_path, 3), random.Random(11), InProcess(num_ranks)
    trainers = trainers_of(ranks)
    trainers.load(checkpoint)
    assert ranks.num_loads == 1
    for _ in range(NUM_FLIPS):
        path = seeded.choice([path for path in files_of(checkpoint) if path.name != MANIFEST])
        bit = seeded.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(CheckpointError, match=path.relative_to(checkpoint).as_posix()):
            trainers.load(checkpoint)
        with pytest.raises(CheckpointError, match=path.relative_to(checkpoint).as_posix()):
            refuse_damage(checkpoint)
        flip(path, bit)
    assert ranks.num_loads == 1
    trainers.load(checkpoint)
    assert ranks.num_loads == 2


def test_the_refusal_names_every_file_what_was_expected_and_the_checkpoints_that_are_whole(tmp_path: Path) -> None:
    first, second, third, last = (saved(tmp_path, rollout_id) for rollout_id in range(4))
    for number, checkpoint in enumerate((first, second, third, last)):
        os.utime(checkpoint / "run_state.json", (number, number))
    flip(third / "model" / "common.pt", 77)
    (last / "model" / "common.pt").unlink()
    (last / "model" / "critic" / "__0_0.distcp").write_bytes(b"short")
    (last / "model" / "left_behind").write_text("x")
    flip(last / "model" / "__0_0.distcp", 4)
    with pytest.raises(CheckpointError) as refused:
        refuse_any_damage(last, compare_hashes)
    said = str(refused.value)
    assert f"--load {last}: 4 of its files are not as they were written; expected what its {MANIFEST} says" in said
    for line in (
        "model/common.pt: is missing, expected 300 bytes",
        "model/critic/__0_0.distcp: has 5 bytes, expected 40",
        "model/left_behind: is there, but was not written with the others",
        "model/__0_0.distcp: its bytes changed",
    ):
        assert line in said
    assert f"Continue with --load {second} instead (whole beside it: iter_0000001, iter_0000000)" in said


def test_without_another_whole_checkpoint_the_refusal_says_so(tmp_path: Path) -> None:
    only = saved(tmp_path, 0)
    flip(only / MANIFEST, 8 * 30)
    with pytest.raises(CheckpointError, match="No other checkpoint beside it is known to be whole"):
        refuse_damage(only)
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: is damaged"):
        refuse_any_damage(only, compare_hashes)


def test_a_large_checkpoint_is_read_in_part_before_the_start_and_in_whole_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(tmp_path, 0)
    monkeypatch.setattr(checkpoint_damage, "QUICK_BYTES", 1000)
    flip(checkpoint / "model" / "__0_0.distcp", 9)
    refuse_damage(checkpoint)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        refuse_any_damage(checkpoint, compare_hashes)
    flip(checkpoint / "model" / "common.pt", 9)
    with pytest.raises(CheckpointError, match=r"common.pt"):
        refuse_damage(checkpoint)


def test_a_checkpoint_from_before_manifests_is_loaded_with_a_word(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 0)
    assert list(doubts(checkpoint, str(tmp_path))) == []
    (checkpoint / MANIFEST).unlink()
    refuse_damage(checkpoint)
    ranks = InProcess(1)
    trainers_of(ranks).load(checkpoint)
    assert ranks.num_loads == 1
    [doubt] = doubts(checkpoint, str(tmp_path))
    assert f"{checkpoint} has no {MANIFEST}" in doubt


def test_a_marker_that_names_an_older_checkpoint_is_said(tmp_path: Path) -> None:
    """One bit makes a 2 of a 6: whether somebody chose it is theirs to say."""
    for rollout_id in (2, 4, 6):
        os.utime(saved(tmp_path, rollout_id) / "run_state.json", (rollout_id, rollout_id))
    chosen = tmp_path / "iter_0000002"
    (tmp_path / LATEST).write_text("2\n")
    [doubt] = doubts(chosen, str(tmp_path))
    assert f"{LATEST} names iter_0000002, but iter_0000004, iter_0000006 was written later" in doubt
    assert list(doubts(chosen, str(chosen))) == []
    os.utime(chosen / "run_state.json", (9, 9))  # the run that went back has saved since
    assert list(doubts(chosen, str(tmp_path))) == []


def test_a_checkpoint_that_is_a_link_to_another_disk_is_loaded_as_any_other(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    root.mkdir()
    saved(elsewhere, 4)
    (root / "iter_0000004").symlink_to(elsewhere / "iter_0000004")
    (root / LATEST).write_text("4\n")
    assert list(doubts(root / "iter_0000004", str(root))) == []


def test_a_run_that_starts_again_reads_its_checkpoint_before_it_starts_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_components(*_: Any, **_named: Any) -> Any:
        raise EngineError("the parts were started")

    monkeypatch.setattr(launch, "start_components", start_components)
    config = parse(["--hf-checkpoint", "models/m", "--load", str(tmp_path)])

    def life() -> launch.End:
        return launch._attempt(config, Mock(path=tmp_path), before=launch.End(code=3))

    assert life().message == "the parts were started"  # there is no checkpoint yet
    checkpoint = saved(tmp_path, 0)
    assert life().message == "the parts were started"
    flip(checkpoint / "model" / "common.pt", 9)
    end = life()
    assert "model/common.pt: its bytes changed" in end.message
    assert (end.code, end.is_worth_a_restart) == (3, False)
