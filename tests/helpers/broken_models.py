"""Broken models, tokenizers and checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.helpers.broken_world import CHARACTERS, World, case
from vime.config.parse import parse
from vime.ray.checkpoint import RunState, save_checkpoint
from vime.ray.checkpoint_identity import facts_of

VOCABULARY = {character: number for number, character in enumerate(CHARACTERS)}


@case(
    "a model directory that is not there", "--hf-checkpoint", "There is no such directory", "Expected", "Check the path"
)
def _(world: World) -> Sequence[str]:
    return ["--hf-checkpoint", str(world.root / "nowhere")]


@case("a file as the model directory", "--hf-checkpoint", "This is a file", "Expected", "Check the path")
def _(world: World) -> Sequence[str]:
    return ["--hf-checkpoint", str(world.model / "config.json")]


@case("an empty model directory", "--hf-checkpoint", "The directory is empty", "Expected", "Check the path")
def _(world: World) -> Sequence[str]:
    (world.root / "empty").mkdir()
    return ["--hf-checkpoint", str(world.root / "empty")]


@case("a config.json that is not JSON", "--hf-checkpoint", "JSONDecodeError", "Expected JSON with model_type")
def _(world: World) -> None:
    (world.model / "config.json").write_text('{"model_type": ')


@case(
    "a config.json that is a list",
    "--hf-checkpoint",
    "cannot be read as a decoder-only",
    "Expected JSON with model_type",
)
def _(world: World) -> None:
    (world.model / "config.json").write_text("[1, 2]")


@case(
    "a config.json without layers", "--hf-checkpoint", "num_layers", "Expected JSON with model_type; num_hidden_layers"
)
def _(world: World) -> None:
    (world.model / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 32}))


@case("an encoder's config.json", "model_type 't5' is not supported", "Expected one of deepseek_v3")
def _(world: World) -> None:
    world.config(model_type="t5")


@case("a family that only the other backend trains", "'gpt_neox' is not supported", "--train-backend fsdp trains this")
def _(world: World) -> None:
    world.config(model_type="gpt_neox", hidden_act="gelu", rotary_pct=0.25)


@case("a sliding window", "use_sliding_window=True", "computes use_sliding_window=False only", "Use another model")
def _(world: World) -> None:
    world.config(use_sliding_window=True)


@case("no weights", "--hf-checkpoint", "no *.safetensors there", "Expected Hugging Face weights", "check the path")
def _(world: World) -> None:
    (world.model / "model.safetensors").unlink()


@case(
    "weights cut short",
    "model.safetensors",
    "not a complete safetensors file",
    "Expected weights",
    "copy the file again",
)
def _(world: World) -> None:
    file = world.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


@case(
    "weights that are text",
    "model.safetensors",
    "not a complete safetensors file",
    "Expected weights",
    "copy the file again",
)
def _(world: World) -> None:
    (world.model / "model.safetensors").write_text("<html>404 not found</html>" * 40)


@case("an empty weights file", "model.safetensors (0 bytes)", "not a complete safetensors file", "copy the file again")
def _(world: World) -> None:
    (world.model / "model.safetensors").write_bytes(b"")


@case("a pointer of Git LFS", "model.safetensors", "pointer of Git LFS", "Run `git lfs pull`")
def _(world: World) -> None:
    (world.model / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )


@case("a header changed", "model.safetensors", "not a complete safetensors file", "copy the file again")
def _(world: World) -> None:
    file = world.model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[0:8] = (2**40).to_bytes(8, "little")
    file.write_bytes(bytes(data))


@case(
    "a tensor that is missing",
    "do not belong to its config.json",
    "1 tensors are missing",
    "Expected 24",
    "take config.json",
)
def _(world: World) -> None:
    world.tensors(lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))


@case("a tensor too many", "do not belong to its config.json", "1 are not expected", "Expected", "take config.json")
def _(world: World) -> None:
    world.tensors(lambda weights: weights.update(extra=np.zeros(3, np.float32)))


@case("a tensor of another shape", "model.norm.weight", "has the shape [31]", "expected [32]", "Take config.json")
def _(world: World) -> None:
    world.tensors(lambda weights: weights.update({"model.norm.weight": np.zeros(31, np.float32)}))


@case("the weights of a larger model", "do not belong to its config.json", "has the shape", "Take config.json")
def _(world: World) -> None:
    world.config(intermediate_size=128)


@case("the weights of a model with more layers", "11 are not expected", "Expected", "take config.json")
def _(world: World) -> None:
    world.config(num_hidden_layers=1)


@case(
    "an embedding smaller than vocab_size", "model.embed_tokens.weight", "has the shape [48, 32]", "expected [64, 32]"
)
def _(world: World) -> None:
    world.config(vocab_size=64)


@case("quantised weights", "model.norm.weight", "is stored as I8", "Expected F32", "before quantisation")
def _(world: World) -> None:
    world.tensors(lambda weights: weights.update({"model.norm.weight": np.zeros(32, np.int8)}))


@case(
    "an index whose file is missing",
    "model.safetensors.index.json names",
    "model-00002.safetensors",
    "finish the download",
)
def _(world: World) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (world.model / "model.safetensors.index.json").write_text(json.dumps(index))


@case(
    "an index that is not JSON",
    "model.safetensors.index.json cannot be read",
    "Expected JSON with weight_map",
    "Copy it",
)
def _(world: World) -> None:
    (world.model / "model.safetensors.index.json").write_text("{")


@case("PyTorch's weights only", "no *.safetensors there", "Expected Hugging Face weights", "PyTorch's *.bin")
def _(world: World) -> None:
    (world.model / "model.safetensors").rename(world.model / "pytorch_model.bin")


@case("GGUF weights only", "--hf-checkpoint", "There are GGUF files", "Expected", "save_pretrained")
def _(world: World) -> Sequence[str]:
    other = world.root / "gguf"
    other.mkdir()
    (other / "model.Q4.gguf").write_bytes(b"GGUF")
    return ["--hf-checkpoint", str(other)]


@case("an adapter as the model", "--hf-checkpoint", "This is an adapter (LoRA)", "merge it into its base model")
def _(world: World) -> Sequence[str]:
    other = world.root / "lora"
    other.mkdir()
    (other / "adapter_config.json").write_text("{}")
    return ["--hf-checkpoint", str(other)]


@case("a run directory as the model", "--hf-checkpoint", "checkpoint or a run directory of Vime", "give it to --load")
def _(world: World) -> Sequence[str]:
    (world.root / "earlier" / "checkpoints").mkdir(parents=True)
    return ["--hf-checkpoint", str(world.root / "earlier")]


@case(
    "a missing tokenizer",
    "--hf-checkpoint",
    "no tokenizer there",
    "Expected tokenizer.json",
    "Copy the tokenizer files",
)
def _(world: World) -> None:
    (world.model / "tokenizer.json").unlink()


@case("a tokenizer that is not JSON", "tokenizer.json", "cannot be read", "Copy the tokenizer files")
def _(world: World) -> None:
    (world.model / "tokenizer.json").write_text("{")


@case("a tokenizer of another format", "tokenizer.json", "cannot be read", "Copy the tokenizer files")
def _(world: World) -> None:
    (world.model / "tokenizer.json").write_text(json.dumps({"vocab": ["a"]}))


@case("a tokenizer without tokens", "tokenizer.json has no tokens", "Expected a vocabulary", "Copy the tokenizer files")
def _(world: World) -> None:
    world.write_tokenizer({})


@case("token ids beyond the embedding", "ids up to 99", "vocab_size 48", "Expected ids below 48", "take the tokenizer")
def _(world: World) -> None:
    world.write_tokenizer({**VOCABULARY, "~": 99})


@case(
    "a tokenizer_config.json that is not JSON",
    "tokenizer_config.json is not JSON",
    "Expected an object",
    "copy it again",
)
def _(world: World) -> None:
    (world.model / "tokenizer_config.json").write_text("{")


@case(
    "a generation_config.json that is a list", "generation_config.json is a list", "expected a JSON object", "Copy it"
)
def _(world: World) -> None:
    (world.model / "generation_config.json").write_text("[]")


@case("a reference of another vocabulary", "--ref-load", "has 32 tokens", "expected at least", "same family")
def _(world: World) -> Sequence[str]:
    other = world.write_model(world.root / "reference", vocab_size=32)
    return ["--ref-load", str(other), "--use-kl-loss", "--kl-loss-coef", "0.1"]


@case(
    "a reference cut short", "--ref-load", "not a complete safetensors file", "Expected weights", "copy the file again"
)
def _(world: World) -> Sequence[str]:
    other = world.write_model(world.root / "reference")
    (other / "model.safetensors").write_bytes(b"12345678")
    return ["--ref-load", str(other), "--use-kl-loss", "--kl-loss-coef", "0.1"]


@case("a reference that is not there", "--ref-load", "no *.safetensors there", "Expected", "check the path")
def _(world: World) -> Sequence[str]:
    return ["--ref-load", str(world.root / "nowhere"), "--use-kl-loss", "--kl-loss-coef", "0.1"]


@case(
    "a critic of another size",
    "--critic-load",
    "do not belong to its config.json",
    "expected [48, 64]",
    "Take config.json",
)
def _(world: World) -> Sequence[str]:
    other = world.write_model(world.root / "critic")
    (other / "config.json").write_text(
        json.dumps(json.loads((other / "config.json").read_text()) | {"hidden_size": 64})
    )
    return ["--advantage-estimator", "ppo", "--critic-load", str(other)]


def checkpoint(world: World, *flags: str, root: str = "checkpoints") -> Path:
    """A checkpoint of a run with these flags, as far as anything reads it before the trainers."""
    chosen = parse([*world.flags(), *flags])
    state = RunState(rollout_id=0, version=1, data_source={}, written_with=facts_of(chosen))
    return save_checkpoint(world.root / root, state, lambda directory: (directory / "w").write_text("w") and None)


@case("--load of nothing", "--load", "does not exist", "Expected a directory of checkpoints", "remove the flag")
def _(world: World) -> Sequence[str]:
    return ["--load", str(world.root / "nowhere")]


@case("--load of a file", "--load", "is a file", "Expected a directory of checkpoints")
def _(world: World) -> Sequence[str]:
    return ["--load", str(world.prompts)]


@case("--load of a Hugging Face model", "--load", "is a Hugging Face model", "give it to --hf-checkpoint")
def _(world: World) -> Sequence[str]:
    return ["--load", str(world.model)]


@case("--load of Megatron's checkpoints", "--load", "checkpoint of another trainer", "give them to --hf-checkpoint")
def _(world: World) -> Sequence[str]:
    directory = world.root / "megatron" / "iter_0000010"
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(b"x")
    (world.root / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    return ["--load", str(world.root / "megatron")]


@case("--load of another backend's checkpoint", "--train-backend fsdp, this run has megatron", "use the backend")
def _(world: World) -> Sequence[str]:
    return ["--load", str(checkpoint(world, "--train-backend", "fsdp"))]


@case("--load of another model's checkpoint", "is of another model", "hidden_size 64, not 32", "Give the model it was")
def _(world: World) -> Sequence[str]:
    other = World(world.root / "other").make() if (world.root / "other").mkdir() is None else world
    other.write_model(other.model, hidden_size=64)
    return ["--load", str(checkpoint(other))]


@case("--load of another algorithm's checkpoint", "holds no critic", "load a checkpoint that was written with one")
def _(world: World) -> Sequence[str]:
    return ["--load", str(checkpoint(world)), "--advantage-estimator", "ppo"]


@case(
    "--load of another mode's checkpoint", "written without a ledger", "Resume without --transferqueue-mode streaming"
)
def _(world: World) -> Sequence[str]:
    return ["--load", str(checkpoint(world)), "--transferqueue-mode", "streaming"]


@case("--load of a damaged checkpoint", "--load", "are not as they were written", "expected what", "Copy it again")
def _(world: World) -> Sequence[str]:
    found = checkpoint(world)
    (found / "model" / "w").write_text("other")
    return ["--load", str(found)]


@case("--load without run_state.json", "--load", "without its run_state.json", "Expected every file", "copy it again")
def _(world: World) -> Sequence[str]:
    found = checkpoint(world)
    (found / "run_state.json").unlink()
    shutil.move(str(found), world.root / "alone")
    return ["--load", str(world.root / "alone")]


@case(
    "a marker that names nothing", "latest_checkpointed_iteration.txt names '77'", "complete are", "Write another name"
)
def _(world: World) -> Sequence[str]:
    found = checkpoint(world)
    (found.parent / "latest_checkpointed_iteration.txt").write_text("77")
    return ["--load", str(found.parent)]


@case(
    "a reference model as slime converts it",
    *(
        "--ref-load",
        "checkpoint of another trainer",
        "the Hugging Face model that it was made from",
        "Expected Hugging Face weights",
    ),
)
def _(world: World) -> Sequence[str]:
    directory = world.root / "model_torch_dist"
    (directory / "iter_0000001").mkdir(parents=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("1\n")
    (directory / "iter_0000001" / "common.pt").write_bytes(b"")
    return ["--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", str(directory)]
