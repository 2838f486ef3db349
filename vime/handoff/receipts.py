"""Receipts: the groups that the trainer stepped on, reported by its ranks; `receipts.jsonl` of a run, a line a round.

Each rank that reads rows for a replica hashes the tokens, and the images, of the rows that its optimizer steps use
(`stepped_groups`).
The driver adds up what the ranks return, group by group, and links the round to the one before. The newest link goes
into the ledger (its line `trained`) and into the checkpoint, so that `vime audit` can compare three records of one
round: what a producer committed, what the queue leased, and what reached the optimizer.

A line is `{"round", "version", "previous", "groups": [[group, attempt, rows, tokens, trainable, content], ...],
"link"}`; `link` is the BLAKE2b (8 bytes) of everything before it. `{"begins": round, "after", "link"}` is written where
a run begins, or continues from a checkpoint of another directory. A round that a restart trains again gets a second
line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vime.data.images import images_of
from vime.data.rows import TrainRow
from vime.types import HandoffError, RoundPlan, Version
from vime.utils.files import sync
from vime.utils.hashing import new_hash

RECEIPTS_NAME = "receipts.jsonl"
TAIL_BYTES = 1 << 20
"""So much is read at a time where the end of a file is looked at."""
_BITS = (1 << 64) - 1


class SteppedGroup(NamedTuple):
    """The rows of one group that a round stepped on. `content`: the sum, modulo 2**64, of the hashes of its rows. So
    parts of a group on different ranks can be added up, and a row that is there twice changes the sum."""

    group: int
    attempt: int  # 0 outside mode streaming
    rows: int
    tokens: int  # prompt and response
    trainable: int
    content: int


def _stepped(group: int, attempt: int, rows: int, tokens: int, trainable: int, content: str) -> SteppedGroup:
    """Make it from the cells of a line."""
    return SteppedGroup(group, attempt, rows, tokens, trainable, int(content, 16))


def row_content(sample_index: int, tokens: ArrayLike, response_length: int, images: bytes = b"") -> int:
    """Return 64 bits of the XXH3 hash of one row's tokens, of where its response begins, and of the cell of its
    images."""
    content = new_hash()
    content.update(np.asarray([sample_index, response_length], dtype="<i8").tobytes())
    content.update(np.asarray(tokens, dtype="<i8").tobytes())
    content.update(images)
    return content.intdigest() & _BITS


def group_content(rows: Iterable[tuple[int, ArrayLike, int, bytes]]) -> str:
    """Return `SteppedGroup.content` of a whole group, as 16 digits: what `row_content` takes of each row."""
    return f"{sum(row_content(*row) for row in rows) & _BITS:016x}"


def stepped_groups(plan: RoundPlan, rows: Mapping[int, TrainRow], dp_rank: int) -> list[SteppedGroup]:
    """Return the groups that the optimizer steps of a round use on one data-parallel rank."""
    mine = [
        rows[number] for step in plan.steps for micro_batch in step.micro_batches[dp_rank] for number in micro_batch
    ]
    return add_up(
        SteppedGroup(
            group=row.group_index,
            attempt=row.attempt,
            rows=1,
            tokens=row.total_length,
            trainable=row.num_trainable,
            content=row_content(row.sample_index, row.tokens, row.response_length, images_of(row)),
        )
        for row in mine
    )


def add_up(parts: Iterable[SteppedGroup]) -> list[SteppedGroup]:
    """Join parts of groups, of any ranks, group by group."""
    found: dict[tuple[int, int], SteppedGroup] = {}
    for part in parts:
        key = (part.group, part.attempt)
        other = found.get(key)
        if other is not None:
            part = SteppedGroup(
                *key,
                part.rows + other.rows,
                part.tokens + other.tokens,
                part.trainable + other.trainable,
                (part.content + other.content) & _BITS,
            )
        found[key] = part
    return [found[key] for key in sorted(found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReceipt:
    """The groups of one round that the trainer stepped on."""

    round_id: int
    version: Version  # of the weights before the round
    previous: str
    groups: tuple[SteppedGroup, ...]
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The beginning of the links of a file: before round `round_id`. `after`: the link that the loaded checkpoint
    keeps, whose line is in another directory; None without one."""

    round_id: int
    after: str | None


class ReceiptFile:
    """Writes the lines of one start of a run. Owned by the driver; `link` is the newest."""

    def __init__(self, run_dir: Path, *, start_round: int, link: str | None) -> None:
        """`link`: the one that the checkpoint keeps; None at the beginning, and for a checkpoint from before there was
        any."""
        self.path = run_dir / RECEIPTS_NAME
        with self._explained():
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            _cut_torn_line(self._file)
            known = read_receipts(self.path)
            assert known is not None, "it has just been opened"
            if link is not None and link in known.lines:
                self.link = link
            else:
                record = {"begins": start_round, "after": link}
                self.link = _link(record)
                if self.link not in known.beginnings:
                    self._write({**record, "link": self.link})

    def note(self, round_id: int, version: Version, groups: Iterable[SteppedGroup]) -> str:
        """Write that the optimizer has stepped on these groups; return the link of the line."""
        cells = [[*group[:5], f"{group.content:016x}"] for group in groups]
        record = {"round": round_id, "version": version, "previous": self.link, "groups": cells}
        link = _link(record)
        with self._explained():
            self._write({**record, "link": link})
        self.link = link
        return link

    def sync(self) -> None:
        """Put every line on the disk: called before a checkpoint with its link becomes visible."""
        with self._explained():
            os.fsync(self._file)
            sync(self.path.parent)

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, record: Mapping[str, object]) -> None:
        """Write a whole line or, on a full disk, nothing of it."""
        data, end = _encode(record) + b"\n", os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, end)
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HandoffError(
                f"{self.path}: what the trainer stepped on cannot be written down: {error}. Free disk space or fix "
                "permissions, then resume with --load."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipts:
    """The content of a file: lines and beginnings by their links, and what is wrong with it."""

    lines: Mapping[str, RoundReceipt]
    beginnings: Mapping[str, Beginning]
    faults: tuple[str, ...]

    @property
    def newest(self) -> str | None:
        """The link of the line that was written last."""
        return next(reversed(list(self.lines)), None)


def read_receipts(path: Path) -> Receipts | None:
    """Return None when there is no such file. Half a line at the end is no fault: it is being written, or a power cut
    cut it off, and neither the ledger nor a checkpoint knows its link."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return Receipts(lines={}, beginnings={}, faults=(f"cannot be read: {error}",))
    lines: dict[str, RoundReceipt] = {}
    beginnings: dict[str, Beginning] = {}
    faults = []
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(text)
            link = record.pop("link")
            if _encode({**record, "link": link}) != text or _link(record) != link:
                raise ValueError("it does not fit its link")
            if "begins" in record:
                beginnings[link] = Beginning(round_id=record["begins"], after=record["after"])
                continue
            lines.pop(link, None)  # of a round that was trained again: the order is that of writing
            lines[link] = RoundReceipt(
                round_id=record["round"],
                version=record["version"],
                previous=record["previous"],
                groups=tuple(_stepped(*cells) for cells in record["groups"]),
                link=link,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            faults.append(f"line {number} is damaged: {type(error).__name__}: {error}")
    return Receipts(lines=lines, beginnings=beginnings, faults=tuple(faults))


def _encode(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def _link(record: Mapping[str, object]) -> str:
    return hashlib.blake2b(_encode(record), digest_size=8).hexdigest()


def _cut_torn_line(file: int) -> None:
    """Remove the half of a line that a power cut left at the end: nothing refers to it. The file may be of any size."""
    start = size = os.fstat(file).st_size
    newline = -1
    while start > 0 and newline < 0:
        start, end = max(0, start - TAIL_BYTES), start
        newline = os.pread(file, end - start, start).rfind(b"\n")
    whole = start + newline + 1
    if whole < size:
        os.ftruncate(file, whole)
