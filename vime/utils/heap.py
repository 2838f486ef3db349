"""Memory of a process that holds a round: freed memory goes back to the kernel, and held objects are not scanned.

Without a GPU glibc keeps what a process frees (decision 0014): a step gets the pages of the step before. But tensors
differ in size from step to step, so that more and more of the kept memory fits nothing, and an engine would keep for
ever what it needed once to load its weights. Giving all of it back costs a call, and later a fresh page for each that
is used again; so it is done after a round or an update of weights, and only as often as it is cheap.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import os
import time

MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    MMAP_THRESHOLD: "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
}
"""For glibc: a step gets the memory of the step before, instead of fresh pages that the kernel clears one by one. One
arena: each thread has its own otherwise, with an upper size, and Ray trains in one thread of several."""
LARGE_BLOCK_BYTES = 64 << 20
"""In an engine blocks from here on go back at once: they are tensors of an update, needed for a moment once a round.
What a step of generation allocates is smaller, 128 rows of 131,072 logits."""
MIN_BYTES = 128 << 20
COST_S_PER_BYTE = 0.25 / (1 << 30)
"""CPU seconds to give pages back and to get as many fresh ones, measured."""
MAX_SHARE = 0.02
"""Share of the wall time since the last time that giving back may cost."""
MAX_LOOK_SHARE = 0.001
"""The same for looking how much is kept: glibc walks all free blocks for it, 2 ms in an engine of a small model."""


class FreedMemory:
    """What this process keeps. `last_s`: when it was given back, on the monotonic clock; not yet: after a start, which
    frees much that is not used again."""

    def __init__(self) -> None:
        self.last_s = -math.inf
        self._next_look_s = -math.inf
        self._others = 0  # bytes that look kept and are not the C library's: small objects of Python, stacks

    def give_back(self) -> int:
        """Give it back if it is much and if this is cheap. Returns about how many bytes, 0 when nothing was given back.

        Does nothing where the C library is not glibc."""
        library = _glibc()
        if library is None:
            return 0
        now = time.monotonic()
        if now < self._next_look_s:
            return 0
        kept = kept_bytes(library) - self._others
        self._next_look_s = now + (time.monotonic() - now) / MAX_LOOK_SHARE
        if kept < MIN_BYTES or kept * COST_S_PER_BYTE > MAX_SHARE * (now - self.last_s):
            return 0
        library.malloc_trim(0)
        self.last_s, self._others = now, kept_bytes(library)
        return kept


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`: `hblkhd` bytes are in mappings of their own; of the rest `uordblks` are in use and
    `fordblks` are free."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def kept_bytes(library: ctypes.CDLL) -> int:
    """Return the anonymous memory that is in no used block of the C library: an upper bound of what was freed and not
    given back."""
    heap = library.mallinfo2()
    with open("/proc/self/statm", "rb") as file:
        resident, shared = (int(pages) for pages in file.read().split()[1:3])
    anonymous = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(int(heap.fordblks), anonymous - int(heap.uordblks) - int(heap.hblkhd)))


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not hasattr(library, "malloc_trim"):
        return None
    library.mallinfo2.restype = _Heap
    return library


def collect_when_asked() -> None:
    """Let only `collect_garbage` scan everything that this process holds; young objects are scanned as before.

    Python's full collections come after a number of new objects, whatever is held, and scan each entry of each list: a
    round of 24 million tokens made reading a response five times as expensive. Current objects are never scanned
    again."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)


def collect_garbage() -> None:
    """Free what only cycles of references hold. Called once a round: generation of the next one may have begun."""
    gc.collect()
