"""Bytes of a spool segment, and how its torn end is recognised (docs/spool-format.md).

    segment = HEADER, then records
    record  = start | name | payload
    start   = "VREC" | u32 length of the name | u64 length of the payload | u32 CRC-32 of the name
              | u32 CRC-32 of the payload | u32 CRC-32 of the 24 bytes before
    name    = JSON [partition, group, attempt]

All numbers little-endian. The start has a checksum of its own, so that a damaged length is not used.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vime.handoff.ledger_types import Task
from vime.types import HandoffError

HEADER = b"VIMESPL\x02"  # the last byte is the version of the format
MAGIC = b"VREC"
_START = struct.Struct("<4sIQII")
_CRC = struct.Struct("<I")
START_BYTES = _START.size + _CRC.size


class SpoolDamageError(HandoffError):
    """A record that was stored has changed."""

    def __init__(self, path: Path, offset: int, group: str, what: str) -> None:
        super().__init__(path, offset, group, what)
        self.path, self.offset, self.group, self.what = path, offset, group, what

    def __str__(self) -> str:
        return (
            f"{self.path}, offset {self.offset}, group {self.group}: {self.what}. The disk or another program changed "
            "it. Restore the file from a copy, or move it out of the directory: what it held is generated again."
        )


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record: [offset, end) of the file, with its payload inside."""

    path: Path
    offset: int
    payload_offset: int
    payload_bytes: int
    end: int


@dataclass(frozen=True, slots=True)
class Tail:
    """Bytes after the last whole record of a spool, and what they reveal about the damaged or unfinished record."""

    path: Path
    offset: int
    what: str  # is wrong with it
    task: Task | None  # None: its name cannot be read
    checksum: int | None  # of its payload; None: its start cannot be read
    is_torn: bool  # it looks as a kill or a power cut leaves it: cut off, or zeros


def read_tail(path: Path, offset: int, data: bytes) -> Tail:
    """Describe `data` at `offset` of a segment, which is no whole record."""
    found = read_record(path, data, 0, base=offset)
    what = found if isinstance(found, str) else "the segment begins in it"
    start, checksum, end = data[: _START.size], None, None
    name = data[START_BYTES : data.find(b"]", START_BYTES) + 1]
    if len(data) >= START_BYTES and _CRC.unpack_from(data, _START.size)[0] == zlib.crc32(start):
        _, name_bytes, payload_bytes, name_crc, checksum = _START.unpack(start)
        name, end = data[START_BYTES : START_BYTES + name_bytes], START_BYTES + name_bytes + payload_bytes
        name = name if zlib.crc32(name) == name_crc else b""
    try:
        task = Task(*json.loads(name))
    except (ValueError, TypeError):
        task = None
    is_torn = len(data) < (START_BYTES if end is None else end) or data.endswith(bytes(16))
    return Tail(path, offset, what, task, checksum, is_torn)


def pack_record(path: Path, offset: int, task: Task, payload: bytes, checksum: int) -> tuple[bytes, Place]:
    """Return the bytes of one record to be written at `offset`, and its place."""
    name = json.dumps([task.partition, task.group, task.attempt]).encode()
    start = _START.pack(MAGIC, len(name), len(payload), zlib.crc32(name), checksum)
    record = b"".join((start, _CRC.pack(zlib.crc32(start)), name, payload))
    payload_offset = offset + START_BYTES + len(name)
    return record, Place(path, offset, payload_offset, len(payload), offset + len(record))


def scan(path: Path, start: int, *, is_last: bool) -> Iterator[tuple[Task, int, Place]]:
    """Yield records from `start` (0: the beginning) to the end of the file, or to its torn tail if it is the last
    segment.

    It reads and does not map the file: if the writer truncated a mapped file, the reading process would be killed.
    """
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    at = 0 if start else _check_header(path, data, is_last=is_last)
    last_group = "the first one"
    while at is not None and at < len(data):
        found = read_record(path, data, at, base=start)
        if isinstance(found, str):
            if is_last and not _has_record_after(path, data, at):
                return
            raise SpoolDamageError(path, start + at, f"after {last_group}", found)
        task, _, place = found
        last_group, at = str(task), place.end - start
        yield found


def read_record(path: Path, data: bytes, at: int, *, base: int = 0) -> tuple[Task, int, Place] | str:
    """Return the record at data[at], which is at `base + at` of the file; or what is wrong with it."""
    if at + START_BYTES > len(data):
        return "the start of the record is cut off"
    start = data[at : at + _START.size]
    magic, name_bytes, payload_bytes, name_crc, checksum = _START.unpack(start)
    if magic != MAGIC or _CRC.unpack_from(data, at + _START.size)[0] != zlib.crc32(start):
        return "no record begins here, or its start is damaged"
    name_at = at + START_BYTES
    payload_at = name_at + name_bytes
    end = payload_at + payload_bytes
    if end > len(data):
        return "the record is cut off"
    name = data[name_at:payload_at]
    if zlib.crc32(name) != name_crc:
        return "the name of the record is damaged"
    if zlib.crc32(memoryview(data)[payload_at:end]) != checksum:
        return f"the payload of group {name.decode()} is damaged"
    return Task(*json.loads(name)), checksum, Place(path, base + at, base + payload_at, payload_bytes, base + end)


def _check_header(path: Path, data: bytes, *, is_last: bool) -> int | None:
    """Return where the first record begins; None when the file ends inside its header."""
    header = data[: len(HEADER)]
    if header == HEADER:
        return len(HEADER)
    if is_last and len(header) < len(HEADER) and HEADER.startswith(header):
        return None
    if header[:-1] == HEADER[:-1]:
        raise HandoffError(
            f"{path}: spool format {header[-1]}, this Vime knows {HEADER[-1]}. Use the Vime that wrote it."
        )
    raise SpoolDamageError(path, 0, "unknown", f"begins with {header!r}, not as a spool segment does")


def _has_record_after(path: Path, data: bytes, at: int) -> bool:
    """Return whether a whole record follows: then `at` is damage in the middle and no torn tail."""
    found = data.find(MAGIC, at + 1)
    while found >= 0:
        if not isinstance(read_record(path, data, found), str):
            return True
        found = data.find(MAGIC, found + 1)
    return False
