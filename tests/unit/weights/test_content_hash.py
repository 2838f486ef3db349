"""The content hash: equal for equal content, different for any difference. And the one for jobs outside."""

import hashlib

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.weights import hashing
from vime.weights.device_hash import _GROUP_PIECES, PIECE_BYTES, piece_digests
from vime.weights.hashing import ContentHash, content_hash, ordered_hash
from vime.weights.plan import TensorMeta


def bytes_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_hash_is_the_documented_tree_of_xxh3():
    weights = {"w": torch.tensor([[1.0, 2.0]]), "b": bytes_of(0, PIECE_BYTES + 3)}
    # 1.0 is 0x3f800000 and 2.0 is 0x40000000, little-endian; the header "w\nfloat32\n1,2\n" has 14 bytes, the other 16
    piece = xxhash.xxh3_128_digest(bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0x40]))
    first = xxhash.xxh3_128_digest(bytes([14, 0, 0, 0]) + b"w\nfloat32\n1,2\n" + piece)
    raw = bytes(weights["b"].tolist())
    pieces = xxhash.xxh3_128_digest(raw[:PIECE_BYTES]) + xxhash.xxh3_128_digest(raw[PIECE_BYTES:])
    second = xxhash.xxh3_128_digest(bytes([15, 0, 0, 0]) + b"b\nuint8\n262147\n" + pieces)
    assert content_hash(weights) == xxhash.xxh3_128_hexdigest(second + first)  # b before w


def test_the_hash_for_jobs_outside_reads_a_copy_before_it_is_gone():
    """A tensor that is not contiguous is copied, as one of a GPU is."""
    for seed in range(20):
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).t()
        assert ordered_hash({"w": weight}) == ordered_hash({"w": weight.contiguous()})


def test_the_hash_for_jobs_outside_is_blake2b_over_length_header_and_raw_bytes():
    header = b"w\nfloat32\n1,2\n"  # 14 bytes
    raw = bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0x40])
    expected = hashlib.blake2b(bytes([14, 0, 0, 0]) + header + raw, digest_size=16).hexdigest()
    assert ordered_hash({"w": torch.tensor([[1.0, 2.0]])}) == expected
    # 1.0 in bfloat16 is 0x3f80
    half = hashlib.blake2b(bytes([13, 0, 0, 0]) + b"w\nbfloat16\n1\n" + bytes([0x80, 0x3F]), digest_size=16)
    assert ordered_hash({"w": torch.ones(1, dtype=torch.bfloat16)}) == half.hexdigest()


def test_every_difference_changes_both_hashes():
    base = {"a": torch.zeros(4), "b": torch.ones(4)}
    variants = [
        base,
        {"a": base["a"], "c": base["b"]},  # name
        {"a": base["a"].reshape(2, 2), "b": base["b"]},  # shape
        {"a": base["a"].to(torch.int32), "b": base["b"]},  # dtype with equal bytes
        {"a": -base["a"], "b": base["b"]},  # -0.0 is not 0.0
        {"a": base["a"]},  # missing
        {"a": base["b"], "b": base["a"]},  # swapped
        {"a": base["a"], "b": base["a"]},  # stale
        {"a": base["a"], "b": torch.nextafter(base["b"], torch.tensor(2.0))},  # one bit
    ]
    assert len({content_hash(variant) for variant in variants}) == len(variants)
    assert len({ordered_hash(variant) for variant in variants}) == len(variants)


def test_tensors_in_another_order_and_parts_that_are_joined_have_the_same_hash():
    weights = {name: bytes_of(seed, 1000 + seed).view(torch.uint8) for seed, name in enumerate("abcd")}
    whole = content_hash(weights)
    assert content_hash(dict(reversed(weights.items()))) == whole
    assert ordered_hash(dict(reversed(weights.items()))) != ordered_hash(weights)
    parts = [ContentHash(), ContentHash()]
    for place, (name, tensor) in enumerate(weights.items()):
        parts[place % 2].add(TensorMeta.of(name, tensor), tensor)
    parts[1].join(parts[0])
    assert (parts[1].hexdigest(), parts[1].num_tensors, parts[1].num_bytes) == (whole, 4, 4006)


# a rank, a piece and a block of the function, a stripe, a word and a lane's half: where a sum could lose the place
SIZES = [2, 4, 8, 64, 1024, 4096, PIECE_BYTES // 2, PIECE_BYTES]


@settings(max_examples=60, deadline=None)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 1000), data=st.data())
def test_parts_of_a_tensor_that_change_places_change_the_hash(size, seed, data):
    content = bytes_of(seed, 3 * PIECE_BYTES)
    places = st.integers(0, content.numel() // size - 1)
    first, second = data.draw(places), data.draw(places)
    other = content.clone().view(-1, size)
    other[[first, second]] = other[[second, first]]
    is_same = torch.equal(other.view(-1), content)
    assert (content_hash({"w": other.view(-1)}) == content_hash({"w": content})) == is_same


@settings(max_examples=100, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, 40_000 - 1), st.integers(0, 31)), min_size=1, max_size=8, unique=True),
    value=st.sampled_from([0, 1, -1, 0x3F800000]),
)
def test_flipped_bits_never_cancel(flips, value):
    """Signs of two values, a bit added here and taken there, the same bit in neighbouring words: of constant tensors,
    where sums are the easiest to fool."""
    content = torch.full((40_000,), value, dtype=torch.int32)
    other = content.clone()
    for place, bit in flips:
        other[place] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert content_hash({"w": other}) != content_hash({"w": content})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permuted_rows_columns_and_blocks_and_compensated_sums_change_the_hash(dtype):
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    added = matrix.clone()
    added[3, 5], added[200, 7] = added[3, 5] + 1, added[200, 7] - 1
    tiles = matrix.view(4, 64, 4, 64).transpose(0, 2).reshape(256, 256)
    variants = [matrix, matrix.roll(1, 0), matrix.roll(1, 1), matrix.flip(0), matrix.t(), tiles, added, -matrix]
    variants += [torch.cat([matrix[128:], matrix[:128]]), matrix.view(128, 2, 256).flip(1).reshape(256, 256)]
    assert len({content_hash({"w": variant}) for variant in variants}) == len(variants)


@pytest.mark.parametrize("fill", ["random", "zeros", "ones"])
def test_the_reduction_for_devices_gives_the_digests_of_the_library(fill):
    pieces = bytes_of(1, (_GROUP_PIECES + 5) * PIECE_BYTES).view(-1, PIECE_BYTES)
    if fill != "random":
        pieces.fill_(255 if fill == "ones" else 0)
    expected = b"".join(xxhash.xxh3_128_digest(piece.numpy().data) for piece in pieces)
    assert piece_digests([pieces[:3], pieces[3:3], pieces[3:]]) == expected
    assert piece_digests([]) == b""


def test_tensors_of_any_size_have_the_same_digests_on_a_device_as_on_the_host():
    sizes = [0, 1, 240, 241, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 77]
    tensors = [bytes_of(seed, size) for seed, size in enumerate(sizes)]
    assert hashing._on_device(tensors) == [hashing._on_cpu(tensor) for tensor in tensors]


def test_a_transposed_view_hashes_as_its_values_not_as_its_memory():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert content_hash({"w": matrix.t()}) == content_hash({"w": matrix.t().contiguous()})
    assert content_hash({"w": matrix.t()}) != content_hash({"w": matrix.reshape(3, 2)})


def test_scalars_and_empty_tensors_can_be_hashed():
    assert content_hash({"s": torch.tensor(1.0)}) != content_hash({"s": torch.tensor(2.0)})
    assert content_hash({"e": torch.zeros(0, 2)}) != content_hash({"e": torch.zeros(2, 0)})


@pytest.mark.parametrize("hashed", [content_hash, ordered_hash])
def test_a_tensor_that_was_hashed_can_still_be_resized(hashed) -> None:
    """A trainer that sleeps gives its storages up."""
    tensor = torch.arange(6.0)
    hashed({"weight": tensor, "none": torch.empty(0)})
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
