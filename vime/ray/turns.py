"""`--colocate`: whose turn it is on the GPUs that trainers and engines share.

    generate, evaluate   engines awake, trainers asleep
    train, save          engines asleep, trainers awake
    update               engines hold weights alone, trainers weights alone; no prompt is taken
    (the hash is confirmed, trainers sleep, the engines' cache wakes up: only then prompts)

Each step is a call of every engine or rank with a deadline, and does nothing where its state is reached already. Random
states are in no memory that moves, on either side.
"""

from __future__ import annotations

from vime.backends.vllm_utils.control import KV_CACHE, WEIGHTS
from vime.config.colocation import sleep_level
from vime.config.parse import Config
from vime.ray.engines import Engines
from vime.ray.round_metrics import RoundMetrics
from vime.ray.trainers import Trainers

KEEP_WEIGHTS = 1  # vLLM's level


class Turns:
    """Owned by the driver. Trainers that are called out of turn (to save what was trained when a run ends, to score
    rows) make the engines sleep first; those keep their weights then, since no update may follow."""

    def __init__(self, config: Config, trainers: Trainers, engines: Engines, round_metrics: RoundMetrics) -> None:
        self._trainers, self._engines, self._round_metrics = trainers, engines, round_metrics
        self._level = sleep_level(config)
        trainers.share_gpus(self._make_room)

    def train(self) -> None:
        """Before a round of training, with nothing left to generate: the engines free the GPUs."""
        self._sleep(self._level)

    def update(self) -> None:
        """Before a weight update: trainers free what it does not need, engines take memory for weights."""
        with self._round_metrics.timed("perf/offload_time"):
            self._trainers.rest()
        with self._round_metrics.timed("perf/engine_wake_time"):
            self._engines.wake_up(WEIGHTS)

    def generate(self) -> None:
        """Before prompts: the trainers free the GPUs, the engines take the rest of their memory."""
        with self._round_metrics.timed("perf/offload_time"):
            self._trainers.sleep()
        if self._engines.is_asleep:
            with self._round_metrics.timed("perf/engine_wake_time"):
                self._engines.wake_up(WEIGHTS)
                self._engines.wake_up(KV_CACHE)

    def _make_room(self) -> None:
        self._sleep(KEEP_WEIGHTS)

    def _sleep(self, level: int) -> None:
        if not self._engines.is_asleep:
            with self._round_metrics.timed("perf/engine_sleep_time"):
                self._engines.sleep(level)
