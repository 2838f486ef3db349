"""Each cause, seeded into rows of a small known model, is named by its own test and by no other.

The trainer is a bigram table: log p of a token depends on the token before it alone, so every prediction can be made
here by plain torch. Rows are sampled, not made up: a fault changes how they were sampled or what was written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from tests.helpers.rows import make_row
from vime.algo.sampling import log_probs_under
from vime.data.rows import TrainRow
from vime.training.diagnosis import Cause, Diagnosis, diagnose
from vime.training.evidence import EngineOpinion, Retokenization, Suspect
from vime.types import SamplingRule, VersionSpan

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
class Court:
    """`diagnosis.Witnesses`: a trainer with TABLE_VV, an engine with `engine_VV`."""

    rule: SamplingRule = field(default_factory=SamplingRule)
    version: int = VERSION
    engine_VV: Tensor | None = field(default_factory=lambda: TABLE_VV)
    engine_version: int = VERSION
    engine_hash: str = "aa"
    cache_gap: float = 0.0
    told: tuple[Retokenization, ...] = ()
    num_forwards: int = 0

    def trainer_log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
        self.num_forwards += 1
        return [scores(TABLE_VV, row.tokens, row.response_length, rule) for row in rows]

    def trainer_hash(self) -> str:
        return "aa"

    def engine_opinions(self, rows: Sequence[TrainRow]) -> list[EngineOpinion]:
        if self.engine_VV is None:
            return []
        fresh = [scores(self.engine_VV, row.tokens, row.response_length, SamplingRule()) for row in rows]
        return [
            EngineOpinion(
                engine="engine-0", version=self.engine_version, content_hash=self.engine_hash, log_probs=fresh
            )
        ]

    def cache_gaps(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        return {"engine-0": self.cache_gap} if rows and self.engine_VV is not None else {}

    def retokenizations(self, rows: Sequence[TrainRow]) -> tuple[Retokenization, ...]:
        return self.told if rows else ()


def judged(rows: Sequence[TrainRow], court: Court) -> Diagnosis:
    suspects = [
        Suspect(row=row, logp_R=scores(TABLE_VV, row.tokens, R, court.rule), is_compared_R=[True] * R) for row in rows
    ]
    return diagnose(suspects, court, threshold=THRESHOLD)


def finding(diagnosis: Diagnosis, cause: Cause):
    [found] = [finding for finding in diagnosis.findings if finding.cause is cause]
    return found


@pytest.mark.parametrize(("declared", "used"), [(1.0, 0.7), (1.0, 1.37), (0.6, 1.0), (0.6, 0.7)])
def test_another_temperature_is_named_with_its_value(declared: float, used: float) -> None:
    court = Court(rule=SamplingRule(temperature=declared))
    found = judged([sampled(SamplingRule(temperature=used), seed=seed) for seed in (0, 1)], court)
    assert found.cause is Cause.TEMPERATURE
    assert f"at temperature {used:g} instead of {declared:g}" in found.summary
    assert finding(found, Cause.TEMPERATURE).after < 1e-5
    assert court.num_forwards < 120  # what a disagreement costs


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (SamplingRule(top_k=3), "with top_k 3"),
        (SamplingRule(top_p=0.8), "with top_p 0.8"),
        (SamplingRule(temperature=0.6, top_k=4), "with top_k 4"),
    ],
)
def test_a_truncated_vocabulary_is_named_with_its_border(rule: SamplingRule, says: str) -> None:
    court = Court(rule=SamplingRule(temperature=rule.temperature))
    found = judged([sampled(rule, seed=seed) for seed in (0, 1, 2)], court)
    assert found.cause is Cause.TRUNCATION
    assert says in found.summary
    assert finding(found, Cause.TRUNCATION).after < 1e-6


@pytest.mark.parametrize(("shift", "says"), [(1, "the next token"), (-1, "the token before")])
def test_log_probs_of_the_neighbouring_token_are_off_by_one(shift: int, says: str) -> None:
    row = sampled(SamplingRule())
    recorded = row.rollout_log_probs
    moved = (*recorded[1:], -1.0) if shift == 1 else (-1.0, *recorded[:-1])
    found = judged([replace(row, rollout_log_probs=moved)], Court())
    assert found.cause is Cause.OFF_BY_ONE
    assert says in found.summary
    assert finding(found, Cause.OFF_BY_ONE).after == pytest.approx(0, abs=1e-6)
    # a truncation cannot make tokens less likely, so nothing is cut to look for one
    assert "of the tokens were recorded as less likely" in finding(found, Cause.TRUNCATION).evidence


@pytest.mark.parametrize(("version", "content_hash"), [(5, "aa"), (6, "bb")])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_engine_with_other_weights_is_named_by_version_or_hash(
    version: int, content_hash: str, temperature: float
) -> None:
    rule = SamplingRule(temperature=temperature)
    court = Court(rule=rule, engine_VV=OTHER_VV, engine_version=version, engine_hash=content_hash)
    found = judged([sampled(rule, table_VV=OTHER_VV)], court)
    assert found.cause is Cause.WEIGHTS
    assert f"version {version} with hash {content_hash}, the trainer has 6 with aa" in found.summary


def test_other_numbers_from_the_same_bytes_are_numerics() -> None:
    found = judged([sampled(SamplingRule(), table_VV=OTHER_VV)], Court(engine_VV=OTHER_VV))
    assert found.cause is Cause.NUMERICS
    assert "the same bytes aa" in found.summary


def test_noise_of_the_engine_does_not_hide_a_larger_fault() -> None:
    # the engine computes 0.003 away from the trainer; a temperature of 0.7 moves log-probabilities by about 0.3
    noisy_VV = TABLE_VV + 0.005 * torch.randn(V, V, generator=torch.Generator().manual_seed(2))
    row = sampled(SamplingRule(temperature=0.7), table_VV=noisy_VV)
    found = judged([row], Court(engine_VV=noisy_VV))
    assert found.cause is Cause.TEMPERATURE


def test_an_answer_that_depends_on_the_cache_names_the_cache() -> None:
    # recorded on keys and values of other weights; a fresh score agrees with the trainer
    found = judged([sampled(SamplingRule(), table_VV=OTHER_VV)], Court(cache_gap=0.25))
    assert found.cause is Cause.PREFIX_CACHE
    assert "0.25 apart with and without" in found.summary


def test_weights_come_before_what_else_was_wrong_while_sampling() -> None:
    court = Court(engine_VV=OTHER_VV, engine_hash="bb", cache_gap=0.25)
    assert judged([sampled(SamplingRule(), table_VV=OTHER_VV)], court).cause is Cause.WEIGHTS


def test_two_faults_at_once_are_not_passed_off_as_one() -> None:
    # at either alone more than a fifth of the difference is left
    found = judged([sampled(SamplingRule(temperature=2.0, top_k=4), seed=seed) for seed in (0, 1)], Court())
    assert found.cause is Cause.UNKNOWN
    for cause in (Cause.TEMPERATURE, Cause.TRUNCATION):
        assert finding(found, cause).after is None or finding(found, cause).after > 0.2 * found.spread["mean"]


def with_other_tokens(row: TrainRow) -> TrainRow:
    """Tokens 10 and 11 of the answer written down as others; the log-probabilities stay those of the sampled ones."""
    tokens = list(row.tokens)
    tokens[12], tokens[13] = (tokens[12] + 3) % V, (tokens[13] + 5) % V
    return replace(row, tokens=tuple(tokens))


def test_tokens_that_the_text_gives_back_explain_what_was_recorded() -> None:
    row = sampled(SamplingRule())
    told = Retokenization(suspect=0, tokens=row.tokens, says="its own text")
    found = judged([with_other_tokens(row)], Court(told=(told,)))
    assert found.cause is Cause.TOKENISATION
    assert "with the tokens of its own text" in found.summary
    assert finding(found, Cause.TOKENISATION).after == pytest.approx(0, abs=1e-6)


def test_a_prompt_of_another_length_can_explain_it_too() -> None:
    row = sampled(SamplingRule())
    shortened = replace(row, tokens=(row.tokens[0], 7, *row.tokens[2:]))  # the answer's context was 1, not 7
    told = Retokenization(suspect=0, tokens=(2, *row.tokens), says="the prompt with a begin token before it")
    found = judged([shortened], Court(told=(told,)))
    assert found.cause is Cause.TOKENISATION


def test_a_text_that_contradicts_the_tokens_is_said_even_when_nothing_else_fits() -> None:
    row = with_other_tokens(sampled(SamplingRule()))
    told = Retokenization(suspect=0, tokens=row.tokens, says="sample 0's own text 'ab'", is_contradiction=True)
    found = judged([row], Court(told=(told,)))
    assert found.cause is Cause.TOKENISATION
    assert "contradict sample 0's own text 'ab'" in found.summary


def test_when_nothing_explains_it_the_spread_is_said() -> None:
    row = sampled(SamplingRule())
    noise = torch.randn(R, generator=torch.Generator().manual_seed(3)).abs() * 0.1
    recorded = tuple((torch.tensor(row.rollout_log_probs) - noise).tolist())
    found = judged([replace(row, rollout_log_probs=recorded)], Court())
    assert found.cause is Cause.UNKNOWN
    assert found.spread["tokens"] == R
    assert found.spread["max"] == pytest.approx(float(noise.max()), abs=1e-6)
    assert f"the largest by {float(noise.max()):.2g}" in found.summary


def test_without_an_engine_the_other_causes_are_still_tested() -> None:
    found = judged([sampled(SamplingRule(temperature=0.7))], Court(engine_VV=None))
    assert found.cause is Cause.TEMPERATURE
    assert "no fresh score of an engine" in finding(found, Cause.WEIGHTS).evidence


def test_only_compared_tokens_count() -> None:
    # the second half was sampled by another version at another temperature: it must not turn the verdict
    row, other = sampled(SamplingRule(top_k=3)), sampled(SamplingRule(temperature=3.0))
    mixed = replace(row, rollout_log_probs=(*row.rollout_log_probs[: R // 2], *other.rollout_log_probs[R // 2 :]))
    suspect = Suspect(
        row=mixed,
        logp_R=scores(TABLE_VV, mixed.tokens, R, SamplingRule()),
        is_compared_R=[position < R // 2 for position in range(R)],
    )
    found = diagnose([suspect], Court(), threshold=THRESHOLD)
    assert found.cause is Cause.TRUNCATION
    assert found.spread["tokens"] == R // 2
