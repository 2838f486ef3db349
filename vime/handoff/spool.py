"""The spool: payloads on disk until no restart can need them, in append-only segment files (docs/spool-format.md).

`append` returns when the records are stored by the fsync policy; only then may the ledger get them. One process
writes; any number may read meanwhile. A record that a kill left half-written at the end of the last segment is cut off
when the spool is opened (before that, a resume checks whether the ledger knows it: spool_check.py). Damage anywhere
else is an error that names file, offset and group, because the records after it were acknowledged. A segment is deleted
when nothing in it is needed any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

from vime.handoff.ledger_types import Task
from vime.handoff.spool_format import HEADER, Place, SpoolDamageError, Tail, pack_record, read_tail, scan
from vime.types import HandoffError
from vime.utils.files import NoLocksError, lock_file

SEGMENT_BYTES = 64 << 20
SUFFIX = ".vsp"
WORKER = "worker-"


class Fsync(StrEnum):
    """When appended bytes are forced to disk. A killed process loses nothing under any of them; a power cut may."""

    NEVER = "never"  # the operating system decides: a power cut may lose the last seconds, even in the middle
    COMMIT = "commit"  # once per `append`, before it returns
    ALWAYS = "always"  # after every record


class SpoolFullError(HandoffError):
    """The disk refused a record; nothing of it was acknowledged, and what was stored before is intact."""


class SpoolReader:
    """The records in the spool. Never writes; `refresh` reads what was appended or dropped since."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._places: dict[tuple[Task, int], Place] = {}
        self._ends: dict[Path, int] = {}  # up to where each segment was read
        self.refresh()

    def refresh(self) -> None:
        """Continue reading where the last call ended. A record that is still being written is left for the next
        call."""
        segments = self.segments()
        for gone in self._ends.keys() - set(segments):
            del self._ends[gone]
            self._places = {key: place for key, place in self._places.items() if place.path != gone}
        for path in segments:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                self._ends[path] = self._index(path, self._ends.get(path, 0), is_last=path == segments[-1])

    def segments(self) -> list[Path]:
        """The segment files, oldest first."""
        return sorted(self.directory.glob(f"segment-*{SUFFIX}"))

    def read(self, task: Task, checksum: int) -> bytes:
        """Return the payload that was appended for `task` with this checksum, verified."""
        place = self._places.get((task, checksum))
        if place is None:
            others = [found for held, found in self._places if held == task]
            raise HandoffError(
                f"{self.directory}: no payload of group {task} with checksum {checksum:08x}; it holds "
                f"{[f'{other:08x}' for other in others] or 'none of this group'}."
            )
        try:
            with place.path.open("rb") as file:
                file.seek(place.payload_offset)
                data = file.read(place.payload_bytes)
        except FileNotFoundError:
            raise HandoffError(f"{place.path}: is gone, and with it the payload of group {task}.") from None
        if zlib.crc32(data) != checksum:
            raise SpoolDamageError(place.path, place.offset, str(task), "its payload changed on disk")
        return data

    def has(self, task: Task, checksum: int) -> bool:
        return (task, checksum) in self._places

    def entries(self) -> Iterator[tuple[Task, int, Place]]:
        """Yield the present records, in the order in which they were appended. A thread may append meanwhile."""
        for (task, checksum), place in list(self._places.items()):
            yield task, checksum, place

    def tail(self) -> Tail | None:
        """Return what follows the last whole record; None when nothing does. A writer that opens the spool cuts it
        off."""
        for path in self.segments()[-1:]:
            end = self._ends[path]
            with path.open("rb") as file:
                file.seek(end)
                data = file.read()
            return read_tail(path, end, data) if data else None
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes on disk that were read as whole records. A thread may append meanwhile."""
        return sum(list(self._ends.values()))

    def _index(self, path: Path, start: int, *, is_last: bool) -> int:
        """Add the records of a segment from `start` on; return where the last whole one ends."""
        end = start
        for task, checksum, place in scan(path, start, is_last=is_last):
            self._places[task, checksum] = place
            end = place.end
        return end


class Spool(SpoolReader):
    """The one writer. Opening it cuts off a torn tail and begins a new segment with the first record."""

    def __init__(self, directory: Path, *, fsync: Fsync = Fsync.COMMIT, segment_bytes: int = SEGMENT_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._fsync, self._segment_bytes = Fsync(fsync), segment_bytes
        self._file = -1
        self._torn: int | None = None  # end of the last good record, when the bytes after it could not be cut
        self._lock = os.open(directory / "spool.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_file(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, directory)
            super().__init__(directory)
            self._cut_tail()
        except BlockingIOError as error:
            self.close()
            raise HandoffError(f"{directory}: another process writes this spool. It has one writer; end it.") from error
        except NoLocksError as error:
            self.close()
            raise HandoffError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def append(self, records: Sequence[tuple[Task, bytes]]) -> list[int]:
        """Store payloads, all or none; return their checksums. A record that is there already is not written again.

        A full disk raises SpoolFullError and leaves the spool as it was.
        """
        checksums = [zlib.crc32(data) for _, data in records]
        fresh = {
            (task, checksum): data
            for (task, data), checksum in zip(records, checksums, strict=True)
            if not self.has(task, checksum)
        }
        if not fresh:
            return checksums
        path, start = self._tail()
        places, offset = {}, start
        try:
            if self._torn is not None:
                os.ftruncate(self._file, self._torn)
                self._torn = None
            for (task, checksum), data in fresh.items():
                record, place = pack_record(path, offset, task, data, checksum)
                _write_all(self._file, record)
                if self._fsync is Fsync.ALWAYS:
                    os.fsync(self._file)
                places[task, checksum], offset = place, place.end
            if self._fsync is Fsync.COMMIT:
                os.fsync(self._file)
        except OSError as error:
            self._undo(start)
            raise SpoolFullError(
                f"{path}: {len(fresh)} payloads could not be stored: {error}. Nothing of them counts; what was stored "
                "before is intact. Free disk space, then repeat."
            ) from error
        self._places |= places
        self._ends[path] = offset
        return checksums

    def compact(self, is_needed: Callable[[Task, int], bool]) -> int:
        """Delete the segments in which nothing is needed any more; return the bytes freed.

        The newest segment stays, so that no name is ever used twice; when nothing in it is needed it takes no more
        records and is deleted the next time.
        """
        needed = {place.path for task, checksum, place in self.entries() if is_needed(task, checksum)}
        segments, freed = self.segments(), 0
        for path in segments[:-1]:
            if path not in needed:
                freed += path.stat().st_size
                path.unlink()
        if freed:
            self._sync_directory()
            self.refresh()
        if segments and segments[-1] not in needed and self._ends[segments[-1]] > len(HEADER):
            self._end_segment()
        return freed

    def close(self) -> None:
        """Release the directory. Calling it again does nothing."""
        self._end_segment()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self) -> Path | None:
        return self.segments()[-1] if self._file >= 0 else None

    def _tail(self) -> tuple[Path, int]:
        """Return the segment to append to, and its end; a new one when there is none or the last is full."""
        path = self._path()
        if path is not None and (self._ends[path] < self._segment_bytes or self._torn is not None):
            return path, self._ends[path]
        self._end_segment()
        segments = self.segments()
        number = int(segments[-1].stem.partition("-")[2]) + 1 if segments else 1
        path = self.directory / f"segment-{number:08d}{SUFFIX}"
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            _write_all(self._file, HEADER)
            self._sync_directory()
        except OSError as error:
            self._end_segment()
            path.unlink(missing_ok=True)
            raise SpoolFullError(f"{path}: cannot be made: {error}. Free disk space, then repeat.") from error
        self._ends[path] = len(HEADER)
        return path, len(HEADER)

    def _undo(self, end: int) -> None:
        """Cut off a failed write; when even that fails, the next `append` tries again before it writes."""
        self._torn = end
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, end)
            self._torn = None

    def _cut_tail(self) -> None:
        """Remove what a kill left half-written; a segment without one whole record is deleted."""
        for path in self.segments()[-1:]:
            if self._ends[path] == 0:
                path.unlink()
                del self._ends[path]
            elif path.stat().st_size > self._ends[path]:
                os.truncate(path, self._ends[path])

    def _end_segment(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _sync_directory(self) -> None:
        if self._fsync is not Fsync.NEVER:
            descriptor = os.open(self.directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class Spools:
    """Every record of a run: of the spool that the RolloutManager writes, and of those of rollout workers in processes
    of their own (`worker-<n>/`). Never writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.readers: list[SpoolReader] = []
        self.refresh()

    def refresh(self) -> None:
        """Read what was appended or deleted since, also of new workers."""
        known = {reader.directory: reader for reader in self.readers}
        for reader in self.readers:
            reader.refresh()
        self.readers = [known.get(path) or SpoolReader(path) for path in spool_directories(self.directory)]

    def read(self, task: Task, checksum: int) -> bytes:
        """See `SpoolReader.read`."""
        holder = next((reader for reader in self.readers if reader.has(task, checksum)), self.readers[0])
        return holder.read(task, checksum)

    def has(self, task: Task, checksum: int) -> bool:
        return any(reader.has(task, checksum) for reader in self.readers)

    def entries(self) -> Iterator[tuple[Task, int, Place]]:
        """Yield `SpoolReader.entries`, one spool after the other."""
        for reader in self.readers:
            yield from reader.entries()

    def tails(self) -> list[Tail]:
        """Return what follows the last whole record of each spool."""
        return [tail for reader in self.readers if (tail := reader.tail()) is not None]

    @property
    def num_bytes(self) -> int:
        return sum(reader.num_bytes for reader in self.readers)


def spool_directories(directory: Path) -> list[Path]:
    """Return the directories of a run's spools: `directory` itself, and those of its workers."""
    return [directory, *sorted(directory.glob(f"{WORKER}*"))]


def worker_spool(directory: Path, number: int) -> Path:
    return directory / f"{WORKER}{number}"


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
