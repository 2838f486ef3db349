"""fetch_round over real gloo processes: two model-parallel groups of two ranks, one per data-parallel index."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.dist_launch import launch
from tests.helpers.fetch_worker import WORLD, rounds
from tests.helpers.rows import flatten

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One launch of four processes does every scenario; what each rank saw, by rank."""
    directory = tmp_path_factory.mktemp("fetch_round")
    return launch(
        "tests.helpers.fetch_worker:run", world_size=WORLD, directory=directory, arguments={}, deadline_s=DEADLINE_S
    )


def test_every_rank_of_a_group_gets_the_rows_of_its_data_parallel_index(answers):
    plan, groups = rounds()
    rows = flatten(groups)
    for rank, answer in enumerate(answers):
        dp_rank = rank // 2
        assert answer["plan"] == plan
        assert answer["rows"] == {number: rows[number] for number in plan.rows_of(dp_rank)}


def test_only_the_source_of_each_group_reads(answers):
    assert [len(answer["reads"]) for answer in answers] == [1, 0, 1, 0]


def test_a_source_that_fails_makes_all_its_peers_raise_the_same_error(answers):
    messages = [answer["failure"] for answer in answers]
    assert messages[0] == messages[1]
    assert "rank 0 could not read the round: WaitTimeoutError: waited 3 s for the queue" in messages[0]
    # the other group's source answered, so its ranks got their rows
    assert messages[2:] == ["none", "none"]


def test_the_group_works_again_after_a_failure(answers):
    assert all(answer["after"] == answer["rows"] for answer in answers)


def test_a_group_of_one_reads_without_communication(answers):
    assert all(answer["alone"] == answer["rows"] for answer in answers)
