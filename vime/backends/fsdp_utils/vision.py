"""Images in the trainer: which families, and how the images of a pack reach the model.

A pack holds whole rows, and the images of its rows follow each other in the same order: the model gets all of them at
once, and their features go to the image places of the prompts, one after the other. A place is an image token of a
prompt; an image token that was sampled is text, for the engine too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from vime.config.hf_config import VISION_FAMILIES
from vime.data.images import images_of, unpack_images
from vime.data.rows import TrainRow
from vime.types import HandoffError


def has_images(config: PretrainedConfig) -> bool:
    return config.model_type in VISION_FAMILIES


def attention_of(config: PretrainedConfig, implementation: str) -> str | dict[str, str]:
    """Return `attn_implementation` for a model: the tower attends within an image, where transformers' own will do."""
    if not has_images(config):
        return implementation
    tower = "eager" if implementation == "eager" else "sdpa"
    return {"": implementation, "text_config": implementation, "vision_config": tower}


class VisionInputs:
    """Gives the images of a pack to one model, and puts their features where the prompts have places for them.

    A pack without images, on whichever rank, gets one blank image whose features go nowhere: every rank gathers the
    tower's parameters, so every rank computes it.
    """

    def __init__(self, family: PreTrainedModel) -> None:
        config = family.config
        self._token, self._side = int(config.image_token_id), int(config.vision_config.image_size)
        self._per_image = (self._side // config.vision_config.patch_size // config.scale_factor) ** 2
        self._places_T: Tensor | None = None
        # transformers' own would take sampled image tokens for places
        setattr(family.base_model, "inputs_merger", self._merge)  # noqa: B010  mypy takes it for a module

    def of(self, rows: Sequence[TrainRow], device: torch.device, num_tokens: int) -> dict[str, Tensor]:
        """Return the arguments of the model for the images of `rows`, which are packed in this order without padding
        between them. The next forward pass of the model is the one of this pack."""
        pixels, masks, places = [], [], torch.zeros(num_tokens, dtype=torch.bool)
        start = 0
        for row in rows:
            images = unpack_images(images_of(row), row.name)
            prompt = torch.as_tensor(row.tokens[: row.total_length - row.response_length])
            places[start : start + len(prompt)] = prompt == self._token
            start += row.total_length
            num_images = len(images["pixel_values"]) if images else 0
            found = int((prompt == self._token).sum())
            if found != num_images * self._per_image:
                raise HandoffError(
                    f"{row.name}: {num_images} images of {self._per_image} tokens, but the prompt has {found} image "
                    "tokens (config.json's image_token_id). Prompt and images must belong together."
                )
            if images:
                pixels.append(torch.as_tensor(images["pixel_values"]))
                masks.append(torch.as_tensor(images["pixel_attention_mask"].astype(np.bool_)))
        if not pixels:
            pixels = [torch.ones(1, 3, self._side, self._side)]
            masks = [torch.ones(1, self._side, self._side, dtype=torch.bool)]
        self._places_T = places.to(device)
        return {
            "pixel_values": torch.cat(pixels).unsqueeze(0).to(device),
            "pixel_attention_mask": torch.cat(masks).unsqueeze(0).to(device),
        }

    def _merge(self, *, inputs_embeds: Tensor, image_hidden_states: Tensor, **_: object) -> Tensor:
        assert self._places_T is not None
        places = self._places_T.view(1, -1, 1).expand_as(inputs_embeds)
        return inputs_embeds.masked_scatter(places, image_hidden_states.to(inputs_embeds.dtype))
