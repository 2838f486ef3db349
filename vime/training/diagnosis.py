"""Why do trainer and engine give the same tokens different log-probabilities? Each known cause is tested, not guessed.

The test of a cause is a prediction: under it, the engine's recorded log-probabilities would have been these; how much
of the difference is gone then? `before` and `after` are means of |recorded - predicted| over the same tokens, nats.
Two causes cannot be computed from logits, so the engine is asked: a fresh score of the same tokens differs (weights),
or an answer that reads the prefix cache differs from one that does not (stale cache).

Pure: who asks trainer, engines and tokenizer is a `Witnesses`. R: response tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vime.data.rows import TrainRow
from vime.training.evidence import EngineOpinion, Retokenization, Suspect
from vime.types import SamplingRule, Version

EXPLAINS = 0.2
"""A prediction explains the difference when at most this share of it is left."""
MIN_TOKENS = 4
"""Fewer tokens than this match a shifted or refitted row by chance."""
LARGEST_K = 1 << 18
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)
GOLDEN = (math.sqrt(5) - 1) / 2


class Cause(StrEnum):
    """What can be named. The values stand in RUN_DIR/agreement and in events."""

    TEMPERATURE = "temperature"
    TRUNCATION = "top-p/top-k truncation"
    PREFIX_CACHE = "stale prefix cache"
    TOKENISATION = "tokenisation"
    WEIGHTS = "weights of another version"
    OFF_BY_ONE = "off-by-one"
    NUMERICS = "numerics"  # the engine computes otherwise with the very same bytes
    UNKNOWN = "unknown"


ADVICE = {
    Cause.TEMPERATURE: "Sample at --rollout-temperature: look for another one in the generate plug-in.",
    Cause.TRUNCATION: "Sample from the whole vocabulary: remove top_p, top_k and min_p from the generate plug-in.",
    Cause.PREFIX_CACHE: "Weights must reach the engines through Vime's publish, which clears the cache; look for "
    "whoever loads weights past it, and restart the engines.",
    Cause.TOKENISATION: "Keep the engine's token ids from turn to turn; never encode decoded text again.",
    Cause.WEIGHTS: "Restart with --load: every engine then gets the trainer's weights. Find who else writes to them.",
    Cause.OFF_BY_ONE: "Align log-probabilities with their tokens: grow answers by Sample.append_response_tokens only.",
    Cause.NUMERICS: "Compare precisions and kernels of both sides (--bf16, --attention-backend, --vllm-quantization), "
    "then raise --train-rollout-diff-threshold or add --off-policy-correction tis.",
    Cause.UNKNOWN: "Look at the rows in the report, and at whatever writes rollout_log_probs or tokens in a plug-in.",
}


class Witnesses(Protocol):
    """Who can be asked about the suspects, while the weights of the round are still in place."""

    rule: SamplingRule  # of the run
    version: Version  # of the trainer's weights

    def trainer_log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> Sequence[Sequence[float]]: ...
    def trainer_hash(self) -> str: ...
    def engine_opinions(self, rows: Sequence[TrainRow]) -> Sequence[EngineOpinion]:
        """[] when no engine can be asked."""
        ...

    def cache_gaps(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Engine -> largest mean |with cache - without| of the likeliest next tokens after a row."""
        ...

    def retokenizations(self, rows: Sequence[TrainRow]) -> Sequence[Retokenization]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, tested. `after` is None when its test is not a prediction of log-probabilities."""

    cause: Cause
    before: float
    after: float | None
    evidence: str
    is_shown: bool  # by this test alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The likely cause with its evidence, and what every other test said."""

    cause: Cause
    summary: str
    findings: Sequence[Finding]
    spread: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cause": str(self.cause),
            "summary": self.summary,
            "advice": ADVICE[self.cause],
            "findings": [asdict(finding) for finding in self.findings],
            "difference": self.spread,
        }


def diagnose(suspects: Sequence[Suspect], witnesses: Witnesses, *, threshold: float) -> Diagnosis:
    """Test every cause. The engine's fresh score comes first: when it differs from the trainer's, nothing that happened
    while sampling matters. Then the prediction that leaves least; then the cache; then what the sample's text says."""
    case = _Case(suspects, witnesses, threshold)
    findings = [test(case) for test in (_weights, _off_by_one, _temperature, _truncation, _tokenisation, _cache)]
    weights, *predicted, cache = findings
    shown = sorted((f for f in predicted if f.is_shown), key=lambda f: math.inf if f.after is None else f.after)
    for finding in [weights, *shown, cache]:
        if finding.is_shown:
            return Diagnosis(cause=finding.cause, summary=finding.evidence, findings=findings, spread=case.spread())
    spread = case.spread()
    summary = (
        f"no known cause explains it. Of {spread['tokens']:g} tokens the median differs by {spread['median']:.2g}, the "
        f"largest by {spread['max']:.2g}; {weights.evidence}"
    )
    return Diagnosis(cause=Cause.UNKNOWN, summary=summary, findings=findings, spread=spread)


class _Case:
    """The suspects as tensors, pooled over their compared tokens."""

    def __init__(self, suspects: Sequence[Suspect], witnesses: Witnesses, threshold: float) -> None:
        self.rows = [suspect.row for suspect in suspects]
        self.masks = [torch.tensor(suspect.is_compared_R, dtype=torch.bool) for suspect in suspects]
        self.recorded = [_tensor(row.rollout_log_probs) for row in self.rows]
        self.own = [_tensor(suspect.logp_R) for suspect in suspects]
        self.witnesses, self.threshold = witnesses, threshold
        self.before = self.left(self.own)

    def pooled(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value_R[mask_R] for value_R, mask_R in zip(values, self.masks, strict=True)])

    def excess(self, predicted: Sequence[Tensor]) -> Tensor:
        """predicted - recorded, of every compared token."""
        return self.pooled(predicted) - self.pooled(self.recorded)

    def left(self, predicted: Sequence[Tensor]) -> float:
        return float(self.excess(predicted).abs().mean())

    def under(self, rule: SamplingRule) -> list[Tensor]:
        return [_tensor(logp) for logp in self.witnesses.trainer_log_probs(self.rows, rule)]

    def explains(self, after: float, before: float | None = None) -> bool:
        return after <= EXPLAINS * (self.before if before is None else before)

    def spread(self) -> dict[str, float]:
        gaps = self.excess(self.own).abs().sort().values
        at = {name: float(gaps[int(share * (len(gaps) - 1))]) for name, share in (("median", 0.5), ("p90", 0.9))}
        above = float((gaps > self.threshold).double().mean())
        return {"mean": self.before, **at, "max": float(gaps[-1]), "share_above": above, "tokens": float(len(gaps))}


def _weights(case: _Case) -> Finding:
    """A fresh score of the same tokens rests on nothing but tokens and weights."""

    def finding(evidence: str, *, cause: Cause = Cause.WEIGHTS, after: float | None = None, shown: bool) -> Finding:
        return Finding(cause=cause, before=case.before, after=after, evidence=evidence, is_shown=shown)

    opinions = case.witnesses.engine_opinions(case.rows)
    if not opinions:
        return finding("no fresh score of an engine to compare with", shown=False)
    plain = SamplingRule()
    own = case.own if case.witnesses.rule == plain else case.under(plain)
    fresh = {opinion.engine: [_tensor(logp) for logp in opinion.log_probs] for opinion in opinions}
    gaps = {name: float((case.pooled(scores) - case.pooled(own)).abs().mean()) for name, scores in fresh.items()}
    worst = max(opinions, key=lambda opinion: gaps[opinion.engine])
    gap, version, own_hash = gaps[worst.engine], case.witnesses.version, case.witnesses.trainer_hash()
    is_shown = gap > case.threshold and gap >= 0.5 * case.before
    after = case.left(fresh[worst.engine]) if case.witnesses.rule == plain else None
    if not is_shown:
        text = f"a fresh score by the engine is within {gap:.2g} of the trainer's (weights agree)"
        return finding(text, after=after, shown=False)
    holds = f"{worst.engine} scores these tokens afresh {gap:.2g} away from the trainer"
    rest = (
        ""
        if after is None
        else f"; towards that score the recorded difference goes from {case.before:.2g} to {after:.2g}"
    )
    if (worst.version, worst.content_hash) == (version, own_hash):
        text = f"{holds}, with the same version {version} and the same bytes {own_hash}{rest}"
        return finding(text, cause=Cause.NUMERICS, after=after, shown=True)
    served = (
        f"it serves version {worst.version} with hash {worst.content_hash}, the trainer has {version} with {own_hash}"
    )
    return finding(f"{holds}: {served}{rest}", after=after, shown=True)


def _off_by_one(case: _Case) -> Finding:
    """The recorded log-probability of token t is the trainer's of token t + 1, or t - 1."""
    best = Finding(
        cause=Cause.OFF_BY_ONE, before=case.before, after=None, evidence="rows too short to shift", is_shown=False
    )
    for shift, words in ((1, "the next token"), (-1, "the token before")):
        recorded, own, shifted = [], [], []
        for recorded_R, own_R, mask_R in zip(case.recorded, case.own, case.masks, strict=True):
            here, there = (slice(0, -1), slice(1, None)) if shift == 1 else (slice(1, None), slice(0, -1))
            both = mask_R[here] & mask_R[there]
            recorded.append(recorded_R[here][both])
            own.append(own_R[here][both])
            shifted.append(own_R[there][both])
        recorded_C, own_C, shifted_C = torch.cat(recorded), torch.cat(own), torch.cat(shifted)
        if len(recorded_C) < MIN_TOKENS:
            continue
        before, after = float((recorded_C - own_C).abs().mean()), float((recorded_C - shifted_C).abs().mean())
        if best.after is None or after < best.after:
            text = f"taken as those of {words}, the difference goes from {before:.2g} to {after:.2g}"
            best = replace(best, before=before, after=after, evidence=text, is_shown=case.explains(after, before))
    return best


def _temperature(case: _Case) -> Finding:
    """The temperature at which the trainer comes closest to what was recorded."""
    declared = case.witnesses.rule.temperature

    def left_at(temperature: float) -> float:
        return case.left(case.under(SamplingRule(temperature=temperature)))

    best, after = _fit(left_at, TEMPERATURES)
    is_shown = abs(best / declared - 1) > 1e-3 and case.explains(after) and len(case.pooled(case.own)) >= MIN_TOKENS
    text = (
        f"at temperature {best:.4g} instead of {declared:g} the difference goes from {case.before:.2g} to {after:.2g}"
    )
    return Finding(cause=Cause.TEMPERATURE, before=case.before, after=after, evidence=text, is_shown=is_shown)


def _truncation(case: _Case) -> Finding:
    """Renormalising over a kept set makes kept tokens likelier; the trainer's logits, cut alike, must reproduce it."""

    def finding(evidence: str, after: float | None = None, *, shown: bool = False) -> Finding:
        return Finding(cause=Cause.TRUNCATION, before=case.before, after=after, evidence=evidence, is_shown=shown)

    below = float((case.excess(case.own) > max(case.threshold, 0.05 * case.before)).double().mean())
    if below > 0.05:
        return finding(f"{below:.0%} of the tokens were recorded as less likely than the trainer says")
    temperature = case.witnesses.rule.temperature

    def by_k(k: float) -> SamplingRule:
        return SamplingRule(temperature=temperature, top_k=int(k))

    def by_p(p: float) -> SamplingRule:
        return SamplingRule(temperature=temperature, top_p=p)

    def is_too_tight(rule: SamplingRule) -> bool:
        """It drops a sampled token, or makes the kept ones likelier than recorded."""
        excess = case.excess(case.under(rule))
        return bool(torch.isneginf(excess).any()) or float(excess.mean()) > 0.01 * case.threshold

    k = _smallest(1, LARGEST_K, lambda k: not is_too_tight(by_k(k)))
    p = _smallest(1, 1 << 20, lambda part: not is_too_tight(by_p(part / (1 << 20)))) / (1 << 20)
    candidates = {f"top_k {k}": by_k(k), f"top_p {p:.3f}": by_p(p)}
    rounded = math.ceil(100 * p) / 100
    candidates[f"top_p {rounded:g}"] = by_p(rounded)
    left = {name: case.left(case.under(rule)) for name, rule in candidates.items()}
    best = min(reversed(left), key=lambda name: left[name])  # of equals the rounded one
    text = f"with {best} the difference goes from {case.before:.2g} to {left[best]:.2g}"
    return finding(text, left[best], shown=case.explains(left[best]) and len(case.pooled(case.own)) >= MIN_TOKENS)


def _tokenisation(case: _Case) -> Finding:
    """Other tokens, that the sample's text or a round trip through the tokenizer gives, explain what was recorded."""

    def finding(evidence: str, before: float, after: float | None = None, *, shown: bool = False) -> Finding:
        return Finding(cause=Cause.TOKENISATION, before=before, after=after, evidence=evidence, is_shown=shown)

    told = case.witnesses.retokenizations(case.rows)
    if not told:
        return finding("the text of every row encodes back to its tokens", case.before)
    rows = [
        replace(case.rows[retokenization.suspect], tokens=np.asarray(retokenization.tokens, dtype=np.int32))
        for retokenization in told
    ]
    scores = [_tensor(logp) for logp in case.witnesses.trainer_log_probs(rows, case.witnesses.rule)]
    gaps: dict[int, list[tuple[float, str]]] = {}
    for retokenization, score_R in zip(told, scores, strict=True):
        mask_R = case.masks[retokenization.suspect]
        left = float((case.recorded[retokenization.suspect] - score_R)[mask_R].abs().mean())
        gaps.setdefault(retokenization.suspect, []).append((left, retokenization.says))
    best = {number: min(options) for number, options in gaps.items()}
    count = {number: int(case.masks[number].sum()) for number in best}
    own = {
        number: float((case.recorded[number] - case.own[number])[case.masks[number]].abs().mean()) for number in best
    }
    total = sum(count.values())
    before = sum(own[number] * count[number] for number in best) / total
    after = sum(left * count[number] for number, (left, _) in best.items()) / total
    says = best[max(best, key=lambda number: own[number] - best[number][0])][1]
    text = f"with the tokens of {says} the difference goes from {before:.2g} to {after:.2g}"
    if case.explains(after, before):
        return finding(text, before, after, shown=True)
    contradictions = [retokenization.says for retokenization in told if retokenization.is_contradiction]
    if contradictions:
        text = f"the row's tokens contradict {contradictions[0]}, though no other tokens that could be tried explain it"
        return finding(text, before, None, shown=True)
    return finding(text, before, after)


def _cache(case: _Case) -> Finding:
    """The engine answers otherwise when it may read its prefix cache than when it may not."""
    gaps = case.witnesses.cache_gaps(case.rows)
    if not gaps:
        text, is_shown = "no engine could be asked to answer with and without its cache", False
    else:
        name, gap = max(gaps.items(), key=lambda item: item[1])
        is_shown = gap > max(case.threshold, 0.1 * case.before)
        text = f"{name} answers the same prefix {gap:.2g} apart with and without its prefix cache"
        if is_shown:
            text += "; without it, it agrees with the trainer"
    return Finding(cause=Cause.PREFIX_CACHE, before=case.before, after=None, evidence=text, is_shown=is_shown)


def _fit(left_at: Callable[[float], float], grid: Sequence[float]) -> tuple[float, float]:
    """(argument, least value) of a function with one valley around the best grid point: golden section between its
    neighbours in the logarithm, then two decimals when they are as good."""
    values: dict[float, float] = {}

    def at(point: float) -> float:
        if point not in values:
            values[point] = left_at(point)
        return values[point]

    place = min(range(len(grid)), key=lambda index: at(grid[index]))
    low, high = math.log(grid[max(0, place - 1)]), math.log(grid[min(len(grid) - 1, place + 1)])
    for _ in range(12):
        first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if at(math.exp(first)) < at(math.exp(second)):
            high = second
        else:
            low = first
    at(round(min(values.items(), key=lambda item: item[1])[0], 2))
    return min(values.items(), key=lambda item: item[1])


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number in [low, high] from which on `holds`, which is true at `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _tensor(values: Sequence[float] | NDArray[np.float32]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)
