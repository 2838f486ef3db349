"""What only a live run can tell about rows on which trainer and engine differ: asked once, and written into the record.

Trainers score the rows under other rules and with other tokens, engines score them again. Which rules: a search for the
temperature, the top_k and the top_p that leave the least of the difference. What the numbers mean is not decided here
(`observability/diagnosis.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from vime.backends.vllm_utils.control import FleetControl
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.observability.diagnosis import MAX_LESS_LIKELY, Cause, Finding
from vime.observability.mismatch_record import (
    MAX_TOKENS,
    EngineLogprobs,
    MismatchRecord,
    RecordedRow,
    RescoredLogprobs,
    RetokenizedLogprobs,
    Scores,
    Stage,
)
from vime.ray.probe import RowImages, lacks_images, rescore
from vime.ray.retokenization import retokenizations
from vime.ray.rollout_manager import SampleText
from vime.ray.trainers import Trainers
from vime.training.evidence import MeasuredMismatch, Suspect
from vime.types import EngineError, SamplingRule, Version

logger = logging.getLogger(__name__)

MAX_TEXT = 4000  # characters that are kept of a sample's text
MAX_ENGINES = 4  # whose scores are kept: those farthest from the trainer
LARGEST_K = 1 << 18
OF_WEIGHTS, OF_TOKENS, OF_CACHE = (Cause.WEIGHTS, Cause.NUMERICS), (Cause.TOKENISATION,), (Cause.PREFIX_CACHE,)
"""What each question to trainers and engines tells."""
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)
GOLDEN = (math.sqrt(5) - 1) / 2

TextsOf = Callable[[int, list[int]], list[SampleText | None]]
"""Round and sample indices -> what those samples said."""


class MismatchProbes:
    """Of one run. `fleet` None: no engines."""

    def __init__(
        self, config: Config, *, trainers: Trainers, fleet: FleetControl | None, texts_of: TextsOf, threshold: float
    ) -> None:
        self._config, self._trainers, self._fleet = config, trainers, fleet
        self._texts_of, self._threshold = texts_of, threshold

    def engine_logprobs(self, rows: Sequence[TrainRow], images: RowImages) -> list[EngineLogprobs]:
        """A fresh score of every response token by each engine; empty when they cannot be asked."""
        if self._fleet is None:
            return []
        try:
            return rescore(self._fleet, rows, images)
        except EngineError as error:
            logger.warning("no fresh score of the rows that differ: %s", error)
            return []

    def record(
        self,
        found: MeasuredMismatch,
        *,
        rollout_id: int,
        stage: Stage,
        version: Version,
        rule: SamplingRule,
        is_current: bool = True,
        again: Finding | None = None,
    ) -> MismatchRecord:
        """Ask everybody, or with `again` only what shows whether the cause of that finding is at work once more.

        `rule`: by which the recorded log-probabilities should have come about. `version`: of the trainer's weights, or
        with `is_current` False of the engines', while the trainer's are newer: engines are then not asked for a score,
        as that they differ would say nothing."""
        rows = [suspect.row for suspect in found.suspects]
        kept = [_kept(suspect) for suspect in found.suspects]
        texts = self._texts_of(rollout_id, [row.sample_index for row in rows])
        images = [None if text is None else text.images for text in texts]
        record = MismatchRecord(
            rollout_id=rollout_id,
            stage=stage,
            version=version,
            rule=rule,
            threshold=self._threshold,
            mean=found.mean,
            largest=found.largest,
            num_tokens=found.num_tokens,
            rows=[_recorded(*each) for each in zip(found.suspects, kept, texts, strict=True)],
        )
        scores: dict[SamplingRule, Scores] = {rule: record.trainer}

        def under(other: SamplingRule) -> Scores:
            if other not in scores:
                scores[other] = _cut(self._trainers.log_probs(rows, other), kept)
            return scores[other]

        own = under(SamplingRule())
        engines = [
            dataclasses.replace(engine, log_probs=_cut(engine.log_probs, kept))
            for engine in (self.engine_logprobs(rows, images) if is_current and _asks(again, OF_WEIGHTS) else [])
        ]
        engines.sort(key=lambda engine: record.left(engine.log_probs, own), reverse=True)
        wanted = dict.fromkeys([SamplingRule(), *_searched(record, under, again)])
        return dataclasses.replace(
            record,
            trainer_hash=self._trainers.weights_hash() if engines else "",
            engines=engines[:MAX_ENGINES],
            rescored=[RescoredLogprobs(rule=other, log_probs=under(other)) for other in wanted],
            retokenized=self._retokenized(rows, kept, texts, rule) if _asks(again, OF_TOKENS) else [],
            cache_gaps=self._cache_gaps(rows, images) if _asks(again, OF_CACHE) else {},
        )

    def _retokenized(
        self, rows: list[TrainRow], kept: list[slice], texts: list[SampleText | None], rule: SamplingRule
    ) -> list[RetokenizedLogprobs]:
        others = retokenizations(self._config, rows, texts)
        if not others:
            return []
        changed = [
            dataclasses.replace(rows[other.row], tokens=np.asarray(other.tokens, dtype=np.int32)) for other in others
        ]
        scores = _cut(self._trainers.log_probs(changed, rule), [kept[other.row] for other in others])
        return [
            RetokenizedLogprobs(
                row=other.row, says=other.says, is_contradiction=other.is_contradiction, log_probs=log_probs
            )
            for other, log_probs in zip(others, scores, strict=True)
        ]

    def _cache_gaps(self, rows: Sequence[TrainRow], images: RowImages) -> dict[str, float]:
        if self._fleet is None or lacks_images(rows, images):
            return {}
        gaps = {address.name: 0.0 for address in self._fleet.addresses}
        try:
            for row, inputs in zip(rows, images, strict=True):
                for tokens in (row.tokens[: -row.response_length].tolist(), row.tokens[:-1].tolist()):
                    ask = partial(self._fleet.next_log_probs, tokens, inputs)
                    cached, fresh = (ask(with_cache=use) for use in (True, False))
                    for address, one, other in zip(self._fleet.addresses, cached, fresh, strict=True):
                        gaps[address.name] = max(gaps[address.name], _mean_gap(one, other))
        except EngineError as error:
            logger.warning("no answer with and without the prefix cache: %s", error)
            return {}
        return gaps


def _asks(again: Finding | None, causes: Sequence[Cause]) -> bool:
    return again is None or again.cause in causes


def _searched(
    record: MismatchRecord, under: Callable[[SamplingRule], Scores], again: Finding | None
) -> list[SamplingRule]:
    """The rules that leave the least, or the one of a finding that is asked about again."""
    if again is None:
        return [_temperature(record, under), *_truncations(record, under)]
    return [again.rule] if again.rule else []


def _kept(suspect: Suspect) -> slice:
    """The MAX_TOKENS response tokens in a row that differ most in sum, or all where they are fewer."""
    length = suspect.row.response_length
    if length <= MAX_TOKENS:
        return slice(0, length)
    gap_R = np.abs(suspect.row.rollout_log_probs - np.asarray(suspect.logp_R)) * np.asarray(suspect.is_compared_R)
    sums = np.concatenate([[0.0], np.cumsum(gap_R)])
    first = int(np.argmax(sums[MAX_TOKENS:] - sums[:-MAX_TOKENS]))
    return slice(first, first + MAX_TOKENS)


def _recorded(suspect: Suspect, kept: slice, text: SampleText | None) -> RecordedRow:
    row = suspect.row
    prompt, response = row.tokens[: -row.response_length], row.tokens[-row.response_length :]
    return RecordedRow(
        sample_index=row.sample_index,
        group_index=row.group_index,
        attempt=row.attempt,
        producer_id=row.producer_id,
        status=row.status,
        versions=[
            (span.version, span.start, span.end)
            for span in row.token_policy_versions
            if span.start < kept.stop and span.end > kept.start
        ],
        prompt_tokens=prompt[-MAX_TOKENS:].tolist(),
        first_token=kept.start,
        response_tokens=response[kept].tolist(),
        recorded=_short(row.rollout_log_probs[kept].tolist()),
        trainer=_short(suspect.logp_R[kept]),
        is_compared=list(suspect.is_compared_R[kept]),
        text=None if text is None else text.response[:MAX_TEXT],
    )


def _cut(scores: Scores, kept: Sequence[slice]) -> list[list[float]]:
    return [_short(logp_R[part]) for logp_R, part in zip(scores, kept, strict=True)]


def _short(values: Sequence[float]) -> list[float]:
    """To nine digits, which name a float32: half the bytes in a file, the same numbers in run and record."""
    return [float(f"{value:.9g}") for value in values]


def _mean_gap(one: dict[int, float], other: dict[int, float]) -> float:
    """Over the tokens that both name; two lists of the likeliest that share none are infinitely far apart."""
    if not one and not other:
        return 0.0
    shared = one.keys() & other.keys()
    return sum(abs(one[token] - other[token]) for token in shared) / len(shared) if shared else float("inf")


def _temperature(record: MismatchRecord, under: Callable[[SamplingRule], Scores]) -> SamplingRule:
    """Where the trainer comes closest to what was recorded, which has one valley around the best of TEMPERATURES:
    golden section between its neighbours in the logarithm, then two decimals when they are as good."""
    values: dict[float, float] = {}  # by temperature: what is left

    def at(temperature: float) -> float:
        if temperature not in values:
            values[temperature] = record.left(under(SamplingRule(temperature=temperature)))
        return values[temperature]

    place = min(range(len(TEMPERATURES)), key=lambda index: at(TEMPERATURES[index]))
    low = math.log(TEMPERATURES[max(0, place - 1)])
    high = math.log(TEMPERATURES[min(len(TEMPERATURES) - 1, place + 1)])
    for _ in range(12):
        first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if at(math.exp(first)) < at(math.exp(second)):
            high = second
        else:
            low = first
    best: float = min(values, key=values.__getitem__)
    at(round(best, 2))
    return SamplingRule(temperature=min(values, key=values.__getitem__))


def _truncations(record: MismatchRecord, under: Callable[[SamplingRule], Scores]) -> list[SamplingRule]:
    """The smallest k, the smallest p and p in two decimals that keep every token and make none likelier than recorded;
    empty when tokens were recorded as less likely than the trainer says, which is no truncation's work."""
    if record.share_less_likely > MAX_LESS_LIKELY:
        return []

    def by_k(k: int) -> SamplingRule:
        return SamplingRule(temperature=record.rule.temperature, top_k=k)

    def by_p(p: float) -> SamplingRule:
        return SamplingRule(temperature=record.rule.temperature, top_p=p)

    def is_wide(rule: SamplingRule) -> bool:
        excess = record.excess(under(rule))
        return not np.isneginf(excess).any() and float(excess.mean()) <= 0.01 * record.threshold

    k = _smallest(1, LARGEST_K, lambda k: is_wide(by_k(k)))
    p = _smallest(1, 1 << 20, lambda part: is_wide(by_p(part / (1 << 20)))) / (1 << 20)
    return [by_k(k), by_p(p), by_p(math.ceil(100 * p) / 100)]


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number in [low, high] from which on `holds`, which is true at `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
