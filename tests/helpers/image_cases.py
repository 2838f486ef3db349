"""Rows with images, and what the tests of the FSDP2 engine run on them, as cases for `megatron_worker.run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers import tiny_images
from tests.helpers.engine_contract import build, take_step
from tests.helpers.fsdp_cases import FSDP
from tests.helpers.megatron_models import make_plan
from tests.helpers.megatron_worker import Bench, Case
from vime.data.images import IMAGE_COLUMN, pack_images
from vime.data.rows import TrainRow
from vime.types import VersionSpan

KEYS = {"multimodal_keys": '{"image": "images"}'}
PROMPTS: list[tuple[str, list[str]]] = [
    ("USER <image> What colour ? ASSISTANT", ["red"]),
    ("USER What colour ? ASSISTANT", []),
    ("USER <image> and <image> What colour ? ASSISTANT", ["blue", "green"]),
    ("USER What <image> ? ASSISTANT", ["white"]),
]
RESPONSES = [[20, 21, 22], [23, 24], [25, tiny_images.IMAGE_TOKEN, 26, 27], [28]]
"""One holds an image token that was sampled: it is text."""


def image_rows(model: Path) -> list[TrainRow]:
    rows = []
    for index, ((text, colours), response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        cell, ids = b"", _ids(text)
        if colours:
            made = tiny_images.processed(model, text, [tiny_images.picture(colour) for colour in colours])
            ids = made["input_ids"][0].tolist()
            cell = pack_images({name: made[name][0].numpy() for name in ("pixel_values", "pixel_attention_mask")})
        rows.append(
            TrainRow(
                sample_index=index,
                group_index=index,
                rollout_id=0,
                tokens=np.asarray([*ids, *response], dtype=np.int32),
                response_length=len(response),
                loss_mask=np.ones(len(response), dtype=np.uint8),
                rollout_log_probs=np.full(len(response), -4.0, dtype=np.float32),
                token_policy_versions=(VersionSpan(0, 0, len(response)),),
                reward=1.0 - index / 2,
                raw_reward=1.0,
                status="completed",
                truncated=False,
                extra={IMAGE_COLUMN: cell},
            )
        )
    return rows


def _ids(text: str) -> list[int]:
    return [tiny_images.WORDS.index(word) for word in text.split()]


def alone(model: torch.nn.Module, row: TrainRow) -> Tensor:
    """Log-probabilities [R] of one row by transformers, with the features at the image tokens of the prompt."""
    from vime.data.images import unpack_images

    images = {name: torch.as_tensor(array)[None] for name, array in unpack_images(row.extra[IMAGE_COLUMN], "").items()}  # type: ignore[arg-type]
    prompt_length = row.total_length - row.response_length
    tokens = torch.as_tensor(row.tokens, dtype=torch.int64)[None]
    places = (tokens == tiny_images.IMAGE_TOKEN) & (torch.arange(row.total_length) < prompt_length)
    body: Any = model.model
    body.inputs_merger = lambda input_ids, inputs_embeds, image_hidden_states: inputs_embeds.masked_scatter(
        places.unsqueeze(-1), image_hidden_states
    )
    logp_TV = model(input_ids=tokens, use_cache=False, **images).logits[0].log_softmax(-1)
    return logp_TV[prompt_length - 1 : -1].gather(1, tokens[0, prompt_length:, None])[:, 0]


def learned(bench: Bench, model: Path) -> dict[str, Any]:
    """Log-probabilities of all rows in one pack, two optimizer steps, and the weights after them."""
    _, backend = bench.backend()
    engine, rows = build(bench, backend), image_rows(model)
    steps = make_plan(rows, dp_size=backend.place.dp_size, num_steps=2).steps
    [before] = engine.forward([rows])
    taken = [take_step(engine, backend, step, rows) for step in steps]
    weights = {name: tensor.cpu().clone() for name, tensor in engine.export_weights()}
    answer = {"before": before, "steps": taken, "weights": weights}
    backend.close()
    return answer


def image_cases(model: Path) -> list[Case]:
    flags = {**FSDP, **KEYS, "hf_checkpoint": str(model), "micro_batch_size": 1}
    here = "tests.helpers.image_cases:learned"
    return [
        Case(name=name, do=here, world=world, flags={**flags, **more}, arguments={"model": model})
        for name, world, more in _layouts()
    ]


def _layouts() -> Sequence[tuple[str, int, dict[str, Any]]]:
    return (("one", 1, {}), ("two", 2, {}), ("recomputed", 2, {"recompute_granularity": "full"}))
