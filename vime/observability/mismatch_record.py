"""What a run records of a logprob mismatch: RUN_DIR/mismatch/round_<id><stage>.json, read by `vime diagnose`.

The driver writes it when the mean difference is above --train-rollout-diff-threshold (`ray/mismatch_probes.py`): the
worst rows with both sides' log-probabilities, and what only live engines and trainers can compute about them. Only
numbers: `observability/diagnosis.py` finds the cause.

All log-probabilities are in nats. R: the response tokens that are kept of a row, at most MAX_TOKENS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from vime.types import ConfigError, SamplingRule, Version

SCHEMA = 1
DIRECTORY = "mismatch"
MAX_TOKENS = 4096
"""Limit for a row's response, and for its prompt. With four rows a record has at most about 4 MB."""
MAX_RECORDS = 32
"""Records kept of a run: the first one and the newest."""
_FILE = re.compile(r"round_(\d+)(|_generated|_published)\.json")

Scores = Sequence[Sequence[float]]
"""[R] log-probabilities of each row."""
Array = NDArray[np.float64]


class Stage(StrEnum):
    """When a round was compared; the value is part of the file's name."""

    BEFORE_TRAINING = ""
    AFTER_GENERATION = "_generated"
    AFTER_PUBLISH = "_published"

    @property
    def words(self) -> str:
        return {
            Stage.BEFORE_TRAINING: "before it was trained",
            Stage.AFTER_GENERATION: "when it had been generated",
            Stage.AFTER_PUBLISH: "after its weights were published",
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """A row with a large difference. `trainer`: by the rule of the run, with the weights of the round."""

    sample_index: int
    group_index: int
    attempt: int
    producer_id: str
    status: str
    versions: list[tuple[Version, int, int]]  # (version, start, end) in the whole response, where tokens are kept
    prompt_tokens: list[int]  # the last ones
    first_token: int  # of the response that is kept: where the lists below begin
    response_tokens: list[int]
    recorded: list[float]  # by the engine, while it sampled
    trainer: list[float]
    is_compared: list[bool]  # trainable, and sampled by the version that is compared
    text: str | None  # the sample's own, where the run still had it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLogprobs:
    """New scores of one engine: no cache, temperature 1, the whole vocabulary."""

    engine: str
    version: Version | None
    content_hash: str
    log_probs: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredLogprobs:
    """The trainer's scores under another rule than the run's."""

    rule: SamplingRule
    log_probs: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class RetokenizedLogprobs:
    """The trainer's scores of row number `row` with other tokens that it may have been sampled with."""

    row: int
    says: str  # where these tokens come from
    is_contradiction: bool  # the sample's own text says that its tokens are not those of the row
    log_probs: Sequence[float]  # [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchRecord:
    """One round that was compared once. `version` and `trainer_hash`: of the trainer's weights."""

    schema: int = SCHEMA
    rollout_id: int
    stage: Stage
    version: Version
    trainer_hash: str = ""  # empty when no engine was asked
    rule: SamplingRule  # by which the recorded log-probabilities should have come about
    threshold: float
    mean: float  # over all compared tokens of the round, as `largest`
    largest: float
    num_tokens: int
    rows: list[RecordedRow]
    engines: list[EngineLogprobs] = field(default_factory=list)  # those farthest from the trainer
    rescored: list[RescoredLogprobs] = field(default_factory=list)
    retokenized: list[RetokenizedLogprobs] = field(default_factory=list)
    cache_gaps: dict[str, float] = field(default_factory=dict)
    """Engine -> largest mean |with prefix cache - without| of the likeliest next tokens after a row."""

    @property
    def recorded(self) -> Scores:
        return [row.recorded for row in self.rows]

    @property
    def trainer(self) -> Scores:
        return [row.trainer for row in self.rows]

    def under(self, rule: SamplingRule) -> Scores | None:
        """Return the trainer's log-probabilities by `rule`; None where they were not computed."""
        if rule == self.rule:
            return self.trainer
        return next((scored.log_probs for scored in self.rescored if scored.rule == rule), None)

    def excess(self, predicted: Scores, of: Scores | None = None) -> Array:
        """predicted - recorded (or another score), of every compared token of all rows."""
        others = self.recorded if of is None else of
        return np.concatenate(
            [
                (np.asarray(one) - np.asarray(other))[np.asarray(row.is_compared, dtype=bool)]
                for one, other, row in zip(predicted, others, self.rows, strict=True)
            ]
        )

    def left(self, predicted: Scores, of: Scores | None = None) -> float:
        """The mean of |excess|: how much of the difference a prediction leaves."""
        return float(np.abs(self.excess(predicted, of)).mean())

    @property
    def before(self) -> float:
        return self.left(self.trainer)

    @property
    def share_less_likely(self) -> float:
        """Return the share of compared tokens recorded as less likely than the trainer says, which no truncation
        does."""
        return float((self.excess(self.trainer) > max(self.threshold, 0.05 * self.before)).mean())


def record_path(run: Path, rollout_id: int, stage: Stage) -> Path:
    return run / DIRECTORY / f"round_{rollout_id}{stage}.json"


def record_files(run: Path) -> dict[Path, int]:
    """Every record of the run with its round, in the order of the rounds."""
    matches = {path: match for path in (run / DIRECTORY).glob("round_*") if (match := _FILE.fullmatch(path.name))}
    return {path: int(match[1]) for path, match in sorted(matches.items(), key=lambda item: (int(item[1][1]), item[0]))}


def write_record(run: Path, record: MismatchRecord) -> Path:
    """Write the record at once or not at all, and remove those beyond MAX_RECORDS. OSError where it cannot be."""
    path = record_path(run, record.rollout_id, record.stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record)) + "\n")
    partial.replace(path)
    others = [other for other in record_files(run) if other != path]
    for other in others[1 : max(1, len(others) - MAX_RECORDS + 2)]:
        other.unlink()
    return path


def read_record(path: Path) -> MismatchRecord:
    """ConfigError says which file is damaged, or was written by a newer version."""
    try:
        told = json.loads(path.read_text())
        schema = told["schema"]
        if schema > SCHEMA:
            raise ConfigError(
                f"{path}: has schema {schema}, this version of Vime reads up to {SCHEMA}. Use the one that wrote it."
            )
        record = msgspec.convert(told, MismatchRecord)
        _check_lengths(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is damaged: {error}. Expected what a run writes when trainer and engine differ; delete the file, "
            "or name another round by --round."
        ) from error
    return record


def _check_lengths(record: MismatchRecord) -> None:
    """ValueError when a list does not have a number for each token of its row."""
    lengths = [len(row.response_tokens) for row in record.rows]
    every = [record.recorded, record.trainer, [row.is_compared for row in record.rows]]
    every += [engine.log_probs for engine in record.engines] + [scored.log_probs for scored in record.rescored]
    if any([len(values) for values in scores] != lengths for scores in every) or any(
        not 0 <= other.row < len(lengths) or len(other.log_probs) != lengths[other.row] for other in record.retokenized
    ):
        raise ValueError(f"rows of {lengths} response tokens have other numbers of log-probabilities")
    if not any(any(row.is_compared) for row in record.rows):
        raise ValueError("no token in it was compared")
