"""HF weights in and out: equal log-probabilities, equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import reference_policy as reference
from tests.helpers.megatron_cases import KINDS, LAYOUTS, MOE_LAYOUTS, cuts, import_cases
from tests.helpers.megatron_models import make_rows
from tests.helpers.megatron_worker import Answers, answers_of
from vime.weights.hashing import content_hash


@pytest.fixture(scope="module")
def answers(models: Path, work: Path) -> Answers:
    return answers_of(import_cases(models, work), directory=work / "launch-import")


def largest_difference(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_transformers_within_1e_4(answers: Answers, models: Path, kind: str) -> None:
    expected = reference.log_probs(reference.load(models / kind), make_rows(), temperature=1.0)
    [answer] = answers(f"import-{kind}")
    difference = largest_difference(answer["log_probs"], expected)
    print(f"{kind}: max abs difference of log-probabilities to transformers {difference:.2e}")  # noqa: T201  the figure belongs in the log
    assert difference < 1e-4


MODEL = {
    **{f"import-{kind}": kind for kind in KINDS},
    **{f"import-{layout}": "qwen2" for layout in cuts(LAYOUTS)},
    **{f"import-moe-{layout}": "qwen3_moe" for layout in cuts(MOE_LAYOUTS)},
}
WORLD = {
    **{f"import-{layout}": world for layout, (world, _) in cuts(LAYOUTS).items()},
    **{f"import-moe-{layout}": world for layout, (world, _) in cuts(MOE_LAYOUTS).items()},
}


@pytest.mark.parametrize("case", WORLD)
def test_every_rank_of_a_layout_gets_the_log_probs_of_transformers(answers: Answers, models: Path, case: str) -> None:
    expected = reference.log_probs(reference.load(models / MODEL[case]), make_rows(), temperature=1.0)
    ranks = answers(case)
    assert len(ranks) == WORLD[case]
    for answer in ranks:
        assert largest_difference(answer["log_probs"], expected) < 1e-4


@pytest.mark.parametrize("case", MODEL)
def test_exported_weights_are_bit_identical_to_the_file_on_every_rank(
    answers: Answers, models: Path, case: str
) -> None:
    file = load_file(models / MODEL[case] / "model.safetensors")
    for answer in answers(case):
        weights = answer["weights"]
        assert set(weights) == set(file)
        assert all(torch.equal(weights[name], tensor) for name, tensor in file.items())


@pytest.mark.parametrize("case", [case for case in MODEL if "-ep" not in case])
def test_order_and_hash_of_the_stream_without_expert_parallelism_are_those_of_one_process(
    answers: Answers, case: str
) -> None:
    [single] = answers(f"import-{MODEL[case]}")
    for answer in answers(case):
        assert list(answer["weights"]) == list(single["weights"])
        assert answer["hash"] == single["hash"]


@pytest.mark.parametrize("case", ["import-qwen2_tied", "import-qwen3", "import-tp2-pp2", "import-moe-ep2-tp2"])
def test_metadata_names_the_export_stream_and_the_hash_is_the_streams(answers: Answers, case: str) -> None:
    for answer in answers(case):
        weights = answer["weights"]
        assert [meta.name for meta in answer["metadata"]] == list(weights)
        for meta, tensor in zip(answer["metadata"], weights.values(), strict=True):
            assert (meta.dtype, meta.shape) == ("float32", tuple(tensor.shape))
        assert answer["hash"] == content_hash(weights)


def test_saved_hf_directory_loads_in_transformers_with_the_trained_weights(
    answers: Answers, models: Path, work: Path
) -> None:
    ranks = answers("saved-hf")
    model = reference.load(work / "hf")
    expected = reference.log_probs(model, make_rows(), temperature=1.0)
    assert largest_difference(ranks[0]["log_probs"], expected) < 1e-4
    state = model.state_dict()
    before = load_file(models / "qwen2" / "model.safetensors")
    for name, tensor in ranks[0]["weights"].items():
        assert torch.equal(state[name], tensor)
    assert not torch.equal(state["lm_head.weight"], before["lm_head.weight"])
    assert not (work / "hf.partial").exists()


@pytest.mark.parametrize("case", ["saved-hf", "saved-moe-hf"])
def test_the_export_stream_is_the_same_in_small_buckets(answers: Answers, case: str) -> None:
    for rank in answers(case):
        assert list(rank["in_buckets"]) == list(rank["weights"])
        assert all(torch.equal(rank["in_buckets"][name], tensor) for name, tensor in rank["weights"].items())


def test_saved_model_with_experts_loads_in_transformers(answers: Answers, work: Path) -> None:
    ranks = answers("saved-moe-hf")
    model = reference.load(work / "moe-hf")
    expected = reference.log_probs(model, make_rows(), temperature=1.0)
    for rank in ranks:
        assert largest_difference(rank["log_probs"], expected) < 1e-4


def test_cut_vocabulary_with_padding_equals_one_softmax(answers: Answers) -> None:
    # 97 columns over 4 ranks: 25 each, 3 of them padding on the last rank; temperature 0.7
    for differences in answers("vocabulary"):
        assert differences["logp"] < 1e-5
        assert differences["entropy"] < 1e-5
        assert differences["gradient"] < 1e-5 * differences["gradient_size"]


def test_a_layout_or_weights_that_do_not_fit_the_model_are_refused(answers: Answers) -> None:
    for message in answers("tp3"):
        assert "--tensor-model-parallel-size 3 does not divide the model's num_attention_heads 8" in message
    for message in answers("experts-of-a-dense-model"):
        assert "are for a model with experts; model_type qwen2 has none" in message
    [message] = answers("wrong-weights")
    assert "the weights do not belong to its config.json" in message
    assert "q_norm" in message


def test_the_device_layer_lives_only_as_long_as_a_trainer(answers: Answers) -> None:
    [answer] = answers("device")
    assert sorted(answer["redirected_while_living"]) == sorted(answer["second_install"])
    assert "torch.cuda.current_device" in answer["redirected_while_living"]
    assert answer["factories_untouched"]
    assert answer["meta_device"] == "meta"
    assert answer["restored"]


def test_all_process_groups_of_a_rank_share_one_event_loop(answers: Answers) -> None:
    [answer] = answers("device")
    assert answer["event_loops"] == 1
