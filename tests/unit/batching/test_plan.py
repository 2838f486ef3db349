import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.batching import plan
from vime.batching.plan import join_plans, plan_round
from vime.types import ConfigError, HandoffError


def _plan(lengths, *, trainable=None, **changes):
    options = {
        "dp_size": 2,
        "samples_per_step": len(lengths),
        "micro_batch_size": 2,
        "max_tokens_per_micro_batch": None,
    }
    return plan_round(5, lengths, trainable if trainable is not None else [1] * len(lengths), **(options | changes))


def test_without_balance_each_rank_gets_consecutive_rows():
    step = _plan([9, 8, 7, 6, 5, 4, 3, 2]).steps[0]
    assert step.micro_batches == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


def test_steps_take_consecutive_rows_and_their_own_denominators():
    plan = _plan([1] * 4, trainable=[1, 2, 3, 4], samples_per_step=2)
    assert [(step.num_samples, step.num_tokens) for step in plan.steps] == [(2, 3), (2, 7)]
    assert plan.rollout_id == 5
    assert plan.steps[1].micro_batches == (((2,),), ((3,),))


def test_balance_spreads_the_long_rows():
    # consecutive: 19 against 5. Longest first: 10 -> rank 0, 9 -> rank 1, 3 -> rank 1 (9 < 10), 2 -> rank 0: 12 and 12
    step = _plan([10, 9, 3, 2], loads=[10, 9, 3, 2]).steps[0]
    assert step.micro_batches == (((0, 3),), ((1, 2),))


def test_balance_goes_by_the_loads_and_not_by_the_lengths():
    # the loads of the rows above, in the order of lengths that are all alike
    step = _plan([4, 4, 4, 4], loads=[2, 10, 3, 9]).steps[0]
    assert step.micro_batches == (((0, 1),), ((2, 3),))


def test_balance_keeps_consecutive_rows_where_those_are_lighter():
    # 3 rows a rank. Heaviest first: 3 | 3, 3+2 | 3+2, 3+2+2 | 3+2+0: 7 against 5. Consecutive: 6 and 6
    step = _plan([3, 3, 1, 2, 2, 2], loads=[3, 3, 0, 2, 2, 2], micro_batch_size=3).steps[0]
    assert step.micro_batches == (((0, 1, 2),), ((3, 4, 5),))


def test_dynamic_micro_batches_are_cut_by_tokens():
    # one rank, limit 10: 6 opens a, 5 opens b, 4 fits a (10), 3 fits b (8)
    step = _plan([6, 5, 4, 3], dp_size=1, micro_batch_size=None, max_tokens_per_micro_batch=10).steps[0]
    assert step.micro_batches == (((0, 2), (1, 3)),)


def test_a_rank_with_too_few_micro_batches_splits_its_heaviest():
    # limit 10: rank 0 needs (0), (1); rank 1 fits all in one and splits it
    step = _plan([10, 10, 2, 3], micro_batch_size=None, max_tokens_per_micro_batch=10).steps[0]
    assert step.micro_batches == (((0,), (1,)), ((2,), (3,)))


def test_the_multiple_of_a_pipeline_is_filled_with_empty_micro_batches():
    step = _plan([1, 1], micro_batch_multiple=2).steps[0]
    assert step.micro_batches == (((0,), ()), ((1,), ()))


def test_a_row_over_the_token_limit_is_a_micro_batch_of_its_own():
    # limit 10: 11 stands alone although nothing else is full, 6 and 3 share
    step = _plan([3, 11, 6], dp_size=1, micro_batch_size=None, max_tokens_per_micro_batch=10).steps[0]
    assert step.micro_batches == (((0, 2), (1,)),)


def test_samples_that_do_not_fill_the_steps_are_refused():
    with pytest.raises(HandoffError, match=r"3 samples.*multiple of the 2.*--global-batch-size"):
        _plan([1, 1, 1], samples_per_step=2)


def test_rows_that_do_not_divide_over_the_ranks_leave_one_rank_fewer_and_no_rank_without_a_micro_batch():
    # 3 rows, 2 ranks: 0..1 and 1..3 by 3 * rank // 2; the first rank has nothing to split and gets an empty one
    assert _plan([1, 1, 1], micro_batch_size=1).steps[0].micro_batches == (((0,), ()), ((1,), (2,)))
    # 1 row, 3 ranks: two ranks work on nothing, as often as the one that has the row
    assert _plan([9], dp_size=3, loads=[9]).steps[0].micro_batches in ((((0,),), ((),), ((),)), (((),), ((),), ((0,),)))


def test_steps_are_cut_between_samples_and_say_the_tokens_of_those_with_several_rows():
    # samples of 1, 3, 2 and 1 rows; two a step. Tokens of the second 2 + 3 + 4 = 9, of the third 5 + 6 = 11
    numbers = [0, 1, 1, 1, 2, 2, 3]
    plan = _plan([5] * 7, trainable=[1, 2, 3, 4, 5, 6, 7], samples_per_step=2, dp_size=1, sample_numbers=numbers)
    first, second = plan.steps
    assert (first.micro_batches, second.micro_batches) == ((((0, 1), (2, 3)),), (((4, 5), (6,)),))
    assert [(step.num_samples, step.num_rows, step.num_tokens) for step in plan.steps] == [(2, 4, 10), (2, 3, 18)]
    assert first.sample_tokens == ((1, 9), (2, 9), (3, 9))
    assert second.sample_tokens == ((4, 11), (5, 11))


def test_rows_that_are_all_samples_by_themselves_are_planned_as_without_numbers():
    lengths = [9, 1, 5, 3, 7, 2]
    options = {"loads": lengths, "samples_per_step": 2}
    assert _plan(lengths, sample_numbers=range(6), **options) == _plan(lengths, **options)
    assert {step.sample_tokens for step in _plan(lengths, **options).steps} == {()}


@pytest.mark.parametrize("numbers", [[1, 1, 2], [0, 2, 2], [0, 1, 0], [-1, -1, 0]])
def test_numbers_of_samples_that_skip_or_return_are_a_fault_of_the_caller(numbers):
    with pytest.raises(ValueError, match="not numbered"):
        _plan([1, 1, 1], samples_per_step=1, sample_numbers=numbers)


def test_samples_and_not_rows_must_fill_the_steps():
    assert len(_plan([1] * 3, samples_per_step=2, sample_numbers=[0, 0, 1]).steps) == 1
    with pytest.raises(HandoffError, match=r"has 1 samples.*multiple of the 2"):
        _plan([1, 1], samples_per_step=2, sample_numbers=[0, 0])


def test_joined_plans_count_rows_and_not_samples():
    # 3 rows of two samples, then 2 rows of one: row 1 of the second is row 4 of the round
    one = _plan([1] * 3, dp_size=1, trainable=[1, 2, 3], samples_per_step=2, sample_numbers=[0, 0, 1])
    other = _plan([1] * 2, dp_size=1, trainable=[4, 5], samples_per_step=1, sample_numbers=[0, 0])
    [step] = join_plans([one, other]).steps
    assert step.micro_batches == (((0, 1), (2,), (3, 4)),)
    assert (step.num_samples, step.num_tokens) == (3, 15)
    assert step.sample_tokens == ((0, 3), (1, 3), (3, 9), (4, 9))


@pytest.mark.parametrize(("rows", "tokens"), [(None, None), (1, 1)])
def test_exactly_one_limit_must_be_given(rows, tokens):
    with pytest.raises(ConfigError, match="exactly one"):
        _plan([1, 1], micro_batch_size=rows, max_tokens_per_micro_batch=tokens)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    dp_size=st.integers(1, 4),
    num_steps=st.integers(1, 3),
    multiple=st.integers(1, 3),
    balance=st.sampled_from(["no", "length", "square"]),
    dynamic=st.booleans(),
    limit=st.integers(5, 20),
)
def test_every_row_is_planned_once_and_all_ranks_count_alike(
    lengths, dp_size, num_steps, multiple, balance, dynamic, limit
):
    lengths = lengths * dp_size * num_steps
    options = {
        "dp_size": dp_size,
        "samples_per_step": len(lengths) // num_steps,
        "micro_batch_size": None if dynamic else 3,
        "max_tokens_per_micro_batch": limit if dynamic else None,
        "loads": {"no": None, "length": lengths, "square": [length**2 for length in lengths]}[balance],
        "micro_batch_multiple": multiple,
    }
    plan = _plan(lengths, **options)
    assert plan == _plan(lengths, **options)
    planned = [row for step in plan.steps for rank in step.micro_batches for batch in rank for row in batch]
    assert sorted(planned) == list(range(len(lengths)))
    for step in plan.steps:
        assert {len(rank) for rank in step.micro_batches} == {len(step.micro_batches[0])}
        assert len(step.micro_batches[0]) % multiple == 0
        assert {sum(map(len, rank)) for rank in step.micro_batches} == {len(lengths) // num_steps // dp_size}
        for rank in step.micro_batches:
            within = all(sum(lengths[row] for row in batch) <= limit or len(batch) == 1 for batch in rank)
            assert within or not dynamic
            assert all(len(batch) <= 3 for batch in rank) or dynamic


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    per_step=st.integers(1, 3),
    dp_size=st.integers(1, 5),
    multiple=st.integers(1, 3),
    is_balanced=st.booleans(),
    dynamic=st.booleans(),
)
def test_samples_of_several_rows_are_planned_whole_and_all_ranks_count_alike(
    sizes, per_step, dp_size, multiple, is_balanced, dynamic
):
    sizes = sizes * per_step
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    lengths = [1 + 7 * row % 5 for row in range(len(numbers))]
    limits = {"micro_batch_size": None, "max_tokens_per_micro_batch": 6} if dynamic else {}
    plan = _plan(
        lengths,
        trainable=lengths,
        samples_per_step=per_step,
        dp_size=dp_size,
        loads=lengths if is_balanced else None,
        micro_batch_multiple=multiple,
        sample_numbers=numbers,
        **limits,
    )
    planned = [row for step in plan.steps for rank in step.micro_batches for batch in rank for row in batch]
    assert sorted(planned) == list(range(len(numbers)))
    for step in plan.steps:
        rows = [row for rank in step.micro_batches for batch in rank for row in batch]
        samples = {numbers[row] for row in rows}
        assert len(samples) == step.num_samples == per_step
        assert step.num_rows == sum(sizes[sample] for sample in samples)  # none of their rows is in another step
        assert {len(rank) for rank in step.micro_batches} == {len(step.micro_batches[0])}
        assert len(step.micro_batches[0]) % multiple == 0
        assert max(sum(map(len, rank)) for rank in step.micro_batches) <= -(-len(rows) // dp_size)
        assert dict(step.sample_tokens) == {
            row: sum(lengths[other] for other in rows if numbers[other] == numbers[row])
            for row in rows
            if sizes[numbers[row]] > 1
        }


@given(
    loads=st.lists(st.integers(0, 1000), min_size=1, max_size=24),
    dp_size=st.integers(1, 4),
)
def test_the_heaviest_rank_is_never_heavier_than_with_consecutive_rows(loads, dp_size):
    loads = loads[: len(loads) // dp_size * dp_size] or loads * dp_size

    def heaviest(**options):
        [step] = _plan([1] * len(loads), dp_size=dp_size, **options).steps
        return max(sum(loads[row] for batch in rank for row in batch) for rank in step.micro_batches)

    assert heaviest(loads=loads) <= heaviest()


def slow_balanced(rows, loads, dp_size):
    """`plan._balanced` as it was: every rank with room is looked at for every row."""
    per_rank = len(rows) // dp_size
    shares = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for row in sorted(rows, key=lambda row: (-loads[row], row)):
        rank = min((r for r in range(dp_size) if len(shares[r]) < per_rank), key=lambda r: (totals[r], r))
        shares[rank].append(row)
        totals[rank] += loads[row]
    consecutive = [list(rows[rank * per_rank : (rank + 1) * per_rank]) for rank in range(dp_size)]
    if max(totals) > max(sum(loads[row] for row in share) for share in consecutive):
        return consecutive
    return [sorted(share) for share in shares]


@given(st.integers(1, 7), st.integers(1, 6), st.data())
@settings(max_examples=300, deadline=None)
def test_the_heap_gives_each_rank_the_rows_that_looking_at_all_ranks_gives(dp_size, per_rank, data):
    count = dp_size * per_rank
    loads = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 100]), min_size=2 * count, max_size=2 * count))
    for rows in (range(count), range(count, 2 * count)):  # also those of a later step
        assert plan._balanced(rows, loads, dp_size) == slow_balanced(rows, loads, dp_size)
