"""The images of a row as its trainer needs them: named arrays in one cell of bytes (a safetensors file). And as an engine
gets them, in a request.

No pickle: reading runs no code of the writer. `rollout/images.py` writes the cell, `backends/fsdp_utils/vision.py` reads
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from vime.data.rows import TrainRow
from vime.types import HandoffError

IMAGE_COLUMN = "multimodal_train_inputs"


def pack_images(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Return the arrays as bytes; b"" for a row without images."""
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()}) if arrays else b""


def images_of(row: TrainRow) -> bytes:
    """Return the cell of a row; b"" without images."""
    cell = row.extra.get(IMAGE_COLUMN, b"")
    if not isinstance(cell, bytes):
        raise HandoffError(f"{row.name}: {IMAGE_COLUMN} holds an array, expected bytes of `pack_images`.")
    return cell


def unpack_images(cell: bytes, where: str) -> dict[str, NDArray[np.generic]]:
    """Read what `pack_images` wrote; HandoffError, which names `where`, when it is something else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if not cell:
        return {}
    try:
        return load(bytes(cell))
    except SafetensorError as error:
        raise HandoffError(
            f"{where}: its {IMAGE_COLUMN} cannot be read: {error}. Expected what --multimodal-keys stores."
        ) from error


def engine_prompt(inputs: Mapping[str, object], tokens: Sequence[int]) -> list[int]:
    """Return `tokens` as the engine gets them: one image token an image in the prompt, then what came after it.
    `inputs`: `Sample.multimodal_inputs`."""
    prompt_ids, length = cast("list[int]", inputs["prompt_ids"]), cast("int", inputs["prompt_length"])
    return [*prompt_ids, *tokens[length:]]


def prompt_fields(tokens: Sequence[int], inputs: Mapping[str, object] | None) -> dict[str, object]:
    """Return the fields of a request to vLLM's /inference/v1/generate that hold the prompt. With images the engine
    expands their tokens itself, and returns to what."""
    if not inputs:
        return {"token_ids": list(tokens)}
    urls = cast("list[str]", inputs["images"])
    parts = [{"type": "image_url", "url": url} for url in urls]
    return {"token_ids": engine_prompt(inputs, tokens), "content_parts": parts, "return_token_ids": True}
