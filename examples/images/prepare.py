"""Make a tiny model that reads images, and pictures of drawn shapes to train it on: no download, some ten seconds.

The task is "What colour?". A picture shows one to three shapes of one of six colours on a grey ground; the answer is
the colour's name. The model, a random Idefics3, is first shown pictures with names drawn at random, for as many steps
as it takes until it answers with one name and nothing else. So it has learned the form of an answer and nothing about
pictures: it guesses, and is right once in six. Rewards alone can teach it to look.

`swapped.jsonl` has the questions and labels of `eval.jsonl` with each other's pictures, so that among the pictures of a
label every colour is as frequent. Whoever answers by the picture is right once in six there, and so is whoever guesses.

    python examples/images/prepare.py --data-dir data/images-seed0

Running it again does nothing while model and data match the arguments (see `made.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from PIL.Image import Image

RECIPE = 1  # raise when anything below changes the outputs
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 220, 50),
    "purple": (170, 60, 200),
    "orange": (250, 140, 30),
}
SHAPES = ("circle", "square", "triangle")
SIDE, PATCH, SCALE = 32, 8, 2  # an image becomes (32 / 8 / 2) ** 2 = 4 tokens
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
WORDS = ["<pad>", "<s>", "</s>", *MARKS, "<end_of_utterance>", "<unk>", "USER", "ASSISTANT", "What", "colour", "?"]
WORDS += [*COLOURS, *SHAPES]
"""The vocabulary; a token's id is its place."""
PAD, BOS, EOS, IMAGE = range(4)
VOCAB_SIZE = 64  # the rest is never used
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT{% endif %}"
)
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour ?"}]}]

BATCH, LEARNING_RATE, MOST_STEPS = 32, 2e-3, 400
LEAST_FORM = 0.97  # probability of a name, and of the end after it
LARGEST_NAME = 0.3  # probability of any one name for any picture: it guesses, and every name may be tried


def draw(rng: random.Random, colour: str) -> Image:
    """One to three shapes of the colour, each anywhere and a quarter to a half as wide as the picture."""
    from PIL import Image as Images
    from PIL import ImageDraw

    ground = rng.randrange(90, 166)
    image = Images.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    shade = tuple(min(255, max(0, part + rng.randrange(-20, 21))) for part in COLOURS[colour])
    for _ in range(rng.randrange(1, 4)):
        size = rng.randrange(SIDE // 4, SIDE // 2 + 1)
        left, top = rng.randrange(SIDE - size), rng.randrange(SIDE - size)
        right, bottom = left + size, top + size
        shape = rng.choice(SHAPES)
        if shape == "circle":
            pen.ellipse((left, top, right, bottom), fill=shade)
        elif shape == "square":
            pen.rectangle((left, top, right, bottom), fill=shade)
        else:
            pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=shade)
    return image


def record(file: str, colour: str) -> str:
    return json.dumps({"input": QUESTION, "images": [file], "label": colour}) + "\n"


def partner(number: int) -> int:
    """Whose picture record `number` has in swapped.jsonl: colours go round, so of 36 records each label has each of
    them once."""
    row, column = divmod(number, len(COLOURS))
    return row * len(COLOURS) + (column + row) % len(COLOURS)


def write_data(directory: Path, *, num_train: int, num_eval: int, seed: int) -> None:
    """train.jsonl, eval.jsonl and swapped.jsonl, with the pictures in `pictures/`."""
    pictures = directory / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1000 + seed)
    names = list(COLOURS)
    by_set: dict[str, list[tuple[str, str]]] = {"train": [], "eval": []}
    for kind, count in (("train", num_train), ("eval", num_eval)):
        for number in range(count):
            colour = names[number % len(names)]
            file = f"pictures/{kind}_{number:04d}.png"
            draw(rng, colour).save(directory / file)
            by_set[kind].append((file, colour))
    swapped = [(by_set["eval"][partner(number)][0], colour) for number, (_, colour) in enumerate(by_set["eval"])]
    for name, pairs in (("train", by_set["train"]), ("eval", by_set["eval"]), ("swapped", swapped)):
        write_atomically(directory / f"{name}.jsonl", "".join(record(file, colour) for file, colour in pairs))


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def build_processor() -> Any:
    """One token a word. Without image splitting a picture of any size becomes IMAGE_TOKENS places between marks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Idefics3ImageProcessor, Idefics3Processor, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(WORDS)}
    words |= {f"<{number}>": number for number in range(len(WORDS), VOCAB_SIZE)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    images = Idefics3ImageProcessor(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE)


def build_model(seed: int) -> Any:
    """A tower of two layers and a Llama of two, hidden 64. Heads of 32 are the smallest that vLLM's CPU attention
    takes."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(seed)
    layers = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    text = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        **ids,
        **layers,
    }
    vision = {"image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.1, **layers}
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        scale_factor=SCALE,
        tie_word_embeddings=False,
        **ids,
    )
    return Idefics3ForConditionalGeneration(config)


def teach_the_form(model: Any, processor: Any, seed: int) -> dict[str, float]:
    """Show pictures with names that have nothing to do with them until each answer is one name and its end, and every
    name is about as likely. Returns what `measure` found last."""
    import torch

    rng = random.Random(seed)
    names = [WORDS.index(colour) for colour in COLOURS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    measured: dict[str, float] = {}
    for step in range(1, MOST_STEPS + 1):
        inputs = batch(processor, [draw(rng, rng.choice(list(COLOURS))) for _ in range(BATCH)])
        answers = torch.tensor([[rng.choice(names), EOS] for _ in range(BATCH)])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answers], 1)
        log_probs = model(**inputs).logits[:, -3:-1].float().log_softmax(-1)
        loss = -log_probs.gather(2, answers[..., None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 10)
        optimizer.step()
        if step % 20 == 0:
            measured = measure(model, processor)
            say(f"model: step {step}, {measured}")
            if refusal(measured) is None:
                break
    return measured


def batch(processor: Any, images: list[Image]) -> dict[str, Any]:
    """The question about each of the images, without attention_mask: all are of one length."""
    text = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
    made = processor(text=[text] * len(images), images=[[image] for image in images], return_tensors="pt")
    return {name: made[name] for name in ("input_ids", "pixel_values", "pixel_attention_mask")}


def measure(model: Any, processor: Any, *, num_pictures: int = 120, seed: int = 5) -> dict[str, float]:
    """`form`: probability of a name and its end; `name`: of the likeliest name; `right`: of the right one."""
    import torch

    rng = random.Random(seed)
    names = [WORDS.index(colour) for colour in COLOURS]
    colours = [list(COLOURS)[number % len(COLOURS)] for number in range(num_pictures)]
    inputs = batch(processor, [draw(rng, colour) for colour in colours])
    with torch.no_grad():
        first = model(**inputs).logits[:, -1].float().softmax(-1)
        guessed = torch.tensor([[rng.choice(names)] for _ in colours])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], guessed], 1)
        ends = model(**inputs).logits[:, -1].float().softmax(-1)[:, EOS]
    by_name = first[:, names]
    right = by_name.gather(1, torch.tensor([[list(COLOURS).index(colour)] for colour in colours]))
    found = {"form": (by_name.sum(1) * ends).min(), "name": by_name.max(), "right": right.mean()}
    return {name: round(float(value), 3) for name, value in found.items()}


def refusal(measured: dict[str, float]) -> str | None:
    """Why a model is no start; None when it is one."""
    if measured["form"] < LEAST_FORM:
        return f"a name and its end have probability {measured['form']}, expected at least {LEAST_FORM}"
    if measured["name"] > LARGEST_NAME:
        return f"it prefers a name, with probability {measured['name']}, expected at most {LARGEST_NAME}"
    return None


def make_model(directory: Path, seed: int) -> dict[str, float]:
    """Build, teach and write the model; or end with a message and exit code 1."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    model, processor = build_model(seed), build_processor()
    say(f"model: {sum(part.numel() for part in model.parameters()):,} parameters, taught the form of an answer")
    measured = teach_the_form(model, processor, seed)
    reason = refusal(measured)
    if reason is not None:
        sys.exit(f"prepare: no model is written: {reason}. Take another --seed.")
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return measured


def is_made(directory: Path, wanted: dict[str, object], outputs: list[str]) -> bool:
    """Whether made.json records these arguments and every output is there."""
    try:
        made = json.loads((directory / "made.json").read_text())
    except (OSError, ValueError):
        return False
    is_whole = all((directory / name).is_file() for name in outputs)
    return is_whole and all(made.get(key) == value for key, value in wanted.items())


def say(text: str) -> None:
    sys.stdout.write(f"prepare: {text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data/images-seed0"), help="the model is in its model/")
    parser.add_argument("--seed", type=int, default=0, help="of pictures, first weights and names (default: 0)")
    parser.add_argument("--num-train", type=int, default=960, help="training pictures (default: 960)")
    parser.add_argument("--num-eval", type=int, default=144, help="held-out pictures, a multiple of 36 (default: 144)")
    options = parser.parse_args()
    if options.num_eval % len(COLOURS) ** 2:
        sys.exit(f"prepare: --num-eval {options.num_eval}: expected a multiple of {len(COLOURS) ** 2}.")
    data, model = options.data_dir, options.data_dir / "model"
    wanted = {"recipe": RECIPE, "seed": options.seed, "train": options.num_train, "eval": options.num_eval}
    if is_made(data, wanted, ["train.jsonl", "eval.jsonl", "swapped.jsonl", "model/model.safetensors"]):
        say(f"{data} is up to date")
        return
    (data / "made.json").unlink(missing_ok=True)
    write_data(data, num_train=options.num_train, num_eval=options.num_eval, seed=options.seed)
    say(f"data: {options.num_train} training and {options.num_eval} held-out pictures in {data}")
    measured = make_model(model, options.seed)
    write_atomically(data / "made.json", json.dumps({**wanted, **measured}) + "\n")
    say(f"model: {model}; {measured}")


if __name__ == "__main__":
    main()
