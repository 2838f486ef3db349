"""Who can be asked about rows that trainer and engine disagree on: ranks, engines, and the samples' own text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from vime.backends.vllm_utils.control import FleetControl
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.ray.retokenization import retokenizations
from vime.ray.rollout_manager import SampleText
from vime.ray.trainers import Trainers
from vime.training.evidence import EngineOpinion, Retokenization
from vime.types import EngineError, SamplingRule, Version

logger = logging.getLogger(__name__)

TextsOf = Callable[[list[int]], list[SampleText | None]]
"""Sample indices -> what those samples said."""


class RunWitnesses:
    """`diagnosis.Witnesses` of a live run."""

    def __init__(
        self,
        config: Config,
        *,
        trainers: Trainers,
        fleet: FleetControl | None,
        texts_of: TextsOf,
        version: Version,
        rule: SamplingRule,
        is_current: bool = True,
    ) -> None:
        """`rule`: by which the recorded log-probabilities should have come about. `version`: of the trainer's weights,
        or with `is_current` False of the engines', while the trainer's are newer. `fleet` None: no engines."""
        self._config, self._trainers, self._texts_of = config, trainers, texts_of
        self._fleet = fleet
        self._is_current = is_current
        self.rule, self.version = rule, version

    def trainer_log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> Sequence[Sequence[float]]:
        return self._trainers.log_probs(list(rows), rule)

    def trainer_hash(self) -> str:
        return self._trainers.weights_hash()

    def engine_opinions(self, rows: Sequence[TrainRow]) -> Sequence[EngineOpinion]:
        """None while the trainer is ahead: that they differ then says nothing."""
        return self.fresh_scores(rows) if self._is_current else []

    def fresh_scores(self, rows: Sequence[TrainRow]) -> Sequence[EngineOpinion]:
        if self._fleet is None:
            return []
        try:
            reports = self._fleet.reports()
            scores = self._fleet.prompt_log_probs([row.tokens.tolist() for row in rows])
        except EngineError as error:
            logger.warning("no fresh score of the suspected rows: %s", error)
            return []
        return [
            EngineOpinion(
                engine=report.engine,
                version=report.version,
                content_hash=report.content_hash,
                log_probs=[values[-row.response_length :] for values, row in zip(by_row, rows, strict=True)],
            )
            for report, by_row in zip(reports, scores, strict=True)
        ]

    def cache_gaps(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        if self._fleet is None:
            return {}
        gaps = {address.name: 0.0 for address in self._fleet.addresses}
        try:
            for row in rows:
                for tokens in (row.tokens[: -row.response_length].tolist(), row.tokens[:-1].tolist()):
                    cached, fresh = (self._fleet.next_log_probs(tokens, with_cache=use) for use in (True, False))
                    for address, one, other in zip(self._fleet.addresses, cached, fresh, strict=True):
                        gaps[address.name] = max(gaps[address.name], _mean_gap(one, other))
        except EngineError as error:
            logger.warning("no answer with and without the prefix cache: %s", error)
            return {}
        return gaps

    def retokenizations(self, rows: Sequence[TrainRow]) -> Sequence[Retokenization]:
        return retokenizations(self._config, rows, self._texts_of([row.sample_index for row in rows]))


def _mean_gap(one: dict[int, float], other: dict[int, float]) -> float:
    """Over the tokens that both name; two lists of the likeliest that share none are infinitely far apart."""
    if not one and not other:
        return 0.0
    shared = one.keys() & other.keys()
    return sum(abs(one[token] - other[token]) for token in shared) / len(shared) if shared else float("inf")
