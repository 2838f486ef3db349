"""What one session said: turns of tokens, which of them continue which, and the sequences to train on.

A turn continues the turn whose prompt and completion are a prefix of its own prompt, token by token; the longest such
turn is its parent. A turn that continues none begins a branch: a subagent, a compacted conversation, a second attempt.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from vime.types import FINISH_STATUS, Sample, SampleStatus, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request and its completion, as the engine said it. `log_probs` has an entry for each token of `token_ids`,
    and `versions` tile them."""

    number: int  # in the session, from 0
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    cached_tokens: int = 0  # of the prompt, in the engine's prefix cache

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.prompt_ids + self.token_ids


def parents(turns: Sequence[Turn]) -> list[int | None]:
    """Return for each turn the position of the turn that it continues; None begins a branch. Of equal candidates the
    newest is taken: a client that asked twice goes on with the completion that it got last. The longest are looked at
    first, so that a turn of a linear agent is compared with one other."""
    found: list[int | None] = []
    by_length: list[tuple[int, int]] = []  # (length of the sequence, position), ascending
    for place, turn in enumerate(turns):
        fitting = by_length[: bisect.bisect_right(by_length, (len(turn.prompt_ids), place))]
        found.append(next((earlier for _, earlier in reversed(fitting) if _continues(turn, turns[earlier])), None))
        bisect.insort(by_length, (len(turn.prompt_ids) + len(turn.token_ids), place))
    return found


def _continues(turn: Turn, earlier: Turn) -> bool:
    """Return whether the sequence of `earlier` begins the prompt of `turn`. What differs is mostly its completion."""
    start = len(earlier.prompt_ids)
    return (
        turn.prompt_ids[start : start + len(earlier.token_ids)] == earlier.token_ids
        and turn.prompt_ids[:start] == earlier.prompt_ids
    )


def branches(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """Return the sequences of a session, each as positions of turns from its first to its last, oldest end first.

    A turn without a continuation ends a sequence, unless another completion of the same prompt was continued: then it
    is an attempt that the client gave up, and no sequence. A linear agent gives one.
    """
    above = parents(turns)
    continued = set[int]()
    for end in reversed(range(len(turns))):  # what said nothing, and that no such turn continues, continues nothing
        parent = above[end]
        if parent is not None and (turns[end].token_ids or end in continued):
            continued.add(parent)
    chosen = {parent for parent in above if parent is not None}  # also by a turn that said nothing
    went_on = {turns[place].prompt_ids for place in chosen if turns[place].token_ids}
    ends = [
        place
        for place, turn in enumerate(turns)
        if place not in continued and (place in chosen or turn.prompt_ids not in went_on) and turn.token_ids
    ]
    paths = []
    for end in ends:
        path: list[int] = []
        place: int | None = end
        while place is not None:
            path.append(place)
            place = above[place]
        while not turns[path[-1]].token_ids:
            path.pop()  # a beginning that said nothing belongs to the prompt of the turn after it
        paths.append(tuple(reversed(path)))
    return paths


def row_samples(turns: Sequence[Turn], base: Sample) -> list[Sample]:
    """Return a sample for each branch, copies of `base` (prompt, label, reward, indices) with tokens.

    The prompt is that of the branch's first turn. Completions are trained, what was put between them is not. A turn
    that several branches share is trained in the first of them only, so that no token counts twice.
    """
    rows: list[Sample] = []
    trained: set[int] = set()
    for path in branches(turns):
        row = Sample.from_dict(base.to_dict())
        row.tokens = list(turns[path[0]].prompt_ids)
        for place in path:
            turn = turns[place]
            row.append_response_tokens(tokens=turn.prompt_ids[len(row.tokens) :], trainable=False)
            row.append_response_tokens(
                tokens=turn.token_ids,
                log_probs=turn.log_probs,
                versions=turn.versions,
                trainable=place not in trained,
            )
        trained.update(path)
        row.status = FINISH_STATUS.get(turns[path[-1]].finish_reason, SampleStatus.FAILED)
        rows.append(row)
    for number, row in enumerate(rows):
        row.metadata["session_row"], row.metadata["session_rows"] = number, len(rows)
    return rows
