"""Transformer Engine's own Python builds a model whose every parameter is exported; its compiled half is made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from vime.backends.megatron_utils.hf_layout import hf_names_and_kind

ROOT = Path(__file__).resolve().parents[3]
CASES = {"qwen2": False, "qwen3": False, "qwen3_moe": False, "qwen3_moe-grouped": True}


@pytest.fixture(scope="module")
def built(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("transformer-engine")
    asked, answers = directory / "models.json", directory / "answers.json"
    cases = {name: [str(models / name.split("-")[0]), grouped] for name, grouped in CASES.items()}
    asked.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.helpers.transformer_engine_python", str(asked), str(answers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answers.read_text())


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_a_rule_and_every_tensor_of_the_file_a_parameter(
    built: dict[str, Any], models: Path, name: str
) -> None:
    parameters, classes = built[name]["parameters"], built[name]["classes"]
    assert {"TELayerNormColumnParallelLinear", "TEDotProductAttention", "TERowParallelLinear"} <= set(classes)
    assert ("GroupedExperts" in classes, "SequentialMLP" in classes) == (
        name == "qwen3_moe-grouped",
        name == "qwen3_moe",
    )
    exported = [hf_name for parameter in parameters for hf_name in hf_names_and_kind(parameter)[0]]
    with safe_open(models / name.split("-")[0] / "model.safetensors", "pt") as file:
        assert sorted(exported) == sorted(file.keys())


def test_grouped_experts_have_the_parameters_of_experts_one_by_one(built: dict[str, Any]) -> None:
    assert built["qwen3_moe-grouped"]["parameters"] == built["qwen3_moe"]["parameters"]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_added_in_the_product_and_positions_rotated_in_one_kernel(
    built: dict[str, Any], name: str
) -> None:
    """Of all linear layers but the output layer, which is not Transformer Engine's."""
    assert built[name]["rotates"]
    linears = {key.removesuffix(".weight") for key in built[name]["parameters"] if ".linear_" in key}
    assert set(built[name]["sums"]) == {key for key in linears if not key.endswith(("layer_norm_weight", "bias"))}
