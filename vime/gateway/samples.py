"""What a job put, checked and made into samples of the run. A sample may have several rows: branches of one session,
which follow each other under one index and have one reward (`rollout/sample_rows.py`)."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from vime.gateway import messages as m
from vime.gateway.refusal import Refusal
from vime.handoff.ledger_types import OWN_KEY
from vime.types import LARGEST_REWARD, Sample, SampleStatus, Version, VersionSpan, tiling_fault

Rows = list[m.GivenSample]
"""The rows of one sample, in their order."""
MOST_LOG_PROB = 1e-3  # engines round
ATTRIBUTES = ("teacher_log_probs", "rollout_routed_experts")
"""Extra columns that are read from an attribute of the sample; the others from its metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call may bring, and what a job is told about the run."""

    samples_per_prompt: int
    max_staleness: int
    lease_timeout_s: float
    vocab_size: int
    max_tokens: int  # of one row, prompt and completion
    temperature: float  # at which the trainer computes log-probabilities
    evaluates: bool = False  # the run has no engines of its own, and its evaluations are for jobs
    reward_key: str = ""  # the entry of a reward with entries that is trained on; empty: rewards are numbers
    extra_fields: tuple[str, ...] = ()  # columns that each row must bring besides
    max_body_bytes: int = 64 << 20
    calls_per_s: float = 200.0  # of one token, on average; twice as many at once
    failures_per_s: float = 20.0  # calls without a valid token, of all callers together
    max_partial_bytes: int = 256 << 20  # samples of one producer whose groups are not whole


def by_index(given: Iterable[m.GivenSample]) -> dict[int, Rows]:
    """Return the rows of each sample. Refusal when the rows of one do not follow each other."""
    found: dict[int, Rows] = {}
    for index, rows in groupby(given, key=lambda row: row.index):
        if index in found:
            raise invalid(
                f"sample {index}: its rows do not follow each other.",
                f"index {index} again after another one",
                "the rows of a sample side by side",
            )
        found[index] = list(rows)
    return found


def check_samples(
    given: Mapping[int, Rows],
    wanted: Sequence[int],
    limits: Limits,
    *,
    has_confirmed: Callable[[Version], bool],
    newest: Version,
    is_whole: bool,
) -> None:
    """Refuse samples that are not those of the prompt (`wanted`: their indices), that no trainer could use, or whose
    tokens name weights that the job has not confirmed."""
    if (is_whole and sorted(given) != sorted(wanted)) or not set(given) <= set(wanted):
        raise invalid(
            "the samples are not those of the group.",
            f"indices {sorted(given)[:16]}",
            f"{'each' if is_whole else 'one'} of {sorted(wanted)[:16]}",
        )
    for index, rows in given.items():
        for row in rows:
            _check_row(row, limits)
            for _, _, version in row.versions:
                if not has_confirmed(version):
                    raise Refusal(
                        409,
                        "unconfirmed_version",
                        f"sample {index}: its tokens name weights that this job has not confirmed.",
                        got=f"version {version}",
                        expected=f"a version that it reported as loaded; the newest is {newest}",
                        next_action="Report the hashes of the engines (POST /v1/weights/loaded), then repeat the call.",
                        retry_after_s=0,
                    )
        if any(row.reward != rows[0].reward for row in rows):
            raise invalid(
                f"sample {index}: its rows have different rewards.",
                f"{[row.reward for row in rows][:4]}"[:200],
                "one reward for all rows of a sample",
            )


def fill(prompts: Iterable[tuple[Sample, Rows]], attempt: int) -> list[Sample]:
    """Return the rows of a group with what the job generated, in the order of `prompts`."""
    return [_filled(copy.deepcopy(prompt), row, attempt) for prompt, rows in prompts for row in rows]


def own_prompts(call: m.PutOwnGroup, places: Sequence[Sample]) -> list[Sample]:
    """Return the prompts of a group whose prompt the job brought itself; `places`: the samples of the run's data under
    the group's number, whose indices it takes."""
    return [
        Sample(
            group_index=place.group_index,
            index=place.index,
            session_id=place.session_id,
            prompt=call.prompt,
            label=call.label,
            metadata={**call.metadata, OWN_KEY: call.key},
        )
        for place in places
    ]


def own_content(call: m.PutOwnGroup) -> str:
    """Return a hash of what a call brings, which is the same in JSON and msgpack."""
    plain = msgspec.structs.replace(call, wait_s=0.0)
    return hashlib.blake2b(msgspec.msgpack.encode(plain, order="deterministic"), digest_size=16).hexdigest()


def _filled(sample: Sample, given: m.GivenSample, attempt: int) -> Sample:
    sample.tokens, sample.response_length = given.tokens, given.response_length
    sample.loss_mask = list(given.loss_mask) if given.loss_mask is not None else [1] * given.response_length
    sample.rollout_log_probs, sample.reward = given.log_probs, given.reward
    sample.token_policy_versions = _spans(given)
    sample.status, sample.response, sample.attempt = SampleStatus(given.status), given.response, attempt
    for name, value in given.extra.items():
        if name in ATTRIBUTES:
            setattr(sample, name, value)
        else:
            sample.metadata[name] = value
    return sample


def _spans(given: m.GivenSample) -> list[VersionSpan]:
    return [VersionSpan(version=version, start=start, end=end) for start, end, version in given.versions]


def _check_row(given: m.GivenSample, limits: Limits) -> None:
    """Refuse a row that no trainer could use, and say which number is wrong."""
    where, length = f"sample {given.index}", given.response_length
    if not length < len(given.tokens) <= limits.max_tokens:
        raise invalid(
            f"{where}: its tokens are not a prompt and a completion within the bound.",
            f"{len(given.tokens)} tokens, response_length {length}",
            f"response_length below the number of tokens, and at most {limits.max_tokens} tokens",
        )
    if max(given.tokens) >= limits.vocab_size:
        raise invalid(
            f"{where}: the model has no such token.", f"token {max(given.tokens)}", f"0 to {limits.vocab_size - 1}"
        )
    mask_length = length if given.loss_mask is None else len(given.loss_mask)
    if len(given.log_probs) != length or mask_length != length:
        raise invalid(
            f"{where}: its lists do not line up.",
            f"{len(given.log_probs)} log_probs, {mask_length} entries of loss_mask",
            f"{length} of each, one for each token of the completion",
        )
    values = given.log_probs
    # One by one costs four times as much, and a sum of finite values is not finite only where it overflows.
    is_fine = max(values) <= MOST_LOG_PROB and math.isfinite(sum(values))
    wrong = None if is_fine else next((value for value in values if not -math.inf < value <= MOST_LOG_PROB), None)
    if wrong is not None:
        raise invalid(f"{where}: a log-probability is impossible.", str(wrong), "finite, and not above 0")
    _check_reward(where, given.reward, limits.reward_key)
    fault = tiling_fault(_spans(given), length)
    if fault is not None:
        raise invalid(
            f"{where}: {fault[:300]}.", f"versions {given.versions[:8]}", f"[start, end, version] over [0, {length})"
        )
    if given.extra.keys() != set(limits.extra_fields):
        raise invalid(
            f"{where}: its extra columns are not those of the run.",
            f"{sorted(given.extra)}"[:200],
            f"{sorted(limits.extra_fields)} (`extra_fields`, as register said)",
        )


def _check_reward(where: str, reward: float | dict[str, float], key: str) -> None:
    """A number, or entries of which the run trains on one."""
    entries = reward if isinstance(reward, dict) else {"": reward}
    if isinstance(reward, dict) and (not key or key not in reward):
        expected = f"a number, or entries with {key!r}" if key else "a number"
        got = f"entries {sorted(reward)[:8]}"[:200]
        raise invalid(f"{where}: no entry of its reward is trained on.", got, f"{expected} (`reward_key`)")
    wrong = next((value for value in entries.values() if not abs(value) <= LARGEST_REWARD), None)
    if wrong is not None:
        raise invalid(f"{where}: the reward is no number.", str(wrong), "a finite number")


def invalid(what: str, got: str, expected: str) -> Refusal:
    return Refusal(
        422, "invalid", what, got=got, expected=expected, next_action="Correct the call; nothing of it was stored."
    )
