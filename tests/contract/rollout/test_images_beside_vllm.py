"""The trainer is shown the picture that vLLM makes of the same bytes: its log-probabilities would be of another one
otherwise."""

import base64
import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from vime.rollout import images

CHANCE = np.random.default_rng(0)


def noise(mode: str, *, width: int = 13, height: int = 7) -> Image.Image:
    """A picture of which no two parts are alike, transparency included."""
    channels = len(mode) if mode in ("LA", "RGB", "RGBA", "CMYK") else 1
    shape = (height, width) if channels == 1 else (height, width, channels)
    return Image.fromarray(CHANCE.integers(0, 256, shape, dtype=np.uint8), mode=mode)


def saved(picture: Image.Image, kind: str, **settings: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format=kind, **settings)
    return buffer.getvalue()


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(noise("RGB"), kind, exif=exif)


def palette() -> bytes:
    """Colour 3 of a palette is transparent."""
    return saved(noise("RGB").quantize(8), "PNG", transparency=3)


def moving(kind: str) -> bytes:
    return saved(noise("RGBA"), kind, save_all=True, append_images=[noise("RGBA")])


PICTURES: dict[str, Callable[[], bytes]] = {
    **{f"png {mode}": lambda mode=mode: saved(noise(mode), "PNG") for mode in ("L", "LA", "RGB", "RGBA")},  # type: ignore[misc]
    "png 1 bit": lambda: saved(noise("L").convert("1"), "PNG"),
    "png 16 bits": lambda: saved(Image.fromarray(CHANCE.integers(0, 65536, (7, 13), dtype=np.uint16)), "PNG"),
    "png palette": palette,
    "png RGB with a transparent colour": lambda: saved(noise("RGB"), "PNG", transparency=(0, 0, 0)),
    "png of several frames": lambda: moving("PNG"),
    "jpeg": lambda: saved(noise("RGB"), "JPEG"),
    "jpeg L": lambda: saved(noise("L"), "JPEG"),
    "jpeg CMYK": lambda: saved(noise("CMYK"), "JPEG"),
    **{f"jpeg turned {number}": lambda number=number: turned("JPEG", number) for number in range(1, 10)},  # type: ignore[misc]
    "jpeg with broken EXIF": lambda: saved(noise("RGB"), "JPEG", exif=b"Exif\0\0MM\0\x2a\0\0\0\x08\xff\xff\0\0"),
    "png turned": lambda: turned("PNG", 6),
    "webp": lambda: saved(noise("RGBA"), "WEBP"),
    "webp turned": lambda: turned("WEBP", 8),
    "webp of several frames": lambda: moving("WEBP"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_trainer_sees_what_vllm_sees(name: str) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    content = PICTURES[name]()
    ours = images._open(f"data:image/png;base64,{base64.b64encode(content).decode()}")
    theirs = ImageMediaIO().load_bytes(content).media
    assert (ours.mode, ours.size) == (theirs.mode, theirs.size)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
