"""A layer leaves the processor free to run ahead of the GPU: it reads no value of a tensor on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.families import MEGATRON
from tests.helpers.host_syncs import IN_A_LAYER, Reads
from tests.helpers.megatron_cases import GROUPED
from tests.helpers.megatron_worker import Answers, Case, answers_of

MODELS = tuple(family.models[0] for family in MEGATRON)
OF_EXPERTS = {"moe_utils.py:permute", "moe_utils.py:sort_chunks_by_idxs", "experts.py:forward"}
"""Without grouped products megatron sorts tokens by expert, and the processor has to know how many each one gets."""
KNOWN = {"qwen3_moe": OF_EXPERTS, "deepseek": OF_EXPERTS}
KNOWN["grouped"] = OF_EXPERTS - {"experts.py:forward"}
KNOWN["gpt_oss"] = {"stacked_experts.py:forward" if "experts.py" in place else place for place in OF_EXPERTS}


@pytest.fixture(scope="module")
def answers(models: Path, work: Path) -> Answers:
    do = "tests.helpers.host_syncs:reads_of_a_step"
    cases = [Case(name=name, do=do, flags={"hf_checkpoint": str(models / name)}) for name in MODELS]
    grouped = {"hf_checkpoint": str(models / "qwen3_moe"), **GROUPED}
    cases.append(Case(name="grouped", do=do, flags=grouped))
    return answers_of(cases, directory=work / "launch-reads")


@pytest.mark.parametrize("name", [*MODELS, "grouped"])
def test_no_layer_of_a_family_waits_for_the_device_but_where_experts_sort_tokens(answers: Answers, name: str) -> None:
    [places] = answers(name)
    inside = {place.removeprefix(IN_A_LAYER) for place in places if place.startswith(IN_A_LAYER)}
    assert inside == KNOWN.get(name, set())
    assert "mismatch.py:compare" in places, "the count sees what a step reads elsewhere"


def test_a_read_in_a_layer_is_seen_however_it_is_written() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> int:
            return int(x.sum()) + x.tolist()[0] + len(x.nonzero()) + (1 if x.any() else 0)

    with Reads() as reads:
        Layer()(torch.tensor([1, 2, 3]))
    [(place, count)] = reads.places.items()
    assert place == f"{IN_A_LAYER}test_host_syncs.py:forward"
    assert count >= 4
