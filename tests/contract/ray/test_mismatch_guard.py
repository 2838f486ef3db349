"""The driver's side of the comparison against scripted engine and ranks: what is compared when, and what follows.

The scripted engine scores every token of a prompt with -1.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.rollout_setup import write_model_directory
from tests.helpers.rows import make_row
from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.fake import FakeEngine
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.observability.diagnosis import diagnose
from vime.observability.events import EventLog, read_events
from vime.observability.mismatch_record import Stage, read_record, record_files, record_path
from vime.observability.screen import Screen
from vime.ray.mismatch_guard import MismatchGuard
from vime.ray.rollout_manager import GeneratedRound, SampleText
from vime.ray.trainers import TrainedRound
from vime.training.evidence import COMPARED, DIFFERENCE, RESCORED, MeasuredMismatch, Suspect
from vime.types import EngineReport, MismatchError, SamplingRule, VersionSpan
from vime.weights.versions import VersionLedger

SERVING, TRAINED, R = 3, 4, 8
TICKET: Any = object()  # nobody reads rows here


class Engine(FakeEngine):
    """Notes every request."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def handle(self, path: str, query: dict[str, list[str]], raw: bytes) -> tuple[int, object]:
        self.asked.append(path)
        return super().handle(path, query, raw)


class Ranks:
    """`Trainers` that answer from a list, and score every token with `log_prob`, divided by the temperature when it
    `is_tempered`."""

    def __init__(self, *answers: Any, log_prob: float = -1.0, is_tempered: bool = False) -> None:
        self.answers, self.log_prob, self.is_tempered = list(answers), log_prob, is_tempered
        self.judged: list[bool] = []
        self.rules: list[SamplingRule] = []

    def train(self, *_: Any, is_judged: bool, num_begun: int, on_poll: object) -> Any:
        self.judged.append(is_judged)
        answer = self.answers.pop(0)
        return TrainedRound(metrics=answer, stepped=[]) if isinstance(answer, dict) else answer

    def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
        self.rules.append(rule)
        scale = rule.temperature if self.is_tempered else 1.0
        return [[self.log_prob / scale] * row.response_length for row in rows]

    def weights_hash(self) -> str:
        return "trainers"


def row(*, recorded: float = -1.0, version: int = SERVING) -> TrainRow:
    span = VersionSpan(version, 0, R)
    return make_row(rollout_id=version, response=range(R), log_probs=[recorded] * R, versions=[span])


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as running:
        running.faults.wrong_version = str(SERVING)
        yield running


def versions(*, serving: int = SERVING, trained: int = TRAINED) -> VersionLedger:
    """The engines confirmed `serving`; since then the trainer went on to `trained`."""
    ledger = VersionLedger()
    ledger.restore(serving)
    ledger.confirm([EngineReport(engine="fake-0", version=serving, content_hash="", num_tensors=0)], "")
    for _ in range(trained - serving):
        ledger.advance()
    return ledger


class Setup:
    def __init__(self, tmp_path: Path, engine: Engine, ranks: Ranks, **flags: Any) -> None:
        model = write_model_directory(tmp_path / "model")
        settings = {"train_rollout_diff_threshold": 1e-4, "on_train_rollout_diff": "warn", **flags}
        self.run_dir, self.stream, self.ranks, self.rollout_id = tmp_path, io.StringIO(), ranks, 0
        self.guard = MismatchGuard(
            Config().replace(hf_checkpoint=str(model), **settings),
            tmp_path,
            trainers=ranks,
            manager=None,
            engines=SimpleNamespace(fleet=FleetControl([engine.address], timeout_s=60)),
            screen=Screen(tmp_path, stream=self.stream),
            events=EventLog(tmp_path, "driver"),
        )
        self.guard._texts = lambda rollout_id, indices: [SampleText(prompt=None, response="") for _ in indices]

    @property
    def causes(self) -> list[str]:
        """What `vime diagnose` makes of every record; there are as many events."""
        num_events = sum(event.kind == "disagreement" for event in read_events(self.run_dir))
        causes = [str(diagnose(read_record(path)).cause) for path in record_files(self.run_dir)]  # none twice here
        assert len(causes) == num_events
        return causes


def mismatch() -> MeasuredMismatch:
    suspect = Suspect(row=row(recorded=-2.0, version=TRAINED), logp_R=[-1.0] * R, is_compared_R=[True] * R)
    return MeasuredMismatch(num_tokens=R, mean=1.0, largest=1.0, suspects=(suspect,))


def generated(**kind: Any) -> GeneratedRound:
    return GeneratedRound(rollout_id=TRAINED, ticket=TICKET, metrics={}, probe=(row(**kind),))


def test_a_sound_round_is_trained_once(tmp_path: Path, engine: Engine) -> None:
    ranks = Ranks({COMPARED: 8.0, DIFFERENCE: 1e-7})
    setup = Setup(tmp_path, engine, ranks)
    assert setup.guard.train(generated(), TRAINED).metrics == {COMPARED: 8.0, DIFFERENCE: 1e-7}
    assert setup.guard.after_publish(TRAINED + 1) == {}  # the ranks have compared: no engine is asked
    assert (ranks.judged, setup.causes, engine.asked) == ([True], [], [])


def test_warn_writes_a_record_and_trains_the_round_unjudged(tmp_path: Path, engine: Engine) -> None:
    ranks = Ranks([mismatch()], {COMPARED: 8.0, DIFFERENCE: 1.0})
    setup = Setup(tmp_path, engine, ranks)
    assert setup.guard.train(generated(), TRAINED).metrics[DIFFERENCE] == 1.0
    assert ranks.judged == [True, False]
    assert len(setup.causes) == 1
    record = read_record(record_path(tmp_path, TRAINED, Stage.BEFORE_TRAINING))
    assert (record.mean, record.version, record.rows[0].recorded) == (1.0, TRAINED, [-2.0] * R)
    assert f"warning: round {TRAINED}, before it was trained: trainer and engine differ by 1 nats" in (
        setup.stream.getvalue()
    )


@pytest.mark.parametrize("colocate", [False, True])
def test_an_engine_says_its_score_for_the_record_unless_it_sleeps_while_trainers_work(
    tmp_path: Path, engine: Engine, colocate: bool
) -> None:
    setup = Setup(tmp_path, engine, Ranks([mismatch()], {COMPARED: 8.0}), colocate=colocate)
    setup.guard._engines.is_asleep = colocate
    setup.guard.train(generated(), TRAINED)
    record = read_record(record_path(tmp_path, TRAINED, Stage.BEFORE_TRAINING))
    assert [each.engine for each in record.engines] == ([] if colocate else ["fake-0"])


def rounds(setup: Setup, found: Sequence[MeasuredMismatch]) -> list[str]:
    """Train one round for each, and return the cause that each event names."""
    for one in found:
        setup.ranks.answers += [[one], {COMPARED: 8.0, DIFFERENCE: one.mean}]
        setup.rollout_id += 1
        setup.guard.train(dataclasses.replace(generated(), rollout_id=setup.rollout_id), TRAINED)
    return [event.fields["cause"] for event in read_events(setup.run_dir) if event.kind == "disagreement"]


def recorded_rounds(setup: Setup) -> list[int]:
    return list(record_files(setup.run_dir).values())


def shifted(scale: float = 1.0) -> MeasuredMismatch:
    """Log-probabilities that were recorded one token too early. The engine, which says -1, must not be asked."""
    own_R = [-scale * (1 + number % 3) for number in range(R)]
    recorded = dataclasses.replace(row(version=TRAINED), rollout_log_probs=np.asarray([*own_R[1:], -1.0], np.float32))
    suspect = Suspect(row=recorded, logp_R=own_R, is_compared_R=[True] * (R - 1) + [False])
    return MeasuredMismatch(num_tokens=R, mean=scale, largest=2 * scale, suspects=(suspect,))


def test_a_cause_is_recorded_once_and_again_when_it_has_doubled(tmp_path: Path, engine: Engine) -> None:
    setup = Setup(tmp_path, engine, Ranks(), colocate=True)  # the engine sleeps: nobody asks it
    setup.guard._engines.is_asleep = True
    causes = rounds(setup, [shifted(), shifted(1.5), shifted(2.5), shifted(4.9), shifted(0.5)])
    assert causes == ["off-by-one"] * 5
    assert recorded_rounds(setup) == [1, 3]
    events = [event.fields for event in read_events(tmp_path) if event.kind == "disagreement"]
    assert [Path(event["path"]).name for event in events] == [f"round_{number}.json" for number in (1, 1, 3, 3, 3)]
    told = setup.stream.getvalue()
    assert "warning: round 2, before it was trained: trainer and engine differ by 1.5 nats a token" in told
    assert "The cause is that of round 1: off-by-one" in told


def test_another_cause_is_recorded_though_it_is_smaller(tmp_path: Path, engine: Engine) -> None:
    setup = Setup(tmp_path, engine, Ranks())
    suspect = Suspect(row=row(recorded=-1.5, version=TRAINED), logp_R=[-1.25] * R, is_compared_R=[True] * R)
    weights = MeasuredMismatch(num_tokens=R, mean=0.01, largest=0.25, suspects=(suspect,))
    engine.faults.status["/inference/v1/generate"] = 500  # no engine says that the weights differ
    assert rounds(setup, [shifted()]) == ["off-by-one"]
    engine.faults.status.clear()
    assert rounds(setup, [weights, shifted(), weights])[1:] == [
        "weights of another version",
        "off-by-one",
        "weights of another version",
    ]
    assert recorded_rounds(setup) == [1, 2]


def test_only_the_test_of_the_known_cause_is_asked_again(tmp_path: Path, engine: Engine) -> None:
    setup = Setup(tmp_path, engine, Ranks())
    engine.faults.status["/inference/v1/generate"] = 500
    rounds(setup, [shifted()])
    assert engine.asked
    assert len(setup.ranks.rules) > 20
    engine.faults.status.clear()
    engine.asked.clear()
    setup.ranks.rules.clear()
    assert rounds(setup, [shifted()]) == ["off-by-one"] * 2
    assert (engine.asked, setup.ranks.rules) == ([], [])


def test_a_known_temperature_is_tried_first_and_another_cause_is_not_taken_for_it(
    tmp_path: Path, engine: Engine
) -> None:
    setup = Setup(tmp_path, engine, Ranks(is_tempered=True), colocate=True)
    setup.guard._engines.is_asleep = True
    assert rounds(setup, [mismatch()]) == ["temperature"]
    setup.ranks.rules.clear()
    assert rounds(setup, [mismatch()]) == ["temperature"] * 2
    assert setup.ranks.rules == [SamplingRule(temperature=0.5)]
    assert rounds(setup, [shifted()])[2:] == ["off-by-one"]
    assert recorded_rounds(setup) == [1, 3]


def test_what_no_cause_explains_is_recorded_in_the_2nd_4th_and_8th_round(tmp_path: Path, engine: Engine) -> None:
    setup = Setup(tmp_path, engine, Ranks())
    assert rounds(setup, [mismatch()] * 9) == ["unknown"] * 9
    assert recorded_rounds(setup) == [1, 2, 4, 8]


def test_stop_ends_the_run_before_a_second_attempt(tmp_path: Path, engine: Engine) -> None:
    ranks = Ranks([mismatch()])
    setup = Setup(tmp_path, engine, ranks, on_train_rollout_diff="stop")
    with pytest.raises(MismatchError, match=r"expected at most 0.0001. The cause: vime diagnose .* --round 4"):
        setup.guard.train(generated(), TRAINED)
    assert ranks.judged == [True]


def test_ignore_measures_only(tmp_path: Path, engine: Engine) -> None:
    ranks = Ranks({COMPARED: 0.0})
    setup = Setup(tmp_path, engine, ranks, on_train_rollout_diff="ignore")
    setup.guard.after_generation(generated(recorded=-2.0), versions())
    assert setup.guard.train(generated(), TRAINED).metrics == {COMPARED: 0.0}
    assert setup.guard.after_publish(TRAINED + 1) == {}
    assert (ranks.judged, setup.causes, engine.asked) == ([False], [], [])


def test_a_prefetched_round_is_compared_with_a_fresh_score_while_its_version_still_serves(
    tmp_path: Path, engine: Engine
) -> None:
    setup = Setup(tmp_path, engine, Ranks({COMPARED: 0.0}, {COMPARED: 0.0}))
    setup.guard.after_generation(generated(), versions())
    assert setup.guard.train(generated(), TRAINED).metrics[RESCORED] == 0.0
    assert setup.causes == []
    setup.guard.after_generation(generated(recorded=-1.5), versions())
    assert setup.guard.train(generated(), TRAINED).metrics[RESCORED] == 0.5
    assert len(setup.causes) == 1
    setup.guard.after_generation(generated(), versions())
    num_asked = len(engine.asked)
    setup.guard.after_generation(
        generated(), versions()
    )  # it is taken, with --update-weights-interval without a publish
    assert len(engine.asked) == num_asked
    assert f"round {TRAINED}, when it had been generated: trainer and engine differ by 0.5" in setup.stream.getvalue()


@pytest.mark.parametrize("why", ["another version serves", "the trainer will compare", "a temperature"])
def test_what_a_fresh_score_cannot_judge_is_not_asked(tmp_path: Path, engine: Engine, why: str) -> None:
    setup = Setup(tmp_path, engine, Ranks(), **({"rollout_temperature": 0.7} if why == "a temperature" else {}))
    sampled = SERVING - 1 if why == "another version serves" else SERVING
    trained = SERVING if why == "the trainer will compare" else TRAINED
    setup.guard.after_generation(generated(recorded=-2.0, version=sampled), versions(trained=trained))
    assert (setup.causes, engine.asked) == ([], [])


@pytest.mark.parametrize(("log_prob", "causes"), [(-1.0, []), (-1.25, ["weights of another version"])])
def test_after_a_round_without_comparable_tokens_the_engines_are_held_against_the_trainer(
    tmp_path: Path, engine: Engine, log_prob: float, causes: list[str]
) -> None:
    setup = Setup(tmp_path, engine, Ranks({COMPARED: 0.0}, log_prob=log_prob))
    setup.guard.train(generated(), TRAINED)
    metrics = setup.guard.after_publish(TRAINED + 1)
    assert metrics[DIFFERENCE] == -1.0 - log_prob
    assert metrics[COMPARED] == R
    assert setup.causes == causes
    assert setup.guard.after_publish(TRAINED + 2) == {}  # once a round


def test_engines_that_do_not_answer_cost_their_evidence_and_not_the_run(tmp_path: Path, engine: Engine) -> None:
    engine.faults.status["/inference/v1/generate"] = 500
    ranks = Ranks([mismatch()], {COMPARED: 8.0, DIFFERENCE: 1.0})
    setup = Setup(tmp_path, engine, ranks)
    setup.guard.train(generated(), TRAINED)
    record = read_record(record_path(tmp_path, TRAINED, Stage.BEFORE_TRAINING))
    assert (record.engines, record.cache_gaps) == ([], {})
    assert diagnose(record).findings[0].evidence == "no fresh score of an engine to compare with"


def test_a_record_that_cannot_be_written_costs_the_diagnosis_and_not_the_run(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "mismatch").write_text("a file where the directory should be")
    setup = Setup(tmp_path, engine, Ranks([mismatch()], {COMPARED: 8.0, DIFFERENCE: 1.0}))
    assert setup.guard.train(generated(), TRAINED).metrics[DIFFERENCE] == 1.0
    assert "Its rows could not be recorded: [Errno" in setup.stream.getvalue()
