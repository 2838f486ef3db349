"""A reward for completions of random tokens: the share with an even id. About a half, seldom equal within a group."""

from __future__ import annotations

from typing import Any


async def even_share(args: Any, sample: Any, **_: Any) -> float:  # noqa: ARG001 - the signature of a reward
    completion = sample.tokens[-sample.response_length :] if sample.response_length else []
    return sum(token % 2 == 0 for token in completion) / max(1, len(completion))
