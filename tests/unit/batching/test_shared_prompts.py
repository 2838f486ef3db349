"""Prompts that sequences of a pack share: which tokens are computed, in which order, and where each token finds its
own."""

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.rows import make_row
from vime.batching.pack import Heads, pack, share_prompts

ROWS = [
    make_row(0, prompt=(7, 8), response=(1,)),
    make_row(1, prompt=(7, 8), response=(2, 3)),
    make_row(2, prompt=(9,), response=(4,)),
]


def test_a_prompt_of_two_rows_is_computed_once_and_a_row_of_its_own_whole():
    # the pack: 7 8 1 | 7 8 2 3 | 9 4. Heads of 2 tokens: 7 8 and 9 4; rests behind 7 8: 1, then 2 3
    shared = share_prompts(pack(ROWS), tokens_per_call=0)
    assert shared.heads == (Heads(length=2, count=2),)
    assert [(rest.head_length, rest.length, rest.heads.tolist()) for rest in shared.rests] == [(2, 1, [0]), (2, 2, [0])]
    assert shared.kept_U.tolist() == [0, 1, 7, 8, 2, 5, 6]
    assert shared.place_T.tolist() == [0, 1, 4, 0, 1, 5, 6, 2, 3]
    assert shared.sizes == [4, 1, 2]


def test_padding_is_the_end_of_the_last_sequence():
    # two rows 7 8 1 of three tokens, padded to eight: the second has two tokens of padding behind its answer
    shared = share_prompts(pack([ROWS[0], ROWS[0]], pad_to_multiple=8), tokens_per_call=0)
    assert [(rest.length, rest.heads.tolist()) for rest in shared.rests] == [(1, [0]), (3, [0])]
    assert shared.kept_U.tolist() == [0, 1, 2, 5, 6, 7]


def test_a_prompt_that_another_only_begins_with_is_not_shared():
    rows = [make_row(0, prompt=(7,), response=(8, 1)), make_row(1, prompt=(7, 8), response=(1,))]
    shared = share_prompts(pack(rows), tokens_per_call=0)
    assert (shared.heads, shared.rests) == ((Heads(length=3, count=2),), ())


def test_where_more_calls_cost_more_than_the_tokens_they_save_every_sequence_is_whole():
    # of ROWS 2 of 9 tokens are saved in as many calls: heads of 2, rests of 1 and 2; whole they have lengths 2, 3, 4
    more = [make_row(3, prompt=(7, 8), response=(1, 1, 1)), make_row(4, prompt=(9,), response=(4, 4, 4, 4, 4))]
    assert len(share_prompts(pack(ROWS), tokens_per_call=100).rests) == 2
    batch = pack([*ROWS, *more])
    # shared: heads of 1 and 2, rests (1, 1), (1, 5), (2, 1), (2, 2), (2, 3): 7 calls for 5 whole ones, that is 2 more
    # for the 2 + 2 + 1 tokens saved
    assert len(share_prompts(batch, tokens_per_call=2.4).sizes) == 7
    whole = share_prompts(batch, tokens_per_call=2.6)
    assert [(head.length, head.count) for head in whole.heads] == [(2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]
    assert whole.rests == ()


def test_a_pack_without_rows_shares_nothing():
    assert share_prompts(pack([]), tokens_per_call=0) is None


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 4)), min_size=1, max_size=12),
    st.integers(1, 8),
)
def test_every_token_finds_itself_at_its_own_position(drawn, multiple):
    # prompts of `length` times one `token`, answers of `response` tokens
    rows = [
        make_row(number, prompt=(token,) * length, response=tuple(range(10, 10 + response)))
        for number, (length, token, response) in enumerate(drawn)
    ]
    batch = pack(rows, pad_to_multiple=multiple)
    shared = share_prompts(batch, tokens_per_call=0)
    for column_T in (batch.tokens_T, batch.position_T):
        assert column_T[shared.kept_U][shared.place_T].tolist() == column_T.tolist()
    assert len(set(shared.kept_U.tolist())) == len(shared.kept_U) == sum(shared.sizes)
    copies = sum(length for length, _, _ in drawn) - sum(
        {(length, token): length for length, token, _ in drawn}.values()
    )
    assert len(shared.kept_U) == batch.num_tokens - copies
