"""What happens when a reward raises, returns an invalid value or is late: --on-reward-error.

`stop` ends the run with the error. `drop` leaves the whole group out, counted as REASON, and continues: a reward that
fails for one odd completion of a thousand then costs that group. No sample ever gets a reward that no function
returned. When too many of the last WINDOW groups were dropped for it, the run ends all the same: the fault is then not
one odd completion.
"""

from __future__ import annotations

import logging
from collections import deque

from vime.config.parse import Args
from vime.types import RewardError, Sample, SampleStatus

logger = logging.getLogger(__name__)

REASON = "reward_error"
WINDOW = 100
STOP, DROP = "stop", "drop"


def mark_or_raise(args: Args, samples: list[Sample], error: RewardError) -> None:
    """Mark the group as dropped because of `error`, or raise the error, as --on-reward-error says."""
    if args.on_reward_error == STOP:
        raise RewardError(
            f"{error} (--on-reward-error {STOP}; with {DROP} its group is left out and counted)"
        ) from error
    logger.warning("group %d is left out: %s", samples[0].group_index, error)
    mark(samples, str(error))


def mark(samples: list[Sample], error: str) -> None:
    """Mark the group as one whose reward failed."""
    for sample in samples:
        sample.status = SampleStatus.FAILED
        sample.metadata = {**sample.metadata, REASON: error}


def error_of(samples: list[Sample]) -> str:
    """Return the error that `mark_or_raise` stored; empty for another group."""
    return next((str(sample.metadata[REASON]) for sample in samples if REASON in sample.metadata), "")


class ErrorShare:
    """The share of errors among the last WINDOW groups that were to be trained. Lives on the rollout loop."""

    def __init__(self, args: Args) -> None:
        self._share: float = args.max_reward_error_share
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)

    def note(self, samples: list[Sample]) -> None:
        """Count a finished group. RewardError when more groups had an error than allowed."""
        error = error_of(samples)
        self._outcomes.append(bool(error))
        num_errors, allowed = sum(self._outcomes), int(self._share * WINDOW)
        if error and num_errors > allowed:
            raise RewardError(
                f"{num_errors} of the last {len(self._outcomes)} groups were dropped because their reward failed, "
                f"expected at most {allowed} of {WINDOW} (--max-reward-error-share {self._share:g}). Correct the "
                f"reward function, or raise the flag. The last error: {error}"
            )


_LATEST: list[tuple[object, ErrorShare]] = []
"""The data source of earlier rounds, and their error share: at most one pair. Owner: the rollout loop."""


def error_share(args: Args, source: object) -> ErrorShare:
    """Return the error share of the rounds that draw from `source`: a run has one for all its rounds."""
    if not _LATEST or _LATEST[0][0] is not source:
        _LATEST[:] = [(source, ErrorShare(args))]
    return _LATEST[0][1]


def check_evaluation(args: Args, name: str, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Return the groups that were scored. RewardError when more than --max-reward-error-share of them were not: the
    others would be a different evaluation."""
    errors = [error for group in groups if (error := error_of(group))]
    if len(errors) == len(groups) or len(errors) > args.max_reward_error_share * len(groups):
        raise RewardError(
            f"evaluation {name}: the reward failed for {len(errors)} of {len(groups)} prompts, expected at most "
            f"{args.max_reward_error_share:g} of them (--max-reward-error-share). Correct the reward function or the "
            f"data. The last error: {errors[-1]}"
        )
    return [group for group in groups if not error_of(group)]
