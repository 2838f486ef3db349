"""Check a Hugging Face directory by the headers of its files: the tokenizer, the tensors, and what else it may be.

A gigabyte of weights has a header of some kilobytes, so all of this is known before any process starts, and without
torch or transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.types import ConfigError

INDEX = "model.safetensors.index.json"
TRAINABLE = ("F32", "F16", "BF16", "F64")
"""As safetensors spells them. Integers are a quantised model's, which no backend here can train."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json"),
    *("vocab.txt", "tiktoken.model", "tekken.json"),
)
COPY_TOKENIZER = (
    "Copy the tokenizer files of the model that it was made from there (tokenizer.json, tokenizer_config.json), or "
    "write them with `AutoTokenizer.from_pretrained(...).save_pretrained(DIRECTORY)`."
)
LFS_MARK = b"version https://git-lfs"
MAX_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: str
    file: str


def read_headers(directory: str, *, flag: str) -> dict[str, TensorHeader]:
    """Return every tensor of DIRECTORY/*.safetensors by name; ConfigError for a file that is missing, cut short or
    invalid."""
    from safetensors import SafetensorError, safe_open

    path, where = Path(os.path.expanduser(directory)), f"{flag} {directory}"
    found: dict[str, TensorHeader] = {}
    for name in _weight_files(path, where):
        file = path / name
        try:
            _refuse_pointer(file, where)
            with safe_open(str(file), "np") as opened:
                for key in opened.keys():  # noqa: SIM118  not a dict
                    part = opened.get_slice(key)
                    found[key] = TensorHeader(shape=tuple(part.get_shape()), dtype=str(part.get_dtype()), file=name)
        except (OSError, SafetensorError) as error:
            size = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
            raise ConfigError(
                f"{where}: {name} ({size}) is not a complete safetensors file: {error}. Expected weights as "
                "transformers writes them; copy the file again from where it came from, and compare the sizes."
            ) from error
    return found


def _weight_files(path: Path, where: str) -> list[str]:
    """Return the files that hold the weights: those of the index, else all."""
    index = path / INDEX
    if not index.is_file():
        return sorted(file.name for file in path.glob("*.safetensors"))
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {INDEX} cannot be read: {type(error).__name__} {error}. Expected JSON with weight_map, "
            "tensor to file. Copy it again, or remove it if all weights are in one file."
        ) from error
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"{where}: {INDEX} names {len(names)} files, of which {len(missing)} are not there: "
            f"{_some(missing)}. Expected all of them; finish the download or the copy."
        )
    return names


def _refuse_pointer(file: Path, where: str) -> None:
    with file.open("rb") as opened:
        if opened.read(len(LFS_MARK)) == LFS_MARK:
            raise ConfigError(
                f"{where}: {file.name} is a pointer of Git LFS ({file.stat().st_size} bytes), not the file itself. "
                "Run `git lfs pull` in that directory."
            )


def check_tensors(
    found: Mapping[str, TensorHeader],
    expected: Mapping[str, tuple[int, ...]],
    *,
    where: str,
    may_miss: Iterable[str] = (),
    may_have: Iterable[str] = (),
) -> None:
    """Check that there are exactly the tensors that config.json describes, with its shapes, in floating point."""
    redundant = {*may_have, *(name for name in found if name.endswith("rotary_emb.inv_freq"))}
    missing = expected.keys() - set(may_miss) - found.keys()
    surplus = found.keys() - expected.keys() - redundant
    if missing or surplus:
        raise ConfigError(
            f"{where}: the weights do not belong to its config.json: {len(missing)} tensors are missing "
            f"({_some(missing)}), {len(surplus)} are not expected ({_some(surplus)}). Expected {len(expected)}; take "
            "config.json and *.safetensors of one model, and remove files of another."
        )
    others = {name: (found[name].shape, shape) for name, shape in expected.items() if name in found}
    others = {name: pair for name, pair in others.items() if pair[0] != pair[1]}
    if others:
        name, (got, wanted) = next(iter(others.items()))
        raise ConfigError(
            f"{where}: the weights do not belong to its config.json: {name} has the shape {list(got)}, expected "
            f"{list(wanted)} ({len(others)} such tensors). Take config.json and *.safetensors of one model."
        )
    check_dtypes({name: found[name] for name in expected if name in found}, where=where)


def check_dtypes(found: Mapping[str, TensorHeader], *, where: str) -> None:
    other = {header.dtype for header in found.values()} - set(TRAINABLE)
    if other:
        name = next(name for name, header in found.items() if header.dtype in other)
        raise ConfigError(
            f"{where}: {name} is stored as {', '.join(sorted(other))}: a quantised model cannot be trained. Expected "
            f"{', '.join(TRAINABLE[:3])}; take the model before quantisation."
        )


def check_tokenizer(directory: str, *, vocab_size: int, flag: str = "--hf-checkpoint") -> None:
    """Check that there is a readable tokenizer with tokens, and that the model has a row for each of them.

    `vocab_size`: rows of the embedding; 0 when config.json does not say.
    """
    path, where = Path(os.path.expanduser(directory)), f"{flag} {directory}"
    if not has_tokenizer(path):
        raise ConfigError(no_tokenizer(where))
    for name in ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        _check_json(path / name, where)
    file = path / "tokenizer.json"
    if not file.is_file():
        return  # transformers makes one from other files, which takes seconds: the RolloutManager reports problems
    from tokenizers import Tokenizer

    try:
        _refuse_pointer(file, where)
        ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except ConfigError:
        raise
    except Exception as error:  # boundary: the library raises bare Exception
        raise ConfigError(
            f"{where}: tokenizer.json ({file.stat().st_size} bytes) cannot be read: {error}. {COPY_TOKENIZER}"
        ) from error
    if not ids:
        raise ConfigError(f"{where}: tokenizer.json has no tokens. Expected a vocabulary. {COPY_TOKENIZER}")
    token, largest = max(ids.items(), key=lambda entry: entry[1])
    if vocab_size and largest >= vocab_size:
        beyond = sum(number >= vocab_size for number in ids.values())
        raise ConfigError(
            f"{where}: the tokenizer makes ids up to {largest} ({token!r}), but config.json has vocab_size "
            f"{vocab_size}, so {beyond} tokens have no row in the embedding. Expected ids below {vocab_size}; take the "
            "tokenizer of this model, or enlarge the embedding (`model.resize_token_embeddings`)."
        )


def no_tokenizer(where: str) -> str:
    return (
        f"{where}: no tokenizer there: none of {', '.join(TOKENIZER_FILES[:5])}, ... Expected tokenizer.json beside "
        f"config.json. {COPY_TOKENIZER}"
    )


def has_tokenizer(path: Path) -> bool:
    """Whether the directory has files of a tokenizer, of whatever kind."""
    if any((path / name).is_file() for name in TOKENIZER_FILES) or any(path.glob("*.tiktoken")):
        return True
    try:  # one whose code lies beside it
        return "auto_map" in json.loads((path / "tokenizer_config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def _check_json(file: Path, where: str) -> None:
    if not file.is_file():
        return
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {file.name} is not JSON: {error}. Expected an object; copy it again.") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: {file.name} is a {type(record).__name__}, expected a JSON object. Copy it again.")


LATEST = "latest_checkpointed_iteration.txt"
"""Names the newest checkpoint beside it: here, in slime and in Megatron."""
OF_MEGATRON = ("*.distcp", "common.pt", ".metadata", "mp_rank_*", "metadata.json")


def what_is_there(directory: str) -> str:
    """Say what a directory is that is not a Hugging Face model with safetensors, and what to do with it; else empty."""
    path = Path(os.path.expanduser(directory))
    if path.is_file():
        return "This is a file, not a directory. "
    if not path.is_dir():
        return "There is no such directory. "
    names = sorted(entry.name for entry in path.iterdir())
    if foreign_round(path) is not None:
        return (
            "This is a checkpoint of another trainer (Megatron, slime, verl): name the Hugging Face model that it was "
            "made from, or export it with that trainer's own converter. "
        )
    if "run_state.json" in names or (path / "checkpoints").is_dir() or any(_is_checkpoint(name) for name in names):
        return (
            "This is a checkpoint or a run directory of Vime: give it to --load, and to --hf-checkpoint the model that "
            "it was started from or an export (--save-hf). "
        )
    if "adapter_config.json" in names:
        return "This is an adapter (LoRA): merge it into its base model and save that. "
    for suffix, what in ((".gguf", "GGUF files"), (".bin", "PyTorch's *.bin"), (".pt", "*.pt"), (".pth", "*.pth")):
        if any(name.endswith(suffix) for name in names):
            return f"There are {what}: load them with transformers and `save_pretrained` writes safetensors. "
    return f"There is {_some(names)}. " if names else "The directory is empty. "


def _is_checkpoint(name: str) -> bool:
    return name.startswith("iter_0") or name == LATEST


def foreign_round(directory: Path) -> Path | None:
    """The first that Megatron, or who builds on it, wrote: `directory` or a round in it; None without one."""
    marker = directory / LATEST
    text = marker.read_text(errors="replace").strip() if marker.is_file() else ""
    names = [f"iter_{int(text):07d}"] if text.isdigit() else [text] if text == "release" else []
    rounds = [directory / name for name in names] + sorted(path for path in directory.glob("iter_*") if path.is_dir())
    for one in (directory, *rounds):
        is_ours = (one / "run_state.json").is_file()
        if not is_ours and any(True for pattern in OF_MEGATRON for _ in one.glob(pattern)):
            return one
    return None


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:MAX_NAMED]) + (", ..." if len(ordered) > MAX_NAMED else "") if ordered else "none"
