"""Samples -> training rows: rewards normalised by group, every list's length checked.

The last step at which plug-ins can change something; from here on a row holds numbers only and never changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from vime.config.parse import Args
from vime.data.images import IMAGE_COLUMN
from vime.data.rows import Column, GroupFacts, GroupNotes, TrainRow, as_array
from vime.handoff.group_store import EncodedGroup, encode_group
from vime.protocols import calling_plugin
from vime.rollout.group_worker import mark_samples
from vime.rollout.images import image_column
from vime.rollout.metrics import reward_entries, source_of
from vime.rollout.plugins import is_of_slime, plugin, plugin_args
from vime.rollout.routed_experts import routed_experts_column
from vime.rollout.sample_rows import by_sample
from vime.types import (
    LARGEST_REWARD,
    HandoffError,
    PluginError,
    Sample,
    SampleStatus,
)

_TRAINABLE = frozenset({SampleStatus.COMPLETED, SampleStatus.TRUNCATED})


def group_rows(
    args: Args, samples: Sequence[Sample], *, partition_id: str = "", producer_id: str = ""
) -> list[TrainRow]:
    """Return the rows of one finished group that belongs to no round yet.

    `row.reward` is what --advantage-estimator makes of the group's rewards, `row.raw_reward` what the reward function
    returned. With --custom-reward-post-process-path, which needs whole rounds, both are the same for now. A sample may
    have several rows (`sample_rows.by_sample`). Raises HandoffError for lists that do not line up.
    """
    if not samples:
        raise HandoffError("an empty group reached conversion. A rollout function must return whole groups.")
    for sample in samples:
        _check_alignment(sample)
    raw = [_raw_reward(args, sample) for sample in samples]
    return [
        TrainRow(
            sample_index=sample.index,
            group_index=sample.group_index,
            rollout_id=sample.rollout_id,
            tokens=as_array(sample.tokens, np.int32, f"{_name(sample)}: tokens"),
            response_length=sample.response_length,
            loss_mask=_mask(sample),
            rollout_log_probs=np.asarray(sample.rollout_log_probs, dtype=np.float32),
            token_policy_versions=tuple(sample.token_policy_versions),
            reward=reward,
            raw_reward=raw_reward,
            status=str(sample.status),
            truncated=sample.status is SampleStatus.TRUNCATED,
            extra=_extra_columns(args, sample),
            attempt=sample.attempt,
            partition_id=partition_id,
            producer_id=producer_id,
        )
        for sample, reward, raw_reward in zip(samples, _normalised(args, samples, raw), raw, strict=True)
    ]


def encoded_group(
    args: Args, samples: Sequence[Sample], *, partition_id: str = "", producer_id: str = "", with_samples: bool = False
) -> EncodedGroup:
    """Return one finished group in its stored form. `partition_id`: where in the queue it will be; `with_samples`: the
    samples may be asked for too."""
    rows = group_rows(args, samples, partition_id=partition_id, producer_id=producer_id)
    return encode_group(
        rows,
        notes=group_notes(args, samples, producer_id),
        removed=[sample.remove_sample for sample in samples],
        samples=samples if with_samples else (),
    )


def group_notes(args: Args, samples: Sequence[Sample], producer_id: str = "") -> GroupNotes:
    """Return what metrics need besides numbers: entries of dict rewards and data sources, where there are any."""
    entries = [reward_entries(sample) for sample in samples]
    sources = [source_of(sample, args.source_key) for sample in samples]
    return GroupNotes(
        producer=producer_id, entries=entries if any(entries) else (), sources=sources if any(sources) else ()
    )


def mark_removed(args: Args, groups: Sequence[GroupFacts], samples: Callable[[], list[list[Sample]]]) -> None:
    """Let --rollout-sample-filter-path take samples of a round out of the loss: their mask becomes 0, and their reward
    stays in the group's mean. `samples` reads the round's samples from where they are stored."""
    if plugin(args, "rollout_sample_filter_path") is None:
        return
    found = samples()
    mark_samples(args, found)
    for facts, group in zip(groups, found, strict=True):
        facts.remove([sample.remove_sample for sample in group])


def set_custom_rewards(args: Args, groups: Sequence[GroupFacts], samples: Callable[[], list[list[Sample]]]) -> None:
    """Let --custom-reward-post-process-path, which needs a whole round, set the numbers that advantages are made of."""
    custom = plugin(args, "custom_reward_post_process_path")
    if custom is not None:
        for facts, rewards in zip(groups, _custom_rewards(args, custom, samples()), strict=True):
            facts.rows["reward"] = rewards


def _extra_columns(args: Args, sample: Sample) -> dict[str, Column]:
    """Return the columns of --transfer-queue-extra-data-fields, and the images of --multimodal-keys."""
    images = {IMAGE_COLUMN: image_column(args, sample, _name(sample))} if args.multimodal_keys else {}
    writers: dict[str, Callable[[Args, Sample, str], Column]]
    writers = {"teacher_log_probs": _teacher_log_probs, "rollout_routed_experts": routed_experts_column}
    return images | {
        name: writers[name](args, sample, _name(sample)) if name in writers else _any_field(sample, name)
        for name in args.transfer_queue_extra_data_fields
    }


def _any_field(sample: Sample, name: str) -> Column:
    """Return a field that a plug-in wrote: an attribute of the sample, or an entry of its metadata. Numbers become an
    array, everything else JSON."""
    missing = object()
    value = getattr(sample, name, missing)
    value = sample.metadata.get(name, missing) if value is missing else value
    if value is missing or value is None:
        raise HandoffError(
            f"{_name(sample)}: field {name!r} was requested (--transfer-queue-extra-data-fields) but the rollout did "
            "not write it, neither as an attribute of the sample nor in its metadata. Write it for every sample, or do "
            "not request it."
        )
    if isinstance(value, bytes):
        return value
    try:
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return array
    except ValueError:  # lists of different lengths
        pass
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise HandoffError(f"{_name(sample)}: field {name!r} cannot be stored: {error}. Expected JSON.") from error


def _name(sample: Sample) -> str:
    return f"sample {sample.index} of group {sample.group_index}"


def _teacher_log_probs(_args: Args, sample: Sample, where: str) -> NDArray[np.float32]:
    values = sample.teacher_log_probs
    if values is None or len(values) != sample.response_length or not all(map(math.isfinite, values)):
        got = "none" if values is None else f"{len(values)} values"
        raise HandoffError(
            f"{where}: teacher_log_probs holds {got}, expected {sample.response_length} finite numbers, one per "
            "response token. The reward or generate plug-in must set sample.teacher_log_probs (--use-opd)."
        )
    return np.asarray(values, dtype=np.float32)


def _normalised(args: Args, samples: Sequence[Sample], raw: list[float]) -> list[float]:
    """Return the numbers that the advantages of one group are made of, one for each row. A sample of several rows
    counts once in the group's mean and deviation, and each of its rows gets its number."""
    if args.loss_type == "sft_loss" or plugin(args, "custom_reward_post_process_path") is not None:
        return raw
    import torch  # imported here: the driver, which imports this file, does without torch

    from vime.algo.advantages import group_signal

    of_rows = iter(raw)
    by_one = [[next(of_rows) for _ in rows] for rows in by_sample(samples)]
    signal: list[float] = group_signal(
        torch.tensor([rewards[0] for rewards in by_one], dtype=torch.float64),
        estimator=args.advantage_estimator,
        divide_by_std=not args.disable_grpo_std_normalization,
    ).tolist()
    return [number for number, rewards in zip(signal, by_one, strict=True) for _ in rewards]


def _custom_rewards(args: Args, custom: Callable[..., object], groups: list[list[Sample]]) -> list[list[float]]:
    where = f"--custom-reward-post-process-path {args.custom_reward_post_process_path}"
    with calling_plugin(where, custom, expected="Expected a list of lists of numbers."):
        returned = [[float(reward) for reward in group] for group in _post_processed(custom, args, groups)]
    shape, expected = [len(group) for group in returned], [len(group) for group in groups]
    if shape != expected:
        raise PluginError(f"{where}: returned groups of sizes {shape[:8]}, expected {expected[:8]}.")
    for group, rewards in zip(groups, returned, strict=True):
        for sample, reward in zip(group, rewards, strict=True):
            if not abs(reward) <= LARGEST_REWARD:
                raise PluginError(
                    f"{where}: returned {reward} for sample {sample.index}, expected a finite number of at most "
                    f"{LARGEST_REWARD:.2g}. Guard the division."
                )
    return returned


def _post_processed(custom: Callable[..., object], args: Args, groups: list[list[Sample]]) -> Iterable[Iterable[float]]:
    """Call the plug-in. A slime plug-in takes the samples of all groups in one list and returns (raw rewards,
    rewards)."""
    if not is_of_slime(custom):
        return cast("Iterable[Iterable[float]]", custom(args, groups))
    samples = [sample for group in groups for sample in group]
    returned = custom(plugin_args(custom, args), samples)
    flat = list(cast("Iterable[float]", returned[1] if isinstance(returned, tuple) else returned))
    if len(flat) != len(samples):
        return [flat]
    taken = iter(flat)
    return [[next(taken) for _ in group] for group in groups]


def _raw_reward(args: Args, sample: Sample) -> float:
    """Return the reward of the reward function. A completion to imitate (--loss-type sft_loss) needs none and counts
    0."""
    if args.loss_type == "sft_loss" and sample.reward is None:
        return 0.0
    return sample.scalar_reward(args.reward_key)


def _check_alignment(sample: Sample) -> None:
    """Check that every per-token list covers the response exactly. What is in them, `rows.check_row` checks."""
    where = f"sample {sample.index} of group {sample.group_index}"
    if sample.status not in _TRAINABLE:
        raise HandoffError(f"{where} is {sample.status}: it cannot be trained on. Drop its group or finish it.")
    length = sample.response_length
    lengths = {"loss_mask": len(sample.loss_mask), "rollout_log_probs": len(sample.rollout_log_probs)}
    wrong = {name: value for name, value in lengths.items() if value != length}
    if length < 1 or wrong or len(sample.tokens) <= length:
        raise HandoffError(
            f"{where}: response_length {length}, tokens {len(sample.tokens)}, {lengths}. Expected a prompt, at least "
            "one response token and lists of response_length; extend samples with Sample.append_response_tokens only."
        )


def _mask(sample: Sample) -> NDArray[np.uint8]:
    mask = np.asarray(sample.loss_mask)
    if not ((mask == 0) | (mask == 1)).all():
        raise HandoffError(f"{_name(sample)}: loss_mask holds {sorted({*mask.tolist()})}, expected 0 and 1 only.")
    return mask.astype(np.uint8, copy=False)
