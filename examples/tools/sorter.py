"""A tool loop: `--custom-generate-function-path examples/tools/sorter.py:generate_with_sorter`.

The model of the quick start writes `<think>`, the letters in order, `</think>`, and then its answer. Here `<think>` is
the call of a tool: the completion stops there, the tool writes the letters in order, and the model continues. It
still may guess without the tool; what it learns is to call it. docs/tools.md walks through this file.
"""

from __future__ import annotations

from typing import Any

from vime.rollout.generation import generate
from vime.rollout.prompts import load_tokenizer
from vime.types import Sample, SampleStatus

CALL, END = "<think>", "</think>"


def sort_letters(prompt: str) -> str:
    """The tool: `4:xlzwxuqa=` -> `alquwxxz`."""
    return "".join(sorted(prompt.partition(":")[2].removesuffix("=")))


async def generate_with_sorter(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate one completion, with at most one call of the tool in it."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    [call] = tokenizer.encode(CALL, add_special_tokens=False)
    sample = await generate(args, sample, {**sampling_params, "stop_token_ids": [call]})
    has_called = sample.status is SampleStatus.COMPLETED and sample.tokens[-1] == call
    sample.metadata["tool_calls"] = int(has_called)
    if not has_called:
        return sample
    # What the tool says is context: the model reads it and is not trained to write it.
    said = tokenizer.encode(sort_letters(str(sample.prompt)) + END, add_special_tokens=False)
    sample.append_response_tokens(said, trainable=False)
    left = sampling_params["max_tokens"] - sample.response_length
    return await generate(args, sample, {**sampling_params, "max_tokens": left})
