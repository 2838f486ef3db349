"""Finished groups as bytes: stored for the ranks and for restarts, and read back.

A group is encoded where it was generated. Its chunks go into the payload store, from which the ranks read rows by key.
Its record (the chunks and the rest of its samples) goes into the spool. `put` comes before the ledger's `commit`: a
crash between the two leaves an orphan payload, never a visible group without data.

`PayloadStore` keeps chunks of rows between the process that generated them and the ranks that train on them. It has
three implementations: TransferQueue (queue_client.py, modes buffer and streaming), objects of Ray (mode off), and a
dict in this process for tests and examples.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from vime.data.images import images_of
from vime.data.payload import (
    Decode,
    cut,
    join_record,
    join_samples,
    joined_bytes,
    pack_rest,
    pack_rows,
    split_record,
    unpack_rows,
)
from vime.data.rows import GroupFacts, GroupNotes, TrainRow, check_group, facts_of
from vime.handoff.ledger_types import Task
from vime.handoff.spool import Spool, Spools, spool_directories
from vime.types import HandoffError, HandoffLostError, Sample, WaitTimeoutError
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)
CAPACITY_POLL_S = 0.05
Handle = object
"""What finds a chunk again: a key of TransferQueue, or a reference to an object of Ray. Only its store looks inside."""


class PayloadStore(Protocol):
    """Bytes by handle. The handles that `put` returns, with the partition, are all that a reader in another process
    needs."""

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Handle]:
        """Store a chunk under each key, none of which was used before; return a handle for each."""
        ...

    def get(self, partition: str, handles: Sequence[Handle]) -> list[bytes]:
        """Return chunks in this order. HandoffLostError when one is missing, or is not what was put."""
        ...

    def clear(self, partition: str, handles: Sequence[Handle]) -> None:
        """Delete chunks that will not be read any more; missing ones are skipped."""
        ...

    def partitions(self) -> list[str]:
        """Return the partitions that were put into and not cleared as a whole."""
        ...

    def clear_partition(self, partition: str) -> None: ...

    def close(self) -> None: ...


class MemoryStore:
    """A dict in this process; the key is the handle."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, Handle], bytes] = {}

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Handle]:
        self.chunks |= {(partition, key): chunk for key, chunk in zip(keys, chunks, strict=True)}
        return list(keys)

    def get(self, partition: str, handles: Sequence[Handle]) -> list[bytes]:
        missing = [key for key in handles if (partition, key) not in self.chunks]
        if missing:
            raise HandoffLostError(f"{partition}: chunks {missing} are not here: they were cleared, or never put.")
        return [self.chunks[partition, key] for key in handles]

    def clear(self, partition: str, handles: Sequence[Handle]) -> None:
        for key in handles:
            self.chunks.pop((partition, key), None)

    def partitions(self) -> list[str]:
        return sorted({partition for partition, _ in list(self.chunks)})  # another thread may change it meanwhile

    def clear_partition(self, partition: str) -> None:
        self.clear(partition, [key for held, key in list(self.chunks) if held == partition])

    def close(self) -> None:
        """Close; other holders of the store keep its chunks."""


class ObjectStore:
    """Chunks as objects, which live as long as a handle of theirs does. Ray itself is not imported here.

    `put(value) -> reference` moves one object, `get(references) -> values` several; `get` has a deadline of its own.
    """

    def __init__(self, *, put: Callable[[bytes], Handle], get: Callable[[list[Handle]], list[bytes]]) -> None:
        self._put, self._get = put, get

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Handle]:  # noqa: ARG002
        return [self._put(chunk) for chunk in chunks]

    def get(self, partition: str, handles: Sequence[Handle]) -> list[bytes]:
        try:
            with waiting("the rows of a round", "rollout-manager", deadline_s=None):
                return self._get(list(handles))
        except HandoffError:
            raise
        except Exception as error:
            raise HandoffLostError(
                f"{partition}: an object of {len(handles)} cannot be read ({type(error).__name__}: {error}). The "
                "process that owned it died."
            ) from error

    def clear(self, partition: str, handles: Sequence[Handle]) -> None:
        """Do nothing: an object is deleted with its last handle."""

    def partitions(self) -> list[str]:
        return []

    def clear_partition(self, partition: str) -> None:
        """See `clear`."""

    def close(self) -> None:
        """Do nothing: no resource is held here."""


class StoredGroup(NamedTuple):
    """What identifies the record of a finished group. `producer`: the worker that stored it."""

    task: Task
    checksum: int
    producer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    """A finished group in its stored form. `rest` is empty when the samples will not be asked for."""

    facts: GroupFacts
    chunks: tuple[bytes, ...]
    rest: bytes = b""
    images: tuple[bytes, ...] = ()  # cell of each row, as it was before it was packed

    @property
    def record(self) -> bytes:
        return join_record(self.chunks, self.rest)

    @property
    def num_bytes(self) -> int:
        """The length of `record`, which is not made for it."""
        return joined_bytes(self.chunks, self.rest)

    def samples(self, decode: Decode | None = None) -> list[Sample]:
        """Return the samples; `decode` as in `payload.join_samples`."""
        return join_samples([row for chunk in self.chunks for row in unpack_rows(chunk)], self.rest, decode)


def encode_group(
    rows: Sequence[TrainRow],
    *,
    notes: GroupNotes | None = None,
    removed: Sequence[bool] = (),
    samples: Sequence[Sample] = (),
) -> EncodedGroup:
    """Check the rows of one group, here and nowhere else, and encode them. `samples`: what the rows were made from, if
    they will be asked for; `removed`: which rows are out of the loss."""
    check_group(rows)
    parts = list(cut(rows))
    facts = GroupFacts(group_index=rows[0].group_index, rows=facts_of(parts, removed), notes=notes or GroupNotes())
    return EncodedGroup(
        facts=facts,
        chunks=tuple(map(pack_rows, parts)),
        rest=pack_rest(samples) if samples else b"",
        images=tuple(map(images_of, rows)),
    )


def chunk_keys(task: Task, num_chunks: int) -> list[str]:
    """Return the keys of a group's chunks in the queue. No other attempt of the run has them."""
    return [f"{task}.{number}" for number in range(num_chunks)]


def groups_partition(train_partition: str) -> str:
    """Return the partition that holds chunks of finished groups in mode streaming."""
    return f"{train_partition}_groups"


def round_partition(train_partition: str, rollout_id: int) -> str:
    """Return the partition that holds the chunks of one round in the modes off and buffer."""
    return f"{train_partition}_{rollout_id}"


class GroupStore:
    """Owned by the process that generates; `spool` None: --no-transferqueue-durable. Callable from any thread."""

    def __init__(
        self,
        store: PayloadStore,
        spool: Spool | None,
        *,
        partition: str,
        directory: Path | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`directory`: where the spools of the run are, when `spool` is not the only one. `decode` makes text of
        response tokens, for callers that ask for samples."""
        self._store, self._spool, self.partition = store, spool, groups_partition(partition)
        self._directory, self.decode = directory, decode
        self._lock = threading.Lock()  # protects the spool
        self._others: Spools | None = None  # made when the first group of another spool is asked for
        self._reading_others = threading.Lock()  # protects it: an index of gigabytes takes seconds, and `put` goes on
        self._held: dict[Task, tuple[int, EncodedGroup]] = {}  # until the checkpoint after the round that trained them
        self.num_spool_reads = 0

    def put(self, groups: Sequence[tuple[Task, EncodedGroup]]) -> list[int]:
        """Store groups; return the checksums of their records when all are stored in both places."""
        records = [(task, group.record) for task, group in groups]
        if self._spool is not None:
            with self._lock:
                checksums = self._spool.append(records)
        else:
            checksums = [zlib.crc32(data) for _, data in records]
        failpoint(Point.SPOOLED)
        with self._lock:  # before the queue has them: `put_again` finds here what is on its way
            self._held |= {task: (crc, group) for (task, group), crc in zip(groups, checksums, strict=True)}
        try:
            self._put(groups)
        except BaseException:
            with self._lock:
                for task, _ in groups:
                    self._held.pop(task, None)
            raise
        return checksums

    def _put(self, groups: Sequence[tuple[Task, EncodedGroup]]) -> None:
        keys = [key for task, group in groups for key in chunk_keys(task, len(group.chunks))]
        self._store.put(self.partition, keys, [chunk for _, group in groups for chunk in group.chunks])

    def keep(self, task: Task, data: bytes) -> int | None:
        """Store in the spool what only a later attempt reads (the tokens of an aborted one); None without a spool."""
        if self._spool is None:
            return None
        with self._lock:
            [checksum] = self._spool.append([(task, data)])
        return checksum

    def kept(self, task: Task) -> list[bytes]:
        """Return everything that this store's own spool has of an attempt, oldest first; nothing without a spool."""
        with self._lock:
            if self._spool is None:
                return []
            return [self._spool.read(task, checksum) for held, checksum, _ in self._spool.entries() if held == task]

    def record(self, task: Task, checksum: int) -> bytes:
        """Return what `put` or `keep` stored with this checksum."""
        with self._lock:
            held = self._held.get(task)
            if held is not None and held[0] == checksum:
                return held[1].record
            if self._spool is None:
                raise HandoffLostError(
                    f"group {task}: its payload is not here, and --no-transferqueue-durable keeps no other copy. "
                    "Resume with --load: the group is generated again."
                )
            self.num_spool_reads += 1
            if self._directory is None or self._spool.has(task, checksum):
                return self._spool.read(task, checksum)
            directory = self._directory
        return self._record_of_another(directory, task, checksum)

    def _record_of_another(self, directory: Path, task: Task, checksum: int) -> bytes:
        """Return what another worker stored. What it has written since the last call is read then, nothing twice."""
        with self._reading_others:
            if self._others is None:
                self._others = Spools(directory)
            elif not self._others.has(task, checksum):
                self._others.refresh()
            return self._others.read(task, checksum)

    def samples(self, task: Task, checksum: int) -> list[Sample]:
        """Return the completions of a finished group, also one stored before the run was restarted."""
        with self._lock:
            held = self._held.get(task)
        if held is not None and held[0] == checksum:
            return held[1].samples(self.decode)
        chunks, rest = split_record(self.record(task, checksum))
        return join_samples([row for chunk in chunks for row in unpack_rows(chunk)], rest, self.decode)

    def restore(self, groups: Sequence[StoredGroup]) -> None:
        """Put chunks into the queue again that were stored before the run was restarted: the queue did not survive."""
        for task, checksum, _ in groups:
            chunks, _ = split_record(self.record(task, checksum))
            self._store.put(self.partition, chunk_keys(task, len(chunks)), chunks)

    def put_again(self, unread: Mapping[Task, int | None]) -> list[Task]:
        """Put into another queue what this process holds of `unread` (`Ledger.unread_payloads`); return which groups
        these are."""
        with self._lock:
            found = [(task, group) for task, (crc, group) in self._held.items() if _is_needed(unread, task, crc)]
        for one in found:
            self._put([one])
        return [task for task, _ in found]

    def forget(self, tasks: Sequence[Task]) -> None:
        """Delete groups that came too late, or became too old: they will not be trained. The spool keeps its copies
        until `compact`."""
        with self._lock:
            held = {task: self._held.pop(task) for task in tasks if task in self._held}
        keys = [key for task, (_, group) in held.items() for key in chunk_keys(task, len(group.chunks))]
        if keys:
            self._store.clear(self.partition, keys)

    def release(self, tasks: Sequence[Task]) -> None:
        """Free these groups' samples: their round is trained, and they will not be asked for. The spool keeps its
        copies until `compact`."""
        with self._lock:
            for task in tasks:
                self._held.pop(task, None)

    def compact(self, needed: Mapping[Task, int | None]) -> int:
        """Delete spool segments that hold nothing of `needed` (`Ledger.needed_payloads`), and chunks of groups that
        became too old to be trained; return the bytes freed on disk."""
        with self._lock:
            given_up = [task for task in self._held if task not in needed]
        self.forget(given_up)
        if self._spool is None:
            return 0
        with self._lock:
            return self._spool.compact(partial(_is_needed, needed))

    @property
    def spool_bytes(self) -> int:
        """Never waits, also not for a disk that is slow."""
        return 0 if self._spool is None else self._spool.num_bytes

    def close(self) -> None:
        """Close queue and spool; stored data stays. Calling it again does nothing."""
        self._store.close()
        if self._spool is not None:
            with self._lock:
                self._spool.close()


class StoresGroups:
    """What every process that stores groups answers about them."""

    _store: GroupStore

    def samples(self, groups: Sequence[StoredGroup]) -> list[list[Sample]]:
        """Return the completions of finished groups, whichever process stored them."""
        return [self._store.samples(group.task, group.checksum) for group in groups]

    def restore(self, groups: Sequence[StoredGroup]) -> None:
        """Put into the queue again what this run stored before it was restarted."""
        self._store.restore(groups)

    def put_again(self, unread: Mapping[Task, int | None]) -> list[Task]:
        """Put into another queue what is still to be read and in memory here; return which groups these are."""
        return self._store.put_again(unread)

    def release(self, tasks: Sequence[Task]) -> None:
        """Free these groups' samples: they will not be asked for again."""
        self._store.release(tasks)

    def forget(self, tasks: Sequence[Task]) -> None:
        """Delete what this process holds of groups that will not be trained."""
        self._store.forget(tasks)

    def compact(self, needed: Mapping[Task, int | None]) -> int:
        """Delete from the spool what no restart can need; return the bytes freed."""
        return self._store.compact(needed)

    @property
    def spool_bytes(self) -> int:
        return self._store.spool_bytes


def compact_left_behind(directory: Path, own: Collection[Path], needed: Mapping[Task, int | None]) -> int:
    """Do the same for spools under `directory` that no worker of this start of the run writes: an earlier start had
    more workers, or other ones. Return the bytes freed."""
    freed = 0
    for path in spool_directories(directory):
        if path not in own and any(path.glob("segment-*")):
            with contextlib.closing(Spool(path)) as spool:
                freed += spool.compact(partial(_is_needed, needed))
    return freed


def _is_needed(needed: Mapping[Task, int | None], task: Task, checksum: int) -> bool:
    return task in needed and needed[task] in (None, checksum)


class RoundStore:
    """Rounds of the modes off and buffer, put as a whole by the one process that generates them.

    Each has a partition of its own (`train_<rollout_id>`). The store holds at most `capacity` of them; `put` waits for
    free capacity, which `clear` makes.
    """

    def __init__(self, store: PayloadStore, *, prefix: str, capacity: int, timeout_s: float) -> None:
        self._store, self._prefix = store, prefix
        self._capacity, self._timeout_s = capacity, timeout_s

    def put(self, rollout_id: int, groups: Sequence[EncodedGroup]) -> tuple[str, list[list[Handle]]]:
        """Waits for: room. Unblocked by: `clear`, which the driver asks for. The partition, and the handles of each
        group's chunks."""
        partition = round_partition(self._prefix, rollout_id)
        with waiting("room in the queue for a round", "driver", deadline_s=self._timeout_s):
            self._wait_for_room(partition)
        attempt = uuid.uuid4().hex[:12]
        keys = [
            [f"{group.facts.group_index}.{number}#{attempt}" for number in range(len(group.chunks))] for group in groups
        ]
        flat = [key for of_group in keys for key in of_group]
        try:
            handles = iter(self._store.put(partition, flat, [chunk for group in groups for chunk in group.chunks]))
        except (HandoffError, WaitTimeoutError):
            self._discard(partition)
            raise
        return partition, [[next(handles) for _ in of_group] for of_group in keys]

    def clear(self, partition: str) -> None:
        """Delete a round that every rank has read; makes capacity for the next `put`."""
        self._store.clear_partition(partition)

    def _wait_for_room(self, partition: str) -> None:
        ends = time.monotonic() + self._timeout_s
        pattern = re.compile(rf"{re.escape(self._prefix)}_\d+")
        while True:
            lying = sorted(name for name in self._store.partitions() if pattern.fullmatch(name))
            if partition in lying:
                raise HandoffError(f"partition {partition} is there already; clear it before the round is put again.")
            if len(lying) < self._capacity:
                return
            if time.monotonic() > ends:
                raise WaitTimeoutError(
                    f"room for partition {partition}",
                    self._timeout_s,
                    "driver",
                    f"It must clear {', '.join(lying)}; --transferqueue-max-staleness {self._capacity - 1} lets at "
                    f"most {self._capacity} wait. See what the trainer does, or raise --transferqueue-timeout-secs.",
                )
            time.sleep(CAPACITY_POLL_S)

    def _discard(self, partition: str) -> None:
        """Remove what a failed put left behind, so that a second attempt is possible."""
        try:
            self._store.clear_partition(partition)
        except (HandoffError, WaitTimeoutError) as error:
            logger.warning("partition %s may hold an incomplete round: %s", partition, error)
