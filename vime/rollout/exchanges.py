"""The requests and completions of one call of a generate function, and samples completed from them.

A plug-in may return tokens without log-probabilities or versions. For tokens of the loss they are then looked up here:
the tokens must be the beginning of a completion that the engine returned for exactly the tokens before them. Otherwise
the plug-in's sample is refused: nothing is guessed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vime.config.parse import Args
from vime.types import PluginError, Sample, Version, VersionSpan, tiling_fault

TOLERANCE = 1e-3
"""Nats by which a plug-in's own log-probability may differ from the engine's: it may have been rounded for JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One of the n completions of a request: parallel lists, tiled by the spans.

    `routed_experts` [prompt + completion - 1, layers, top_k]: the experts of each token that the engine computed (the
    last token was only sampled); None from an engine that does not report them. `cached_tokens` of the prompt were in
    the engine's prefix cache.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[VersionSpan]
    finish_reason: str  # stop, length or abort
    routed_experts: NDArray[np.integer] | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class PromptTokens:
    """Prompt tokens of requests, and how many of them were in the engines' prefix caches."""

    asked: int = 0
    cached: int = 0

    def add(self, other: PromptTokens) -> None:
        self.asked, self.cached = self.asked + other.asked, self.cached + other.cached

    def metrics(self) -> dict[str, float]:
        """Return the share; empty when no engine said how many were cached."""
        return {"rollout/prefix_cached_share": self.cached / self.asked} if self.asked else {}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and one of its completions; `log_probs` and `versions` have an entry for each token."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[Version, ...]


@dataclass(slots=True)
class Record:
    """All requests of one call. `sample`: the one that the call is about, for requests made of text."""

    args: Args
    sample: Sample
    exchanges: list[Exchange] = field(default_factory=list)


_RECORD: ContextVar[Record | None] = ContextVar("vime_exchanges", default=None)


@contextlib.contextmanager
def recording(args: Args, sample: Sample) -> Iterator[Record]:
    """Record the requests made inside, also by tasks that are started there."""
    record = Record(args, sample)
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def current_record() -> Record | None:
    """Return the record of the current call; None outside of any."""
    return _RECORD.get()


def note_completions(prompt: Sequence[int], completions: Sequence[Completion]) -> None:
    """Add every completion that the engine's client read to the record."""
    record = _RECORD.get()
    if record is None:
        return
    for completion in completions:
        versions = tuple(span.version for span in completion.versions for _ in range(span.end - span.start))
        record.exchanges.append(
            Exchange(tuple(prompt), tuple(completion.token_ids), tuple(completion.log_probs), versions)
        )


def complete(sample: Sample, record: Record, *, where: str) -> None:
    """Fill in missing masks, log-probabilities and versions of a finished sample. PluginError for a token of the loss
    that no request explains."""
    length = sample.response_length
    _make_plain(sample)
    if sample.loss_mask is None or (not sample.loss_mask and length):
        sample.loss_mask = [1] * length
    log_probs = sample.rollout_log_probs
    known = [math.nan] * length if log_probs is None or (not log_probs and length) else list(log_probs)
    if not (len(known) == len(sample.loss_mask) == length < len(sample.tokens)):
        raise PluginError(
            f"{where}: returned {len(sample.tokens)} tokens, of which response_length {length} are the response, with "
            f"{len(sample.loss_mask)} entries of loss_mask and {len(known)} of rollout_log_probs. Expected a prompt, "
            "and as many entries as the response has tokens."
        )
    is_tiled = tiling_fault(sample.token_policy_versions, length) is None
    if is_tiled and all(map(math.isfinite, known)):
        return
    versions = _explain(sample, known, record, where)
    sample.rollout_log_probs = known
    sample.token_policy_versions = _spans(versions)
    sample.policy_version = min(versions, default=None)


def _make_plain(sample: Sample) -> None:
    """Replace tensors and arrays by lists of numbers."""
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is not None and not isinstance(values, list):
            setattr(sample, name, list(values.tolist() if hasattr(values, "tolist") else values))


def _explain(sample: Sample, known: list[float], record: Record, where: str) -> list[Version]:
    """Return the version of each token of the response; `known` gets the log-probabilities that are missing."""
    start, mask = sample.prompt_length, sample.loss_mask
    versions: list[Version | None] = [None] * sample.response_length
    place = 0
    while place < len(mask):
        if not mask[place]:
            known[place] = known[place] if math.isfinite(known[place]) else 0.0
            place += 1
            continue
        end = next((later for later in range(place, len(mask)) if not mask[later]), len(mask))
        exchange, count = _asked(sample.tokens, start + place, start + end, record.exchanges)
        if exchange is None:
            raise PluginError(
                f"{where}: tokens {place} to {end} of the response are to be trained (loss_mask 1), and no request of "
                f"this call returned them after the {start + place} tokens before them: log-probabilities "
                "and versions would be a guess. Ask with input_ids that are the sample's own tokens, through "
                "slime.utils.http_utils.post or vime.rollout.generation; append what the policy did not sample with "
                "trainable=False."
            )
        for offset in range(count):
            said, own = exchange.log_probs[offset], known[place + offset]
            if math.isfinite(own) and abs(own - said) > TOLERANCE:
                raise PluginError(
                    f"{where}: rollout_log_probs holds {own:g} for token {place + offset} of the response, and the "
                    f"engine returned {said:g}. Leave them out to use the engine's."
                )
            known[place + offset], versions[place + offset] = said, exchange.versions[offset]
        place += count
    return _neighbours(versions, fallback=max(sample.rollout_id, 0))


def _asked(tokens: Sequence[int], start: int, end: int, exchanges: Sequence[Exchange]) -> tuple[Exchange | None, int]:
    """Return the exchange whose prompt is tokens[:start] and whose completion covers most of tokens[start:end]."""
    best: tuple[Exchange | None, int] = (None, 0)
    before = tuple(tokens[:start])
    for exchange in exchanges:
        if len(exchange.prompt) != start:  # the prompts of a session share their beginning: comparing them is slow
            continue
        count = min(len(exchange.token_ids), end - start)
        is_same = exchange.prompt == before and exchange.token_ids[:count] == tuple(tokens[start : start + count])
        if is_same and count > best[1]:
            best = exchange, count
    return best


def _neighbours(versions: Sequence[Version | None], *, fallback: Version) -> list[Version]:
    """Give context the version of the token before it, or at the beginning the first version that is known."""
    latest = next((version for version in versions if version is not None), fallback)
    filled = []
    for version in versions:
        latest = latest if version is None else version
        filled.append(latest)
    return filled


def _spans(versions: Sequence[Version]) -> list[VersionSpan]:
    starts = [place for place in range(len(versions)) if place == 0 or versions[place] != versions[place - 1]]
    return [
        VersionSpan(versions[start], start, end)
        for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
    ]
