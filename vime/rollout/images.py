"""Images of prompts: from a record to the engine and to the trainer's column.

A record holds paths, data URLs, base64 or bytes (`--multimodal-keys '{"image": "images"}'`). They are read once, into
`Sample.multimodal_inputs`, which is JSON, so that ledger, spool, checkpoints and dumps carry it like any other field:

    {"images": [data URL, ...], "prompt_ids": tokens with one image token an image, "prompt_length": len(tokens)}

`Sample.tokens` has the prompt as the model sees it: each image token is expanded to the places of its image, by the
model's own processor. The engine gets `prompt_ids` and the images and expands them itself; what it made of them comes
back with the response and must be the same tokens.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from vime.config.parse import Args
from vime.data.images import pack_images
from vime.types import DataError, HandoffError, Sample, describe

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

EXPECTED = "Expected a PNG, JPEG or WebP image: a path, a data URL, base64, bytes, or a list of them."
MIME = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
COLUMNS = ("pixel_values", "pixel_attention_mask")


def image_key(args: Args) -> str | None:
    """Return the record key of the images; None without --multimodal-keys."""
    return None if args.multimodal_keys is None else cast("str", json.loads(args.multimodal_keys)["image"])


def read_images(args: Args, record: Mapping[str, object], directory: Path, where: str) -> tuple[str, ...]:
    """Return the record's images as data URLs, each decoded once to see that it is whole. DataError when one is not.
    Relative paths begin at `directory`, that of the record's file."""
    key = image_key(args)
    found = record.get(key) if key is not None else None
    if found is None:
        return ()
    entries = found if isinstance(found, list) else [found]
    return tuple(
        _data_url(entry, directory, f"{where}: image {number} of {len(entries)} ({key!r})")
        for number, entry in enumerate(entries, start=1)
    )


def _data_url(entry: object, directory: Path, where: str) -> str:
    content = _content(entry, directory, where)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            kind = image.format
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: {_named(entry)} cannot be opened: {describe(error)}. {EXPECTED}") from error
    if kind not in MIME:
        raise DataError(f"{where}: {_named(entry)} is {kind}. {EXPECTED}")
    return f"data:{MIME[kind]};base64,{base64.b64encode(content).decode()}"


def _content(entry: object, directory: Path, where: str) -> bytes:
    """Return the bytes of an image file. `entry` may be what `datasets` stores: {"bytes": ..., "path": ...}."""
    if isinstance(entry, Mapping):
        entry = entry.get("bytes") or entry.get("path")
    if isinstance(entry, bytes):
        return entry
    if not isinstance(entry, str) or not entry:
        raise DataError(f"{where}: got {_named(entry)}. {EXPECTED}")
    encoded = entry.partition(",")[2] if entry.startswith("data:") else entry
    path = directory / Path(entry).expanduser()
    if not entry.startswith("data:") and (len(entry) < 256 or path.suffix) and _is_file(path):
        return path.read_bytes()
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"{where}: {_named(entry)}: there is no such file. {EXPECTED}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _named(entry: object) -> str:
    return f"{entry!r:.80}" if isinstance(entry, str) else type(entry).__name__


@lru_cache(maxsize=2)
def load_processor(directory: str) -> ProcessorMixin:
    """Return the processor of --hf-checkpoint, tokenizer and image processor."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(str(Path(directory).expanduser()), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"--hf-checkpoint {directory}: no processor can be loaded from there: {describe(error)}. --multimodal-keys "
            "needs processor_config.json or preprocessor_config.json."
        ) from error
    if not hasattr(processor, "image_processor"):
        raise DataError(
            f"--hf-checkpoint {directory}: its processor reads no images, which --multimodal-keys needs. Give a model "
            "with vision, or remove the flag."
        )
    return cast("ProcessorMixin", processor)


def expand_prompt(
    args: Args, text: str, images: Sequence[str], where: str, *, special: bool
) -> tuple[list[int], dict[str, object]]:
    """Return the prompt's tokens with the places of its images, and `Sample.multimodal_inputs`. `special`: the
    tokenizer adds its own special tokens."""
    processor = load_processor(args.hf_checkpoint)
    token = str(vars(processor)["image_token"])
    if text.count(token) != len(images):
        raise DataError(
            f"{where}: {len(images)} images, but the prompt has {text.count(token)} times {token!r}. Expected one for "
            "each image, in their order; in chat messages a part of type image."
        )
    opened = [_open(url) for url in images]
    try:
        whole = processor(text=text, images=opened, add_special_tokens=special)["input_ids"]
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: the processor refused the prompt: {describe(error)}.") from error
    tokens = list(whole[0] if isinstance(whole[0], list) else whole)
    short = list(processor.tokenizer(text, add_special_tokens=special)["input_ids"])
    return tokens, {"images": list(images), "prompt_ids": short, "prompt_length": len(tokens)}


def _open(url: str) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")


def engine_prompt(sample_inputs: Mapping[str, object], tokens: Sequence[int]) -> list[int]:
    """Return `tokens` as the engine gets them: one image token an image in the prompt, then what came after it."""
    prompt_ids, length = cast("list[int]", sample_inputs["prompt_ids"]), cast("int", sample_inputs["prompt_length"])
    return [*prompt_ids, *tokens[length:]]


def content_parts(sample_inputs: Mapping[str, object]) -> list[dict[str, str]]:
    """Return the images as vLLM's /inference/v1/generate takes them."""
    return [{"type": "image_url", "url": url} for url in cast("list[str]", sample_inputs["images"])]


def image_column(args: Args, sample: Sample, where: str) -> bytes:
    """Return the cell of `multimodal_train_inputs`: the arrays that a plug-in set, else those of the processor."""
    given = sample.multimodal_train_inputs
    if given is not None:
        missing = [name for name in COLUMNS if name not in given]
        if missing:
            raise HandoffError(f"{where}: multimodal_train_inputs has no {', '.join(missing)}.")
        return pack_images({name: np.asarray(given[name]) for name in COLUMNS})
    if not sample.multimodal_inputs:
        return b""
    return _processed(args.hf_checkpoint, tuple(cast("list[str]", sample.multimodal_inputs["images"])))


@lru_cache(maxsize=64)
def _processed(directory: str, images: tuple[str, ...]) -> bytes:
    """Return the cell. Cached: the samples of a group have the same images."""
    made = load_processor(directory).image_processor([_open(url) for url in images], return_tensors="np")
    pixels = np.asarray(made["pixel_values"], dtype=np.float32)
    mask = np.asarray(made["pixel_attention_mask"], dtype=np.uint8)
    return pack_images({"pixel_values": pixels[0], "pixel_attention_mask": mask[0]})
