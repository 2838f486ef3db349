"""Stops a run that drops everything it generates: --max-dropped-in-a-row.

A filter that keeps nothing, a reward that is the same for every completion, or a generate function that always fails
would otherwise use the engines until --rollout-timeout-secs, an hour; only then would the error say that no group was
ready.
"""

from __future__ import annotations

from collections import Counter

from vime.config.parse import Args
from vime.rollout.images import CHANGED
from vime.types import PluginError

ROUNDS, AT_LEAST = 10, 64
"""The default limit, in rounds' worth of groups. DAPO's filter drops up to nine of ten on hard data."""


class DropStreak:
    """Counts the groups dropped since the last one that was kept."""

    def __init__(self, args: Args) -> None:
        self._args = args
        self._limit: int = args.max_dropped_in_a_row or max(AT_LEAST, ROUNDS * args.rollout_batch_size)
        self._reasons: Counter[str] = Counter()

    def kept(self) -> None:
        self._reasons.clear()

    def dropped(self, reason: str) -> None:
        """Count a dropped group. PluginError when the limit is passed."""
        self._reasons[reason] += 1
        number = self._reasons.total()
        if number < self._limit:
            return
        reasons = ", ".join(f"{each} {count}" for each, count in self._reasons.most_common())
        path = self._args.dynamic_sampling_filter_path
        raise PluginError(
            f"{number} groups in a row were dropped and none was kept, by reason: {reasons}. Expected one of "
            f"{self._limit} to be kept (--max-dropped-in-a-row). {self._advice(path)}"
        )

    def _advice(self, path: str | None) -> str:
        if any(reason.startswith("zero_std") for reason in self._reasons):
            return (
                f"--dynamic-sampling-filter-path {path} drops a group whose completions all got the same reward. Look "
                "at completions and labels: is the reward right, are the prompts of the right difficulty, are they cut "
                "(--rollout-max-response-len)? Else raise the limit, or leave the filter out."
            )
        if CHANGED in self._reasons:
            return "Image files were changed or removed while the run used them, see the warnings: put them back."
        if path is not None:
            return f"The filter is --dynamic-sampling-filter-path {path}: correct or relax it, or raise the limit."
        return "Look at the generate function and the logs of the engines, or raise the limit."
