"""Each model family in a run of train.py over two trainer ranks, with real vLLM."""

import dataclasses
from pathlib import Path

import pytest

from tests.helpers.families import EXPORTS, RUNS
from tests.helpers.training import TinyTask, train

ROUNDS = 3
BOUND = 1e-4  # mean difference of log-probabilities between engine and trainer, fp32 on both sides


@pytest.mark.nightly
@pytest.mark.parametrize("kind", RUNS)
def test_engine_and_trainer_of_a_family_agree_in_every_round(kind: str, tiny_task: TinyTask, tmp_path: Path) -> None:
    task = dataclasses.replace(tiny_task, model=EXPORTS[kind](tmp_path / "model"))
    flags = [*task.flags(), "--num-rollout", str(ROUNDS), "--actor-num-gpus-per-node", "2", *RUNS[kind]]
    finished = train([*flags, "--check-weight-update-equal"], tmp_path / "run")
    assert finished.code == 0, finished.output
    lines = finished.metrics()
    differences = [lines[number]["train/train_rollout_logprob_abs_diff"] for number in range(ROUNDS)]
    print(f"{kind}: {differences}")  # noqa: T201
    assert max(differences) < BOUND
    assert len(set(finished.confirmed_hashes())) == ROUNDS + 1
