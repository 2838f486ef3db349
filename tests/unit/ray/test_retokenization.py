"""Other tokens that a row may have had: from its sample's text and from a round trip through the tokenizer."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import tiny_images
from tests.helpers.rollout_setup import write_model_directory
from tests.helpers.rows import make_row
from vime.config.parse import Config
from vime.data.images import IMAGE_COLUMN
from vime.data.rows import TrainRow
from vime.ray.retokenization import Retokenization, retokenizations
from vime.ray.rollout_manager import SampleText
from vime.rollout.prompts import load_tokenizer

BOS, EOS = 1, 2


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config().replace(hf_checkpoint=str(write_model_directory(tmp_path / "model")))


def row(config: Config, prompt: str, answer: str, *, begin: bool = True) -> TrainRow:
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    response = [*tokenizer.encode(answer, add_special_tokens=False), EOS]
    tokens = [*([BOS] if begin else []), *tokenizer.encode(prompt, add_special_tokens=False)]
    return make_row(7, prompt=tokens, response=response)


def told(config: Config, one: TrainRow, text: SampleText | None) -> dict[str, Retokenization]:
    found = retokenizations(config, [one], [text])
    return {retokenization.says: retokenization for retokenization in found}


def test_a_faithful_row_differs_by_its_begin_token_only(config: Config) -> None:
    one = row(config, "1+2=", "3")
    assert list(told(config, one, SampleText(prompt="1+2=", response="3"))) == ["the prompt without its begin token"]
    assert list(told(config, one, None)) == ["the prompt without its begin token"]
    no_text = SampleText(prompt="1+2=", response="")  # a plug-in that keeps none says nothing against its tokens
    assert list(told(config, one, no_text)) == ["the prompt without its begin token"]


def test_the_text_of_a_sample_gives_back_the_tokens_it_was_sampled_with(config: Config) -> None:
    written, sampled = row(config, "1+2=", "45"), row(config, "1+2=", "43")
    found = told(config, written, SampleText(prompt="1+2=", response="43"))
    [own] = [retokenization for says, retokenization in found.items() if "own text" in says]
    assert list(own.tokens) == list(sampled.tokens)
    assert own.is_contradiction
    assert own.says.startswith("sample 7's own text '43' (they decode to '45') (token 1: the row has ")


def test_a_text_of_another_length_contradicts_without_tokens_to_try(config: Config) -> None:
    written = row(config, "1+2=", "45")
    found = told(config, written, SampleText(prompt="1+2=", response="435"))
    [own] = [retokenization for retokenization in found.values() if retokenization.is_contradiction]
    assert list(own.tokens) == list(written.tokens)


def test_a_prompt_that_lost_its_begin_token_is_told_with_it(config: Config) -> None:
    bare, whole = row(config, "1+2=", "3", begin=False), row(config, "1+2=", "3")
    found = told(config, bare, SampleText(prompt="1+2=", response="3"))
    first = bare.tokens[0]
    assert list(found) == [
        f"sample 7's prompt text (token 0: the row has {first}, this {BOS})",
        "the prompt with a begin token before it",
    ]
    assert all(list(retokenization.tokens) == list(whole.tokens) for retokenization in found.values())


def test_a_prompt_with_images_is_compared_with_the_places_of_its_images(tmp_path: Path) -> None:
    """Else each would be told as encoded otherwise, and the trainer asked for rows without their places."""
    model = tiny_images.make_idefics3(tmp_path / "model")
    url = f"data:image/png;base64,{base64.b64encode(tiny_images.png('red')).decode()}"
    config = Config().replace(hf_checkpoint=str(model), multimodal_keys='{"image": "images"}')
    # USER, the image, What ?
    prompt = [8, *tiny_images.IMAGE_IDS, 10, 12]
    one = replace(make_row(7, prompt=prompt, response=[20, 21]), extra={IMAGE_COLUMN: b"pixels"})
    images = {"images": [url], "prompt_ids": [8, 3, 10, 12], "prompt_length": len(prompt)}

    def says(text: str) -> dict[str, list[int]]:
        found = told(config, one, SampleText(prompt=text, response="", images=images))
        return {key: list(other.tokens) for key, other in found.items() if "begin token" not in key}

    assert says("USER <image> What ?") == {}
    [other] = says("USER <image> colour ?").values()  # another text, with the same image
    assert other == [8, *tiny_images.IMAGE_IDS, 11, 12, 20, 21]
    assert says("USER What ?") == {}  # a plug-in's text has no place for the image: there are no tokens to try
