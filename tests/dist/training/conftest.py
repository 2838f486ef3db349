"""All cases of this folder run in one launch of two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.early_cases import early_cases
from tests.helpers.engine_contract import contract_cases
from tests.helpers.megatron_models import make_model, make_models
from tests.helpers.megatron_worker import Answers, answers_of
from tests.helpers.nightly import is_night
from tests.helpers.role_cases import role_cases
from tests.helpers.several_rows_cases import several_rows_cases


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_models(["qwen2"], tmp_path_factory.mktemp("contract-models"))
    make_model("qwen2", directory / "teacher", seed=2)
    return directory


@pytest.fixture(scope="session")
def contract(small_models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Answers:
    work = tmp_path_factory.mktemp("contract-work")
    night = is_night(request, Path(__file__).parent)
    cases = [*contract_cases(small_models, work), *role_cases(small_models, is_night=night)]
    cases += early_cases(small_models, is_night=night)
    cases += several_rows_cases(small_models, is_night=night)
    return answers_of(cases, directory=work / "launch")
