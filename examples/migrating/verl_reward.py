"""A reward written for verl: `--custom-rm-path examples/migrating/verl_reward.py:reward`.

verl calls `compute_score(data_source, solution_str, ground_truth, extra_info)`; Vime hands over the sample. Put your
own `compute_score` in the place of the one below; `reward` is all that is needed around it.
"""

from __future__ import annotations

from typing import Any

from vime.types import Sample


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 for the right answer. Put your own function here."""
    return float(solution_str.strip() == ground_truth)


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """A plain function, so it may compute or block: Vime runs it in a thread."""
    extra = sample.metadata  # of --metadata-key extra_info
    return compute_score(str(extra.get("data_source", "")), sample.response, str(sample.label), extra)
