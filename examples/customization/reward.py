"""A custom reward: `--custom-rm-path examples/customization/reward.py:reward --reward-key score`.

Right answers score 1; a right answer that is also short scores up to 0.2 more. Returns a dict: `score` is trained on
(--reward-key), the other entries are recorded with the sample. `async def` for work that waits (HTTP); use a plain
`def` for work that computes or blocks: Vime runs that in a thread. Either has --rm-timeout-secs.
"""

from __future__ import annotations

from typing import Any

from vime.types import Sample, SampleStatus

FREE_TOKENS = 10  # completions up to this length get the whole bonus
BONUS = 0.2


async def reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """1 + bonus for a right answer, 0 for a wrong or cut-off one."""
    answer = sample.response.rpartition("</think>")[2].strip()
    is_right = sample.status is SampleStatus.COMPLETED and answer == str(sample.label)
    brevity = min(1.0, FREE_TOKENS / max(1, sample.response_length))
    return {"score": is_right * (1.0 + BONUS * brevity), "accuracy": float(is_right)}


def group_reward(args: Any, samples: list[Sample]) -> list[float]:
    """The same idea relative to the group, with --group-rm: the shortest right answer of a group gets the bonus."""
    answers = [sample.response.rpartition("</think>")[2].strip() == str(sample.label) for sample in samples]
    right = [sample.response_length for sample, is_right in zip(samples, answers, strict=True) if is_right]
    return [
        is_right * (1.0 + BONUS * (sample.response_length == min(right, default=0)))
        for sample, is_right in zip(samples, answers, strict=True)
    ]
