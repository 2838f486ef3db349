"""The registry of waits: what is on disk, when, and that entering costs next to nothing and never raises."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vime.utils import waits
from vime.utils.processes import read_process
from vime.utils.waits import close_registry, doing, open_registry, peer, run_directory, waiting


@pytest.fixture(autouse=True)
def _registry_ends() -> Iterator[None]:
    yield
    close_registry()


def begun(stretch: waits.Stretch, *, seconds_ago: float) -> waits.Stretch:
    """A stretch that is made to look as if it had begun earlier."""
    stretch.__enter__()
    stretch.since = time.monotonic() - seconds_ago
    return stretch


def on_disk(run_dir: Path) -> dict:
    """The file after one look of the registry, as its thread takes them."""
    waits._registry.tick()
    [path] = (run_dir / "waits").glob("*.json")
    return json.loads(path.read_text())


def test_the_file_says_who_writes_it_before_anything_waits(tmp_path: Path) -> None:
    open_registry(tmp_path, "trainer-1")
    found = on_disk(tmp_path)
    assert (found["process"], found["pid"]) == ("trainer-1", os.getpid())
    assert found["start"] == read_process(os.getpid()).start
    assert (found["waits"], found["work"]) == ([], [])
    assert run_directory() == tmp_path


def test_only_what_lasts_is_on_disk_and_it_leaves_with_its_end(tmp_path: Path) -> None:
    open_registry(tmp_path, "driver")
    old = begun(waiting("a round of generation", "rollout-manager", deadline_s=60), seconds_ago=5)
    with waiting("a moment", "ledger", deadline_s=60):
        [found] = on_disk(tmp_path)["waits"]
    assert (found["name"], found["owners"], found["deadline_s"]) == ("a round of generation", ["rollout-manager"], 60)
    assert found["since"] == old.since
    old.__exit__(None, None, None)
    assert on_disk(tmp_path)["waits"] == []


def test_equal_waits_are_one_line_with_their_number_and_the_oldest(tmp_path: Path) -> None:
    open_registry(tmp_path, "rollout-manager")
    # 3 requests begun 5, 9 and 7 s ago, and one of 0 s, which counts although it is not old enough to be shown alone
    requests = [begun(waiting("a completion", "engine", deadline_s=60), seconds_ago=age) for age in (5, 9, 7, 0)]
    begun(waiting("a completion", "router", deadline_s=60), seconds_ago=2)
    first, second = on_disk(tmp_path)["waits"]
    assert (first["count"], first["since"]) == (4, requests[1].since)
    assert (second["count"], second["owners"]) == (1, ["router"])


def test_owners_that_have_answered_are_waited_for_no_more(tmp_path: Path) -> None:
    open_registry(tmp_path, "driver")
    wait = begun(waiting("ranks to train", "trainer-0", "trainer-1", deadline_s=60), seconds_ago=2)
    wait.owners = ("trainer-1",)
    assert on_disk(tmp_path)["waits"][0]["owners"] == ["trainer-1"]


def test_work_is_listed_outermost_first_and_apart_from_waits(tmp_path: Path) -> None:
    open_registry(tmp_path, "trainer-0")
    begun(doing("round 3"), seconds_ago=9)
    begun(doing("optimizer step 1"), seconds_ago=4)
    found = on_disk(tmp_path)
    assert [work["name"] for work in found["work"]] == ["round 3", "optimizer step 1"]
    assert found["waits"] == []


async def test_threads_and_tasks_wait_side_by_side(tmp_path: Path) -> None:
    open_registry(tmp_path, "rollout-manager")
    entered, done = threading.Semaphore(0), threading.Event()

    def in_thread() -> None:
        with waiting("in a thread", deadline_s=60):
            entered.release()
            done.wait(60)

    async def in_task(gate: asyncio.Event) -> None:
        with waiting("in a task", deadline_s=60):
            await gate.wait()

    threads = [threading.Thread(target=in_thread) for _ in range(8)]
    for thread in threads:
        thread.start()
        assert entered.acquire(timeout=60)
    gate = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(50):
            tasks.create_task(in_task(gate))
        await asyncio.sleep(0)  # every task has entered
        later = time.monotonic() + 5
        found = waits._described(waits._OPEN.copy(), later)["waits"]
        gate.set()
    done.set()
    for thread in threads:
        thread.join(60)
    assert {wait["name"]: wait["count"] for wait in found} == {"in a thread": 8, "in a task": 50}
    assert waits._described(waits._OPEN.copy(), later)["waits"] == []


def test_a_wait_that_fails_is_over_and_its_error_goes_on(tmp_path: Path) -> None:
    open_registry(tmp_path, "driver")
    with pytest.raises(TimeoutError, match="too late"), waiting("x", deadline_s=1):
        raise TimeoutError("too late")
    assert waits._OPEN == {}


def test_entering_and_leaving_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_registry(tmp_path, "driver")
    writes: list[object] = []
    monkeypatch.setattr(waits._Registry, "_write", lambda _, found: writes.append(found))
    for _ in range(10_000):
        with waiting("a completion", "engine", deadline_s=60):
            pass
    waits._registry.tick()
    assert writes == []  # nor does a look that finds what it found before


def test_a_file_that_does_not_change_is_touched(tmp_path: Path) -> None:
    open_registry(tmp_path, "driver")
    [path] = (tmp_path / "waits").glob("*.json")
    os.utime(path, (1, 1))
    waits._registry._touched -= waits.HEARTBEAT_S
    waits._registry.tick()
    assert path.stat().st_mtime > 1


def test_the_thread_brings_a_wait_to_the_disk_by_itself(tmp_path: Path) -> None:
    open_registry(tmp_path, "driver")
    [path] = (tmp_path / "waits").glob("*.json")
    ends = time.monotonic() + 60
    with waiting("a completion", "engine", deadline_s=60):
        while not json.loads(path.read_text())["waits"]:
            assert time.monotonic() < ends
            time.sleep(0.05)


def test_a_disk_that_fails_costs_one_warning_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_registry(tmp_path, "driver")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(waits._Registry, "_write", full)
        begun(waiting("a", deadline_s=60), seconds_ago=2)
        for _ in range(3):
            waits._registry.tick()
    assert [record.message for record in caplog.records if "No space left" in record.message] != []
    assert len(caplog.records) == 1
    assert [wait["name"] for wait in on_disk(tmp_path)["waits"]] == ["a"]  # room again


def test_a_wait_that_outlives_its_deadline_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_registry(tmp_path, "driver")
    caplog.set_level(logging.WARNING)
    begun(waiting("ranks to train", "trainer-1", deadline_s=10), seconds_ago=10 + waits.OVERDUE_GRACE_S + 1)
    begun(waiting("a bounded thing", deadline_s=None), seconds_ago=9999)
    begun(waiting("in time", deadline_s=10), seconds_ago=11)
    for _ in range(3):
        waits._registry.tick()
    [record] = caplog.records
    assert "driver waits 41 s for ranks to train from trainer-1, past its deadline of 10 s" in record.message


def test_peers_are_the_ranks_of_the_own_world(tmp_path: Path) -> None:
    open_registry(tmp_path, "critic-2")
    assert (peer(), peer(0)) == ("critic", "critic-0")


@pytest.fixture(autouse=True)
def _no_stretch_is_left() -> Iterator[None]:
    before = set(waits._OPEN)
    yield
    for key in set(waits._OPEN) - before:
        del waits._OPEN[key]
