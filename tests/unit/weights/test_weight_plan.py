"""Buckets: cut alike from metadata alone, aligned, order kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.weights.plan import Slot, TensorMeta, cut_buckets, single_bucket


def test_offsets_are_aligned_and_a_bucket_is_cut_before_it_overflows():
    metas = [TensorMeta("a", "float32", (3,)), TensorMeta("b", "bfloat16", (5,)), TensorMeta("c", "float32", (8,))]
    # a: 12 bytes at 0; b: 10 bytes at 16 (end 26); c: 32 bytes at 32 -> end 64 > 48, so a new bucket
    first, second = cut_buckets(metas, 48)
    assert [(slot.meta.name, slot.offset) for slot in first.slots] == [("a", 0), ("b", 16)]
    assert [(slot.meta.name, slot.offset) for slot in second.slots] == [("c", 0)]
    assert (first.nbytes, second.nbytes) == (32, 32)
    assert [(bucket.index, bucket.count) for bucket in (first, second)] == [(0, 2), (1, 2)]


def test_a_tensor_larger_than_a_bucket_travels_alone():
    metas = [
        TensorMeta("small", "int8", (4,)),
        TensorMeta("large", "float32", (100,)),
        TensorMeta("last", "int8", (4,)),
    ]
    assert [[slot.meta.name for slot in bucket.slots] for bucket in cut_buckets(metas, 64)] == [
        ["small"],
        ["large"],
        ["last"],
    ]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "int8"]), min_size=30, max_size=30),
    bucket_bytes=st.integers(1, 200),
)
def test_every_tensor_lies_in_one_bucket_in_order_and_no_two_overlap(sizes, dtypes, bucket_bytes):
    metas = [TensorMeta(f"t{i}", dtypes[i], (size,)) for i, size in enumerate(sizes)]
    buckets = cut_buckets(metas, bucket_bytes)
    assert [slot.meta for bucket in buckets for slot in bucket.slots] == metas
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset % 16 == 0
            end = slot.offset + slot.meta.nbytes
        assert end <= bucket.nbytes
        assert len(bucket.slots) == 1 or end <= bucket_bytes
        assert single_bucket([slot.meta for slot in bucket.slots], index=bucket.index, count=bucket.count) == bucket


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_view_reads_back_what_was_written(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    meta = TensorMeta.of("t", tensor)
    buffer = torch.zeros(16 + meta.nbytes, dtype=torch.uint8)
    Slot(meta, 16).view(buffer).copy_(tensor)
    assert torch.equal(Slot(meta, 16).view(buffer), tensor)
    assert not buffer[:16].any()


def test_a_scalar_and_an_empty_tensor_have_a_view():
    buffer = torch.zeros(16, dtype=torch.uint8)
    assert Slot(TensorMeta("scalar", "float32", ()), 0).view(buffer).shape == ()
    assert Slot(TensorMeta("empty", "float32", (0, 4)), 0).view(buffer).shape == (0, 4)


def test_a_dtype_that_cannot_be_sent_is_refused_by_name():
    with pytest.raises(ValueError, match=r"embed.*complex64"):
        TensorMeta("embed", "complex64", (1,))
