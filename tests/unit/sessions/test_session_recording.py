"""Turns to sequences: which turn continues which, and what is trained."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vime.sessions.recording import Turn, branches, parents, row_samples
from vime.types import Sample, SampleStatus, VersionSpan


def turn(number: int, prompt: list[int], said: list[int], *, version: int = 0, reason: str = "stop") -> Turn:
    spans = (VersionSpan(version, 0, len(said)),) if said else ()
    probs = tuple(-0.5 - token / 100 for token in said)
    return Turn(
        number=number,
        prompt_ids=tuple(prompt),
        token_ids=tuple(said),
        log_probs=probs,
        versions=spans,
        finish_reason=reason,
    )


def test_a_linear_agent_is_one_row_with_the_version_of_each_token() -> None:
    turns = [turn(0, [1, 2], [3, 4], version=5), turn(1, [1, 2, 3, 4, 9], [6], version=7)]
    (row,) = row_samples(turns, Sample(index=3, group_index=2, reward=1.0))
    assert row.tokens == [1, 2, 3, 4, 9, 6]
    assert row.response_length == 4
    assert row.loss_mask == [1, 1, 0, 1]
    assert row.rollout_log_probs == [-0.53, -0.54, 0.0, -0.56]
    # The context token 9 takes the version of the token before it.
    assert row.token_policy_versions == [VersionSpan(5, 0, 3), VersionSpan(7, 3, 4)]
    assert (row.index, row.group_index, row.reward, row.status) == (3, 2, 1.0, SampleStatus.COMPLETED)


def test_an_attempt_that_was_given_up_is_no_row() -> None:
    turns = [turn(0, [1], [2]), turn(1, [1], [3]), turn(2, [1, 3, 9], [4])]
    assert parents(turns) == [None, None, 1]
    assert branches(turns) == [(1, 2)]


def plainly(turns: list[Turn]) -> list[int | None]:
    """As `parents` says it."""
    found: list[int | None] = []
    for place, one in enumerate(turns):
        begins = [n for n in range(place) if one.prompt_ids[: len(turns[n].sequence)] == turns[n].sequence]
        found.append(max(begins, key=lambda n: (len(turns[n].sequence), n), default=None))
    return found


SHORT = st.lists(st.integers(1, 2), max_size=4)


@given(st.lists(st.tuples(SHORT, SHORT), max_size=9))
def test_the_parent_is_the_longest_that_fits_and_of_equal_ones_the_newest(pairs: list[tuple[list[int], list[int]]]):
    turns = [turn(number, prompt, said) for number, (prompt, said) in enumerate(pairs)]
    assert parents(turns) == plainly(turns)


class CountedIds(tuple[int, ...]):
    """Counts the tokens that are cut out of it."""

    num_cut = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        CountedIds.num_cut += len(found) if isinstance(key, slice) else 1
        return found


def test_a_linear_agent_compares_each_turn_with_the_one_before_alone() -> None:
    """It compared all with all: seconds for 200 turns, on the loop that generates."""
    turns = []
    for number in range(100):
        prompt = [7] * (20 * number + 10)
        made = turn(number, prompt, [7] * 10)
        turns.append(replace(made, prompt_ids=CountedIds(made.prompt_ids)))
    assert parents(turns) == [None, *range(99)]
    assert CountedIds.num_cut <= sum(len(one.prompt_ids) for one in turns)


def test_two_completions_of_one_prompt_that_nobody_continued_are_two_rows() -> None:
    assert branches([turn(0, [1], [2]), turn(1, [1], [3])]) == [(0,), (1,)]


def test_a_subagent_and_a_compaction_are_rows_of_their_own() -> None:
    turns = [turn(0, [1], [2]), turn(1, [50], [51]), turn(2, [1, 2, 9], [3]), turn(3, [60], [61])]
    assert branches(turns) == [(1,), (0, 2), (3,)]


def test_a_turn_that_two_branches_share_is_trained_once() -> None:
    turns = [turn(0, [1], [2]), turn(1, [1, 2, 8], [3]), turn(2, [1, 2, 9], [4])]
    first, second = row_samples(turns, Sample())
    assert (first.tokens, first.loss_mask) == ([1, 2, 8, 3], [1, 0, 1])
    assert (second.tokens, second.loss_mask) == ([1, 2, 9, 4], [0, 0, 1])
    assert (second.metadata["session_row"], second.metadata["session_rows"]) == (1, 2)


def test_an_empty_first_completion_is_part_of_the_prompt() -> None:
    (row,) = row_samples([turn(0, [1], []), turn(1, [1, 9], [2])], Sample())
    assert (row.tokens, row.prompt_length, row.loss_mask) == ([1, 9, 2], 2, [1])


def test_a_completion_without_tokens_takes_no_row_away() -> None:
    last = [turn(0, [1], [2]), turn(1, [1, 2, 9], [])]
    assert branches(last) == [(0,)]
    assert branches([*last, turn(2, [1, 2, 9], []), turn(3, [1, 2, 9, 9], [])]) == [(0,)]
    given_up = [turn(0, [1], [2]), turn(1, [1], [3]), turn(2, [1, 2, 9], [])]
    assert branches(given_up) == [(0,)], "the client went on with the first"
    asked_again = [turn(0, [1], []), turn(1, [1], [2])]
    assert branches(asked_again) == [(1,)]


@given(st.lists(st.tuples(SHORT, SHORT), max_size=9))
def test_a_session_that_said_something_has_a_row(pairs: list[tuple[list[int], list[int]]]) -> None:
    turns = [turn(number, prompt, said) for number, (prompt, said) in enumerate(pairs)]
    assert bool(branches(turns)) == any(said for _, said in pairs)


def test_a_cut_completion_is_truncated() -> None:
    assert row_samples([turn(0, [1], [2], reason="length")], Sample())[0].status is SampleStatus.TRUNCATED


@given(st.lists(st.tuples(st.integers(-1, 5), st.lists(st.integers(1, 3), max_size=2)), min_size=1, max_size=8))
def test_every_token_is_trained_at_most_once_and_as_it_was_recorded(plan: list[tuple[int, list[int]]]) -> None:
    """Each entry continues an earlier turn (or none, -1) by some context; completions carry their turn's number."""
    turns: list[Turn] = []
    for number, (base, context) in enumerate(plan):
        start = list(turns[base].sequence) if 0 <= base < number else [7]
        turns.append(turn(number, [*start, *context], [100 + number], version=number))
    rows = row_samples(turns, Sample())
    trained = []
    for row in rows:
        start = row.prompt_length
        for span in row.token_policy_versions:
            for place in range(span.start, span.end):
                if row.loss_mask[place]:
                    token = row.tokens[start + place]
                    assert token == 100 + span.version
                    assert row.rollout_log_probs[place] == -0.5 - token / 100
                    trained.append(token)
    assert len(trained) == len(set(trained))
    given_up = {turn.number for place, turn in enumerate(turns) if not any(place in path for path in branches(turns))}
    assert len(trained) == len(turns) - len(given_up)
