"""A training row (the numbers of one sample that training needs), and the facts of a group: its numbers without tokens.

Per-token values are numpy arrays from the moment a row is made. `check_row` is called once, where a row is made; after
that a checksum shows that nothing changed.

Facts go through the ledger to the coordinator of rounds. A plan, the staleness bound and the metrics of a round need
nothing else. Their size does not depend on the length of a completion: 54 bytes a completion, and a few more in some
runs (entries of a dict reward, sources).

    facts = u16 rows | rows of FACTS | JSON of GroupNotes
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vime.types import HandoffError, SampleStatus, StaleError, Version, VersionSpan, tiling_fault

Column = NDArray[np.generic] | bytes
"""One entry of an optional column."""
STATUS_CODES = tuple(str(status) for status in SampleStatus)
FACTS = np.dtype(
    [
        ("sample_index", "<i8"),
        ("reward", "<f8"),  # the number that the advantage is made from
        ("raw_reward", "<f8"),
        ("total_length", "<i4"),
        ("response_length", "<i4"),
        ("num_trainable", "<i4"),  # also of a removed row, which a plug-in may take in again: see `trained_tokens`
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

Kind = TypeVar("Kind", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRow:
    """One prompt with its completion. T: tokens, R: response tokens.

    The arrays may be given as any sequence of numbers; they are converted to their type. Rows are equal when every
    number is.
    """

    sample_index: int
    group_index: int
    rollout_id: int  # -1 until it is part of a round
    tokens: NDArray[np.int32]  # [T] prompt + response
    response_length: int
    loss_mask: NDArray[np.uint8]  # [R] 1 where the token may be trained
    rollout_log_probs: NDArray[np.float32]  # [R] behaviour log-probabilities, from the engine
    token_policy_versions: Sequence[VersionSpan]  # tiles [0, R)
    reward: float  # the number that the advantage is made from (group-normalised for GRPO)
    raw_reward: float  # as the reward function returned it
    status: str
    truncated: bool
    extra: Mapping[str, Column] = field(default_factory=dict)  # optional columns by name
    attempt: int = 0  # of generating the prompt; the ledger of mode streaming counts from 1
    partition_id: str = ""  # of the queue
    producer_id: str = ""  # the worker that generated it

    def __post_init__(self) -> None:
        for name, kind in _ARRAYS.items():
            object.__setattr__(self, name, as_array(getattr(self, name), kind, f"{self.name}: {name}"))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainRow):
            return NotImplemented
        return all(_is_same(getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self))

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    @property
    def name(self) -> str:
        """The name of the row in messages."""
        return f"sample {self.sample_index} of group {self.group_index}"

    @property
    def global_index(self) -> int:
        """The RFC's name for the number that identifies a sample in the run."""
        return self.sample_index

    @property
    def total_length(self) -> int:
        return len(self.tokens)

    @property
    def num_trainable(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def version_start(self) -> Version:
        """Version of the first response token; -1 without one."""
        return self.token_policy_versions[0].version if self.token_policy_versions else -1

    @property
    def version_end(self) -> Version:
        """Version of the last response token; -1 without one."""
        return self.token_policy_versions[-1].version if self.token_policy_versions else -1

    @property
    def oldest_version(self) -> Version:
        """Oldest version among the trainable tokens; of all tokens when none is trainable."""
        spans = self.token_policy_versions
        if not spans:
            raise StaleError(f"sample {self.sample_index}: no token carries a policy version")
        trainable = [span.version for span in spans if self.loss_mask[span.start : span.end].any()]
        return min(trainable or [span.version for span in spans])


_ARRAYS: dict[str, type[np.generic]] = {"tokens": np.int32, "loss_mask": np.uint8, "rollout_log_probs": np.float32}


def as_array(values: ArrayLike, kind: type[Kind], where: str) -> NDArray[Kind]:
    """Return the numbers in type `kind`; HandoffError, which names `where`, for a number that does not fit."""
    try:
        array = np.asarray(values, dtype=kind)
        if isinstance(values, np.ndarray) and array.dtype.kind in "iu" and not np.array_equal(array, values):
            raise ValueError("casting changes it")  # numpy casts an array, unlike a list, silently
    except (OverflowError, ValueError, TypeError) as error:
        raise HandoffError(f"{where}: a value does not fit {np.dtype(kind)}: {error}") from error
    return array


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        left, right = np.asarray(one), np.asarray(other)
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return bool(one == other)


def check_row(row: TrainRow) -> None:
    """Refuse a row whose parts do not line up or whose numbers cannot be trained on."""
    name, length = row.name, row.response_length
    if not 0 <= length < row.total_length:
        raise HandoffError(f"{name}: {row.total_length} tokens, {length} of them response; expected a prompt too.")
    if len(row.loss_mask) != length or len(row.rollout_log_probs) != length:
        raise HandoffError(
            f"{name}: {length} response tokens, {len(row.loss_mask)} mask entries and {len(row.rollout_log_probs)} "
            "log-probabilities; expected equally many. Extend samples with append_response_tokens only."
        )
    if row.tokens.min() < 0 or (length and row.loss_mask.max() > 1):
        raise HandoffError(f"{name}: token ids must be >= 0 and mask entries 0 or 1.")
    if not np.isfinite(row.rollout_log_probs).all():
        raise HandoffError(f"{name}: a log-probability is not finite. See the log of the engine.")
    if not np.isfinite([row.reward, row.raw_reward]).all():
        raise HandoffError(f"{name}: reward {row.reward}, raw reward {row.raw_reward}; expected finite numbers.")
    if row.status not in STATUS_CODES:
        raise HandoffError(f"{name}: status {row.status!r}; expected one of {', '.join(STATUS_CODES)}.")
    fault = tiling_fault(row.token_policy_versions, length)
    if fault is not None:
        raise HandoffError(f"{name}: {fault}.")


def check_group(rows: Sequence[TrainRow]) -> None:
    """Refuse rows that are not one whole group, or of which one cannot be trained on."""
    if not rows:
        raise HandoffError("a group has no rows; a rollout function must return whole groups.")
    for row in rows:
        check_row(row)
    groups = sorted({row.group_index for row in rows})
    if len(groups) > 1:
        raise HandoffError(
            f"one group holds samples of groups {groups}; expected a single group_index. The rollout function mixed "
            "groups."
        )
    by_sample = [list(of_one) for _, of_one in itertools.groupby(rows, key=lambda row: row.sample_index)]
    indices = [of_one[0].sample_index for of_one in by_sample]
    if len(set(indices)) != len(indices) or any(len(of_one) > 1 and of_one[0].sample_index < 0 for of_one in by_sample):
        raise HandoffError(
            f"group {groups[0]}: sample indices {[row.sample_index for row in rows]} repeat; each sample needs its "
            "own, and the rows of one sample follow each other."
        )
    for of_one in by_sample:
        rewards = sorted({row.raw_reward for row in of_one})
        if len(rewards) > 1:
            raise HandoffError(
                f"{of_one[0].name}: {len(of_one)} rows with the rewards {rewards}; a sample has one reward. Give "
                "every row the same, or each an index of its own if they are samples by themselves."
            )


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
        """Decide which rows are out of the loss; one entry for each row."""
        self.rows["is_removed"] = is_removed

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
            oldest = min(versions, default=-1)
            found.append(
                (
                    row.sample_index,
                    row.reward,
                    row.raw_reward,
                    row.total_length,
                    row.response_length,
                    row.num_trainable,
                    row.oldest_version if versions else oldest,
                    oldest,
                    max(versions, default=-1),
                    chunk,
                    place,
                    STATUS_CODES.index(row.status),
                    bool(removed) and removed[len(found)],
                )
            )
    return np.array(found, dtype=FACTS)


def trained_tokens(rows: NDArray[np.void]) -> NDArray[np.int32]:
    """Return how many tokens of each row are in the loss: none of a removed one."""
    return np.where(rows["is_removed"] > 0, 0, rows["num_trainable"])


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
        is_too_old = (trained_tokens(rows) > 0) & (rollout_id - rows["oldest_trainable"] > max_staleness)
        wrong = np.flatnonzero(is_too_old | (rows["newest_version"] > rollout_id))
        for row in rows[wrong[:1]]:
            raise StaleError(
                f"sample {row['sample_index']} of group {group.group_index}: versions "
                f"{sorted({int(row['oldest_version']), int(row['newest_version'])})} in round {rollout_id}, expected "
                f"{max(0, rollout_id - max_staleness)}..{rollout_id}: --transferqueue-max-staleness {max_staleness}."
            )
