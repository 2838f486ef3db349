"""Completions of every round, kept for the reader: RUN_DIR/samples, read by `vime samples` and the report.

    round_000012.jsonl.gz    a head line, then one line for each group with its completions, tokens and
    log-probabilities groups.jsonl             one line a round: which groups were kept for training and which dropped,
    and why

The directory has a bound (--keep-samples-mib). Beyond it rounds are removed one by one: the one whose neighbours are
closest together, of several the oldest, never the first or the newest. So the rest is spread evenly over the run. Of a
round over a sixteenth of the bound, every n-th group is written. groups.jsonl is never thinned: about six bytes a
group.
"""

from __future__ import annotations

import base64
import gzip
import json
import logging
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from vime.types import Sample

logger = logging.getLogger(__name__)

DIRECTORY, FATES_FILE = "samples", "groups.jsonl"
SHARE_OF_A_ROUND = 16
MAX_CHARS = 2000
"""Limit of a label or metadata: they may hold whole test suites."""
BYTES_A_TOKEN = 12  # before compression: id and log-probability, four bytes each, in base64, and some of the text
_ROUND_FILE = re.compile(r"round_(\d+)\.jsonl\.gz")

Reward = float | Mapping[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that does not train. `samples` is empty where only its number is known."""

    group_index: int
    reason: str
    samples: Sequence[Sample] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundGroup:
    """A group that trains. Its samples may lie elsewhere: `read` returns them, and only the written ones are read."""

    group_index: int
    num_tokens: int
    read: Callable[[], Sequence[Sample]]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> RoundGroup:
        """Make a group of samples that are in memory."""
        num_tokens = sum(len(sample.tokens) for sample in samples)
        return cls(group_index=samples[0].group_index, num_tokens=num_tokens, read=lambda: samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """One completion as it was read back. `versions`: (version, start, end) over the response tokens."""

    index: int
    prompt: object  # text, or the turns of a conversation
    response: str
    reward: Reward
    status: str
    is_removed: bool
    versions: tuple[tuple[int, int, int], ...]
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # of the response
    log_probs: tuple[float, ...]  # float32, one for each response token
    loss_mask: tuple[int, ...]

    def score(self, key: str | None = None) -> float | None:
        """Return the reward as one number: entry `key` of a dict, or its first; None where there is none."""
        reward = self.reward
        if isinstance(reward, Mapping):
            reward = reward[key] if key is not None and key in reward else next(iter(reward.values()), None)
        return float(reward) if isinstance(reward, int | float) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """One prompt with its completions. `reason`: why it was dropped; None for a group that was kept for training."""

    round_id: int
    group_index: int
    reason: str | None
    prompt: object  # text, or the turns of a conversation
    label: object
    metadata: object
    answers: tuple[KeptSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFates:
    """What became of the groups of a round."""

    round_id: int
    kept: tuple[int, ...]
    dropped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # reason -> groups


class _SampleRecord(TypedDict):
    """A completion in a round's file; `tokens`, `log_probs` and `mask` are packed."""

    index: int
    response: str
    reward: Reward
    status: str
    length: int
    tokens: str
    log_probs: str
    versions: list[list[int]]
    prompt: NotRequired[object]  # where it is not the group's
    mask: NotRequired[str]  # where it is not 1 everywhere
    removed: NotRequired[bool]


class _GroupRecord(TypedDict):
    """A line of a round's file."""

    group: int
    prompt: object
    label: object
    metadata: object
    answers: list[_SampleRecord]
    reason: NotRequired[str]


class SampleStore:
    """Writes the directory; one owner, one call at a time."""

    def __init__(self, run_dir: Path, max_bytes: int) -> None:
        self._directory = Path(run_dir) / DIRECTORY
        self._directory.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._sizes = {
            round_id: path.stat().st_size for round_id, path in _round_files(Path(run_dir)).items()
        }  # by round, ascending

    def write(self, round_id: int, groups: Sequence[RoundGroup], dropped: Sequence[DroppedGroup]) -> None:
        """Keep a round; what an earlier start of this run wrote of this round and later ones is removed."""
        for later in [known for known in self._sizes if known >= round_id]:
            self._remove(later)
        entries: list[tuple[RoundGroup, str | None]] = [(group, None) for group in groups]
        entries += [(RoundGroup.of(group.samples), group.reason) for group in dropped if group.samples]
        size = sum(BYTES_A_TOKEN * group.num_tokens for group, _ in entries)
        stride = max(1, -(-size * SHARE_OF_A_ROUND // self._max_bytes))
        head = {"round": round_id, "groups": len(groups), "dropped": len(dropped), "every": stride}
        lines = [json.dumps(head), *(_group_line(group.read(), reason) for group, reason in entries[::stride])]
        path = self._path(round_id)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", compresslevel=1))
        temporary.replace(path)
        self._sizes[round_id] = path.stat().st_size
        self._write_fates(round_id, groups, dropped)
        while sum(self._sizes.values()) > self._max_bytes and len(self._sizes) > 2:
            self._remove(thinned(sorted(self._sizes)))

    def _write_fates(self, round_id: int, groups: Sequence[RoundGroup], dropped: Sequence[DroppedGroup]) -> None:
        reasons: dict[str, list[int]] = {}
        for group in dropped:
            reasons.setdefault(group.reason, []).append(group.group_index)
        record = {"round": round_id, "kept": [group.group_index for group in groups], "dropped": reasons}
        line = json.dumps(record, separators=(",", ":")) + "\n"
        with (self._directory / FATES_FILE).open("ab+") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":  # torn by a crash
                file.write(b"\n")
            file.write(line.encode())

    def _remove(self, round_id: int) -> None:
        del self._sizes[round_id]
        self._path(round_id).unlink(missing_ok=True)

    def _path(self, round_id: int) -> Path:
        return self._directory / f"round_{round_id:06d}.jsonl.gz"


def thinned(rounds: Sequence[int]) -> int:
    """Choose the round to remove: [0, 1, 2, 3] -> 1, [0, 2, 3, 4] -> 3. Neither the first nor the last."""
    gaps = [(rounds[place + 1] - rounds[place - 1], rounds[place]) for place in range(1, len(rounds) - 1)]
    return min(gaps)[1]


def kept_rounds(run_dir: Path) -> list[int]:
    """Return the rounds whose completions are there."""
    return list(_round_files(run_dir))


def read_round(run_dir: Path, round_id: int) -> Iterator[KeptGroup]:
    """Return the groups of one round; a damaged end is left out and logged."""
    path = _round_files(run_dir).get(round_id)
    if path is None:
        return
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            next(lines, None)  # the head
            for line in lines:
                yield _group_of(round_id, json.loads(line))
    except FileNotFoundError:  # removed by a live run
        return
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, AttributeError, zlib.error) as error:
        logger.warning("%s: the rest is left out, the file is damaged: %s", path, error)


def read_fates(run_dir: Path) -> dict[int, RoundFates]:
    """Read by round, ascending. A resumed run writes rounds again: the later line counts, and cancels later rounds."""
    path = Path(run_dir) / DIRECTORY / FATES_FILE
    fates: dict[int, RoundFates] = {}
    if not path.is_file():
        return fates
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            round_id = int(record["round"])
            fate = RoundFates(
                round_id=round_id,
                kept=tuple(record["kept"]),
                dropped={reason: tuple(groups) for reason, groups in record["dropped"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("%s:%d: left out a line that is not a round's groups", path, number)
            continue
        fates = {known: fate for known, fate in fates.items() if known < round_id} if round_id in fates else fates
        fates[round_id] = fate
    return dict(sorted(fates.items()))


def _round_files(run_dir: Path) -> dict[int, Path]:
    found = {}
    for path in (Path(run_dir) / DIRECTORY).glob("round_*.jsonl.gz"):
        if match := _ROUND_FILE.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def _group_line(group: Sequence[Sample], reason: str | None) -> str:
    first = group[0]
    record: _GroupRecord = {
        "group": first.group_index,
        "prompt": first.prompt,
        "label": _short(first.label),
        "metadata": _short(first.metadata),
        "answers": [_answer(sample, first.prompt) for sample in group],
    }
    if reason is not None:
        record["reason"] = reason
    return json.dumps(record, default=str, separators=(",", ":"))


def _answer(sample: Sample, prompt: object) -> _SampleRecord:
    record: _SampleRecord = {
        "index": sample.index,
        "response": sample.response,
        "reward": sample.reward,
        "status": str(sample.status),
        "length": sample.response_length,
        "tokens": _packed("i", sample.tokens),
        "log_probs": _packed("f", sample.rollout_log_probs),
        "versions": [[span.version, span.start, span.end] for span in sample.token_policy_versions],
    }
    if sample.prompt != prompt:  # a generate function may have changed it
        record["prompt"] = sample.prompt
    if not all(sample.loss_mask):
        record["mask"] = _packed("b", sample.loss_mask)
    if sample.remove_sample:
        record["removed"] = True
    return record


def _packed(kind: str, values: Sequence[int] | Sequence[float] | None) -> str:
    """Pack as bytes in base64: a tenth of the time and a third of the size of JSON numbers."""
    return base64.b64encode(array(kind, values or ()).tobytes()).decode()


def _integers(kind: Literal["i", "b"], text: str) -> tuple[int, ...]:
    values: array[int] = array(kind)
    values.frombytes(base64.b64decode(text))
    return tuple(values)


def _floats(text: str) -> tuple[float, ...]:
    values: array[float] = array("f")
    values.frombytes(base64.b64decode(text))
    return tuple(values)


def _short(value: object) -> object:
    text = json.dumps(value, default=str)
    return value if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."


def _group_of(round_id: int, record: _GroupRecord) -> KeptGroup:
    return KeptGroup(
        round_id=round_id,
        group_index=record["group"],
        reason=record.get("reason"),
        prompt=record["prompt"],
        label=record["label"],
        metadata=record["metadata"],
        answers=tuple(_answer_of(answer, record["prompt"]) for answer in record["answers"]),
    )


def _answer_of(record: _SampleRecord, prompt: object) -> KeptSample:
    tokens, length = _integers("i", record["tokens"]), record["length"]
    return KeptSample(
        index=record["index"],
        prompt=record.get("prompt", prompt),
        response=record["response"],
        reward=record["reward"],
        status=record["status"],
        is_removed=record.get("removed", False),
        versions=tuple((span[0], span[1], span[2]) for span in record["versions"]),
        prompt_tokens=tokens[: len(tokens) - length],
        tokens=tokens[len(tokens) - length :],
        log_probs=_floats(record["log_probs"]),
        loss_mask=_integers("b", record["mask"]) if "mask" in record else (1,) * length,
    )
