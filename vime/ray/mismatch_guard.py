"""How far are trainer and engine apart? Measured every round; above the threshold recorded, then warned of or fatal.

Four comparisons, so that like always meets like (T: the version that trains):

* Tokens sampled by T: recorded against the trainer's own. The ranks measure it before the first step moves a weight
  (`training/mismatch.py`) and answer their worst rows instead of taking the step, so the trainer can still be asked.
* A round whose tokens are all older (prefetch): when it was generated, while the engines still serve the version that
  sampled it, an engine scores a few of its rows afresh: recorded against that.
* After such a round, when the engines have confirmed the new weights: a fresh score against the trainer's.
* An engine that has got its first weights since its start: its score of a fixed text against the trainer's, before it
  gets a prompt. It began with random weights, so this shows each value that the update did not reach (decision 0055).

`ray/mismatch_probes.py` makes the record; `vime diagnose` finds the cause in it, when somebody asks. A cause is
recorded once: in later rounds only its own test is asked, and everything again when that test does not show it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.launch import may_start_random
from vime.config.parse import Config
from vime.data.images import images_of
from vime.data.rows import TrainRow
from vime.observability.diagnosis import Cause, Finding, diagnose
from vime.observability.events import EventKind, EventLog
from vime.observability.mismatch_record import MismatchRecord, Stage, write_record
from vime.observability.screen import Screen
from vime.ray.actor import Actor
from vime.ray.mismatch_probes import MismatchProbes
from vime.ray.probe import RowImages, check_engines_agree, compare_with_engines
from vime.ray.rank_rounds import TrainedRound
from vime.ray.rollout_manager import GeneratedRound, RolloutManager, SampleText
from vime.ray.trainers import Trainers
from vime.ray.waits import wait_for
from vime.training.evidence import COMPARED, RESCORED, MeasuredMismatch, merge, of_rows
from vime.types import EngineAddress, EngineError, MismatchError, PublishError, SamplingRule, Version, VimeError
from vime.weights.versions import VersionLedger

logger = logging.getLogger(__name__)


ASKED_TIMEOUT_S = 60.0  # of an engine that has nothing else to do
GROWN = 2.0
"""A known cause is recorded again when the mean difference is this many times that of its last record."""


@dataclasses.dataclass(slots=True, kw_only=True)
class KnownCause:
    """What a record of this run has shown. `finding` None: no known cause explained it."""

    finding: Finding | None
    rollout_id: int
    mean: float
    path: str = ""  # of the record; empty: it could not be written
    num_rounds: int = 1  # with this cause so far

    @property
    def name(self) -> str:
        return str(self.finding.cause if self.finding else Cause.UNKNOWN)


class HasFleet(Protocol):
    """The engines, of which other ones serve after a loss."""

    @property
    def fleet(self) -> FleetControl: ...
    @property
    def is_asleep(self) -> bool: ...


class MismatchGuard:
    """Owned by the driver. `trainers` and `engines` are None when the run has none."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        trainers: Trainers | None,
        manager: Actor[RolloutManager],
        engines: HasFleet | None,
        screen: Screen,
        events: EventLog,
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._trainers, self._manager, self._engines = trainers, manager, engines
        self._screen, self._events = screen, events
        self._is_judged = config.agreement.on_train_rollout_diff != "ignore"
        self._rule = SamplingRule(temperature=config.rollout.rollout_temperature)
        self._unconfirmed: GeneratedRound | None = None  # trained, but none of its tokens could be compared
        self._rescored: dict[int, dict[str, float]] = {}  # by round, until it is trained
        self._causes: dict[tuple[Stage, str], KnownCause] = {}  # the last record of each

    def train(
        self, generated: GeneratedRound, version: Version, on_poll: Callable[[], None] | None = None
    ) -> TrainedRound:
        """One round on every rank. A mismatch is recorded before any weight moves; with `warn` the round is then
        trained as it is (its first step is computed again)."""
        rollout_id, ticket, num_begun = generated.rollout_id, generated.ticket, generated.num_begun
        assert ticket is not None, "a run that trains has tickets"
        train = partial(self._ranks.train, rollout_id, ticket, version, num_begun=num_begun, on_poll=on_poll)
        trained = train(is_judged=self._is_judged)
        if not isinstance(trained, TrainedRound):
            found, stage = merge(trained), Stage.BEFORE_TRAINING
            self._record_above(found, rollout_id=rollout_id, stage=stage, version=version, rule=self._rule)
            trained = train(is_judged=False)
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
            or generated.rollout_id in self._rescored  # a prefetched round that no publish has followed
            or serving in (None, versions.trained)
            or self._config.rollout.rollout_temperature != 1
        ):
            return
        rollout_id = generated.rollout_id
        fresh = self._probes_of(self._fleet).engine_logprobs(rows, self._images(rollout_id, rows))
        if fresh:
            found, stage = of_rows(rows, fresh[0].log_probs), Stage.AFTER_GENERATION
            self._rescored[rollout_id] = {RESCORED: found.mean}
            self._record_above(
                found, rollout_id=rollout_id, stage=stage, version=serving, rule=self._rule, is_current=False
            )

    def after_publish(self, version: Version, between: Callable[[], None] | None = None) -> dict[str, float]:
        """Compare fresh scores with the trainer's log-probabilities, when the last round had no token to compare.
        `between`: as in `compare_with_engines`."""
        generated, self._unconfirmed = self._unconfirmed, None
        if generated is None or not (generated.probe and self._engines and self._is_judged):
            return {}
        try:
            images = self._images(generated.rollout_id, generated.probe)
            found = compare_with_engines(self._engines.fleet, self._ranks, generated.probe, images, between=between)
        except EngineError as error:
            logger.warning("engines and trainer are not compared after round %d: %s", generated.rollout_id, error)
            return {}
        worst, stage = max(found.values(), key=lambda measured: measured.mean), Stage.AFTER_PUBLISH
        self._record_above(worst, rollout_id=generated.rollout_id, stage=stage, version=version, rule=SamplingRule())
        return worst.metrics()

    def after_first_update(
        self, version: Version, engines: Sequence[EngineAddress], between: Callable[[], None] | None = None
    ) -> None:
        """Compare these engines, which have got no prompt since their start, with the trainer. One that differs is
        named in a warning, or in a MismatchError under --on-train-rollout-diff stop where it began with random weights:
        one that is quantised, or that somebody else has started, may differ by design. With --check-weight-update-equal
        all engines are compared elsewhere. `between`: as in `compare_with_engines`."""
        if not engines or not self._is_judged or self._config.weights.check_weight_update_equal:
            return
        fleet = FleetControl(engines, timeout_s=ASKED_TIMEOUT_S)
        try:
            check_engines_agree(self._config, self._ranks, fleet, version, between=between, is_of_text=True)
        except PublishError as error:
            is_known = may_start_random(self._config) and not self._config.cluster.rollout_external_engine_addrs
            if is_known and self._config.agreement.on_train_rollout_diff == "stop":
                raise MismatchError(f"{error} (--on-train-rollout-diff stop)") from error
            self._screen.warn(str(error))
        except EngineError as error:  # one that is lost is for the next check of the engines
            self._screen.warn(f"version {version}: engines that started serve without a comparison. {error}")
        finally:
            fleet.close()

    @property
    def _fleet(self) -> FleetControl | None:
        """None: no engine can be asked for scores."""
        if self._engines is None or (self._config.cluster.colocate and self._engines.is_asleep):
            return None
        return self._engines.fleet

    @property
    def _ranks(self) -> Trainers:
        assert self._trainers is not None, "nothing is trained without trainer ranks"
        return self._trainers

    @property
    def _threshold(self) -> float:
        threshold = self._config.agreement.train_rollout_diff_threshold
        assert threshold is not None, "resolved at start"
        return threshold

    def _probes_of(self, fleet: FleetControl | None) -> MismatchProbes:
        return MismatchProbes(
            self._config, trainers=self._ranks, fleet=fleet, texts_of=self._texts, threshold=self._threshold
        )

    def _record_above(
        self,
        found: MeasuredMismatch,
        *,
        rollout_id: int,
        stage: Stage,
        version: Version,
        rule: SamplingRule,
        is_current: bool = True,
    ) -> None:
        """Above the threshold: write the record unless its cause is known, say so, and raise MismatchError under
        --on-train-rollout-diff stop."""
        if not found.mean > self._threshold:
            return
        self._screen.activity("recording where trainer and engine differ")
        # the trainers score the rows; with --colocate the engines are asleep meanwhile
        probes = self._probes_of(None if self._config.cluster.colocate else self._fleet)
        ask = partial(
            probes.record,
            found,
            rollout_id=rollout_id,
            stage=stage,
            version=version,
            rule=rule,
            is_current=is_current,
        )
        known = self._known(ask, found.mean, stage)
        if known is not None:
            says = f"The cause is that of round {known.rollout_id}: {known.name}"
        else:
            known, says = self._record(ask(), found.mean)
        self._events.emit(
            EventKind.DISAGREEMENT,
            rollout_id=rollout_id,
            difference=found.mean,
            threshold=self._threshold,
            path=known.path,
            cause=known.name,
        )
        message = (
            f"round {rollout_id}, {stage.words}: trainer and engine differ by {found.mean:.3g} nats a token (largest "
            f"{found.largest:.3g}, {found.num_tokens} tokens), expected at most {self._threshold:g}. {says}"
        )
        logger.info(message)
        if self._config.agreement.on_train_rollout_diff == "stop":
            raise MismatchError(f"{message} (--on-train-rollout-diff stop)")
        self._screen.warn(message)

    def _record(self, record: MismatchRecord, mean: float) -> tuple[KnownCause, str]:
        """Write it and remember its cause. Returns that, and what to tell."""
        known = KnownCause(finding=diagnose(record).finding, rollout_id=record.rollout_id, mean=mean)
        told = f"The cause: vime diagnose {self._run_dir} --round {record.rollout_id}"
        try:
            known.path = str(write_record(self._run_dir, record))
        except OSError as error:  # a full disk does not end a run that may go on
            return known, f"Its rows could not be recorded: {error}"
        known.num_rounds = self._causes.get((record.stage, known.name), known).num_rounds
        self._causes[record.stage, known.name] = known
        return known, told

    def _known(self, ask: Callable[..., MismatchRecord], mean: float, stage: Stage) -> KnownCause | None:
        """Return the recorded cause that is at work once more. None: it is another one, or it has grown.

        Nothing tests that the cause is still unknown, so everything is asked again in the 2nd, 4th, 8th ... round."""
        candidates = [known for (at, _), known in self._causes.items() if at == stage and mean <= GROWN * known.mean]
        for known in candidates:
            if known.finding is not None:
                told = diagnose(ask(again=known.finding)).finding
                if told is not None and told.cause == known.finding.cause:
                    return known
        for known in candidates:
            if known.finding is None:
                known.num_rounds += 1
                if known.num_rounds & (known.num_rounds - 1):  # no power of two
                    return known
        return None

    def _images(self, rollout_id: int, rows: Sequence[TrainRow]) -> RowImages:
        """Return the images of the rows for an engine. Nobody is asked for those of rows that have none."""
        if not any(map(images_of, rows)):
            return [None] * len(rows)
        texts = self._texts(rollout_id, [row.sample_index for row in rows])
        return [None if text is None else text.images for text in texts]

    def _texts(self, rollout_id: int, indices: list[int]) -> list[SampleText | None]:
        """What the samples said, from the RolloutManager, which may be generating meanwhile."""
        try:
            [texts] = wait_for(
                [self._manager.ask(RolloutManager.texts_of, rollout_id, indices)],
                name="the texts of the samples that differ",
                owner="RolloutManager",
                deadline_s=30,
            )
        except VimeError as error:
            logger.warning("no texts of the samples that differ: %s", error)
            return [None] * len(indices)
        return list(texts)
