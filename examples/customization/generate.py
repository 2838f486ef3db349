"""A custom generate function: `--custom-generate-function-path examples/customization/generate.py:generate_with_hint`.

Two turns. When the first answer is wrong, the words "try again" of an imagined environment are added to the context
and the policy tries once more. The environment's tokens are in the context and not in the loss (`trainable=False`).
"""

from __future__ import annotations

from typing import Any

from vime.rollout.generation import generate
from vime.rollout.prompts import load_tokenizer
from vime.types import Sample, SampleStatus, VersionSpan

HINT = "?"


async def generate_with_hint(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate an answer; after a wrong one add the hint and generate another. `sample.response` ends with the last
    one."""
    sample = await generate(args, sample, sampling_params)
    if sample.status is not SampleStatus.COMPLETED or sample.response == str(sample.label):
        return sample
    tokenizer = load_tokenizer(args.hf_checkpoint)
    hint = tokenizer.encode(HINT, add_special_tokens=False)
    # Tokens that no policy sampled still need a version; the newest one keeps the spans in order.
    version = sample.weight_versions[-1]
    sample.append_response_tokens(
        hint, [0.0] * len(hint), trainable=False, versions=[VersionSpan(version, 0, len(hint))]
    )
    already = sample.response_length
    sample.metadata["first_answer"] = sample.response
    sample = await generate(args, sample, sampling_params)
    second = sample.tokens[sample.prompt_length + already :]
    sample.response = tokenizer.decode(second, skip_special_tokens=True)
    return sample
