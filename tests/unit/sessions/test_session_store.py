"""Writes that wait together are one transaction, in their order, and each caller is told what became of its own."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

from vime.sessions.store import Budget, Session, SessionStore, State


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
