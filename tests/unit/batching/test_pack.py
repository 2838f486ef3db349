import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.rows import make_row
from vime.batching.pack import pack
from vime.types import HandoffError

# Row a: prompt 7 8, response 1 2 3 (the second not trainable). Row b: prompt 9, response 4.
A = make_row(0, prompt=(7, 8), response=(1, 2, 3), loss_mask=(1, 0, 1), log_probs=(-0.1, -0.2, -0.3), reward=2.0)
B = make_row(1, prompt=(9,), response=(4,), log_probs=(-0.4,), reward=-1.0)


def test_two_rows_laid_end_to_end():
    batch = pack([A, B])
    assert batch.tokens_T.tolist() == [7, 8, 1, 2, 3, 9, 4]
    assert batch.labels_T.tolist() == [8, 1, 2, 3, 0, 4, 0]
    assert batch.position_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    # position 1 (token 8) predicts the first response token, position 3 the last
    assert batch.mask_T.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert batch.advantage_T.tolist() == [0, 2, 2, 2, 0, -1, 0]
    torch.testing.assert_close(batch.rollout_logp_T, torch.tensor([0, -0.1, -0.2, -0.3, 0, -0.4, 0]))
    assert batch.cu_seqlens == [0, 5, 7]
    assert batch.max_seqlen == 5
    assert batch.row_slices == [slice(1, 4), slice(5, 6)]
    assert (batch.tokens_T.dtype, batch.mask_T.dtype) == (torch.int64, torch.float32)


def test_padding_belongs_to_the_last_sequence_and_is_masked():
    batch = pack([A, B], pad_to_multiple=4)
    assert batch.cu_seqlens == [0, 5, 8]
    assert batch.tokens_T.tolist()[7:] == [0]
    assert batch.position_T.tolist()[5:] == [0, 1, 2]
    assert batch.mask_T.tolist()[7:] == [0]


def test_each_sequence_is_padded_by_itself_and_the_pack_as_a_whole() -> None:
    # rows of 5 and 2 tokens, sequences in fours: 8 and 4; a pack in eights: 16, the rest goes to the last sequence
    batch = pack([A, B], sequence_multiple=4, pad_to_multiple=8)
    assert batch.cu_seqlens == [0, 8, 16]
    assert batch.tokens_T.tolist() == [7, 8, 1, 2, 3, 0, 0, 0, 9, 4, 0, 0, 0, 0, 0, 0]
    assert batch.labels_T.tolist() == [8, 1, 2, 3, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]
    assert batch.position_T.tolist() == [*range(8), *range(8)]
    assert batch.row_slices == [slice(1, 4), slice(8, 9)]
    assert batch.mask_T.nonzero().flatten().tolist() == [1, 3, 8]
    assert pack([], sequence_multiple=4).cu_seqlens == [0, 4]


def test_further_columns_are_aligned_like_the_log_probabilities():
    batch = pack([A, B], extra={"ref_logp": [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0])]})
    assert batch.extra_T["ref_logp"].tolist() == [0, -1, -2, -3, 0, -4, 0]


@pytest.mark.parametrize(("multiple", "tokens"), [(1, 2), (2, 2), (8, 8)])
def test_no_rows_make_a_masked_dummy(multiple, tokens):
    batch = pack([], pad_to_multiple=multiple, extra={"ref_logp": []})
    assert batch.cu_seqlens == [0, tokens]
    assert batch.max_seqlen == tokens
    assert batch.row_slices == []
    assert batch.mask_T.tolist() == [0.0] * tokens
    assert batch.extra_T["ref_logp"].shape == (tokens,)


def test_a_response_without_a_prompt_is_refused():
    with pytest.raises(HandoffError, match="at least one prompt token"):
        pack([make_row(prompt=(), response=(1, 2))])


def test_a_column_of_the_wrong_length_is_refused():
    with pytest.raises(HandoffError, match="'ref_logp' has 2 entries for a response of 3"):
        pack([A], extra={"ref_logp": [torch.zeros(2)]})


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5),
    multiple=st.integers(1, 6),
)
def test_every_response_token_is_the_label_of_its_prediction_position(shapes, multiple):
    rows = [
        make_row(at, prompt=range(1, 1 + prompt), response=range(50 + at, 50 + at + response), versions=())
        for at, (prompt, response) in enumerate(shapes)
    ]
    batch = pack(rows, pad_to_multiple=multiple)
    assert batch.num_tokens % multiple == 0
    assert batch.cu_seqlens[-1] == len(batch.tokens_T) == len(batch.mask_T)
    for row, positions in zip(rows, batch.row_slices, strict=True):
        prompt_length = row.total_length - row.response_length
        assert tuple(batch.labels_T[positions].tolist()) == tuple(row.tokens[prompt_length:])
    assert batch.mask_T.sum().item() == sum(row.num_trainable for row in rows)
