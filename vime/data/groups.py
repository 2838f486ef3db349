"""The numbers of a group without its tokens ("facts"): they go through the ledger to the coordinator of rounds.

A plan, the staleness bound and the metrics of a round need nothing else. Their size does not depend on the length of a
completion: 54 bytes a completion, and a few more in some runs (entries of a dict reward, sources).

    facts = u16 rows | rows of FACTS | JSON of GroupNotes
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vime.data.rows import STATUS_CODES, TrainRow
from vime.types import HandoffError, SampleStatus, StaleError, Version

FACTS = np.dtype(
    [
        ("sample_index", "<i8"),
        ("reward", "<f8"),  # the number that the advantage is made from
        ("raw_reward", "<f8"),
        ("total_length", "<i4"),
        ("response_length", "<i4"),
        ("num_trainable", "<i4"),
        ("oldest_trainable", "<i4"),  # version, among the trainable tokens; of all tokens when none is trainable
        ("oldest_version", "<i4"),  # among all response tokens; -1 without one
        ("newest_version", "<i4"),
        ("chunk", "<u2"),  # number of the chunk in the group's payload
        ("place", "<u2"),  # place in the chunk
        ("status", "u1"),  # place in STATUS_CODES
        ("is_removed", "u1"),
    ]
)
_COUNT = struct.Struct("<H")
_TRUNCATED = STATUS_CODES.index(SampleStatus.TRUNCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNotes:
    """What metrics need besides the numbers of FACTS. Each list has one entry for each row, or is empty."""

    producer: str = ""  # the process that stored the payload
    entries: Sequence[Mapping[str, float] | None] = ()  # of dict rewards
    sources: Sequence[str] = ()  # of the data


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """The numbers of one row that metrics use."""

    reward: float  # as the reward function returned it
    response_length: int
    is_truncated: bool
    is_removed: bool = False
    entries: Mapping[str, float] | None = None
    source: str = ""
    oldest_version: Version = -1
    newest_version: Version = -1
    is_first_row: bool = True  # of its sample: rewards and samples are counted there


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The numbers of one group that planning and metrics need, without its tokens. `rows` are of type FACTS."""

    group_index: int
    rows: NDArray[np.void]
    notes: GroupNotes = field(default_factory=GroupNotes)

    @property
    def num_chunks(self) -> int:
        return int(self.rows["chunk"].max()) + 1

    def remove(self, is_removed: Sequence[bool]) -> None:
        """Take rows out of the loss; one entry for each row."""
        self.rows["is_removed"] = is_removed
        self.rows["num_trainable"][self.rows["is_removed"] > 0] = 0

    def completions(self) -> Iterator[SampleFacts]:
        is_first = np.diff(sample_numbers(self.rows), prepend=-1) > 0
        for number, row in enumerate(self.rows):
            yield SampleFacts(
                reward=float(row["raw_reward"]),
                response_length=int(row["response_length"]),
                is_truncated=row["status"] == _TRUNCATED,
                is_removed=bool(row["is_removed"]),
                entries=self.notes.entries[number] if self.notes.entries else None,
                source=self.notes.sources[number] if self.notes.sources else "",
                oldest_version=int(row["oldest_version"]),
                newest_version=int(row["newest_version"]),
                is_first_row=bool(is_first[number]),
            )


def facts_of(chunks: Sequence[Sequence[TrainRow]], removed: Sequence[bool] = ()) -> NDArray[np.void]:
    """Return FACTS of the rows of a group, given by chunk; `removed` has one entry for each row, or none."""
    found: list[tuple[float, ...]] = []
    for chunk, rows in enumerate(chunks):
        for place, row in enumerate(rows):
            versions = [span.version for span in row.token_policy_versions]
            is_removed = bool(removed) and removed[len(found)]
            oldest = min(versions, default=-1)
            found.append(
                (
                    row.sample_index,
                    row.reward,
                    row.raw_reward,
                    row.total_length,
                    row.response_length,
                    0 if is_removed else row.num_trainable,
                    oldest if is_removed or not versions else row.oldest_version,
                    oldest,
                    max(versions, default=-1),
                    chunk,
                    place,
                    STATUS_CODES.index(row.status),
                    is_removed,
                )
            )
    return np.array(found, dtype=FACTS)


def sample_numbers(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the number of the sample of each row, counted from 0; `rows`: FACTS of whole groups, one after the other.
    Rows of one index that follow each other in a group are one sample's: branches of one session, averaged once.

    Example: rows of the samples 4, 5, 5 of one group and 5 of the next one -> 0, 1, 1, 2.
    """
    is_first_of_group = (rows["chunk"] == 0) & (rows["place"] == 0)
    index = rows["sample_index"]
    is_new = is_first_of_group | (index != np.roll(index, 1))
    is_new[:1] = True
    return np.cumsum(is_new, dtype=np.int64) - 1


def encode_facts(facts: GroupFacts) -> bytes:
    notes = facts.notes
    record = {"producer": notes.producer, "entries": list(notes.entries), "sources": list(notes.sources)}
    text = json.dumps({name: value for name, value in record.items() if value}, separators=(",", ":"))
    return _COUNT.pack(len(facts.rows)) + facts.rows.tobytes() + text.encode()


def decode_facts(group_index: int, data: bytes) -> GroupFacts:
    """Read what `encode_facts` wrote."""
    try:
        [count] = _COUNT.unpack_from(data)
        end = _COUNT.size + count * FACTS.itemsize
        rows = np.frombuffer(data[_COUNT.size : end], dtype=FACTS).copy()
        if len(rows) != count or not count:
            raise ValueError(f"{len(rows)} of {count} rows")
        notes = GroupNotes(**json.loads(data[end:]))
    except (struct.error, ValueError, TypeError) as error:
        raise HandoffError(
            f"group {group_index}: its facts cannot be read ({len(data)} bytes: {error}). The writer is of another "
            "version."
        ) from error
    return GroupFacts(group_index=group_index, rows=rows, notes=notes)


def check_versions(groups: Sequence[GroupFacts], rollout_id: int, max_staleness: int) -> None:
    """Refuse rows with a trainable token older than the bound, or any token newer than the weights. Weights of version
    r train round r: its tokens are of versions r - max staleness .. r."""
    for group in groups:
        rows = group.rows
        is_too_old = (rows["num_trainable"] > 0) & (rollout_id - rows["oldest_trainable"] > max_staleness)
        wrong = np.flatnonzero(is_too_old | (rows["newest_version"] > rollout_id))
        for row in rows[wrong[:1]]:
            raise StaleError(
                f"sample {row['sample_index']} of group {group.group_index}: versions "
                f"{sorted({int(row['oldest_version']), int(row['newest_version'])})} in round {rollout_id}, expected "
                f"{max(0, rollout_id - max_staleness)}..{rollout_id}: --transferqueue-max-staleness {max_staleness}."
            )
