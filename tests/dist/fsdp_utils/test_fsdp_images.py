"""Rows with images on the FSDP2 engine: a pack keeps rows and images together, also where a rank's micro-batch has no
image, and the tower learns."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import tiny_images
from tests.helpers.image_cases import alone, image_cases, image_rows
from tests.helpers.megatron_worker import Answers, answers_of

LAYOUTS = ("one", "two", "recomputed")


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.make_idefics3(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="session")
def shown(vision_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(image_cases(vision_model), directory=tmp_path_factory.mktemp("images-work") / "launch")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pack_of_rows_with_images_gives_each_what_it_gets_alone(
    shown: Answers, vision_model: Path, layout: str
) -> None:
    model = tiny_images.load(vision_model)
    for rank in shown(layout):
        for row, found_R in zip(image_rows(vision_model), rank["before"], strict=True):
            torch.testing.assert_close(found_R, alone(model, row).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_two_ranks_of_which_one_has_no_image_learn_what_one_rank_learns(shown: Answers, layout: str) -> None:
    [expected] = shown("one")
    for rank in shown(layout):
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][name], rtol=0, atol=2e-6, msg=name)


def test_every_part_of_the_model_learns_from_images(shown: Answers, vision_model: Path) -> None:
    before = load_file(vision_model / "model.safetensors")
    [rank] = shown("one")
    assert set(rank["weights"]) == set(before)
    moved = {name for name, tensor in rank["weights"].items() if not torch.equal(tensor, before[name])}
    for part in ("vision_model.embeddings.patch", "vision_model.encoder.layers.1", "connector", "text_model.layers.0"):
        assert any(part in name for name in moved), part
