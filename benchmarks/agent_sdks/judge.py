"""Compare what a run trained with what its engines say that they generated; nothing else is believed.

    python -m benchmarks.agent_sdks.judge RUN JOURNAL --samples 6 --groups 4 --rounds 10

JOURNAL is the directory of journal.py, RUN/rollout_{round}.jsonl what --save-debug-rollout-data wrote. The file of the
server of sessions is not read. How many conversations a program holds is known: one that broke, so that its next turn
was rendered anew, is another branch in the journal too. Exit code 1 when something was lost, trained twice, or is not
what an engine said.

With --sessions-outlive a session goes on when the process that serves it is killed, and a turn that was being sampled
is sampled anew: a generation that was not trained is no fault when another one of the same session and prompt was.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.agent_sdks.launch import ROWS, program_of
from vime.rollout.record import load_rollout
from vime.types import Sample


@dataclass(slots=True)
class Generation:
    """One request as an engine answered it. A request that was answered again, because its answer was lost with an
    engine or a router, has several of `said`."""

    session: str
    prompt: tuple[int, ...]
    said: list[tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], str]] = field(default_factory=list)
    trained: int = 0


@dataclass(slots=True)
class Verdict:
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    other_rows: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    sessions: int = 0
    rows: int = 0
    turns: int = 0
    tokens: int = 0
    generations: int = 0
    answered_again: int = 0
    of_other_sessions: int = 0
    sampled_anew: int = 0

    @property
    def faults(self) -> list[str]:
        return [*self.lost, *self.twice, *self.differ, *self.other_rows, *self.untrained]

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.sessions} sessions, {self.rows} rows, {self.turns} turns, {self.tokens} trained tokens; engines: "
            f"{self.generations} generations, {self.answered_again} answered more than once, {self.of_other_sessions} "
            f"of sessions that were given up and asked anew, {self.sampled_anew} turns of trained sessions sampled anew"
        )
        for name in ("lost", "twice", "differ", "other_rows", "untrained"):
            found = getattr(self, name)
            yield f"{name.replace('_', ' ')}: {len(found)}{''.join(f'{chr(10)}  {fault}' for fault in found[:20])}"


def read_journal(directory: Path) -> list[Generation]:
    """Return the generations by request. A line that a SIGKILL cut off was never answered."""
    found: dict[str, Generation] = {}
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            try:
                noted = json.loads(line)
            except ValueError:
                continue
            generation = found.setdefault(noted["request"], Generation(noted["session"], tuple(noted["prompt"])))
            (choice,) = noted["choices"]
            log_probs = tuple(array("f", choice["log_probs"]))  # rows have them in fp32
            generation.said.append((tuple(choice["tokens"]), log_probs, tuple(choice["versions"]), choice["reason"]))
    return list(found.values())


def judge(
    rounds: Sequence[Sequence[Sample]],
    journal: Sequence[Generation],
    *,
    groups: int,
    samples: int,
    sessions_outlive: bool = False,
) -> Verdict:
    """`rounds`: the rows that each round trained. `groups` of `samples` are wanted in each round."""
    verdict = Verdict(generations=len(journal), answered_again=sum(len(each.said) > 1 for each in journal))
    by_session: dict[str, list[Generation]] = defaultdict(list)
    for generation in journal:
        by_session[generation.session].append(generation)
    seen: Counter[tuple[int, int]] = Counter()
    trained: set[str] = set()
    for number, rows in enumerate(rounds):
        of_session: dict[str, list[Sample]] = defaultdict(list)
        for row in rows:
            of_session[row.session_id].append(row)
        if len(of_session) != groups * samples:
            verdict.lost.append(f"round {number} has {len(of_session)} sessions, wanted {groups * samples}")
        for session, found in of_session.items():
            seen[found[0].group_index, found[0].index] += 1
            _judge_session(verdict, session, found, by_session.get(session, []), sessions_outlive)
        trained |= of_session.keys()
    verdict.twice += [f"sample {which} was trained {count} times" for which, count in seen.items() if count > 1]
    verdict.of_other_sessions = sum(len(by_session[session]) for session in by_session.keys() - trained)
    verdict.sessions = sum(seen.values())
    return verdict


def _judge_session(
    verdict: Verdict, session: str, rows: Sequence[Sample], said: Sequence[Generation], outlives: bool
) -> None:
    verdict.rows += len(rows)
    for row in rows:
        _judge_row(verdict, session, row, said)
    if outlives:
        again = _sampled_anew(said)
        verdict.sampled_anew += len(again)
        said = [each for each in said if each not in again]
    for generation in said:
        if generation.trained > 1:
            verdict.twice.append(f"session {session}: a generation was trained {generation.trained} times")
        if generation.trained == 0 and any(tokens for tokens, *_ in generation.said):
            verdict.untrained.append(f"session {session}: a generation of its {len(said)} was not trained")
    num_branches = sum(not any(_goes_on(other, each) for other in said) for each in said)
    program = program_of(rows[0].index)
    wanted = ROWS.get(program, 1)
    if not len(rows) == num_branches == wanted:
        verdict.other_rows.append(
            f"session {session} of {program}: {len(rows)} rows of {num_branches} branches, wanted {wanted}"
        )


def _sampled_anew(said: Sequence[Generation]) -> list[Generation]:
    """Return the generations that were not trained because their turn was sampled anew: those to a prompt that another
    one was trained for, and what went on with them after an abort."""
    prompts, found = {each.prompt for each in said if each.trained}, list[Generation]()
    for _ in said:
        more = [each for each in said if not each.trained and each.prompt in prompts and each not in found]
        found += more
        prompts |= {each.prompt + tokens for each in more for tokens, *_, reason in each.said if reason == "abort"}
    return found


def _goes_on(later: Generation, earlier: Generation) -> bool:
    return later is not earlier and any(
        later.prompt[: len(earlier.prompt) + len(tokens)] == earlier.prompt + tokens for tokens, *_ in earlier.said
    )


def _judge_row(verdict: Verdict, session: str, row: Sample, said: Sequence[Generation]) -> None:
    """Walk over the trained tokens: each stretch must be what an engine said to exactly the tokens before it."""
    tokens, begin = tuple(row.tokens), row.prompt_length
    mask = list(row.loss_mask or [1] * row.response_length)
    place = begin
    while place < len(tokens):
        if not mask[place - begin]:
            place += 1
            continue
        # Of several to the same prompt one that is not trained yet, and of these the longest: the beginning of a turn
        # that was aborted and sampled anew says the same.
        fitting = [(generation, _end_of(generation, row, tokens, place)) for generation in said]
        fitting = [(generation, end) for generation, end in fitting if end]
        if not fitting:
            verdict.differ.append(f"session {session}: from token {place} on it is what no engine said")
            return
        generation, end = min(fitting, key=lambda each: (each[0].trained, -each[1]))
        generation.trained += 1
        verdict.turns += 1
        verdict.tokens += end - place
        place = end


def _end_of(generation: Generation, row: Sample, tokens: tuple[int, ...], place: int) -> int:
    """Return the place behind what this generation says at `place` of the row, all of it trained with its
    log-probabilities and versions; 0 when it says something else."""
    if generation.prompt != tokens[:place]:
        return 0
    begin = row.prompt_length
    versions = [span.version for span in row.token_policy_versions for _ in range(span.start, span.end)]
    mask = list(row.loss_mask or [1] * row.response_length)
    ends = [
        place + len(ids)
        for ids, log_probs, their_versions, _ in generation.said
        if ids
        and tokens[place : place + len(ids)] == ids
        and tuple(row.rollout_log_probs[place - begin : place - begin + len(ids)]) == log_probs
        and tuple(versions[place - begin : place - begin + len(ids)]) == their_versions
        and all(mask[place - begin : place - begin + len(ids)])
    ]
    return max(ends, default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of rollout_{round}.jsonl")
    parser.add_argument("journal", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True, help="of a round")
    parser.add_argument("--samples", type=int, required=True, help="of a group")
    parser.add_argument("--sessions-outlive", action="store_true", help="the process that serves them")
    arguments = parser.parse_args()
    rounds = [
        [row for group in load_rollout(arguments.run / f"rollout_{number}.jsonl") for row in group]
        for number in range(arguments.rounds)
    ]
    verdict = judge(
        rounds,
        read_journal(arguments.journal),
        groups=arguments.groups,
        samples=arguments.samples,
        sessions_outlive=arguments.sessions_outlive,
    )
    print("\n".join(verdict.lines()))
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
