"""An export of --save-hf, loaded by vLLM from the disk, says what the trainer says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.dist_launch import launch
from tests.helpers.families import EXPORTS, EXPORTS_BY_NIGHT
from tests.helpers.megatron_models import make_rows
from tests.helpers.nightly import is_night
from vime.backends.vllm_utils.launch import DEFAULT_ENV, DEFAULT_ENV_CPU, REQUIRED_ENV_CPU

ROOT = Path(__file__).resolve().parents[3]
BOUND = 1e-4  # largest difference of a log-probability, fp32 on both sides


@pytest.fixture(scope="module")
def difference(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, float]:
    """By model: trained for a round, exported, loaded; the largest difference to the trainer over eight rows."""
    work = tmp_path_factory.mktemp("exports")
    kinds = [name for name in EXPORTS if name not in EXPORTS_BY_NIGHT or is_night(request, Path(__file__))]
    models = {name: EXPORTS[name](work / "models" / name) for name in kinds}
    arguments = {"models": models, "directory": work}
    [trainer] = launch(
        "tests.helpers.megatron_worker:trained_exports",
        world_size=1,
        directory=work / "launch",
        arguments=arguments,
        deadline_s=240,
    )
    rows = make_rows()
    (work / "models.json").write_text(json.dumps([str(work / name) for name in kinds]))
    (work / "tokens.json").write_text(json.dumps([row.tokens.tolist() for row in rows]))
    files = [str(work / f"{name}.json") for name in ("models", "tokens", "answers")]
    asked = subprocess.run(
        [sys.executable, "-m", "tests.helpers.vllm_log_probs", *files],
        cwd=ROOT,
        env={**os.environ, **DEFAULT_ENV, **DEFAULT_ENV_CPU, **REQUIRED_ENV_CPU},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr[-4000:]
    by_model = json.loads((work / "answers.json").read_text())
    return {
        name: max(
            abs(theirs - ours)
            for row, logp_R, answer in zip(rows, trainer[name], answers, strict=True)
            for ours, theirs in zip(logp_R.tolist(), answer[-row.response_length :], strict=True)
        )
        for name, answers in zip(kinds, by_model, strict=True)
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[pytest.mark.nightly] * (name in EXPORTS_BY_NIGHT)) for name in EXPORTS]
)
def test_vllm_says_of_an_export_what_the_trainer_says(difference: dict[str, float], kind: str) -> None:
    print(f"{kind}: {difference[kind]:.2e}")  # noqa: T201
    assert difference[kind] < BOUND
