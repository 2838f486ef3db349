"""Freed memory goes back to the kernel where it is much and where that is cheap; held memory is walked when asked."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from vime.utils import heap
from vime.utils.heap import FreedMemory, kept_bytes

MIB = 1 << 20
has_glibc = pytest.mark.skipif(heap._glibc() is None, reason="the C library is not glibc")


class Library:
    """glibc, of which 1 GiB is kept, and 300 MiB that are somebody else's."""

    def __init__(self) -> None:
        self.num_trims = 0
        self.others = 300 * MIB

    def malloc_trim(self, pad: int) -> None:
        assert pad == 0
        self.num_trims += 1
        self.is_trimmed = True

    def kept_bytes(self) -> int:
        """Right after a trim only the others'; then the next round keeps its GiB."""
        was_trimmed, self.is_trimmed = self.is_trimmed, False
        return self.others if was_trimmed else self.others + 1024 * MIB

    is_trimmed = False


def pairs(readings: Iterator[float]) -> Iterator[float]:
    for reading in readings:
        yield from (reading, reading)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    monkeypatch.setattr(heap, "_glibc", lambda: fake)
    monkeypatch.setattr(heap, "kept_bytes", lambda library: library.kept_bytes())
    return fake


def test_it_is_given_back_at_first_and_then_when_its_price_is_a_small_share_of_the_time(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1 GiB costs 0.25 s, which is 0.02 of 12.5 s
    hands = iter([100.0, 112.0, 113.0, 114.0])  # looking takes no time here
    monkeypatch.setattr(time, "monotonic", functools.partial(next, pairs(hands)))
    freed = FreedMemory()
    # at first the others' 300 MiB cannot be told apart
    assert [freed.give_back() for _ in range(4)] == [1324 * MIB, 0, 1024 * MIB, 0]
    assert library.num_trims == 2


def test_looking_costs_a_small_share_of_the_time(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    # a look of 0.004 s is 0.001 of 4 s; by then 1 GiB, which waits for 12.5 s, is not given back a second time
    looks: list[float] = []
    clock = SimpleNamespace(now=100.0)

    def look(fake: Library) -> int:
        looks.append(clock.now)
        clock.now += 0.004
        return fake.kept_bytes()

    monkeypatch.setattr(heap, "kept_bytes", look)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    freed = FreedMemory()
    given = []
    for now in (100.0, 101.0, 103.9, 104.1, 120.0):
        clock.now = now
        given.append(freed.give_back())
    assert given == [1324 * MIB, 0, 0, 0, 1024 * MIB]
    # one look more after each time it was given back: what stayed is not the C library's
    assert looks == [100.0, 100.004, 104.1, 120.0, 120.004]


def test_little_is_kept(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "kept_bytes", lambda _library: heap.MIN_BYTES - 1)
    assert FreedMemory().give_back() == 0
    assert library.num_trims == 0


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_glibc", lambda: None)
    assert FreedMemory().give_back() == 0


@has_glibc
def test_what_a_process_frees_is_seen_and_goes_back() -> None:
    # 300 blocks of 1 MiB, of which every second is freed: half of 300 MiB lies in holes. In a process of its own, where
    # glibc keeps what is freed as it does in a run (KEEP_FREED_MEMORY)
    script = """
import ctypes, os
from vime.utils import heap
library = heap._glibc()
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
blocks = [library.malloc(1 << 20) for _ in range(300)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
before = heap.kept_bytes(library)
for block in blocks[::2]:
    library.free(block)
freed = heap.FreedMemory()
print(before >> 20, heap.kept_bytes(library) >> 20, freed.give_back() >> 20, heap.kept_bytes(library) >> 20)
"""
    keep = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "16000000000"}
    answer = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **keep}, capture_output=True, text=True, check=True
    )
    before, kept, given_back, after = (int(word) for word in answer.stdout.split())
    assert before < 20
    assert 145 <= kept <= 170
    assert given_back == kept
    assert after < 20


@has_glibc
def test_what_is_in_use_is_not_counted() -> None:
    library = heap._glibc()
    before = kept_bytes(library)
    block = ctypes.create_string_buffer(b"1" * (64 * MIB))
    assert kept_bytes(library) - before < 32 * MIB
    assert len(block) > 0


WATCHED = """
import gc, weakref
from vime.utils.heap import collect_garbage, collect_when_asked

class Node: pass

collect_when_asked()
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
node, other = Node(), Node()
node.other, other.other = other, node
old = weakref.ref(node)
gc.collect(1)  # it has lived for a while
del node, other
held = [[[at] for at in range(100)] for _ in range(20_000)]  # 2 million objects: full collections otherwise
while_held, survived = len(full), old() is not None
collect_garbage()
print(while_held, survived, old() is None, len(full))
"""


def test_a_full_collection_comes_between_rounds_only_and_frees_the_circles_of_plug_ins() -> None:
    said = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["0", "True", "True", "2"]
    without = WATCHED.replace("collect_when_asked()\nfull", "full")
    said = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=120)
    assert int(said.stdout.split()[0]) > 0, "the objects above bring no full collection, so nothing was tested"
