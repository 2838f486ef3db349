"""Writes that wait together are one transaction, in their order, and each caller is told what became of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shutil
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest

from vime.sessions import store as store_module
from vime.sessions.recording import Turn
from vime.sessions.store import (
    Budget,
    DamagedSessionsError,
    Entry,
    Reply,
    Session,
    SessionStore,
    State,
    forget_sessions,
    keep_sessions,
)
from vime.types import VersionSpan, VimeError


def session(number: int, state: State = State.OPEN) -> Session:
    return Session(
        id=str(number), key_hash=str(number), group_index=0, index=number, budget=Budget(), created=0.0,
        last_asked=0.0, state=state,
    )  # fmt: skip


def test_writes_that_wait_together_wait_for_the_disk_once(tmp_path: Path) -> None:
    statements: list[str] = []

    async def play() -> list[tuple[str, State]]:
        store, gate = SessionStore(tmp_path / "s.sqlite"), threading.Event()
        store._thread.submit(store._database.set_trace_callback, statements.append).result(60)
        held = store._thread.submit(gate.wait, 60)
        writes = [asyncio.create_task(store.put_session(session(number))) for number in range(64)]
        writes.append(asyncio.create_task(store.put_session(session(0, State.FAILED))))  # the later one counts
        while len(store._waiting) < len(writes):
            await asyncio.sleep(0)
        writes.pop(1).cancel()  # whoever asked for it went away
        gate.set()
        await asyncio.gather(*writes)
        assert held.result()
        found = [(one.id, one.state) for one, _ in await store.load()]
        await store.close()
        return found

    found = asyncio.run(asyncio.wait_for(play(), 60))
    assert sorted(found) == sorted((str(number), State.OPEN if number else State.FAILED) for number in range(64))
    assert statements.count("COMMIT") == 1


def test_a_write_that_failed_is_told_to_everybody_who_waited_with_it(tmp_path: Path) -> None:
    async def play() -> list[object]:
        store = SessionStore(tmp_path / "s.sqlite")
        store._thread.submit(store._database.execute, "PRAGMA query_only=1").result(60)
        told = await asyncio.gather(
            *(store.put_session(session(number)) for number in range(3)), return_exceptions=True
        )
        store._thread.submit(store._database.execute, "PRAGMA query_only=0").result(60)
        await store.put_session(session(7))
        assert [one.id for one, _ in await store.load()] == ["7"]
        await store.close()
        return list(told)

    told = asyncio.run(asyncio.wait_for(play(), 60))
    assert len(told) == 3
    assert all(isinstance(error, sqlite3.OperationalError) and "readonly" in str(error) for error in told), told


def turn(*versions: int) -> Entry:
    spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))
    made = Turn(
        number=0, prompt_ids=(1,), token_ids=(2,) * len(versions), log_probs=(-1.0,) * len(versions),
        versions=spans, finish_reason="stop", cached_tokens=0,
    )  # fmt: skip
    return Entry(turn=made, digest="", idempotency_key="", messages=None, tools=[], reply=Reply(), created=0.0)


@pytest.mark.parametrize(
    ("versions", "claim", "state", "expected"),
    [
        ((), "", State.OPEN, (1, 0)),  # its agent has asked for nothing yet
        ((3, 4), "a", State.OPEN, (1, 0)),
        ((4,), "", State.COMPLETE, (1, 0)),
        ((1, 3), "", State.OPEN, (1, 0)),  # its newest token can be trained
        ((4, 5), "", State.OPEN, (0, 1)),  # by weights that do not come again
        ((2,), "", State.OPEN, (0, 1)),  # too old to be trained
        ((2,), "", State.COMPLETE, (0, 0)),  # and trained already, or too old in any case
        ((4,), None, State.OPEN, (0, 0)),  # nobody has claimed it, or it was one of an evaluation
        ((4,), "", State.FAILED, (0, 0)),
    ],
)
def test_which_sessions_the_next_process_can_go_on_with(
    tmp_path: Path, versions: tuple[int, ...], claim: str | None, state: State, expected: tuple[int, int]
) -> None:
    one = session(0, state)
    one.claim = claim
    turns = [turn(*versions)] if versions else []
    path = written(tmp_path, [(one, turns)])
    assert forget_sessions(path, newest=4, oldest=3) == expected
    assert forget_sessions(path, newest=4, oldest=3) == (expected[0], 0)  # what is forgotten is gone
    assert left(path) == ([(one, len(turns))] if expected[0] else [])


def test_of_several_claimed_sessions_of_a_sample_the_last_goes_on(tmp_path: Path) -> None:
    """A sample of an evaluation may have the same numbers; it is never noted as claimed."""
    found = [session(0), session(0), session(0)]
    for at, one in enumerate(found):
        one.id, one.key_hash, one.created = f"s{at}", f"h{at}", float(10 - at)
        one.claim = None if at == 0 else ""
    path = written(tmp_path, [(one, []) for one in found])
    assert forget_sessions(path, newest=0, oldest=0) == (1, 0)
    assert [one.id for one, _ in left(path)] == ["s1"]


def test_a_run_that_begins_has_no_sessions_to_look_at(tmp_path: Path) -> None:
    assert forget_sessions(tmp_path / "s.sqlite", newest=0, oldest=0) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def written(directory: Path, sessions: list[tuple[Session, list[Entry]]]) -> Path:
    async def write() -> None:
        store = SessionStore(directory / "s.sqlite")
        for one, turns in sessions:
            await store.put_session(one)
            for entry in turns:
                await store.put_turn(one.id, entry)
        await store.close()

    asyncio.run(write())
    return directory / "s.sqlite"


def left(path: Path) -> list[tuple[Session, int]]:
    async def read() -> list[tuple[Session, int]]:
        store = SessionStore(path)
        found = [(one, len(turns)) for one, turns in await store.load()]
        await store.close()
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_flipped_bit_is_named_or_changes_nothing(tmp_path: Path, is_killed: bool) -> None:
    """What a killed process left has all of it in the log, what one that ended has none."""
    sessions = [session(number) for number in range(3)]
    for one in sessions:
        one.claim = "a" * 40
    files = [path for path in left_files(tmp_path, sessions, is_killed) if not path.name.endswith("-shm")]
    whole = {path.name: path.read_bytes() for path in files if path.stat().st_size}
    expected = ((3, 0), [(one, 4) for one in sessions])
    chance, num_named = random.Random(7), 0
    for attempt in range(200):
        place = tmp_path / str(attempt)
        place.mkdir()
        for name, data in whole.items():
            (place / name).write_bytes(data)
        changed = place / chance.choice(sorted(whole))
        flipped = bytearray(changed.read_bytes())
        if attempt:
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        changed.write_bytes(flipped)
        try:
            found = (forget_sessions(place / "s.sqlite", newest=0, oldest=0), left(place / "s.sqlite"))
        except DamagedSessionsError:
            num_named += 1
        else:
            assert found == expected, changed
    assert 40 < num_named < 200


@pytest.mark.parametrize("is_long", [False, True])
def test_what_a_kill_cut_off_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool) -> None:
    """A log that was moved into the file in between is cut like any other."""
    if is_long:
        monkeypatch.setattr(store_module, "LONGEST_LOG", 100_000)
    sessions = [session(number) for number in range(20)]
    for one in sessions:
        one.claim = "a"
    files = {path.name: path.read_bytes() for path in left_files(tmp_path, sessions, is_killed=True)}
    log = files["s.sqlite-wal"]
    assert (len(files["s.sqlite"]) > 20_000) == is_long
    assert 0 < len(log) < (120_000 if is_long else 2_000_000)
    counts = []
    for length in [*range(0, len(log), len(log) // 60), len(log)]:
        place = tmp_path / str(length)
        place.mkdir()
        (place / "s.sqlite").write_bytes(files["s.sqlite"])
        (place / "s.sqlite-wal").write_bytes(log[:length])
        counts.append(forget_sessions(place / "s.sqlite", newest=0, oldest=0)[0])
    assert counts == sorted(counts)  # a longer log has no less
    assert counts[-1] >= 19


def test_the_log_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sqlite moves one of 1,000 pages into the file by itself, and writes over it: a kill in that looks like damage."""
    monkeypatch.setattr(store_module, "LONGEST_LOG", 1 << 40)
    one = msgspec.structs.replace(session(0), reason="a" * 500_000)
    files = {path.name: path for path in left_files(tmp_path, [one] * 12, is_killed=True)}
    assert files["s.sqlite-wal"].stat().st_size > 1_200 * 4_096
    assert files["s.sqlite"].stat().st_size < 50_000


def test_a_text_that_is_no_text_is_damage_and_no_fault_of_ours(tmp_path: Path) -> None:
    """sqlite looks at no text, and Python's own error has no code of sqlite."""
    [path, *_] = sorted(left_files(tmp_path, [session(0)], is_killed=False))
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE turns SET session = CAST(x'ff' AS TEXT)")
    with pytest.raises(DamagedSessionsError, match="Could not decode to UTF-8"):
        forget_sessions(path, newest=0, oldest=0)


def test_a_file_that_is_in_use_is_named_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path, *_] = sorted(left_files(tmp_path, [session(0)], is_killed=False))
    monkeypatch.setattr(store_module, "PATIENCE_S", 0.1)
    with sqlite3.connect(path) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(VimeError, match=r"database is locked. .* end the program that uses the file") as found:
            keep_sessions(path)
        assert not isinstance(found.value, DamagedSessionsError)
    other.close()
    assert path.exists()


def left_files(directory: Path, sessions: list[Session], is_killed: bool) -> list[Path]:
    copies: list[Path] = []
    (directory / "left").mkdir()

    async def write() -> None:
        store = SessionStore(directory / "s.sqlite")
        for one in sessions:
            await store.put_session(one)
            for number in range(4):
                made = turn(0, 0, 0)
                numbered = dataclasses.replace(made.turn, number=number)
                await store.put_turn(one.id, msgspec.structs.replace(made, turn=numbered, digest=str(number) * 300))
        await store.load()  # behind whatever the store still does
        if not is_killed:
            await store.close()
        for file in directory.glob("s.sqlite*"):
            copies.append(Path(shutil.copy(file, directory / "left")))
        if is_killed:
            await store.close()

    asyncio.run(write())
    return copies
