"""The content hash of bytes that Vime stores or sends: XXH3 with 128 bits.

It finds damage, from a flipped bit to a torn file; it does not protect against somebody who changes both the bytes and
the hash beside them. It takes 0.03 to 0.2 s of CPU for a gigabyte, an eighth of BLAKE2b, and leaves Python's lock to
other threads meanwhile. The same bytes have the same hash on every machine and in every release of the library.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

PIECE_BYTES = 1 << 20  # stays in the cache of a core between being read and being hashed


def new_hash() -> xxhash.xxh3_128:
    """An empty hash: `update` takes bytes or any buffer, `hexdigest` returns 32 digits."""
    return xxhash.xxh3_128()


def hash_file(path: Path) -> tuple[int, str]:
    """Return (bytes read, hash) of a whole file."""
    content, piece, total = new_hash(), memoryview(bytearray(PIECE_BYTES)), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            content.update(piece[:count])
            total += count
    return total, content.hexdigest()
