"""The content hash: equal for equal content, different for any difference."""

import hashlib

import torch

from vime.weights.hashing import content_hash


def test_the_hash_is_blake2b_over_length_header_and_raw_bytes():
    header = b"w\nfloat32\n1,2\n"  # 14 bytes
    # 1.0 is 0x3f800000 and 2.0 is 0x40000000, little-endian
    raw = bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0x40])
    expected = hashlib.blake2b(bytes([14, 0, 0, 0]) + header + raw, digest_size=16).hexdigest()
    assert content_hash({"w": torch.tensor([[1.0, 2.0]])}) == expected


def test_bfloat16_needs_no_conversion():
    # 1.0 in bfloat16 is 0x3f80
    expected = hashlib.blake2b(bytes([13, 0, 0, 0]) + b"w\nbfloat16\n1\n" + bytes([0x80, 0x3F]), digest_size=16)
    assert content_hash({"w": torch.ones(1, dtype=torch.bfloat16)}) == expected.hexdigest()


def test_every_difference_changes_the_hash():
    base = {"a": torch.zeros(4), "b": torch.ones(4)}
    variants = [
        base,
        {"b": base["b"], "a": base["a"]},  # order
        {"a": base["a"], "c": base["b"]},  # name
        {"a": base["a"].reshape(2, 2), "b": base["b"]},  # shape
        {"a": base["a"].to(torch.int32), "b": base["b"]},  # dtype with equal bytes
        {"a": -base["a"], "b": base["b"]},  # -0.0 is not 0.0
        {"a": base["a"]},  # missing
        {"a": base["a"], "b": torch.nextafter(base["b"], torch.tensor(2.0))},  # one bit
    ]
    assert len({content_hash(variant) for variant in variants}) == len(variants)


def test_a_transposed_view_hashes_as_its_values_not_as_its_memory():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert content_hash({"w": matrix.t()}) == content_hash({"w": matrix.t().contiguous()})
    assert content_hash({"w": matrix.t()}) != content_hash({"w": matrix.reshape(3, 2)})


def test_scalars_and_empty_tensors_can_be_hashed():
    assert content_hash({"s": torch.tensor(1.0)}) != content_hash({"s": torch.tensor(2.0)})
    assert content_hash({"e": torch.zeros(0, 2)}) != content_hash({"e": torch.zeros(2, 0)})


def test_a_tensor_that_was_hashed_can_still_be_resized() -> None:
    """A trainer that sleeps gives its storages up."""
    tensor = torch.arange(6.0)
    content_hash({"weight": tensor, "none": torch.empty(0)})
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
