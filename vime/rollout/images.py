"""Images of prompts: from a record to the engine and to the trainer's column.

A record holds paths, data URLs, base64 or bytes (`--multimodal-keys '{"image": "images"}'`). All are decoded once,
before the start. Of a file only path, size and hash are kept (`ImageFile`); it is read when its prompt is issued, into
`Sample.multimodal_inputs`, which is JSON, so that ledger, spool, checkpoints and dumps carry it like any other field:

    {"images": [data URL, ...], "prompt_ids": tokens with one image token an image, "prompt_length": len(tokens)}

`Sample.tokens` has the prompt as the model sees it: each image token is expanded to the places of its image, by the
model's own processor. The engine gets `prompt_ids` and the images and expands them itself; what it made of them comes
back with the response and must be the same tokens.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from vime.config.parse import Args
from vime.data.images import pack_images
from vime.types import DataError, HandoffError, Sample, SampleStatus, describe

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from transformers import ProcessorMixin

EXPECTED = "Expected a PNG, JPEG or WebP image: a path, a data URL, base64, bytes, or a list of them."
MIME = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
CHANGED = "image_changed"
"""Reason of a group of which an image file was not what it was when the run started."""
COLUMNS = ("pixel_values", "pixel_attention_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """A file as it was when the run started. `where`: of its record, for messages; `digest`: SHA-256 of the file."""

    path: str
    where: str
    kind: str  # MIME type
    num_bytes: int
    digest: bytes

    def read(self) -> str:
        """Return the data URL. DataError when the file is another one than at the start, or cannot be read."""
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            raise self._fault(describe(error)) from error
        if len(content) != self.num_bytes:
            raise self._fault(f"it has {len(content)} bytes")
        if hashlib.sha256(content).digest() != self.digest:
            raise self._fault("it has other content of the same length")
        return _encoded(self.kind, content)

    def _fault(self, got: str) -> DataError:
        return DataError(
            f"{self.where}: {self.path} has changed since the run started: {got}, expected the {self.num_bytes} bytes "
            "that were checked then. Put the file back, and leave the images of a run as they are until it ends."
        )


Image = str | ImageFile
"""A data URL, or a file that is read when it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImages:
    """The images of a prompt, and its tokens with one image token an image. `prompt_length`: with their places."""

    images: tuple[Image, ...]
    prompt_ids: tuple[int, ...]
    prompt_length: int

    def inputs(self) -> dict[str, object]:
        """Read the files and return `Sample.multimodal_inputs`. DataError when one has changed."""
        return {
            "images": [read_image(image) for image in self.images],
            "prompt_ids": list(self.prompt_ids),
            "prompt_length": self.prompt_length,
        }

    @property
    def digests(self) -> list[str]:
        """SHA-256 of the content of each image, wherever it is."""
        return [
            image.digest.hex() if isinstance(image, ImageFile) else hashlib.sha256(_decoded(image)).hexdigest()
            for image in self.images
        ]


def read_image(image: Image) -> str:
    return image if isinstance(image, str) else image.read()


def mark_image_fault(samples: Sequence[Sample], fault: str) -> None:
    """Mark a group as one whose images could not be read: it is dropped, and never generated without them."""
    for sample in samples:
        sample.status = SampleStatus.FAILED
        sample.metadata = {**sample.metadata, CHANGED: fault}


def image_key(args: Args) -> str | None:
    """Return the record key of the images; None without --multimodal-keys."""
    return None if args.multimodal_keys is None else cast("str", json.loads(args.multimodal_keys)["image"])


def read_images(args: Args, record: Mapping[str, object], directory: Path, where: str) -> tuple[Image, ...]:
    """Return the record's images, each decoded once to see that it is whole. DataError when one is not.
    Relative paths begin at `directory`, that of the record's file."""
    key = image_key(args)
    found = record.get(key) if key is not None else None
    if found is None:
        return ()
    entries = found if isinstance(found, list) else [found]
    return tuple(
        _image(entry, directory, f"{where}: image {number} of {len(entries)} ({key!r})")
        for number, entry in enumerate(entries, start=1)
    )


def _image(entry: object, directory: Path, where: str) -> Image:
    content, path = _content(entry, directory, where)
    from PIL import Image as Images

    try:
        with Images.open(io.BytesIO(content)) as image:
            image.load()
            name = image.format
    except (OSError, ValueError, SyntaxError, Images.DecompressionBombError) as error:
        raise DataError(f"{where}: {_named(entry)} cannot be opened: {describe(error)}. {EXPECTED}") from error
    if name not in MIME:
        raise DataError(f"{where}: {_named(entry)} is {name}. {EXPECTED}")
    if path is None:
        return _encoded(MIME[name], content)
    digest = hashlib.sha256(content).digest()
    return ImageFile(path=str(path), where=where, kind=MIME[name], num_bytes=len(content), digest=digest)


def _content(entry: object, directory: Path, where: str) -> tuple[bytes, Path | None]:
    """Return the bytes of an image, and of a file its path. `entry` may be what `datasets` stores:
    {"bytes": ..., "path": ...}."""
    if isinstance(entry, Mapping):
        entry = entry.get("bytes") or entry.get("path")
    if isinstance(entry, bytes):
        return entry, None
    if not isinstance(entry, str) or not entry:
        raise DataError(f"{where}: got {_named(entry)}. {EXPECTED}")
    is_url = entry.startswith("data:")
    path = None if is_url else _file(entry, directory)
    if path is not None:
        try:
            return path.read_bytes(), path
        except OSError as error:
            raise DataError(f"{where}: {_named(entry)} cannot be read: {describe(error)}. {EXPECTED}") from error
    try:
        return base64.b64decode(entry.partition(",")[2] if is_url else entry, validate=True), None
    except (binascii.Error, ValueError) as error:
        fault = f"its base64 cannot be read: {error}" if is_url else "there is no such file"
        raise DataError(f"{where}: {_named(entry)}: {fault}. {EXPECTED}") from None


def _encoded(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _decoded(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def _file(entry: str, directory: Path) -> Path | None:
    """Return the file that a record names; None when there is none."""
    try:
        path = directory / Path(entry).expanduser()
        return path if (len(entry) < 256 or path.suffix) and path.is_file() else None
    except (OSError, RuntimeError):  # a name that is too long; a home of nobody
        return None


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
    args: Args, text: str, images: Sequence[Image], where: str, *, special: bool
) -> tuple[list[int], PromptImages]:
    """Return the prompt's tokens with the places of its images, and what is kept of the images. `special`: the
    tokenizer adds its own special tokens."""
    processor = load_processor(args.hf_checkpoint)
    token = str(vars(processor)["image_token"])
    if text.count(token) != len(images):
        raise DataError(
            f"{where}: {len(images)} images, but the prompt has {text.count(token)} times {token!r}. Expected one for "
            "each image, in their order; in chat messages a part of type image."
        )
    opened = [_open(read_image(image)) for image in images]
    try:
        whole = processor(text=text, images=opened, add_special_tokens=special)["input_ids"]
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: the processor refused the prompt: {describe(error)}.") from error
    tokens = list(whole[0] if isinstance(whole[0], list) else whole)
    short = tuple(processor.tokenizer(text, add_special_tokens=special)["input_ids"])
    return tokens, PromptImages(images=tuple(images), prompt_ids=short, prompt_length=len(tokens))


def single_image_prompt(args: Args, png: bytes) -> tuple[list[int], dict[str, object]]:
    """Return the tokens of a prompt that is one image and nothing else, and its `Sample.multimodal_inputs`."""
    token = str(vars(load_processor(args.hf_checkpoint))["image_token"])
    tokens, images = expand_prompt(args, token, [_encoded("image/png", png)], "one image", special=False)
    return tokens, images.inputs()


def refuse_places(args: Args, token_ids: Sequence[int], where: str) -> None:
    """Refuse a prompt without images that has an image token: the trainer would look for its image."""
    processor = load_processor(args.hf_checkpoint)
    token = str(vars(processor)["image_token"])
    number = processor.tokenizer.convert_tokens_to_ids(token)
    if number in token_ids:
        raise DataError(
            f"{where}: 0 images, but the prompt has {list(token_ids).count(number)} times {token!r}. Give its images "
            "under the key of --multimodal-keys, or take the token out of the text."
        )


def _open(url: str) -> Picture:
    """Return the picture that vLLM makes of the same bytes: the first frame, turned as its EXIF says, what is
    transparent on white."""
    from PIL import Image as Images
    from PIL import ImageOps

    picture: Picture = Images.open(io.BytesIO(_decoded(url)))
    with contextlib.suppress(Exception):  # as vLLM: EXIF that cannot be read turns nothing
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "RGB" or not (picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info):
        return picture.convert("RGB")
    layers = picture.convert("RGBA")
    whole = Images.new("RGB", layers.size, (255, 255, 255))
    whole.paste(layers, mask=layers.getchannel("A"))
    return whole


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
