"""A tiny random Idefics3 on disk with its processor, images of one colour, and the family's log-probabilities.

Idefics3: a SigLIP tower, a projection, and a Llama whose positions are those of text. Without image splitting an image
of any size becomes `IMAGE_IDS`: `IMAGE_TOKENS` places between tokens that mark it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
WORDS = ["<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
WORDS += ["<unk>", "USER", "ASSISTANT", "What", "colour", "?", "and", *COLOURS]
"""The vocabulary; a token's id is its place. The rest is filled with numbers."""
VOCAB = 64
IMAGE_TOKEN = 3
SIDE, PATCH = 16, 4
IMAGE_TOKENS = 4  # (16 / 4) ** 2 patches, of which 2 x 2 become one token
IMAGE_IDS = [4, 5, 3, 3, 3, 3, 4]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }} {% if message['content'] is string %}"
    "{{ message['content'] }} {% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image> "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT{% endif %}"
)


def make_idefics3(directory: Path, *, seed: int = 0, tied: bool = False, scale: float = 0.2) -> Path:
    """Two layers of a Llama of hidden 64, two layers of a tower of hidden 64. Heads of 32: vLLM's CPU build has no
    attention for smaller ones."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    text = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "initializer_range": scale,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": tied,
        **heads,
    }
    vision = {"image_size": SIDE, "patch_size": PATCH, "initializer_range": scale, **heads}
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(directory)
    _save_processor(directory)
    return directory


def _save_processor(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Idefics3ImageProcessor, Idefics3Processor, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(WORDS)}
    words |= {f"<{number}>": number for number in range(len(WORDS), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<image>", "<fake_token_around_image>", "<global-img>"]})
    fast.chat_template = TEMPLATE
    images = Idefics3ImageProcessor(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    Idefics3Processor(images, fast, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE).save_pretrained(directory)


def picture(colour: str, *, side: int = 20) -> Image:
    from PIL import Image as Images

    return Images.new("RGB", (side, side), COLOURS[colour])


def png(colour: str, *, side: int = 20) -> bytes:
    buffer = io.BytesIO()
    picture(colour, side=side).save(buffer, format="PNG")
    return buffer.getvalue()


def load(directory: Path) -> torch.nn.Module:
    from transformers import Idefics3ForConditionalGeneration

    return Idefics3ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()


def processed(directory: Path, text: str, images: Sequence[Image]) -> dict[str, Any]:
    """Return input_ids, pixel_values and pixel_attention_mask by the directory's processor."""
    from transformers import AutoProcessor

    return dict(AutoProcessor.from_pretrained(directory)(text=text, images=list(images), return_tensors="pt"))


def log_probs(model: torch.nn.Module, tokens: Sequence[int], images: dict[str, Any]) -> list[float]:
    """Log-probability of tokens[1:], each given those before it and the images."""
    given = {name: images[name] for name in ("pixel_values", "pixel_attention_mask")}
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)]), **given).logits
    logp_TV = logits[0, :-1].log_softmax(-1)
    return [float(logp_TV[position, token]) for position, token in enumerate(tokens[1:])]
