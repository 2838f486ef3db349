"""Which rank computes which rows: one global plan of a round, made once, before rows are read.

The RolloutManager calls `plan_round` when a round is complete. Because every rank reads the same plan, no two ranks
can disagree on the number of micro-batches, which would block the pipeline and gradient collectives for ever.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence

from vime.types import ConfigError, HandoffError, RoundPlan, StepPlan

Batches = list[list[int]]
"""The micro-batches of one rank: row numbers."""


def plan_round(
    rollout_id: int,
    total_lengths: Sequence[int],
    num_trainable: Sequence[int],
    *,
    dp_size: int,
    samples_per_step: int,
    micro_batch_size: int | None,
    max_tokens_per_micro_batch: int | None,
    loads: Sequence[int] | None = None,
    micro_batch_multiple: int = 1,
    sample_numbers: Sequence[int] | None = None,
) -> RoundPlan:
    """Split the rows of a round into optimizer steps, each step into ranks, each rank's share into micro-batches.

    `total_lengths[i]` and `num_trainable[i]` are the tokens and the trainable tokens of row i; rows are numbered over
    the round's flattened groups. `sample_numbers[i]` is the sample of row i, counted from 0 in the order of the rows;
    None: every row is a sample. Steps take consecutive samples, each with all its rows, which may be on several ranks
    (`StepPlan.sample_tokens` makes up for that). Each rank gets an equal share of a step's rows, or, where they cannot
    be divided, at most that share rounded up: consecutive rows, or with `loads` (the cost of each row: tokens, or
    FLOPs) spread so that the heaviest rank is light; it is never heavier than with consecutive rows. Exactly one of
    `micro_batch_size` (rows) and `max_tokens_per_micro_batch` (tokens) splits a share; a row that is longer than that
    is a micro-batch of its own. All ranks get the same number of micro-batches, rounded up to `micro_batch_multiple`
    (the pipeline size, for interleaved pipelines); where there are too few, the heaviest is split, and empty ones are
    added last. Every row appears exactly once. The same input gives the same plan.
    """
    _check_limits(micro_batch_size, max_tokens_per_micro_batch, dp_size, samples_per_step)
    numbers = range(len(total_lengths)) if sample_numbers is None else sample_numbers
    _check_rows(rollout_id, total_lengths, num_trainable, loads, numbers, samples_per_step)
    steps = []
    for rows in _cut_into_steps(numbers, samples_per_step):
        shares = _consecutive(rows, dp_size) if loads is None else _balanced(rows, loads, dp_size)
        if micro_batch_size is not None:
            ranks = [_cut_by_rows(share, micro_batch_size) for share in shares]
        else:
            assert max_tokens_per_micro_batch is not None
            ranks = [_cut_by_tokens(share, total_lengths, max_tokens_per_micro_batch) for share in shares]
        most = max(len(batches) for batches in ranks)
        count = -(-most // micro_batch_multiple) * micro_batch_multiple
        ranks = [_grow(batches, total_lengths, count) for batches in ranks]
        steps.append(
            StepPlan(
                micro_batches=tuple(tuple(tuple(batch) for batch in batches) for batches in ranks),
                num_samples=samples_per_step,
                num_tokens=sum(num_trainable[row] for row in rows),
                sample_tokens=_sample_tokens(rows, numbers, num_trainable),
            )
        )
    return RoundPlan(rollout_id=rollout_id, steps=tuple(steps))


def join_plans(plans: Sequence[RoundPlan]) -> RoundPlan:
    """Return the plan of a round from plans of its early batches, each of one step and with its own row numbers.
    Micro-batches and rows keep the order of the early batches.

    Example: early batches of 4 and 2 rows; row 1 of the second is row 5 of the round.
    """
    steps, shifted, first = [step for plan in plans for step in plan.steps], [], 0
    sample_tokens: list[tuple[int, int]] = []
    for step in steps:
        shifted.append([[[first + row for row in batch] for batch in rank] for rank in step.micro_batches])
        sample_tokens += [(first + row, tokens) for row, tokens in step.sample_tokens]
        first += step.num_rows
    whole = StepPlan(
        micro_batches=tuple(
            tuple(tuple(batch) for early_batch in shifted for batch in early_batch[rank])
            for rank in range(len(shifted[0]))
        ),
        num_samples=sum(step.num_samples for step in steps),
        num_tokens=sum(step.num_tokens for step in steps),
        sample_tokens=tuple(sample_tokens),
    )
    return RoundPlan(rollout_id=plans[0].rollout_id, steps=(whole,))


def _check_limits(micro_batch_size: int | None, max_tokens: int | None, dp_size: int, samples_per_step: int) -> None:
    if (micro_batch_size is None) == (max_tokens is None):
        raise ConfigError(
            f"micro-batches: got micro_batch_size={micro_batch_size} and max_tokens_per_micro_batch={max_tokens}; "
            "expected exactly one. Give --micro-batch-size, or --use-dynamic-batch-size with --max-tokens-per-gpu."
        )
    limit = micro_batch_size if micro_batch_size is not None else max_tokens
    if dp_size < 1 or samples_per_step < 1 or (limit is not None and limit < 1):
        raise ConfigError(
            f"micro-batches: got dp_size={dp_size}, samples_per_step={samples_per_step}, limit={limit}; expected >= 1."
        )


def _check_rows(
    rollout_id: int,
    total_lengths: Sequence[int],
    num_trainable: Sequence[int],
    loads: Sequence[int] | None,
    numbers: Sequence[int],
    samples_per_step: int,
) -> None:
    num_rows = len(total_lengths)
    if {len(num_trainable), len(numbers), num_rows if loads is None else len(loads)} != {num_rows}:
        raise ValueError(
            f"plan_round: {num_rows} lengths, {len(num_trainable)} counts of trainable tokens, {len(numbers)} numbers "
            f"of samples, {'no' if loads is None else len(loads)} loads; expected as many of each"
        )
    num_samples = numbers[-1] + 1 if num_rows else 0
    if any(after - before not in (0, 1) for before, after in itertools.pairwise([-1, *numbers])) or -1 in numbers:
        raise ValueError("plan_round: the samples of rows are not numbered 0, 1, 2, ... in the order of the rows")
    if num_samples == 0 or num_samples % samples_per_step:
        raise HandoffError(
            f"round {rollout_id} has {num_samples} samples; expected a positive multiple of the {samples_per_step} "
            "samples of one optimizer step. Make --rollout-batch-size * --n-samples-per-prompt a multiple of "
            "--global-batch-size; a rollout function must return whole groups."
        )


def _cut_into_steps(numbers: Sequence[int], samples_per_step: int) -> list[range]:
    """Return the rows of each step. `numbers`: the sample of each row, ascending."""
    starts = [row for row, number in enumerate(numbers) if number % samples_per_step == 0]
    firsts = [row for row in starts if row == 0 or numbers[row - 1] != numbers[row]]
    return [range(first, end) for first, end in itertools.pairwise([*firsts, len(numbers)])]


def _sample_tokens(rows: range, numbers: Sequence[int], num_trainable: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return `StepPlan.sample_tokens` of a step."""
    num_rows = Counter(numbers[row] for row in rows)
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens[numbers[row]] += num_trainable[row]
    return tuple((row, tokens[numbers[row]]) for row in rows if num_rows[numbers[row]] > 1)


def _consecutive(rows: range, dp_size: int) -> Batches:
    """Return one list of ascending row numbers per rank, equally many each, or one fewer."""
    edges = [rank * len(rows) // dp_size for rank in range(dp_size + 1)]
    return [list(rows[first:end]) for first, end in itertools.pairwise(edges)]


def _balanced(rows: range, loads: Sequence[int], dp_size: int) -> Batches:
    """Return the same, with the load of the heaviest rank kept low."""
    # Longest processing time first (Graham 1969): each row, heaviest first, goes to the lightest rank that is not full.
    most = -(-len(rows) // dp_size)
    shares: Batches = [[] for _ in range(dp_size)]
    not_full = [(0, rank) for rank in range(dp_size)]  # a heap of (load, rank)
    heaviest = 0
    for row in sorted(rows, key=lambda row: (-loads[row], row)):
        load, rank = not_full[0]
        shares[rank].append(row)
        heaviest = max(heaviest, load + loads[row])
        if len(shares[rank]) < most:
            heapq.heapreplace(not_full, (load + loads[row], rank))
        else:
            heapq.heappop(not_full)
    consecutive = _consecutive(rows, dp_size)  # equal counts restrict the greedy choice, so it may be worse
    if heaviest > max(sum(loads[row] for row in share) for share in consecutive):
        return consecutive
    return [sorted(share) for share in shares]


def _cut_by_rows(share: list[int], micro_batch_size: int) -> Batches:
    return [share[start : start + micro_batch_size] for start in range(0, len(share), micro_batch_size)]


def _cut_by_tokens(share: list[int], total_lengths: Sequence[int], max_tokens: int) -> Batches:
    """First fit decreasing: each row, longest first, goes into the first micro-batch that has space for its tokens."""
    batches: Batches = []
    room: list[int] = []
    for row in sorted(share, key=lambda row: (-total_lengths[row], row)):
        index = next((i for i, tokens in enumerate(room) if tokens >= total_lengths[row]), None)
        if index is None:
            batches.append([])
            room.append(max_tokens)
            index = len(batches) - 1
        batches[index].append(row)
        room[index] -= total_lengths[row]
    return sorted(sorted(batch) for batch in batches)


def _grow(batches: Batches, total_lengths: Sequence[int], count: int) -> Batches:
    """Make `count` micro-batches: halve the heaviest that has two rows or more, then add empty ones."""
    grown = [list(batch) for batch in batches]
    while len(grown) < count:
        splittable = [index for index, batch in enumerate(grown) if len(batch) > 1]
        if not splittable:
            grown.append([])
            continue
        heaviest = max(splittable, key=lambda index: (sum(total_lengths[row] for row in grown[index]), -index))
        batch = grown.pop(heaviest)
        middle = len(batch) // 2
        grown[heaviest:heaviest] = [batch[:middle], batch[middle:]]
    return grown
