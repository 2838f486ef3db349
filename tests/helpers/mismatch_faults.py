"""A generate plug-in that commits another fault in each round."""

from __future__ import annotations

from typing import Any

from vime.rollout.generation import generate
from vime.types import Sample

FAULTS = ("none", "temperature", "top_p", "top_k", "tokens", "shift", "temperature")


async def faulty(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    fault = FAULTS[sample.rollout_id]
    changed = {"temperature": {"temperature": 0.7}, "top_p": {"top_p": 0.8}, "top_k": {"top_k": 5}}.get(fault, {})
    sample = await generate(args, sample, {**sampling_params, **changed})
    if fault == "tokens" and sample.response_length > 3:  # the second token is written down as another one
        place = sample.prompt_length + 1
        sample.tokens[place] = 5 + (sample.tokens[place] - 4) % 20
    if fault == "shift":
        sample.rollout_log_probs = [*sample.rollout_log_probs[1:], -1.0]
    return sample
