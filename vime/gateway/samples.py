"""What a job put, checked and made into samples of the run. A sample may have several rows: branches of one session,
which follow each other under one index and have one reward (`rollout/sample_rows.py`)."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from vime.gateway import messages as m
from vime.gateway.refusal import Refusal
from vime.handoff.ledger_types import OWN_KEY
from vime.types import LARGEST_REWARD, Sample, SampleStatus, Version, VersionSpan, tiling_fault

Number = TypeVar("Number", bound=np.generic)
Rows = list[m.GivenSample]
"""The rows of one sample, in their order."""
MOST_LOG_PROB, LEAST_LOG_PROB = 1e-3, float(np.finfo(np.float32).min)  # engines round; rows are float32
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
    max_held_bytes: int = 1 << 30  # of bodies at a time, of all callers together
    max_held_bytes_of_job: int = 256 << 20  # of bodies at a time, of one caller
    calls_per_s: float = 200.0  # of one token, on average; twice as many at once
    failures_per_s: float = 20.0  # calls without a valid token, of all callers together
    max_partial_bytes: int = 256 << 20  # samples of one producer whose groups are not whole
    mixed_versions: str = "correct"  # what is done with a completion of several versions: --mixed-version-policy
    has_capacity: bool = True  # the queue has a bound, so the ledger is asked for room before a group is stored


class Checked(NamedTuple):
    """A row that was checked, with its numbers as arrays: they are converted once, and checked and stored from
    there."""

    given: m.GivenSample
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.floating]
    loss_mask: NDArray[np.uint8]
    spans: list[VersionSpan]


CheckedRows = list[Checked]
"""The rows of one sample, in their order."""


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
) -> dict[int, CheckedRows]:
    """Return the rows of each sample, checked. Refuse samples that are not those of the prompt (`wanted`: their
    indices), that no trainer could use, or whose tokens name weights that the job has not confirmed."""
    if (is_whole and sorted(given) != sorted(wanted)) or not set(given) <= set(wanted):
        raise invalid(
            "the samples are not those of the group.",
            f"indices {sorted(given)[:16]}",
            f"{'each' if is_whole else 'one'} of {sorted(wanted)[:16]}",
        )
    checked: dict[int, CheckedRows] = {}
    for index, rows in given.items():
        checked[index] = [_checked(row, limits) for row in rows]
        for row in rows:
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
    return checked


def refuse_mixed(checked: Mapping[int, CheckedRows]) -> None:
    """Refuse a row whose trained tokens several versions have sampled."""
    for index, rows in checked.items():
        for row in rows:
            versions = _trained_versions(row)
            if len(versions) > 1:
                raise Refusal(
                    422,
                    "mixed_versions",
                    f"sample {index}: several versions have sampled it, and the run trains no such group.",
                    got=f"versions {sorted(versions)[:8]}",
                    expected="one version in each completion (--mixed-version-policy reject)",
                    next_action="Give the lease back, or drop it with the reason mixed_versions.",
                )


def mask_mixed(rows: Sequence[Checked], max_staleness: int) -> int:
    """Take the tokens out of the loss that are older than the newest of their row, or too old to be trained beside the
    newest of the group (`vime.rollout.partial.settle_versions`); return how many were in it."""
    oldest = max((span.version for row in rows for span in row.spans), default=0) - max_staleness
    num_masked = 0
    for row in rows:
        bound = max({oldest, *_trained_versions(row)})
        for span in row.spans:
            if span.version < bound:
                num_masked += int(row.loss_mask[span.start : span.end].sum())
                row.loss_mask[span.start : span.end] = 0
    return num_masked


def _trained_versions(row: Checked) -> set[Version]:
    return {span.version for span in row.spans if row.loss_mask[span.start : span.end].any()}


def fill(prompts: Iterable[tuple[Sample, CheckedRows]], attempt: int) -> list[Sample]:
    """Return the rows of a group with what the job generated, in the order of `prompts`, which are filled themselves;
    further rows of one sample are filled copies. Tokens, mask and log-probabilities are arrays: the samples are for
    encoding, and no plug-in sees them."""
    return [
        _filled(place, row, attempt)
        for prompt, rows in prompts
        for place, row in zip([prompt, *(copy.deepcopy(prompt) for _ in rows[1:])], rows, strict=True)
    ]


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


def _filled(sample: Sample, row: Checked, attempt: int) -> Sample:
    given, length = row.given, row.given.response_length
    sample.tokens, sample.response_length = cast("list[int]", row.tokens), length
    sample.loss_mask, sample.rollout_log_probs = cast("list[int]", row.loss_mask), cast("list[float]", row.log_probs)
    sample.token_policy_versions, sample.reward = row.spans, given.reward
    sample.status, sample.response, sample.attempt = SampleStatus(given.status), given.response, attempt
    for name, value in given.extra.items():
        if name in ATTRIBUTES:
            setattr(sample, name, value)
        else:
            sample.metadata[name] = value
    return sample


def _checked(given: m.GivenSample, limits: Limits) -> Checked:
    """Refuse a row that no trainer could use, and say which number is wrong."""
    where, length = f"sample {given.index}", given.response_length
    # tokens as rows hold them; a list of the message has no larger number
    tokens = _numbers(where, "tokens", given.tokens, np.dtype("<i4"))
    if not length < len(tokens) <= limits.max_tokens:
        raise invalid(
            f"{where}: its tokens are not a prompt and a completion within the bound.",
            f"{len(tokens)} tokens, response_length {length}",
            f"response_length below the number of tokens, and at most {limits.max_tokens} tokens",
        )
    wrong = tokens.min() if tokens.min() < 0 else tokens.max()
    if not 0 <= wrong < limits.vocab_size:
        raise invalid(f"{where}: the model has no such token.", f"token {wrong}", f"0 to {limits.vocab_size - 1}")
    is_packed = isinstance(given.log_probs, bytes)
    log_probs = _numbers(where, "log_probs", given.log_probs, np.dtype("<f4" if is_packed else "<f8"))
    loss_mask = np.ones(length, np.uint8)
    if given.loss_mask is not None:
        loss_mask = _numbers(where, "loss_mask", given.loss_mask, np.dtype("u1"))
    if len(log_probs) != length or len(loss_mask) != length:
        raise invalid(
            f"{where}: its lists do not line up.",
            f"{len(log_probs)} log_probs, {len(loss_mask)} entries of loss_mask",
            f"{length} of each, one for each token of the completion",
        )
    if loss_mask.max() > 1:
        raise invalid(f"{where}: a number of its loss_mask is impossible.", str(loss_mask.max()), "0 or 1")
    is_fine = (log_probs <= MOST_LOG_PROB) & (log_probs > LEAST_LOG_PROB)  # False for what is no number
    if not is_fine.all():
        raise invalid(
            f"{where}: a log-probability is impossible.",
            str(log_probs[~is_fine][0]),
            "finite as float32, and not above 0",
        )
    _check_reward(where, given.reward, limits.reward_key)
    spans = [VersionSpan(version=version, start=start, end=end) for start, end, version in given.versions]
    fault = tiling_fault(spans, length)
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
    return Checked(given, tokens, log_probs, loss_mask, spans)


def _numbers(where: str, name: str, given: Sequence[float] | bytes, kind: np.dtype[Number]) -> NDArray[Number]:
    """Return a column of its own memory, from a list or from bytes."""
    if not isinstance(given, bytes):
        return np.asarray(given, kind)
    if len(given) % kind.itemsize:
        raise invalid(
            f"{where}: the bytes of its {name} are no whole numbers.",
            f"{len(given)} bytes",
            f"{kind.itemsize} for each number ({kind.name}, little-endian)",
        )
    return np.frombuffer(given, kind).copy()


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
