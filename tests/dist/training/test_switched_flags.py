"""A checkpoint of other flags is loaded as it is, or refused by the flag's name before a weight is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoint_cases import LOADED, REFUSED, switch_cases
from tests.helpers.megatron_worker import Answers, answers_of


@pytest.fixture(scope="module")
def switched(small_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    work = tmp_path_factory.mktemp("switch-work")
    return answers_of(switch_cases(small_models, work), directory=work / "launch")


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_of_another_kind_is_refused_by_the_flag_and_nothing_is_touched(
    switched: Answers, name: str
) -> None:
    flag = name.split()[0]
    for rank in switched(name):
        assert rank["said"].startswith("CheckpointError: --load")
        assert f"{flag}, this run" in rank["said"]
        assert "Nothing was loaded. Give the flag as it was" in rank["said"]
        assert rank["after"].keys() == rank["before"].keys()
        assert all(torch.equal(tensor, rank["before"][weight]) for weight, tensor in rank["after"].items())
    first = switched(name)[0]  # the others export nothing
    assert not all(torch.equal(tensor, first["saved"][weight]) for weight, tensor in first["after"].items())


@pytest.mark.parametrize("name", LOADED)
def test_what_does_not_depend_on_a_flag_is_loaded_without_it(switched: Answers, name: str) -> None:
    assert switched(name)[0]["after"]
    for rank in switched(name):
        assert rank["said"] == ""
        for tensor_name, tensor in rank["after"].items():
            saved = rank["saved"][tensor_name].float()  # of a bf16 run a rounding, 2**-8 of the value
            torch.testing.assert_close(tensor.float(), saved, rtol=2**-7, atol=1e-6, msg=tensor_name)
