"""Which positions of a pack each context-parallel rank computes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.backends.megatron_utils.context_parallel import zigzag_positions


def test_each_rank_gets_one_early_and_one_late_chunk_of_every_sequence() -> None:
    # 8 tokens in 4 chunks of 2, 4 tokens in 4 chunks of 1; rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2
    assert zigzag_positions([0, 8, 12], rank=0, size=2) == [0, 1, 6, 7, 8, 11]
    assert zigzag_positions([0, 8, 12], rank=1, size=2) == [2, 3, 4, 5, 9, 10]


@given(chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4), size=st.integers(1, 4))
def test_ranks_share_every_position_once_and_all_look_back_alike(chunks: list[int], size: int) -> None:
    starts = [0, *itertools.accumulate(chunk * 2 * size for chunk in chunks)]
    shares = [zigzag_positions(starts, rank=rank, size=size) for rank in range(size)]
    assert sorted(position for share in shares for position in share) == list(range(starts[-1]))
    # position p of its sequence looks at p + 1 keys: the sum is the attention work of a rank
    work = [sum(p - max(s for s in starts if s <= p) for p in share) for share in shares]
    assert len(set(work)) == 1


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="6 tokens, expected a multiple of 4"):
        zigzag_positions([0, 6], rank=0, size=2)
