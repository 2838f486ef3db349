"""The images of a pack reach their rows, whoever else is in the pack."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import tiny_images
from tests.helpers.image_cases import alone, image_rows
from vime.backends.fsdp_utils import attention
from vime.backends.fsdp_utils.hf_config import read_config
from vime.backends.fsdp_utils.model import model_inputs
from vime.backends.fsdp_utils.probe import check_family
from vime.backends.fsdp_utils.vision import VisionInputs, attention_of
from vime.batching.pack import pack
from vime.data.images import IMAGE_COLUMN
from vime.data.rows import TrainRow
from vime.types import HandoffError


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.make_idefics3(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def model(vision: Path) -> Any:
    from transformers import Idefics3ForConditionalGeneration

    attention.register()
    chosen = attention_of(read_config(str(vision)), attention.NAME)
    return Idefics3ForConditionalGeneration.from_pretrained(
        vision, dtype=torch.float32, attn_implementation=chosen
    ).eval()


def packed(model: Any, rows: list[TrainRow]) -> list[torch.Tensor]:
    batch = pack(rows)
    inputs = model_inputs(batch, attention.NAME) | VisionInputs(model).of(rows, torch.device("cpu"), batch.num_tokens)
    with torch.no_grad():
        logp_TV = model(**inputs).logits[0].log_softmax(-1)
    logp_T = logp_TV.gather(1, batch.labels_T[:, None])[:, 0]
    return [logp_T[positions] for positions in batch.row_slices]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1,), (2, 0)])
def test_each_row_of_a_pack_gets_what_it_gets_alone(vision: Path, model: Any, order: tuple[int, ...]) -> None:
    rows = [image_rows(vision)[number] for number in order]
    plain = tiny_images.load(vision)
    for row, found_R in zip(rows, packed(model, rows), strict=True):
        torch.testing.assert_close(found_R, alone(plain, row).detach(), rtol=0, atol=1e-5)


def test_another_image_is_another_row(vision: Path) -> None:
    rows, plain = image_rows(vision), tiny_images.load(vision)
    one, other = rows[0], rows[3]
    swapped = TrainRow(**{name: getattr(one, name) for name in one.__slots__} | {"extra": other.extra})
    difference = (alone(plain, one) - alone(plain, swapped)).detach().abs()
    assert float(difference.max()) > 1e-2


def test_a_row_whose_images_are_missing_is_refused(vision: Path, model: Any) -> None:
    row = image_rows(vision)[2]  # two images of four tokens
    without = TrainRow(**{name: getattr(row, name) for name in row.__slots__} | {"extra": {IMAGE_COLUMN: b""}})
    with pytest.raises(HandoffError, match="0 images of 4 tokens, but the prompt has 8 image tokens"):
        VisionInputs(model).of([without], torch.device("cpu"), without.total_length)


def test_the_proof_of_a_family_reads_its_language_model(vision: Path) -> None:
    check_family(read_config(str(vision)), flag="--hf-checkpoint", checkpoint=str(vision))
