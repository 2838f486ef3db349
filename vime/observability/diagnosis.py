"""Why do trainer and engine give the same tokens different log-probabilities? Each known cause is tested, not guessed.

Each cause predicts which log-probabilities the engine would have recorded; its test is how much of the difference
that prediction removes. `before` and `after` are means of |recorded - predicted| over the same tokens, nats.
Two causes cannot be predicted, so the run has called the engine: a new score of the same tokens differs (weights), or a
score that reads the prefix cache differs from one that does not (stale cache).

Everything comes from the record of the round (`mismatch_record.py`): no trainer, engine or tokenizer is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

import numpy as np

from vime.observability.mismatch_record import MismatchRecord, RetokenizedLogprobs
from vime.types import SamplingRule

EXPLAINS = 0.2
"""A prediction explains the difference when at most this share of it is left."""
MIN_TOKENS = 4
"""Fewer tokens than this match a shifted or refitted row by chance."""
MAX_LESS_LIKELY = 0.05
"""A truncation makes tokens likelier: it is not looked for when more of them than this were recorded as less likely."""


class Cause(StrEnum):
    """What can be named."""

    TEMPERATURE = "temperature"
    TRUNCATION = "top-p/top-k truncation"
    PREFIX_CACHE = "stale prefix cache"
    TOKENISATION = "tokenisation"
    WEIGHTS = "weights of another version"
    OFF_BY_ONE = "off-by-one"
    NUMERICS = "numerics"  # the engine computes differently with the same bytes
    UNKNOWN = "unknown"


ADVICE = {
    Cause.TEMPERATURE: "Sample at --rollout-temperature: look for another one in the generate plug-in.",
    Cause.TRUNCATION: "Sample from the whole vocabulary: remove top_p, top_k and min_p from the generate plug-in.",
    Cause.PREFIX_CACHE: "Weights must reach the engines through Vime's publish, which clears the cache; look for "
    "code that loads weights in another way, and restart the engines.",
    Cause.TOKENISATION: "Keep the engine's token ids from turn to turn; never encode decoded text again.",
    Cause.WEIGHTS: "Restart with --load: every engine then gets the trainer's weights. Find what else writes to them.",
    Cause.OFF_BY_ONE: "Align log-probabilities with their tokens: use Sample.append_response_tokens only.",
    Cause.NUMERICS: "Compare precisions and kernels of both sides (--bf16, --attention-backend, --vllm-quantization), "
    "then raise --train-rollout-diff-threshold or add --off-policy-correction tis.",
    Cause.UNKNOWN: "Look at the recorded rows, and at plug-ins that write rollout_log_probs or tokens.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, tested. `after` is None when its test is not a prediction of log-probabilities."""

    cause: Cause
    before: float
    after: float | None
    evidence: str
    is_shown: bool  # by this test alone
    rule: SamplingRule | None = None  # under which the trainer comes closest, where the cause is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The likely cause with its evidence, and the results of all other tests."""

    cause: Cause
    summary: str
    findings: Sequence[Finding]
    spread: Mapping[str, float]  # of the difference: mean, median, p90, max, share above the threshold, tokens

    @property
    def finding(self) -> Finding | None:
        """Return the test that shows the cause; None when no cause is known."""
        return next((found for found in self.findings if found.is_shown and found.cause == self.cause), None)

    @property
    def advice(self) -> str:
        """Return what to do next."""
        return ADVICE[self.cause]

    def to_dict(self) -> dict[str, object]:
        return {
            "cause": str(self.cause),
            "summary": self.summary,
            "advice": self.advice,
            "findings": [asdict(finding) for finding in self.findings],
            "difference": dict(self.spread),
        }


def diagnose(record: MismatchRecord) -> Diagnosis:
    """Test every cause. The engine's new score comes first: when it differs from the trainer's, sampling is not the
    cause. Then the prediction that leaves least; then the cache; then the sample's text."""
    findings = [test(record) for test in (_weights, _off_by_one, _temperature, _truncation, _tokenisation, _cache)]
    weights, *predicted, cache = findings
    shown = sorted((f for f in predicted if f.is_shown), key=lambda f: math.inf if f.after is None else f.after)
    spread = _spread(record)
    for finding in [weights, *shown, cache]:
        if finding.is_shown:
            return Diagnosis(cause=finding.cause, summary=finding.evidence, findings=findings, spread=spread)
    summary = (
        f"no known cause explains it. Of {spread['tokens']:g} tokens the median differs by {spread['median']:.2g}, the "
        f"largest by {spread['max']:.2g}; {weights.evidence}"
    )
    return Diagnosis(cause=Cause.UNKNOWN, summary=summary, findings=findings, spread=spread)


def _spread(record: MismatchRecord) -> dict[str, float]:
    gaps = np.sort(np.abs(record.excess(record.trainer)))
    at = {name: float(gaps[int(share * (len(gaps) - 1))]) for name, share in (("median", 0.5), ("p90", 0.9))}
    above = float((gaps > record.threshold).mean())
    return {"mean": record.before, **at, "max": float(gaps[-1]), "share_above": above, "tokens": float(len(gaps))}


def _explains(after: float, before: float) -> bool:
    return after <= EXPLAINS * before


def _weights(record: MismatchRecord) -> Finding:
    """Test the weights: a new score of the same tokens depends on nothing but tokens and weights."""
    before = record.before

    def finding(evidence: str, *, cause: Cause = Cause.WEIGHTS, after: float | None = None, shown: bool) -> Finding:
        return Finding(cause=cause, before=before, after=after, evidence=evidence, is_shown=shown)

    own = record.under(SamplingRule())
    if not record.engines or own is None:
        return finding("no fresh score of an engine to compare with", shown=False)
    gaps = [record.left(engine.log_probs, own) for engine in record.engines]
    gap, worst = max(zip(gaps, record.engines, strict=True), key=lambda pair: pair[0])
    after = record.left(worst.log_probs) if record.rule == SamplingRule() else None
    if gap <= record.threshold or gap < 0.5 * before:
        text = f"a fresh score by the engine is within {gap:.2g} of the trainer's (weights agree)"
        return finding(text, after=after, shown=False)
    holds = f"{worst.engine} scores these tokens afresh {gap:.2g} away from the trainer"
    rest = (
        "" if after is None else f"; towards that score the recorded difference goes from {before:.2g} to {after:.2g}"
    )
    if (worst.version, worst.content_hash) == (record.version, record.trainer_hash):
        text = f"{holds}, with the same version {record.version} and the same bytes {record.trainer_hash}{rest}"
        return finding(text, cause=Cause.NUMERICS, after=after, shown=True)
    served = (
        f"it serves version {worst.version} with hash {worst.content_hash}, the trainer has {record.version} with "
        f"{record.trainer_hash}"
    )
    return finding(f"{holds}: {served}{rest}", after=after, shown=True)


def _off_by_one(record: MismatchRecord) -> Finding:
    """Test whether the recorded log-probability of token t is the trainer's of token t + 1, or t - 1."""
    best = Finding(
        cause=Cause.OFF_BY_ONE,
        before=record.before,
        after=None,
        evidence="rows too short to shift",
        is_shown=False,
    )
    for shift, words in ((1, "the next token"), (-1, "the token before")):
        here, there = (slice(0, -1), slice(1, None)) if shift == 1 else (slice(1, None), slice(0, -1))
        own, shifted = [], []
        for row in record.rows:
            mask_R = np.asarray(row.is_compared, dtype=bool)
            recorded_R, own_R = np.asarray(row.recorded), np.asarray(row.trainer)
            both = mask_R[here] & mask_R[there]
            own.append(np.abs(recorded_R[here] - own_R[here])[both])
            shifted.append(np.abs(recorded_R[here] - own_R[there])[both])
        own_C, shifted_C = np.concatenate(own), np.concatenate(shifted)
        if len(own_C) < MIN_TOKENS:
            continue
        before, after = float(own_C.mean()), float(shifted_C.mean())
        if best.after is None or after < best.after:
            text = f"taken as those of {words}, the difference goes from {before:.2g} to {after:.2g}"
            best = replace(best, before=before, after=after, evidence=text, is_shown=_explains(after, before))
    return best


def _temperature(record: MismatchRecord) -> Finding:
    """Test the temperature at which the trainer comes closest to what was recorded, which the run has searched for."""
    before, declared = record.before, record.rule.temperature
    left = {
        scored.rule.temperature: record.left(scored.log_probs)
        for scored in record.rescored
        if scored.rule == SamplingRule(temperature=scored.rule.temperature)
    }
    if not left:
        evidence = "the trainer was not asked at another temperature"
        return Finding(cause=Cause.TEMPERATURE, before=before, after=None, evidence=evidence, is_shown=False)
    best = min(left, key=lambda temperature: left[temperature])
    after = left[best]
    is_shown = abs(best / declared - 1) > 1e-3 and _explains(after, before) and _has_enough(record)
    text = f"at temperature {best:.4g} instead of {declared:g} the difference goes from {before:.2g} to {after:.2g}"
    rule = SamplingRule(temperature=best)
    return Finding(cause=Cause.TEMPERATURE, before=before, after=after, evidence=text, is_shown=is_shown, rule=rule)


def _truncation(record: MismatchRecord) -> Finding:
    """Test truncation: it makes the kept tokens likelier, and the trainer's logits, cut in the same way, must reproduce
    it."""
    before = record.before

    def finding(
        evidence: str, after: float | None = None, *, shown: bool = False, rule: SamplingRule | None = None
    ) -> Finding:
        return Finding(cause=Cause.TRUNCATION, before=before, after=after, evidence=evidence, is_shown=shown, rule=rule)

    below = record.share_less_likely
    if below > MAX_LESS_LIKELY:
        return finding(f"{below:.0%} of the tokens were recorded as less likely than the trainer says")
    left = {
        scored.rule: record.left(scored.log_probs)
        for scored in record.rescored
        if scored.rule.top_k > 0 or scored.rule.top_p < 1
    }
    if not left:
        return finding("the trainer was not asked with a part of the vocabulary")
    best = min(reversed(left), key=lambda rule: left[rule])  # among equals the rounded one, which is written last
    name = f"top_k {best.top_k}" if best.top_k > 0 else f"top_p {best.top_p:.3g}"
    text = f"with {name} the difference goes from {before:.2g} to {left[best]:.2g}"
    return finding(text, left[best], shown=_explains(left[best], before) and _has_enough(record), rule=best)


def _tokenisation(record: MismatchRecord) -> Finding:
    """Test whether other tokens, from the sample's text or a round trip through the tokenizer, explain what was
    recorded."""

    def finding(evidence: str, before: float, after: float | None = None, *, shown: bool = False) -> Finding:
        return Finding(cause=Cause.TOKENISATION, before=before, after=after, evidence=evidence, is_shown=shown)

    def gap(number: int, log_probs: Sequence[float]) -> float:
        row = record.rows[number]
        return float(np.abs(np.asarray(row.recorded) - np.asarray(log_probs))[np.asarray(row.is_compared)].mean())

    if not record.retokenized:
        return finding("the text of every row encodes back to its tokens", record.before)
    by_row: dict[int, list[RetokenizedLogprobs]] = {}
    for other in record.retokenized:
        by_row.setdefault(other.row, []).append(other)
    best = {number: min((gap(number, other.log_probs), other.says) for other in by_row[number]) for number in by_row}
    own = {number: gap(number, record.rows[number].trainer) for number in best}
    count = {number: sum(record.rows[number].is_compared) for number in best}
    total = sum(count.values())
    before = sum(own[number] * count[number] for number in best) / total
    after = sum(left * count[number] for number, (left, _) in best.items()) / total
    says = best[max(best, key=lambda number: own[number] - best[number][0])][1]
    text = f"with the tokens of {says} the difference goes from {before:.2g} to {after:.2g}"
    if _explains(after, before):
        return finding(text, before, after, shown=True)
    contradictions = [other.says for other in record.retokenized if other.is_contradiction]
    if contradictions:
        text = f"the row's tokens contradict {contradictions[0]}, though no other tokens that could be tried explain it"
        return finding(text, before, None, shown=True)
    return finding(text, before, after)


def _cache(record: MismatchRecord) -> Finding:
    """Test whether the engine's scores differ with and without its prefix cache."""
    before = record.before
    if not record.cache_gaps:
        text, is_shown = "no engine could score with and without its cache", False
    else:
        name, gap = max(record.cache_gaps.items(), key=lambda item: item[1])
        is_shown = gap > max(record.threshold, 0.1 * before)
        text = f"{name} scores the same prefix {gap:.2g} apart with and without its prefix cache"
        if is_shown:
            text += "; without it, it agrees with the trainer"
    return Finding(cause=Cause.PREFIX_CACHE, before=before, after=None, evidence=text, is_shown=is_shown)


def _has_enough(record: MismatchRecord) -> bool:
    return sum(sum(row.is_compared) for row in record.rows) >= MIN_TOKENS
