"""Fetch models and data sets by their names on the Hugging Face hub. The rest of Vime sees local files.

A value is taken for a name when it looks like `owner/name`, nothing of that path exists, and its first part is no local
directory (then it is probably a typing mistake). Of a data set, `owner/name:split` names a split (train when left out),
and a slice may follow: `openai/gsm8k:test@[0:64]`.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from vime.config.parse import Config
from vime.types import ConfigError

MODEL_KNOBS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "critic_load")
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
CONVERTED = "refs/convert/parquet"
"""A branch that the hub itself adds to data sets in other formats."""
HUB_CALL_S = 10.0
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<split>[\w.-]+))?")
_FORMATS = (".parquet", ".jsonl")


def with_local_copies(config: Config) -> Config:
    """Return the configuration with each name replaced by the path of its local copy, fetched if it is not there
    yet."""
    changes: dict[str, object] = {}
    for knob in MODEL_KNOBS:
        value = getattr(config.flat, knob)
        if value and (name := hub_name(value)):
            changes[knob] = fetch_model(name[0], flag=f"--{knob.replace('_', '-')}")
    if config.data.prompt_data:
        changes["prompt_data"] = _local_data(config.data.prompt_data, "--prompt-data")
    if pairs := config.eval.eval_prompt_data:
        changes["eval_prompt_data"] = tuple(
            _local_data(text, "--eval-prompt-data") if place % 2 else text for place, text in enumerate(pairs)
        )
    return config.replace(**changes)


def hub_name(value: str) -> tuple[str, str] | None:
    """Return (`owner/name`, split or "") of what can only be a name; None for anything else."""
    match = _NAME.fullmatch(value)
    if match is None or os.path.lexists(value) or Path(value).parent.is_dir():
        return None
    return match["name"], match["split"] or ""


def fetch_model(name: str, *, flag: str) -> str:
    """Return the directory of the model's local copy: configuration, safetensors, tokenizer."""
    from huggingface_hub import snapshot_download  # 0.3 s that a local path does not cost

    _say(f"{flag} {name}: looking on the hub")
    try:
        return str(
            snapshot_download(name, allow_patterns=list(MODEL_FILES), endpoint=_endpoint(), etag_timeout=HUB_CALL_S)
        )
    except Exception as error:
        raise _refusal(flag, name, error, f"hf download {name} --local-dir DIR") from error


def fetch_data(name: str, split: str, *, flag: str) -> str:
    """Return the path or pattern of the files of one split."""
    from huggingface_hub import HfApi, snapshot_download

    _say(f"{flag} {name}: looking on the hub")
    wanted = split or "train"
    try:
        for revision in (None, CONVERTED):
            told = HfApi(endpoint=_endpoint()).dataset_info(name, revision=revision, timeout=HUB_CALL_S)
            every = [entry.rfilename for entry in told.siblings or []]
            files = files_of_split(every, wanted)
            if files:
                pattern = _pattern(files, every, flag, name)
                root = snapshot_download(
                    name, repo_type="dataset", revision=revision, allow_patterns=files, endpoint=_endpoint(),
                    etag_timeout=HUB_CALL_S,
                )  # fmt: skip
                return str(Path(root) / pattern)
    except ConfigError:
        raise
    except Exception as error:
        raise _refusal(flag, name, error, f"hf download {name} --repo-type dataset --local-dir DIR") from error
    shown = ", ".join(sorted(every)[:12]) or "no file"
    raise ConfigError(
        f"{flag} {name}: the data set has no parquet or jsonl files of the split {wanted!r}. It has {shown}. Name "
        f"another split, {name}:SPLIT, or fetch it and give a file of it."
    )


def files_of_split(files: Sequence[str], split: str) -> list[str]:
    """`data/train-00000-of-00002.parquet`, `train.jsonl`, `main/train/0000.parquet`: those of the split, in order."""

    def is_of_split(file: str) -> bool:
        path = PurePosixPath(file)
        return path.suffix in _FORMATS and (
            path.parent.name == split or re.fullmatch(rf"{re.escape(split)}([-_.].*)?", path.stem) is not None
        )

    found = sorted(filter(is_of_split, files))
    columnar = [file for file in found if file.endswith(".parquet")]
    return columnar or found


def _pattern(files: Sequence[str], every: Sequence[str], flag: str, name: str) -> str:
    """One path, or a pattern that is all of `files` and nothing else. ConfigError when they are of several subsets."""
    if len(files) == 1:
        return files[0]
    folders = sorted({str(PurePosixPath(file).parent) for file in files})
    suffix = PurePosixPath(files[0]).suffix
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(files[0], files[-1], strict=False))  # sorted
    pattern = f"{''.join(first for first, _ in pairs)}*{suffix}"
    if len(folders) > 1 or sorted(fnmatch.filter(every, pattern)) != list(files):
        raise ConfigError(
            f"{flag} {name}: the split lies in several places: {', '.join(folders)}. Fetch the data set (hf download "
            f"{name} --repo-type dataset --local-dir DIR) and give the files of one, for example DIR/{folders[0]}/*"
            f"{suffix}."
        )
    return pattern


def _local_data(value: str, flag: str) -> str:
    text, mark, part = value.partition("@[")
    name = hub_name(text)
    return value if name is None else f"{fetch_data(*name, flag=flag)}{mark}{part}"


def _endpoint() -> str | None:
    """HF_ENDPOINT, which the library reads when it is imported only."""
    return os.environ.get("HF_ENDPOINT")


def _refusal(flag: str, name: str, error: Exception, command: str) -> ConfigError:
    """Say what can be done, by whether the hub responded."""
    kind, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
    if kind == "GatedRepoError":
        said = "its owner wants a form filled in first. Do that on its page, log in with `hf auth login`"
    elif status in (401, 403, 404):
        said = f"the hub has nothing of this name, or does not show it to you ({status}). Check the name, or log in"
    else:
        first = str(error).strip().splitlines() or [kind]
        said = f"the hub does not respond here ({first[0][:200]}). Fetch it where it responds: {command}"
    return ConfigError(f"{flag} {name}: there is no such path, and {said}, and give the directory: {flag} DIR.")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
