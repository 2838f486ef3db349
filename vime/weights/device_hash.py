"""XXH3 with 128 bits, of many pieces of 256 KiB at once, by integer operations of torch: the library's own digests.

For weights on a GPU: copied to the host and hashed there, they would cross the bus once more for nothing else. Within a
block of 1 KiB the function is a sum, so all blocks of all pieces are reduced at once, to 64 bytes each; what is left is
a chain of 256 short steps over all pieces together. The last mixing (64 bytes a piece) is done on the host.

Integers wrap in 64 bits on every device, so the result does not depend on the order of sums. Constants and steps are
those of the specification (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, seed 0); tests compare the digests
with the library's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

DIGEST_BYTES = 16
PIECE_BYTES = 256 << 10
"""Long enough that Python's part does not count and the library gives Python's lock away (100 kB); short enough that a
bucket has thousands, which a GPU needs to be busy."""

_GROUP_PIECES = 128  # reduced at a time: 32 MiB and about four times that for intermediate values
_STRIPES, _LANES = 16, 8  # a block: 16 stripes of 8 words of 64 bits
_BLOCKS = PIECE_BYTES // (_STRIPES * _LANES * 8)
_WORD = (1 << 64) - 1

_PRIME32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def piece_digests(runs: Sequence[torch.Tensor]) -> bytes:
    """Return the digests, one after another, of every piece [n, PIECE_BYTES] of `runs`, which lie on one device."""
    if not runs:
        return b""
    sums = torch.cat([_block_sums(group) for group in _groups(runs)])
    return _mixed(_chained(sums).cpu().numpy().view(np.uint64))


def _groups(runs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Pieces in groups, so that intermediate values stay small and small tensors share their kernels."""
    held: list[torch.Tensor] = []
    room = _GROUP_PIECES
    for run in runs:
        while run.shape[0]:
            held.append(run[:room])
            run, room = run[room:], room - held[-1].shape[0]
            if not room:
                yield torch.cat(held)
                held, room = [], _GROUP_PIECES
    if held:
        yield torch.cat(held)


def _block_sums(pieces: torch.Tensor) -> torch.Tensor:
    """What each block adds to the eight accumulators: [n, blocks, 8]."""
    words = pieces.view(torch.int64).view(-1, _BLOCKS, _STRIPES, _LANES)
    keys = [_secret_words(8 * stripe) for stripe in range(_STRIPES)]
    usual = torch.tensor(keys, device=pieces.device)
    last = torch.tensor([*keys[:-1], _secret_words(192 - 64 - 7)], device=pieces.device)
    return torch.cat([_summed(words[:, :-1], usual), _summed(words[:, -1:], last)], dim=1)


def _summed(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    keyed = words ^ keys
    products = ((keyed >> 32) & 0xFFFFFFFF).mul_(keyed.bitwise_and_(0xFFFFFFFF)).sum(2)
    neighbours = words.sum(2).view(*products.shape[:2], _LANES // 2, 2).flip(3).view(products.shape)
    return products.add_(neighbours)


def _chained(sums: torch.Tensor) -> torch.Tensor:
    """The accumulators [n, 8] after the last block."""
    key = torch.tensor(_secret_words(192 - 64), device=sums.device)
    held = torch.tensor([_signed(word) for word in _START], device=sums.device).expand(sums.shape[0], _LANES)
    for block in range(_BLOCKS - 1):
        held = held + sums[:, block]
        held = (held ^ ((held >> 47) & 0x1FFFF) ^ key).mul_(_PRIME32[0])
    return held + sums[:, -1]


def _mixed(held: npt.NDArray[np.uint64]) -> bytes:
    """The digests of accumulators [n, 8], as the library prints them: the high half first."""
    start = (PIECE_BYTES * _PRIME64[0]) & _WORD, ~(PIECE_BYTES * _PRIME64[1]) & _WORD
    low, high = _merged(held, 11, start[0]), _merged(held, 192 - 64 - 11, start[1])
    return np.stack([high, low], axis=1).astype(">u8").tobytes()


def _merged(held: npt.NDArray[np.uint64], secret_at: int, start: int) -> npt.NDArray[np.uint64]:
    keyed = held ^ np.frombuffer(_SECRET, "<u8", _LANES, secret_at)
    result: npt.NDArray[np.uint64] = np.full(held.shape[0], start, np.uint64)
    for lane in range(0, _LANES, 2):
        result += _folded(keyed[:, lane], keyed[:, lane + 1])
    result ^= result >> np.uint64(37)
    result *= _AVALANCHE
    result ^= result >> np.uint64(32)
    return result


def _folded(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Both halves of the 128-bit products, xor-ed."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    left_low, left_high, right_low, right_high = left & mask, left >> half, right & mask, right >> half
    low, first, second = left_low * right_low, left_high * right_low, left_low * right_high
    middle = (low >> half) + (first & mask) + second
    high = left_high * right_high + (first >> half) + (middle >> half)
    folded: npt.NDArray[np.uint64] = ((middle << half) | (low & mask)) ^ high
    return folded


def _secret_words(start: int) -> list[int]:
    return [_signed(int.from_bytes(_SECRET[at : at + 8], "little")) for at in range(start, start + 64, 8)]


def _signed(word: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return word - (1 << 64) if word >> 63 else word
