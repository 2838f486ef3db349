"""Rewards of end_to_end.py, the same function for every side; for Vime as --custom-rm-path plug-ins."""

from typing import Any


def score(kind: str, *, tokens: list[int], text: str, label: str, has_ended: bool) -> float:
    """Return the reward of one completion. `tokens` are those of the completion, its end of sequence included;
    `has_ended`: it was not cut at the length limit."""
    if kind == "exact_match":
        return float(has_ended and text.rpartition("</think>")[2].strip() == label)
    if kind == "first_line":
        return float(text.partition("\n")[0].strip() == label)
    if kind == "even_share":
        return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))
    raise ValueError(f"reward {kind!r}; expected exact_match, first_line or even_share")


def _of_sample(kind: str, sample: Any) -> float:
    return score(
        kind,
        tokens=list(sample.tokens[len(sample.tokens) - sample.response_length :]),
        text=sample.response,
        label=str(sample.label),
        has_ended=str(sample.status) == "completed",
    )


async def exact_match(args: Any, sample: Any, **_: Any) -> float:  # noqa: ARG001 - the signature of a reward
    return _of_sample("exact_match", sample)


async def first_line(args: Any, sample: Any, **_: Any) -> float:  # noqa: ARG001
    return _of_sample("first_line", sample)


async def even_share(args: Any, sample: Any, **_: Any) -> float:  # noqa: ARG001
    return _of_sample("even_share", sample)
