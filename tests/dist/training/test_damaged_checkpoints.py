"""No flipped bit in a checkpoint that the trainer ranks wrote gets as far as a weight, whichever backend wrote it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.checkpoint_cases import damage_cases
from tests.helpers.engine_contract import SETTINGS
from tests.helpers.megatron_worker import Answers, answers_of
from vime.ray.checkpoint import RunState, save_checkpoint
from vime.ray.checkpoint_damage import refuse_any_damage, refuse_damage
from vime.types import CheckpointError
from vime.utils.hashing import hash_file
from vime.utils.manifest import MANIFEST, compare_hashes, read_manifest

NUM_FLIPS = 60


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage-work")


@pytest.fixture(scope="module")
def answers(small_models: Path, work: Path) -> Answers:
    return answers_of(damage_cases(small_models, work), directory=work / "launch")


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_file_is_hashed_by_the_rank_that_wrote_it_and_no_damage_is_loaded(
    setting: str, answers: Answers, work: Path, tmp_path: Path
) -> None:
    ranks = answers(f"{setting}-written")
    entries = {name: entry for rank in ranks for name, entry in rank.items()}
    assert sum(map(len, ranks)) == len(entries)  # no file was read twice
    files = [path for path in (work / setting).rglob("*") if path.is_file()]
    assert entries == {path.relative_to(work / setting).as_posix(): hash_file(path) for path in files}
    assert any(name.startswith("critic/") for name in entries)

    def save_model(directory: Path) -> dict[str, tuple[int, str]]:
        shutil.copytree(work / setting, directory, dirs_exist_ok=True)
        return entries

    checkpoint = save_checkpoint(tmp_path, RunState(rollout_id=0, version=1, data_source={}), save_model)
    assert read_manifest(checkpoint).keys() == {f"model/{name}" for name in entries} | {"run_state.json"}
    refuse_damage(checkpoint)
    refuse_any_damage(checkpoint, compare_hashes)
    seeded = random.Random(17)
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
    for _ in range(NUM_FLIPS):
        path = seeded.choice(paths)
        whole = path.read_bytes()
        damaged, bit = bytearray(whole), seeded.randrange(8 * len(whole))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.relative_to(checkpoint).as_posix()):
            refuse_any_damage(checkpoint, compare_hashes)
        path.write_bytes(whole)
