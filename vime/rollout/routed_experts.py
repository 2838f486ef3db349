"""The experts that generation used for each token, from the engine's response to the column that training replays.

T: tokens of a sample (prompt + response). The engine computes T - 1 of them: it only samples the last one. Unknown
entries are NOT_RECORDED, and the trainer's own router decides there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from vime.config.hf_config import ModelShape, read_model_shape
from vime.config.parse import Args
from vime.rollout.exchanges import Completion
from vime.types import NOT_RECORDED, HandoffError, RoutedExperts, Sample


def join_routed_experts(parts: Sequence[Completion], before: RoutedExperts | None = None) -> NDArray[np.integer] | None:
    """Return [T - 1, layers, top_k] of a completion in several parts, each continuing the one before it; `before` holds
    the first part.

    A later part computes the earlier tokens again, perhaps with newer weights. The log-probabilities are those of the
    part that sampled the token, so the experts are that part's too; a later part adds only the new tokens.
    """
    joined: NDArray[np.integer] | None = None if before is None else np.asarray(before)
    for part in parts:
        if not part.token_ids:
            continue
        if part.routed_experts is None:
            return None
        joined = (
            part.routed_experts
            if joined is None
            else np.concatenate([joined, part.routed_experts[len(joined) :]], axis=0)
        )
    return joined


def routed_experts_column(args: Args, sample: Sample, where: str) -> NDArray[np.int16]:
    """Return [T, layers x top_k] of a sample, NOT_RECORDED where it holds none; HandoffError when it cannot be
    replayed."""
    shape = _shape(args.hf_checkpoint)
    expected = f"expert numbers below {shape.num_experts} (or all {NOT_RECORDED}: not recorded) of shape [tokens, "
    expected += f"{shape.num_layers} layers, {shape.num_experts_per_token}], at most {len(sample.tokens)} tokens"
    advice = "Every sample needs sample.rollout_routed_experts with --use-rollout-routing-replay."
    if sample.rollout_routed_experts is None:
        raise HandoffError(f"{where}: rollout_routed_experts is None, expected {expected}. {advice}")
    try:
        experts = np.asarray(sample.rollout_routed_experts)
    except ValueError as error:
        raise HandoffError(f"{where}: rollout_routed_experts cannot be read: {error}; expected {expected}.") from error
    width = (shape.num_layers, shape.num_experts_per_token)
    is_shaped = experts.ndim == 3 and experts.shape[1:] == width and len(experts) <= len(sample.tokens)
    if experts.dtype.kind not in "iu" or not is_shaped:
        raise HandoffError(
            f"{where}: rollout_routed_experts is {experts.dtype} of shape {experts.shape}, expected {expected}. "
            f"{advice}"
        )
    if not _is_routing(experts, shape.num_experts):
        raise HandoffError(
            f"{where}: rollout_routed_experts names no {width[1]} different experts; expected {expected}."
        )
    column = np.full((len(sample.tokens), width[0] * width[1]), NOT_RECORDED, dtype=np.int16)
    column[: len(experts)] = experts.reshape(len(experts), -1)
    return column


def _is_routing(experts: NDArray[np.integer], count: int) -> bool:
    """Return whether each token has different experts in each layer, or no record at all."""
    ordered = np.sort(experts.astype(np.int32), axis=-1)
    is_absent = (ordered == NOT_RECORDED).all(axis=-1)
    is_chosen = (ordered[..., 0] >= 0) & (ordered[..., -1] < count) & (np.diff(ordered, axis=-1) > 0).all(axis=-1)
    return bool((is_absent | is_chosen).all())


@cache
def _shape(hf_checkpoint: str) -> ModelShape:
    return read_model_shape(hf_checkpoint)
