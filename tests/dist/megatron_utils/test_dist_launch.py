"""The launcher of the distributed tests: answers by rank, no hang, nothing left running."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.helpers import dist_launch
from tests.helpers.dist_launch import launch


def assert_all_gone(directory: Path) -> None:
    pids = [int(file.read_text()) for file in directory.glob("pid-?")]
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_answers_come_back_by_rank_and_ports_agree(tmp_path: Path) -> None:
    first, second = launch(
        "tests.helpers.launch_targets:meet",
        world_size=2,
        directory=tmp_path,
        arguments={"greeting": "hello"},
        deadline_s=120,
    )
    assert (first[:2], second[:2]) == (("hello", 0), ("hello", 1))
    assert first[2] == second[2]


def test_ranks_of_a_parent_with_a_thread_are_new_processes(tmp_path: Path) -> None:
    answers = launch(
        "tests.helpers.launch_targets:meet",
        world_size=2,
        directory=tmp_path,
        arguments={"greeting": "hello"},
        deadline_s=120,
        preload="tests.helpers.launch_targets:start_a_thread",
    )
    assert [answer[:2] for answer in answers] == [("hello", 0), ("hello", 1)]


def test_launches_with_the_same_imports_are_forks_of_one_process_that_the_session_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins with what the imports made, and with nothing that an earlier one did; a variable of the environment,
    which an import may have read, makes another process."""
    monkeypatch.setattr(dist_launch, "_bases", {})  # others go on
    answers = []
    try:
        for number, variables in enumerate(({}, {}, {"VIME_TEST_LAUNCH": "1"})):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                [answer] = launch(
                    "tests.helpers.launch_targets:count",
                    world_size=1,
                    directory=tmp_path / str(number),
                    arguments={},
                    deadline_s=120,
                    preload="tests.helpers.launch_targets:import_once",
                )
            answers.append(answer)
        imported = [by for _, _, by in answers]
        assert [psutil.pid_exists(pid) for pid in imported] == [True] * 3
    finally:
        dist_launch.pytest_sessionfinish()
    assert [psutil.pid_exists(pid) for pid in imported] == [False] * 3
    assert len({pid for pid, _, _ in answers}) == 3
    assert [calls for _, calls, _ in answers] == [1, 1, 1]
    assert imported[0] == imported[1] != imported[2]


def test_the_failing_rank_of_a_fork_is_shown_and_its_peer_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 raised.*rank one has had enough"):
        launch(
            "tests.helpers.launch_targets:fail_on_one",
            world_size=2,
            directory=tmp_path,
            arguments={},
            deadline_s=120,
            preload="tests.helpers.launch_targets:import_once",
        )
    assert_all_gone(tmp_path)


def test_the_traceback_of_the_failing_rank_is_shown_and_its_peer_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 raised.*rank one has had enough"):
        launch(
            "tests.helpers.launch_targets:fail_on_one", world_size=2, directory=tmp_path, arguments={}, deadline_s=120
        )
    assert_all_gone(tmp_path)


def test_the_deadline_ends_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when both of them wait."""

    def now() -> float:
        return time.time() + (1e6 if len(list(tmp_path.glob("pid-?"))) == 2 else 0)

    monkeypatch.setattr(dist_launch, "time", SimpleNamespace(time=now, sleep=time.sleep))
    with pytest.raises(AssertionError, match="deadline reached"):
        launch(
            "tests.helpers.launch_targets:wait_for_ever", world_size=2, directory=tmp_path, arguments={}, deadline_s=120
        )
    assert_all_gone(tmp_path)
