"""Each cause, seeded into rows of a small known model, is named from the record alone, by its own test and no other.

The trainer is a bigram table: log p of a token depends on the token before it alone, so every prediction can be made
here by plain torch. Rows are sampled, not made up: a fault changes how they were sampled or what was written down.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.rows import make_row
from vime.algo.sampling import log_probs_under
from vime.config.parse import Config
from vime.data.images import IMAGE_COLUMN
from vime.data.rows import TrainRow
from vime.observability.diagnosis import Cause, Diagnosis, diagnose
from vime.observability.mismatch_record import (
    MAX_RECORDS,
    MAX_TOKENS,
    MismatchRecord,
    Stage,
    read_record,
    record_files,
    write_record,
)
from vime.ray import mismatch_probes
from vime.ray.mismatch_probes import MAX_ENGINES, MismatchProbes
from vime.ray.retokenization import Retokenization
from vime.ray.rollout_manager import SampleText
from vime.training.evidence import MeasuredMismatch, Suspect
from vime.types import ConfigError, EngineError, EngineReport, SamplingRule, VersionSpan

V, R, VERSION, THRESHOLD = 13, 40, 6, 1e-4
TABLE_VV = torch.randn(V, V, generator=torch.Generator().manual_seed(0)) * 1.5
OTHER_VV = TABLE_VV + 0.3 * torch.randn(V, V, generator=torch.Generator().manual_seed(1))


def scores(table_VV: Tensor, tokens: Sequence[int], length: int, rule: SamplingRule) -> list[float]:
    """Log-probabilities of the last `length` tokens."""
    chosen = torch.tensor(tokens)
    return log_probs_under(table_VV[chosen[-length - 1 : -1]], chosen[-length:], rule).tolist()


def sampled(rule: SamplingRule, *, table_VV: Tensor = TABLE_VV, seed: int = 0) -> TrainRow:
    """A row drawn under `rule`, with the log-probabilities it was drawn with."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [seed % V, 1]
    for _ in range(R):
        every = log_probs_under(table_VV[tokens[-1]].expand(V, V), torch.arange(V), rule)
        tokens.append(int(torch.multinomial(every.exp(), 1, generator=generator)))
    log_probs, span = scores(table_VV, tokens, R, rule), VersionSpan(VERSION, 0, R)
    return make_row(
        seed, rollout_id=VERSION, prompt=tokens[:2], response=tokens[2:], log_probs=log_probs, versions=[span]
    )


@dataclass
class Run:
    """Trainers with TABLE_VV, an engine with `engine_VV`, and a tokenizer that says `told`."""

    rule: SamplingRule = field(default_factory=SamplingRule)
    engine_VV: Tensor | None = field(default_factory=lambda: TABLE_VV)
    engine_version: int = VERSION
    engine_hash: str = "aa"
    cache_gap: float = 0.0
    told: tuple[Retokenization, ...] = ()
    num_forwards: int = 0
    texts: Sequence[SampleText | None] = ()
    images_asked_with: list[Any] = field(default_factory=list)
    addresses: Sequence[SimpleNamespace] = (SimpleNamespace(name="engine-0"),)

    def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
        self.num_forwards += 1
        return [scores(TABLE_VV, row.tokens, row.response_length, rule) for row in rows]

    def weights_hash(self) -> str:
        return "aa"

    def reports(self) -> list[EngineReport]:
        return [
            EngineReport(engine="engine-0", version=self.engine_version, content_hash=self.engine_hash, num_tensors=1)
        ]

    def prompt_log_probs(self, rows: Sequence[Sequence[int]], images: Sequence[Any]) -> list[list[list[float]]]:
        self.images_asked_with += images
        return [[scores(self.engine_VV, tokens, len(tokens) - 1, SamplingRule()) for tokens in rows]]

    def next_log_probs(self, tokens: Sequence[int], images: Any, *, with_cache: bool) -> list[dict[int, float]]:
        self.images_asked_with.append(images)
        return [{7: -1.0 - (self.cache_gap if with_cache else 0.0)}]

    def recorded(self, rows: Sequence[TrainRow], masks: Sequence[Sequence[bool]] | None = None) -> MismatchRecord:
        masks = masks or [[True] * row.response_length for row in rows]
        suspects = tuple(
            Suspect(row=row, logp_R=scores(TABLE_VV, row.tokens, row.response_length, self.rule), is_compared_R=mask_R)
            for row, mask_R in zip(rows, masks, strict=True)
        )
        probes = MismatchProbes(
            Config(),
            trainers=self,
            fleet=None if self.engine_VV is None else self,
            texts_of=lambda _, indices: list(self.texts or [None for _ in indices]),
            threshold=THRESHOLD,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mismatch_probes, "retokenizations", lambda config, rows, texts: list(self.told))
            return probes.record(
                MeasuredMismatch(num_tokens=R, mean=1.0, largest=1.0, suspects=suspects),
                rollout_id=VERSION,
                stage=Stage.BEFORE_TRAINING,
                version=VERSION,
                rule=self.rule,
            )


def through_a_file(record: MismatchRecord, directory: Path) -> MismatchRecord:
    """What another process, after the run, reads."""
    return read_record(write_record(directory, record))


@pytest.fixture
def judged(tmp_path: Path):
    """Record the rows, read the record, and diagnose it: the run is not asked any more."""

    def judge(rows: Sequence[TrainRow], run: Run, masks: Sequence[Sequence[bool]] | None = None) -> Diagnosis:
        record = through_a_file(run.recorded(rows, masks), tmp_path)
        asked = run.num_forwards
        found = diagnose(record)
        assert run.num_forwards == asked
        return found

    return judge


def finding(diagnosis: Diagnosis, cause: Cause):
    [found] = [finding for finding in diagnosis.findings if finding.cause is cause]
    return found


@pytest.mark.parametrize(("declared", "used"), [(1.0, 0.7), (1.0, 1.37), (0.6, 1.0), (0.6, 0.7)])
def test_another_temperature_is_named_with_its_value(judged, declared: float, used: float) -> None:
    run = Run(rule=SamplingRule(temperature=declared))
    found = judged([sampled(SamplingRule(temperature=used), seed=seed) for seed in (0, 1)], run)
    assert found.cause is Cause.TEMPERATURE
    assert f"at temperature {used:g} instead of {declared:g}" in found.summary
    assert finding(found, Cause.TEMPERATURE).after < 1e-5
    assert run.num_forwards < 120  # what a disagreement costs


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (SamplingRule(top_k=3), "with top_k 3"),
        (SamplingRule(top_p=0.8), "with top_p 0.8"),
        (SamplingRule(temperature=0.6, top_k=4), "with top_k 4"),
    ],
)
def test_a_truncated_vocabulary_is_named_with_its_border(judged, rule: SamplingRule, says: str) -> None:
    run = Run(rule=SamplingRule(temperature=rule.temperature))
    found = judged([sampled(rule, seed=seed) for seed in (0, 1, 2)], run)
    assert found.cause is Cause.TRUNCATION
    assert says in found.summary
    assert finding(found, Cause.TRUNCATION).after < 1e-6


@pytest.mark.parametrize(("shift", "says"), [(1, "the next token"), (-1, "the token before")])
def test_log_probs_of_the_neighbouring_token_are_off_by_one(judged, shift: int, says: str) -> None:
    row = sampled(SamplingRule())
    recorded = row.rollout_log_probs
    moved = (*recorded[1:], -1.0) if shift == 1 else (-1.0, *recorded[:-1])
    found = judged([replace(row, rollout_log_probs=moved)], Run())
    assert found.cause is Cause.OFF_BY_ONE
    assert says in found.summary
    assert finding(found, Cause.OFF_BY_ONE).after == pytest.approx(0, abs=1e-6)
    # a truncation cannot make tokens less likely, so nothing is cut to look for one
    assert "of the tokens were recorded as less likely" in finding(found, Cause.TRUNCATION).evidence


@pytest.mark.parametrize(("version", "content_hash"), [(5, "aa"), (6, "bb")])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_engine_with_other_weights_is_named_by_version_or_hash(
    judged, version: int, content_hash: str, temperature: float
) -> None:
    rule = SamplingRule(temperature=temperature)
    run = Run(rule=rule, engine_VV=OTHER_VV, engine_version=version, engine_hash=content_hash)
    found = judged([sampled(rule, table_VV=OTHER_VV)], run)
    assert found.cause is Cause.WEIGHTS
    assert f"version {version} with hash {content_hash}, the trainer has 6 with aa" in found.summary


def test_other_numbers_from_the_same_bytes_are_numerics(judged) -> None:
    found = judged([sampled(SamplingRule(), table_VV=OTHER_VV)], Run(engine_VV=OTHER_VV))
    assert found.cause is Cause.NUMERICS
    assert "the same bytes aa" in found.summary


def test_noise_of_the_engine_does_not_hide_a_larger_fault(judged) -> None:
    # the engine computes 0.003 away from the trainer; a temperature of 0.7 moves log-probabilities by about 0.3
    noisy_VV = TABLE_VV + 0.005 * torch.randn(V, V, generator=torch.Generator().manual_seed(2))
    row = sampled(SamplingRule(temperature=0.7), table_VV=noisy_VV)
    found = judged([row], Run(engine_VV=noisy_VV))
    assert found.cause is Cause.TEMPERATURE


def test_an_answer_that_depends_on_the_cache_names_the_cache(judged) -> None:
    # recorded on keys and values of other weights; a fresh score agrees with the trainer
    found = judged([sampled(SamplingRule(), table_VV=OTHER_VV)], Run(cache_gap=0.25))
    assert found.cause is Cause.PREFIX_CACHE
    assert "0.25 apart with and without" in found.summary


def test_weights_come_before_what_else_was_wrong_while_sampling(judged) -> None:
    run = Run(engine_VV=OTHER_VV, engine_hash="bb", cache_gap=0.25)
    assert judged([sampled(SamplingRule(), table_VV=OTHER_VV)], run).cause is Cause.WEIGHTS


def test_two_faults_at_once_are_not_passed_off_as_one(judged) -> None:
    # at either alone more than a fifth of the difference is left
    found = judged([sampled(SamplingRule(temperature=2.0, top_k=4), seed=seed) for seed in (0, 1)], Run())
    assert found.cause is Cause.UNKNOWN
    for cause in (Cause.TEMPERATURE, Cause.TRUNCATION):
        assert finding(found, cause).after is None or finding(found, cause).after > 0.2 * found.spread["mean"]


def with_other_tokens(row: TrainRow) -> TrainRow:
    """Tokens 10 and 11 of the answer written down as others; the log-probabilities stay those of the sampled ones."""
    tokens = list(row.tokens)
    tokens[12], tokens[13] = (tokens[12] + 3) % V, (tokens[13] + 5) % V
    return replace(row, tokens=tuple(tokens))


def test_tokens_that_the_text_gives_back_explain_what_was_recorded(judged) -> None:
    row = sampled(SamplingRule())
    told = Retokenization(row=0, tokens=row.tokens, says="its own text")
    found = judged([with_other_tokens(row)], Run(told=(told,)))
    assert found.cause is Cause.TOKENISATION
    assert "with the tokens of its own text" in found.summary
    assert finding(found, Cause.TOKENISATION).after == pytest.approx(0, abs=1e-6)


def test_a_prompt_of_another_length_can_explain_it_too(judged) -> None:
    row = sampled(SamplingRule())
    shortened = replace(row, tokens=(row.tokens[0], 7, *row.tokens[2:]))  # the answer's context was 1, not 7
    told = Retokenization(row=0, tokens=(2, *row.tokens), says="the prompt with a begin token before it")
    found = judged([shortened], Run(told=(told,)))
    assert found.cause is Cause.TOKENISATION


def test_a_text_that_contradicts_the_tokens_is_said_even_when_nothing_else_fits(judged) -> None:
    row = with_other_tokens(sampled(SamplingRule()))
    told = Retokenization(row=0, tokens=row.tokens, says="sample 0's own text 'ab'", is_contradiction=True)
    found = judged([row], Run(told=(told,)))
    assert found.cause is Cause.TOKENISATION
    assert "contradict sample 0's own text 'ab'" in found.summary


def test_when_nothing_explains_it_the_spread_is_said(judged) -> None:
    row = sampled(SamplingRule())
    noise = torch.randn(R, generator=torch.Generator().manual_seed(3)).abs() * 0.1
    recorded = tuple((torch.tensor(row.rollout_log_probs) - noise).tolist())
    found = judged([replace(row, rollout_log_probs=recorded)], Run())
    assert found.cause is Cause.UNKNOWN
    assert found.spread["tokens"] == R
    assert found.spread["max"] == pytest.approx(float(noise.max()), abs=1e-6)
    assert f"the largest by {float(noise.max()):.2g}" in found.summary


def test_without_an_engine_the_other_causes_are_still_tested(judged) -> None:
    found = judged([sampled(SamplingRule(temperature=0.7))], Run(engine_VV=None))
    assert found.cause is Cause.TEMPERATURE
    assert "no fresh score of an engine" in finding(found, Cause.WEIGHTS).evidence


def test_only_compared_tokens_count(judged) -> None:
    # the second half was sampled by another version at another temperature: it must not turn the verdict
    row, other = sampled(SamplingRule(top_k=3)), sampled(SamplingRule(temperature=3.0))
    mixed = replace(row, rollout_log_probs=(*row.rollout_log_probs[: R // 2], *other.rollout_log_probs[R // 2 :]))
    found = judged([mixed], Run(), [[position < R // 2 for position in range(R)]])
    assert found.cause is Cause.TRUNCATION
    assert found.spread["tokens"] == R // 2


def test_the_answer_is_from_the_record(tmp_path: Path) -> None:
    """Three changes of one file, three other answers: nothing else is read."""
    record = Run().recorded([sampled(SamplingRule(temperature=0.7), seed=seed) for seed in (0, 1)])
    path = write_record(tmp_path, record)
    assert diagnose(read_record(path)).cause is Cause.TEMPERATURE
    told = json.loads(path.read_text())

    def altered(**changes: object) -> Cause:
        path.write_text(json.dumps({**told, **changes}))
        return diagnose(read_record(path)).cause

    assert altered(rescored=[]) is Cause.UNKNOWN
    assert altered(rescored=[], cache_gaps={"engine-0": 5.0}) is Cause.PREFIX_CACHE
    off = [{**told["engines"][0], "log_probs": [[-9.0] * R, [-9.0] * R], "version": 1}]
    assert altered(engines=off) is Cause.WEIGHTS


def test_what_is_recorded_has_a_bound(tmp_path: Path) -> None:
    """Of a long row the tokens that differ most; of engines the farthest; of rounds the first and the newest."""
    length, start = MAX_TOKENS + 1000, 700
    generator = torch.Generator().manual_seed(0)
    response = torch.randint(V, (length,), generator=generator).tolist()
    log_probs = torch.tensor(scores(TABLE_VV, [0, 1, *response], length, SamplingRule()))
    log_probs[start : start + MAX_TOKENS] -= 0.5
    row = make_row(0, prompt=[0, 1], response=response, log_probs=log_probs.tolist())
    [kept] = Run().recorded([row]).rows
    assert (kept.first_token, len(kept.recorded), kept.response_tokens[0]) == (start, MAX_TOKENS, response[start])

    class Many(Run):
        def reports(self) -> list[EngineReport]:
            return [EngineReport(engine=f"engine-{i}", version=6, content_hash="aa", num_tensors=1) for i in range(9)]

        def prompt_log_probs(self, rows: Sequence[Sequence[int]], images: Sequence[Any]) -> list[list[list[float]]]:
            return [[[-10.0 * number] * (len(tokens) - 1) for tokens in rows] for number in range(9)]

    record = Many().recorded([sampled(SamplingRule(temperature=0.7))])
    assert [engine.engine for engine in record.engines] == [f"engine-{8 - place}" for place in range(MAX_ENGINES)]
    for rollout_id in range(MAX_RECORDS + 3):
        write_record(tmp_path, replace(record, rollout_id=rollout_id))
    assert list(record_files(tmp_path).values()) == [0, *range(4, MAX_RECORDS + 3)]


def test_engines_score_a_row_with_its_images_or_not_at_all() -> None:
    images = {"images": ["data:image/png;base64,AAAA"], "prompt_ids": [0], "prompt_length": 2}
    row = replace(sampled(SamplingRule(temperature=0.7)), extra={IMAGE_COLUMN: b"pixels"})
    run = Run(texts=[SampleText(prompt=None, response="", images=images)])
    assert run.recorded([row]).engines
    assert run.images_asked_with == [images] * 5  # one score; two beginnings with the cache and without it
    lost = Run(texts=[None])  # the round is too old
    record = lost.recorded([row])
    assert (record.engines, record.cache_gaps, lost.images_asked_with) == ([], {}, [])


def test_engines_that_do_not_answer_leave_the_trainer_s_word(judged) -> None:
    class Silent(Run):
        def reports(self) -> list[EngineReport]:
            raise EngineError("no answer")

        def next_log_probs(self, tokens: Sequence[int], images: Any, *, with_cache: bool) -> list[dict[int, float]]:
            raise EngineError("no answer")

    found = judged([sampled(SamplingRule(temperature=0.7))], Silent())
    assert found.cause is Cause.TEMPERATURE
    assert "no fresh score of an engine" in finding(found, Cause.WEIGHTS).evidence


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "has schema 2, this version of Vime reads up to 1"),
        ({"mean": "much"}, "is damaged: Expected `float`, got `str`"),
        ({"rescored": [{"rule": {"temperature": 1.0, "top_k": -1, "top_p": 1.0}, "log_probs": [[-1.0]]}]}, "log-prob"),
        ({"rows": []}, "is damaged: "),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_name(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = write_record(tmp_path, Run().recorded([sampled(SamplingRule(top_k=3))]))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"round_{VERSION}.json: {says}" if "log-prob" not in says else says):
        read_record(path)
    path.write_text(path.read_text()[:-200])
    with pytest.raises(ConfigError, match="is damaged"):
        read_record(path)
