"""The staleness bound, checked where rows are consumed."""

from __future__ import annotations

from collections.abc import Sequence

from vime.data.rows import TrainRow
from vime.types import StaleError, Version

STALENESS_MEAN = "transferqueue/sample_staleness/mean"
STALENESS_MAX = "transferqueue/sample_staleness/max"


def check_staleness(rows: Sequence[TrainRow], *, version: Version, max_staleness: int | None) -> list[int]:
    """Refuse rows older than the bound; return the staleness of each row that trains.

    staleness of a row = version of the weights it trains - oldest version among its trainable tokens. A row without
    trainable tokens has none. Example: tokens of versions 3 and 4 trained on weights 5 are 2 stale. Without a bound
    (None, for recorded rounds: their versions are those of the run that made them) it only measures.
    """
    found: list[int] = []
    for row in rows:
        if row.num_trainable == 0:
            continue
        staleness = version - row.oldest_version
        if max_staleness is not None and not 0 <= staleness <= max_staleness:
            versions = sorted({span.version for span in row.token_policy_versions})
            reason = "newer than the weights" if staleness < 0 else f"{staleness} versions behind"
            raise StaleError(
                f"sample {row.sample_index} of group {row.group_index}: sampled by versions {versions}, {reason} "
                f"{version} that train on it; the bound is {max_staleness} (--transferqueue-max-staleness). Raise the "
                "bound, or update the engines more often (--update-weights-interval)."
            )
        found.append(staleness)
    return found


def staleness_metrics(found: Sequence[int]) -> dict[str, float]:
    """Return mean and maximum over the rows of a round, by metric name."""
    return {
        STALENESS_MEAN: sum(found) / len(found) if found else 0.0,
        STALENESS_MAX: float(max(found, default=0)),
    }
