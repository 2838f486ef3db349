"""One number from many tokens, with denominators that are global to the optimizer step. T: packed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reduce_loss(
    value_T: Tensor,
    mask_T: Tensor,
    row_slices: Sequence[slice],
    *,
    per_token: bool,
    num_samples: int,
    num_tokens: int,
    sample_tokens_T: Tensor | None = None,
) -> Tensor:
    """Return this pack's share of the step's mean: a scalar, float32.

    Default: for each sample the mean over its masked tokens, summed over the samples, divided by `num_samples`.
    `per_token`: the sum over masked tokens, divided by `num_tokens`. (GRPO, Shao et al. 2024, equation 3, and the
    token-level loss of DAPO, Yu et al. 2025.)

    A sample is one row, unless `sample_tokens_T` says otherwise: at the positions of each row the masked tokens of its
    sample, over all of the sample's rows, wherever they are. Then a row gives its sum divided by that number.

    `value_T` and `mask_T` are [T] (mask 1 = counts; any dtype), `row_slices` are the positions of each row. Both
    denominators count the WHOLE optimizer step, over all ranks and micro-batches, so the sum of the results over all
    packs is the step's value, on any packing; code that averages over ranks afterwards must undo that. A row without
    masked tokens contributes 0 and still counts in `num_samples`. A step with none gives 0. Values where the mask
    is 0 are never read, so they may be inf or nan. The result is part of the graph even for an empty pack: every rank
    can call backward. Example: rows with values (1, 3) and (5,), num_samples 2, num_tokens 3: (2 + 5) / 2 = 3.5, or
    9 / 3 = 3 per token; both of one sample, num_samples 1: 4 / 3 + 5 / 3 = 3.
    """
    counts_T = mask_T > 0
    value_T = torch.where(counts_T, value_T.float(), 0.0)
    if per_token:
        return value_T.sum() / max(num_tokens, 1)
    total = value_T[:0].sum()
    for row in row_slices:
        divisor = counts_T[row].sum() if sample_tokens_T is None else sample_tokens_T[row.start]
        total = total + value_T[row].sum() / divisor.clamp(min=1)
    return total / max(num_samples, 1)


def row_sums(value_T: Tensor, mask_T: Tensor, row_slices: Sequence[slice]) -> Tensor:
    """Return at each token the sum of `value_T` over the masked tokens of its row; [T], 0 outside of rows, with graph.

    Values where the mask is 0 are never read. Example: rows with values (1, 3) and (5,) -> (4, 4, 5).
    """
    return _per_row(value_T, mask_T, row_slices)[0]


def row_means(value_T: Tensor, mask_T: Tensor, row_slices: Sequence[slice]) -> Tensor:
    """Return `row_sums` divided by the row's masked tokens; a row without any is 0. Example: as there -> (2, 2, 5)."""
    sum_T, count_T = _per_row(value_T, mask_T, row_slices)
    return sum_T / count_T.clamp(min=1)


def _per_row(value_T: Tensor, mask_T: Tensor, row_slices: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """Return at each token (sum, count) of its row's masked tokens; 0 outside. Rows are ascending and disjoint.

    It expands and concatenates: unlike scattered adds, this has one order of summation on every device.
    """
    counts_T = mask_T > 0
    value_T = torch.where(counts_T, value_T, 0.0)
    if not row_slices:  # zeros with a graph: a rank with nothing to do calls backward like its peers
        return 0.0 * value_T, 0.0 * value_T.detach()
    sums, counts, end = [], [], 0
    for positions in row_slices:
        gap, length = value_T.new_zeros(positions.start - end), positions.stop - positions.start
        sums += [gap, value_T[positions].sum().expand(length)]
        counts += [gap, counts_T[positions].sum().to(value_T.dtype).expand(length)]
        end = positions.stop
    gap = value_T.new_zeros(value_T.numel() - end)
    return torch.cat([*sums, gap]), torch.cat([*counts, gap])
