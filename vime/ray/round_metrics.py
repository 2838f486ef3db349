"""The metrics of a round: each step adds its numbers, and they are written once, when the round ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from vime.observability.events import span
from vime.observability.metrics import VERSION, Tracker
from vime.observability.screen import Screen
from vime.types import Version


class RoundMetrics:
    """Owned by the driver. Durations are wall seconds."""

    def __init__(self, tracker: Tracker, screen: Screen) -> None:
        self._tracker, self._screen = tracker, screen
        self._metrics: dict[str, float] = {}
        self._started = time.monotonic()

    def begin(self) -> None:
        """Start the time of the first round, so that it does not include start-up."""
        self._metrics, self._started = {}, time.monotonic()

    def add(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)

    @contextlib.contextmanager
    def timed(self, metric: str) -> Iterator[None]:
        """Add the block's duration to the round under `metric`; perf/train_time is also the span `train`."""
        started = time.monotonic()
        with span(metric.removeprefix("perf/").removesuffix("_time")):
            yield
        self._metrics[metric] = self._metrics.get(metric, 0.0) + time.monotonic() - started

    def spent(self, metric: str) -> float:
        """Return the seconds under `metric` in this round so far."""
        return self._metrics.get(metric, 0.0)

    def so_far(self) -> dict[str, float]:
        """Return what is known of the open round."""
        return {name: float(value) for name, value in self._metrics.items()}

    def finish(self, rollout_id: int, version: Version) -> None:
        """Write the round's line to tracking and screen, and open the next one."""
        now = time.monotonic()
        elapsed = now - self._started
        tokens = self._metrics.get("rollout/num_tokens", 0.0)
        self._metrics |= {
            "perf/step_time": elapsed,
            "perf/tokens_per_sec": tokens / max(1e-9, elapsed),
            **_accepted(self._metrics, elapsed),
            VERSION: float(version),
        }
        self._tracker.log(rollout_id, self._metrics)
        self._screen.round_done(rollout_id, self._metrics)
        self._metrics, self._started = {}, now

    def retell(self, rollout_id: int, version: Version, metrics: Mapping[str, float]) -> None:
        """Write the line of a round whose process ended between its checkpoint and this line: what the checkpoint knows
        of it, without the times of later steps."""
        if self._tracker.lacks(rollout_id, VERSION):
            self._tracker.log(rollout_id, {**metrics, VERSION: float(version)})

    def log_eval(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """`rollout_id` names the round before which it ran; the numbers join the round that made the weights, because
        wandb refuses steps that run ahead of the round's own line."""
        self._tracker.log(max(0, rollout_id - 1), metrics)
        self._screen.note_eval(rollout_id, metrics)

    def close(self) -> None:
        self._tracker.close()


def _accepted(metrics: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """What counts of a round's speed: tokens that entered the loss, whatever else was generated for them."""
    if "train/num_tokens" not in metrics:
        return {}
    return {"perf/accepted_tokens_per_sec": metrics["train/num_tokens"] / max(1e-9, elapsed)}
