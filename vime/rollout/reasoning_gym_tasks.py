"""reasoning-gym as a data source and its verifiers as a reward (optional extra `reasoning-gym`).

A problem is identified by (task, seed, size, number) and generated again when it is scored, so that a sample's metadata
stays small and JSON-ready, whatever the generator puts into its own.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol, TypedDict

from vime.config.parse import Args
from vime.rollout.conversations import chat_text
from vime.rollout.prompts import Prompt, load_tokenizer
from vime.types import ConfigError, RewardError, Sample

METADATA_KEY = "reasoning_gym"
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Problem(TypedDict):
    question: str
    answer: str | None


class Dataset(Protocol):
    """A generator of reasoning-gym, which has no types of its own."""

    def __getitem__(self, number: int) -> Problem: ...
    def score_answer(self, answer: str, entry: Problem) -> float: ...


class Factory(Protocol):
    DATASETS: Mapping[str, object]


class Package(Protocol):
    """The parts of the module that are used here."""

    factory: Factory

    def create_dataset(self, name: str, *, seed: int, size: int) -> Dataset: ...


def task_names(args: Args) -> list[str]:
    """Return the generators of --reasoning-gym, each checked against the installed package."""
    known = _package().factory.DATASETS
    names = [name.strip() for name in (args.reasoning_gym or "").split(",") if name.strip()]
    for name in names:
        if name not in known:
            close = ", ".join(difflib.get_close_matches(name, known, n=3)) or ", ".join(sorted(known)[:8]) + ", ..."
            raise ConfigError(f"--reasoning-gym {name}: no such generator; near matches: {close}. Name one of them.")
    if not names:
        raise ConfigError(f"--reasoning-gym {args.reasoning_gym!r}: expected names such as chain_sum,gsm_symbolic.")
    return names


def make_prompts(args: Args) -> list[Prompt]:
    """Return `reasoning_gym_size` problems of each task; tasks alternate so that an unshuffled run mixes them."""
    names, size, seed = task_names(args), args.reasoning_gym_size, args.rollout_seed
    tokenizer, template_arguments = (
        load_tokenizer(args.hf_checkpoint),
        json.loads(args.apply_chat_template_kwargs or "{}"),
    )
    prompts = []
    for number in range(size):
        for name in names:
            entry = dataset(name, seed, size)[number]
            text = entry["question"]
            if args.apply_chat_template:
                text = chat_text(tokenizer, [{"role": "user", "content": text}], None, template_arguments, asks=True)
            token_ids = tokenizer(text, add_special_tokens=not args.apply_chat_template)["input_ids"]
            identity = {"task": name, "seed": seed, "size": size, "number": number}
            prompts.append(
                Prompt(
                    text=text,
                    token_ids=tuple(token_ids),
                    label=entry["answer"],
                    where=f"reasoning-gym {name} number {number}",
                    metadata={METADATA_KEY: identity},
                )
            )
    return prompts


@lru_cache(maxsize=128)
def dataset(name: str, seed: int, size: int) -> Dataset:
    """Return the generator; item i is a pure function of (name, seed, i)."""
    return _package().create_dataset(name, seed=seed, size=size)


def score(sample: Sample) -> float:
    """Return the task's own score of the completion: of the text after the last `</think>`, inside `<answer>` if
    present."""
    identity = sample.metadata.get(METADATA_KEY)
    if not isinstance(identity, dict):
        raise RewardError(
            f"--rm-type reasoning_gym: sample {sample.index} has no metadata[{METADATA_KEY!r}]; it scores prompts of "
            "--reasoning-gym only. Use another reward for --prompt-data."
        )
    source = dataset(identity["task"], identity["seed"], identity["size"])
    answer = sample.response.rpartition("</think>")[2]
    tagged = _ANSWER_TAG.findall(answer)
    return float(source.score_answer((tagged[-1] if tagged else answer).strip(), source[identity["number"]]))


def _package() -> Package:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"--reasoning-gym: {error}. Install the extra: ./scripts/install.sh reasoning-gym."
        ) from error
    package: Package = reasoning_gym
    return package
