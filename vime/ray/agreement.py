"""Do trainer and engine agree? Measured every round; when they do not, find out why, say it, and warn or stop.

Three comparisons, so that like always meets like (T: the version that trains):

* Tokens sampled by T: recorded against the trainer's own. The ranks measure it before the first step moves a weight
  (`training/agreement.py`) and answer their worst rows instead of taking the step, so the trainer can still be asked.
* A round whose tokens are all older (prefetch): when it was generated, while the engines still serve the version that
  sampled it, an engine scores a few of its rows afresh: recorded against that.
* After such a round, when the engines have confirmed the new weights: a fresh score against the trainer's.

`training/diagnosis.py` finds the cause; `ray/witnesses.py` asks on its behalf.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vime.backends.vllm_utils.control import FleetControl
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.observability.events import EventKind, EventLog
from vime.observability.screen import Screen
from vime.ray.rollout_manager import GeneratedRound, SampleText
from vime.ray.trainers import TrainedRound, Trainers
from vime.ray.waits import wait_for
from vime.ray.witnesses import RunWitnesses
from vime.training.evidence import COMPARED, Agreement, Suspect, merge, of_rows
from vime.types import AgreementError, SamplingRule, Version, VimeError
from vime.weights.versions import VersionLedger

if TYPE_CHECKING:
    from vime.training.diagnosis import Diagnosis

logger = logging.getLogger(__name__)

RESCORED = "rollout/rescored_logprob_abs_diff"


class Stage(StrEnum):
    """When a round was compared; the value names the report."""

    BEFORE_TRAINING = ""
    AFTER_GENERATION = "_generated"
    AFTER_PUBLISH = "_published"


SAID = {
    Stage.BEFORE_TRAINING: "before it was trained",
    Stage.AFTER_GENERATION: "when it had been generated",
    Stage.AFTER_PUBLISH: "after its weights were published",
}


class AgreementGuard:
    """Owned by the driver. `trainers` and `fleet` are None when the run has none."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        trainers: Trainers | None,
        manager: Any,
        fleet: FleetControl | None,
        screen: Screen,
        events: EventLog,
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._trainers, self._manager, self._fleet = trainers, manager, fleet
        self._screen, self._events = screen, events
        self._is_judged = config.agreement.on_train_rollout_diff != "ignore"
        self._unconfirmed: GeneratedRound | None = None  # trained, but none of its tokens could be compared
        self._rescored: dict[int, dict[str, float]] = {}  # by round, until it is trained

    def train(self, generated: GeneratedRound, version: Version) -> TrainedRound:
        """One round on every rank. A disagreement is examined before any weight moves; with `warn` the round is then
        trained as it is (its first step is computed again)."""
        rollout_id, ticket, num_begun = generated.rollout_id, generated.ticket, generated.num_begun
        trained = self._ranks.train(rollout_id, ticket, version, is_judged=self._is_judged, num_begun=num_begun)
        if not isinstance(trained, TrainedRound):
            self._examine(rollout_id, merge(trained), self._witnesses(rollout_id, version), Stage.BEFORE_TRAINING)
            trained = self._ranks.train(rollout_id, ticket, version, is_judged=False, num_begun=num_begun)
        assert isinstance(trained, TrainedRound), "a round that is not judged is trained"
        self._unconfirmed = generated if trained.metrics.get(COMPARED) == 0 else None
        return dataclasses.replace(trained, metrics=trained.metrics | self._rescored.pop(rollout_id, {}))

    def after_generation(self, generated: GeneratedRound, versions: VersionLedger) -> None:
        """Compare what was recorded with a fresh score, when no rank will be able to: the rows are older than the
        trainer's weights, and the engines still serve the version that sampled them. At temperature 1 only: vLLM scores
        a prompt before any."""
        serving = versions.serving
        rows = [row for row in generated.probe if {span.version for span in row.token_policy_versions} == {serving}]
        is_possible = self._is_judged and self._fleet is not None and self._trainers is not None
        if (
            not (is_possible and rows)
            or serving in (None, versions.trained)
            or self._config.rollout.rollout_temperature != 1
        ):
            return
        rollout_id = generated.rollout_id
        witnesses = self._witnesses(rollout_id, serving, is_current=False)
        opinions = witnesses.fresh_scores(rows)
        if opinions:
            found = of_rows(rows, opinions[0].log_probs)
            self._rescored[rollout_id] = {RESCORED: found.mean}
            self._examine_above(rollout_id, found, witnesses, Stage.AFTER_GENERATION)

    def after_publish(self, version: Version) -> dict[str, float]:
        """Compare fresh scores with the trainer's log-probabilities, when the last round had no token to compare."""
        generated, self._unconfirmed = self._unconfirmed, None
        if generated is None or not (generated.probe and self._fleet and self._is_judged):
            return {}
        rows, rule = list(generated.probe), SamplingRule()
        witnesses = self._witnesses(generated.rollout_id, version, rule=rule)
        with ThreadPoolExecutor(1, thread_name_prefix="agreement") as beside:
            asked = beside.submit(witnesses.fresh_scores, rows)
            own = self._ranks.log_probs(rows, rule)
            opinions = asked.result()
        found = [of_rows(_with_recorded(rows, opinion.log_probs), own) for opinion in opinions]
        if not found:
            return {}
        worst = max(found, key=lambda agreement: agreement.mean)
        self._examine_above(generated.rollout_id, worst, witnesses, Stage.AFTER_PUBLISH)
        return worst.metrics()

    @property
    def _ranks(self) -> Trainers:
        assert self._trainers is not None, "nothing is trained without trainer ranks"
        return self._trainers

    @property
    def _threshold(self) -> float:
        threshold = self._config.agreement.train_rollout_diff_threshold
        assert threshold is not None, "resolved at start"
        return threshold

    def _witnesses(
        self, rollout_id: int, version: Version, *, is_current: bool = True, rule: SamplingRule | None = None
    ) -> RunWitnesses:
        return RunWitnesses(
            self._config,
            trainers=self._ranks,
            fleet=self._fleet,
            texts_of=partial(self._texts, rollout_id),
            version=version,
            is_current=is_current,
            rule=rule or SamplingRule(temperature=self._config.rollout.rollout_temperature),
        )

    def _examine_above(self, rollout_id: int, found: Agreement, witnesses: RunWitnesses, stage: Stage) -> None:
        if found.mean > self._threshold:
            self._examine(rollout_id, found, witnesses, stage)

    def _examine(self, rollout_id: int, found: Agreement, witnesses: RunWitnesses, stage: Stage) -> None:
        """Write the report, say the cause, and raise AgreementError under --on-train-rollout-diff stop."""
        from vime.training.diagnosis import ADVICE, diagnose  # brings torch, which a sound run's driver does without

        self._screen.activity("finding out why trainer and engine disagree")
        diagnosis = diagnose(found.suspects, witnesses, threshold=self._threshold)
        path = self._run_dir / "agreement" / f"round_{rollout_id}{stage}.json"
        self._write(path, rollout_id, found, diagnosis, witnesses.version)
        self._events.emit(
            EventKind.DISAGREEMENT,
            rollout_id=rollout_id,
            cause=str(diagnosis.cause),
            difference=found.mean,
            threshold=self._threshold,
            path=str(path),
        )
        message = (
            f"round {rollout_id}, {SAID[stage]}: trainer and engine differ by {found.mean:.3g} nats a token (largest "
            f"{found.largest:.3g}, {found.num_tokens} tokens), expected at most {self._threshold:g}. Likely cause: "
            f"{diagnosis.cause}: {diagnosis.summary}. {ADVICE[diagnosis.cause]} Report: {path}"
        )
        logger.info(message)
        if self._config.agreement.on_train_rollout_diff == "stop":
            raise AgreementError(f"{message} (--on-train-rollout-diff stop)")
        self._screen.warn(message)

    def _texts(self, rollout_id: int, indices: list[int]) -> list[SampleText | None]:
        """What the samples said, from the RolloutManager, which may be generating meanwhile."""
        try:
            [texts] = wait_for(
                [self._manager.texts_of.remote(rollout_id, indices)],
                name="the texts of the suspected samples",
                owner="RolloutManager",
                deadline_s=30,
            )
        except VimeError as error:
            logger.warning("no texts of the suspected samples: %s", error)
            return [None] * len(indices)
        return list(texts)

    def _write(self, path: Path, rollout_id: int, found: Agreement, diagnosis: Diagnosis, version: Version) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "rollout_id": rollout_id,
            "version": version,
            "mean": found.mean,
            "largest": found.largest,
            "num_tokens": found.num_tokens,
            "threshold": self._threshold,
            **diagnosis.to_dict(),
            "rows": [_row_record(suspect) for suspect in found.suspects],
        }
        path.write_text(json.dumps(record, indent=1) + "\n")


def _with_recorded(rows: Sequence[TrainRow], log_probs: Sequence[Sequence[float]]) -> list[TrainRow]:
    """The rows as if these had been recorded."""
    return [
        dataclasses.replace(row, rollout_log_probs=np.asarray(values, dtype=np.float32))
        for row, values in zip(rows, log_probs, strict=True)
    ]


def _row_record(suspect: Suspect) -> dict[str, Any]:
    row = suspect.row
    return {
        "sample_index": row.sample_index,
        "group_index": row.group_index,
        "mean": suspect.difference,
        "prompt_tokens": row.tokens[: -row.response_length].tolist(),
        "response_tokens": row.tokens[-row.response_length :].tolist(),
        "recorded": row.rollout_log_probs.tolist(),
        "trainer": list(suspect.logp_R),
        "is_compared": list(suspect.is_compared_R),
        "versions": [[span.version, span.start, span.end] for span in row.token_policy_versions],
    }
