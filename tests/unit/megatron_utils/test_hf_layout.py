"""HF tensors cut into tensor-parallel shards, and back."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.architecture import Architecture
from vime.backends.megatron_utils.hf_layout import (
    Kind,
    from_shards,
    hf_names_and_kind,
    is_expert,
    to_shard,
    with_expert_offset,
)


def architecture(*, num_heads: int = 8, num_kv_heads: int = 4, head_dim: int = 2, vocab_size: int = 7) -> Architecture:
    return Architecture(
        model_type="qwen3",
        num_layers=2,
        hidden_size=6,
        intermediate_size=8,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_experts=0,
        num_experts_per_token=0,
        moe_intermediate_size=0,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        norm_epsilon=1e-6,
        rope_theta=10_000.0,
        rope_llama3_factor=None,
        is_tied=False,
        has_qkv_bias=False,
        has_qk_norm=True,
        normalizes_chosen=True,
    )


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_each_rank_gets_its_gate_rows_then_its_up_rows() -> None:
    # gate rows 0..3, up rows 10..13, two ranks: (0, 1, 10, 11) and (2, 3, 12, 13)
    gate, up = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11], [12], [13]])
    shards = [
        to_shard(Kind.GATE_UP, [gate, up], architecture=architecture(), rank=rank, size=2, rows=4) for rank in (0, 1)
    ]
    assert shards[0].flatten().tolist() == [0, 1, 10, 11]
    assert shards[1].flatten().tolist() == [2, 3, 12, 13]


def test_query_key_value_rows_interleave_per_group() -> None:
    # 4 query heads, 2 groups, head_dim 1: group 0 is q0 q1 k0 v0, group 1 is q2 q3 k1 v1
    small = architecture(num_heads=4, num_kv_heads=2, head_dim=1)
    query, key, value = torch.arange(4.0), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    shards = [to_shard(Kind.QKV, [query, key, value], architecture=small, rank=rank, size=2, rows=4) for rank in (0, 1)]
    assert shards[0].tolist() == [0, 1, 10, 20]
    assert shards[1].tolist() == [2, 3, 11, 21]


def test_a_cut_through_stacked_experts_keeps_each_gate_beside_its_up() -> None:
    # one expert, one input, columns g0 u0 g1 u1 g2 u2 g3 u3; two ranks: g0 u0 g1 u1 and g2 u2 g3 u3
    stacked = torch.tensor([[[0.0, 10, 1, 11, 2, 12, 3, 13]]])
    shards = [to_shard(Kind.LAST, [stacked], architecture=architecture(), rank=rank, size=2, rows=1) for rank in (0, 1)]
    assert [shard.flatten().tolist() for shard in shards] == [[0, 10, 1, 11], [2, 12, 3, 13]]


def test_missing_vocabulary_rows_are_zero() -> None:
    # 7 rows over 4 ranks of 2: the last rank has row 6 and one row of zeros
    shard = to_shard(Kind.VOCAB, [numbered(7, 1, start=1)], architecture=architecture(), rank=3, size=4, rows=2)
    assert shard.flatten().tolist() == [7, 0]


CASES = [
    (Kind.REPLICATED, [(6,)]),
    (Kind.ROW, [(6, 8)]),
    (Kind.COLUMN, [(8, 6)]),
    (Kind.GATE_UP, [(8, 6), (8, 6)]),
    (Kind.QKV, [(16, 6), (8, 6), (8, 6)]),
    (Kind.QKV, [(16,), (8,), (8,)]),
    (Kind.VOCAB, [(7, 6)]),
    (Kind.ROW, [(3, 8, 6)]),
    (Kind.LAST, [(3, 6, 16)]),
    (Kind.LAST, [(3, 16)]),
]


@pytest.mark.parametrize("size", [1, 2, 4, 8])  # 8 is more ranks than key/value groups: the cut goes through a group
@pytest.mark.parametrize(("kind", "shapes"), CASES)
def test_shards_put_together_are_the_hf_tensors(kind: Kind, shapes: list[tuple[int, ...]], size: int) -> None:
    model = architecture()
    tensors = [numbered(*shape, start=1000 * index) for index, shape in enumerate(shapes)]
    rows = -(-model.vocab_size // size)
    shards = [to_shard(kind, tensors, architecture=model, rank=rank, size=size, rows=rows) for rank in range(size)]
    back = from_shards(kind, shards, architecture=model)
    assert len(back) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def test_both_layer_implementations_name_the_same_hf_norm() -> None:
    expected = (("model.layers.3.input_layernorm.weight",), Kind.REPLICATED)
    assert hf_names_and_kind("decoder.layers.3.input_layernorm.weight") == expected
    assert hf_names_and_kind("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight") == expected


def test_a_parameter_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyError, match="shared_experts"):
        hf_names_and_kind("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")


def test_an_expert_is_named_by_its_number_in_the_whole_model() -> None:
    # 8 experts on 4 ranks: the second expert of rank 3 is number 7
    name = "decoder.layers.11.mlp.experts.local_experts.1.linear_fc1.weight"
    whole = with_expert_offset(name, 6)
    prefix = "model.layers.11.mlp.experts.7."
    assert hf_names_and_kind(whole) == ((prefix + "gate_proj.weight", prefix + "up_proj.weight"), Kind.GATE_UP)
    assert is_expert(name)
    assert not is_expert("decoder.layers.11.mlp.router.weight")
    assert hf_names_and_kind("decoder.layers.1.mlp.router.weight") == (
        ("model.layers.1.mlp.gate.weight",),
        Kind.REPLICATED,
    )
