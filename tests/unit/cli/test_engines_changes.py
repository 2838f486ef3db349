"""`vime engines RUN add|drain`: what the command writes for the run, and what it does with the answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vime.cli import engines as engines_module
from vime.cli.main import main
from vime.observability.requests import (
    Answer,
    AnswerState,
    FleetRequest,
    answer,
    ask,
    open_requests,
    read_answer,
    take,
    waiting_requests,
)
from vime.observability.run_dir import RunDir
from vime.types import ConfigError, DataError


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    with RunDir.create(str(tmp_path / "run"), '{"cluster": {"rollout_num_engines": 2}}') as claimed:
        yield claimed.path


class Driver(threading.Thread):
    """In the place of a run: takes one request and says these answers to it."""

    def __init__(self, run: Path, *said: Answer, last: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(daemon=True)
        self._run, self._said, self._last = run, said, last
        self.request: FleetRequest | None = None
        open_requests(run)
        self.start()

    def run(self) -> None:
        ends = time.monotonic() + 30
        while not (names := waiting_requests(self._run)) and time.monotonic() < ends:
            time.sleep(0.01)
        self.request = take(self._run, names[0])
        for said in self._said:
            answer(self._run, names[0], said)
        self._last(names[0])


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        (["drain", "engine-1"], FleetRequest(command="drain", engine="engine-1")),
        (["drain", "engine-1", "--within", "5"], FleetRequest(command="drain", engine="engine-1", within_s=5.0)),
        (["add"], FleetRequest(command="add")),
        (["add", "2"], FleetRequest(command="add", count=2)),
    ],
)
def test_the_run_gets_the_request_and_its_answer_is_shown(run, capsys, words, request_) -> None:
    driver = Driver(run, Answer(AnswerState.DONE, "engine-1 is stopped"))
    assert main(["engines", str(run), *words]) == 0
    assert driver.request == request_
    assert capsys.readouterr().out.splitlines()[-1] == "engine-1 is stopped"
    assert list((run / "requests").iterdir()) == []


@pytest.mark.parametrize(("state", "code"), [(AnswerState.REFUSED, 2), (AnswerState.FAILED, 3)])
def test_what_the_run_refuses_or_fails_to_do_has_its_exit_code(run, capsys, state, code) -> None:
    Driver(run, Answer(state, "engine-9: this run has no such engine"))
    assert main(["engines", str(run), "drain", "engine-9"]) == code
    assert "engine-9: this run has no such engine" in capsys.readouterr().err


def test_a_run_that_is_over_or_takes_no_requests_is_refused(tmp_path, run, capsys) -> None:
    assert main(["engines", str(run), "add"]) == 2
    assert "takes no requests" in capsys.readouterr().err  # it starts, or stops
    with RunDir.create(str(tmp_path / "over"), "{}") as over:
        open_requests(over.path)
    assert main(["engines", str(over.path), "drain", "engine-0"]) == 2
    assert "it is over" in capsys.readouterr().err
    assert waiting_requests(over.path) == []


def test_a_run_without_engines_of_its_own_is_refused(tmp_path, capsys) -> None:
    with RunDir.create(str(tmp_path / "run"), '{"cluster": {"rollout_num_engines": 0}}') as claimed:
        assert main(["engines", str(claimed.path), "add"]) == 2
    assert "--rollout-num-engines 0" in capsys.readouterr().err


SECONDS = "expected a number of seconds above 0, with drain"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["drain"], "Expected its name, as in `vime engines RUN drain engine-1`"),
        (["add", "none"], "expected a number of engines, as in `vime engines RUN add 2`"),
        (["add", "0"], "expected a number of engines"),
        (["list", "engine-0"], "expected nothing after list"),
        (["add", "--within", "3"], SECONDS),
        *((["drain", "engine-0", f"--within={seconds}"], SECONDS) for seconds in ("0", "-1", "inf", "nan")),
    ],
)
def test_other_words_are_refused_with_an_example(run, capsys, words, said) -> None:
    assert main(["engines", str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_ends_or_starts_its_parts_again_meanwhile_is_not_waited_for(run, tmp_path, capsys) -> None:
    Driver(run, last=lambda _: open_requests(run))
    assert main(["engines", str(run), "add"]) == 3
    assert "started its parts again" in capsys.readouterr().err
    claimed = RunDir.create(str(tmp_path / "ends"), "{}")
    Driver(claimed.path, Answer(AnswerState.WORKING, "engine-2 starts"), last=lambda _: claimed.close())
    assert main(["engines", str(claimed.path), "add"]) == 2
    assert "it is over" in capsys.readouterr().err


def test_a_request_that_nobody_takes_is_withdrawn(run, capsys, monkeypatch) -> None:
    monkeypatch.setattr(engines_module, "TAKEN_S", 0.0)
    open_requests(run)
    assert main(["engines", str(run), "add"]) == 3
    assert "has not taken the request" in capsys.readouterr().err
    assert waiting_requests(run) == []


def test_a_file_of_another_user_is_no_request(run, monkeypatch) -> None:
    open_requests(run)
    name, mine = ask(run, FleetRequest(command="add")), os.stat(run).st_uid
    if mine == 0:
        os.chown(run / "requests" / f"{name}.request.json", 4242, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(DataError, match="a file of user"):
        take(run, name)
    assert waiting_requests(run) == []


def test_the_directory_of_requests_is_of_its_user_alone(run) -> None:
    open_requests(run)
    assert (run / "requests").stat().st_mode & 0o777 == 0o700


def test_requests_of_an_earlier_start_are_not_found(run) -> None:
    open_requests(run)
    name = ask(run, FleetRequest(command="add"))
    open_requests(run)
    assert waiting_requests(run) == []
    assert read_answer(run, name) is None


def test_asking_a_directory_that_nobody_reads_names_it(run) -> None:
    with pytest.raises(ConfigError, match="requests"):
        ask(run, FleetRequest(command="add"))
