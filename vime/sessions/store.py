"""The durable state of sessions: one SQLite file, written before anything is answered.

Every write is in a transaction with `synchronous=FULL`: what was acknowledged survives a SIGKILL and a power cut.
Writes that wait at the same time share one, because each costs a wait for the disk. Each row has a checksum: what is
read again may be trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from vime.handoff.ledger_file import find_damage
from vime.sessions.recording import Turn
from vime.types import Version, VimeError

AGENTS_ELSEWHERE = Path("sessions") / "elsewhere.sqlite"
"""In the directory of a run of mode streaming with --agent-listen: its sessions outlive the process that serves
them."""
ANY_VERSION = sys.maxsize
CRC_BYTES = 4
PATIENCE_S = 5.0
"""How long another process may hold the file."""
LONGEST_LOG = 4 << 20
"""Bytes of the write-ahead log after which it is moved into the file."""
OF_THE_MACHINE = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
        *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM),
    }
)
"""Errors of sqlite that say nothing about the file's content."""
logger = logging.getLogger(__name__)
T = TypeVar("T")
Record = TypeVar("Record", "Session", "Entry")
Work = Callable[[sqlite3.Connection], object]


class DamagedSessionsError(VimeError):
    """The file of sessions is not as it was written."""


class State(StrEnum):
    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool; `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a completion says, read by the parsers of the model's family."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session may use; None is no limit. Tokens are sampled ones."""

    turns: int | None = None
    tokens: int | None = None
    seconds: float | None = None


class Session(msgspec.Struct, kw_only=True):
    """One sample of a group. `reason` says why it failed, `stopped` which budget ended it. `claim`: the Idempotency-Key
    (or "") with which an agent elsewhere got the session, where that is to outlive this process; else None."""

    id: str
    key_hash: str
    group_index: int
    index: int
    budget: Budget
    created: float  # seconds since 1970, as are the others
    last_asked: float
    state: State = State.OPEN
    reason: str = ""
    stopped: str = ""
    reward: float | None = None
    claim: str | None = None


class Entry(msgspec.Struct, kw_only=True):
    """One turn with what is needed to answer it again: its answer is a function of this alone.

    `messages` is the conversation that was asked; None for a request made of tokens. `claimed` is the largest retry
    count that this turn was the answer to. `is_lost`: its answer did not arrive whole, and nobody has asked again.
    """

    turn: Turn
    digest: str
    idempotency_key: str
    messages: list[dict[str, object]] | None
    tools: list[dict[str, object]]
    reply: Reply
    created: float
    claimed: int = 0
    is_lost: bool = False

    @property
    def versions(self) -> list[Version]:
        return sorted({span.version for span in self.turn.versions})


SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, key_hash TEXT UNIQUE NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS turns (session TEXT NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (session, number));
"""


class SessionStore:
    """All calls run in one thread of its own, in the order in which they were made."""

    def __init__(self, path: Path) -> None:
        self._waiting: deque[tuple[Work, asyncio.Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-store")
        self._database = self._thread.submit(_opened, path).result()
        self._log = _log_of(path)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transaction() -> T:
            with self._database:
                return work(self._database)

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    async def _write(self, work: Work) -> None:
        """Return when the work is on the disk. It gets there also when the caller is cancelled."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._waiting.append((work, done))
        if len(self._waiting) == 1:  # else the thread was told already, or is taking them just now
            self._thread.submit(self._write_what_waits, loop)
        await done

    def _write_what_waits(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write everything that waits by now; nothing, when an earlier call took it along."""
        taken: list[tuple[Work, asyncio.Future[None]]] = []
        problem: BaseException | None = None
        while self._waiting:
            taken.append(self._waiting.popleft())
        try:
            with self._database:
                for work, _ in taken:
                    work(self._database)
        except BaseException as error:  # boundary: whatever it is, it is told to everybody whose write did not happen
            problem = error
        loop.call_soon_threadsafe(_tell, [done for _, done in taken], problem)
        self._fold_in()

    def _fold_in(self) -> None:
        """Move a long log into the file, and truncate it. Where that fails it stays, and is moved later."""
        with contextlib.suppress(OSError, sqlite3.Error):
            if self._log.stat().st_size > LONGEST_LOG:
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    async def put_session(self, session: Session) -> None:
        row = (session.id, session.key_hash, _encoded(session))
        await self._write(lambda database: database.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", row))

    async def put_turn(self, session_id: str, entry: Entry) -> None:
        row = (session_id, entry.turn.number, _encoded(entry))
        await self._write(lambda database: database.execute("INSERT OR REPLACE INTO turns VALUES (?, ?, ?)", row))

    async def delete(self, session_id: str) -> None:
        await self._write(_deleting(session_id))

    async def load(self) -> list[tuple[Session, list[Entry]]]:
        """Return every session with its turns in order. A session was last asked for its newest turn, which does not
        write the session again."""

        return await self._run(_all_sessions)

    async def turns(self, session_id: str) -> list[Entry]:
        """Return the turns of one session, in order."""
        query = "SELECT body FROM turns WHERE session = ? ORDER BY number"
        return await self._run(
            lambda database: [_decoded(body, Entry) for (body,) in database.execute(query, (session_id,))]
        )

    async def close(self) -> None:
        await self._run(lambda database: database.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()


def keep_sessions(path: Path, *, newest: Version = ANY_VERSION, oldest: Version = 0) -> None:
    """Leave the sessions that the successor of their process can go on with, and say in the log how many. A damaged
    file is set aside: its sessions end, and their samples are given to agents anew."""
    try:
        kept, lost = forget_sessions(path, newest=newest, oldest=oldest)
    except DamagedSessionsError as error:
        for file in path.parent.glob(f"{path.name}*"):
            file.rename(file.with_name(f"damaged.{file.name}"))
        logger.warning("%s. All sessions of agents elsewhere end; the file is damaged.%s now", error, path.name)
        return
    if kept or lost:
        logger.info(
            "sessions of agents elsewhere: %d kept; %d under way ended: their weights do not come again, or are old",
            *(kept, lost),
        )


def forget_sessions(path: Path, *, newest: Version, oldest: Version) -> tuple[int, int]:
    """Delete the sessions of a process that has ended which its successor cannot go on with; return how many stay, and
    how many under way are gone because of their versions.

    One stays when an agent has claimed it, it has not failed, no token is of a version above `newest` (those weights
    will not come again) and the newest is not of one below `oldest` (it could not be trained). Of several claimed ones
    of one sample only the last counts. DamagedSessionsError when a bit of the file or its log is not as it was written,
    VimeError when it cannot be read or written now.
    """
    if not path.exists():
        return 0, 0
    try:
        return _forget(path, newest, oldest)
    except sqlite3.DatabaseError as error:
        # without a code: Python could not read what sqlite has returned, a text that is no UTF-8
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in OF_THE_MACHINE:
            what = "Make room on the disk, or end the program that uses the file, and start again"
            raise VimeError(f"{path}: cannot be read and written: {error}. {what}.") from error
        raise DamagedSessionsError(f"{path}: {error}") from error


def _forget(path: Path, newest: Version, oldest: Version) -> tuple[int, int]:
    log = _log_of(path)
    fault = find_damage(log.read_bytes()) if log.exists() else None
    if fault is not None:  # sqlite would drop the rest of it silently
        raise DamagedSessionsError(f"{log}: {fault}")
    with contextlib.closing(_opened(path)) as database, database:
        for [fault] in database.execute("PRAGMA integrity_check"):
            if fault != "ok":
                raise DamagedSessionsError(f"{path}: {fault}")
        found = _all_sessions(database)
        claimed = sorted((one for one, _ in found if one.claim is not None), key=lambda one: one.created)
        last = {(one.group_index, one.index): one.id for one in claimed}
        num_kept = num_lost = 0
        for session, entries in found:
            versions = [version for entry in entries for version in entry.versions] or [newest]
            is_last = last.get((session.group_index, session.index)) == session.id
            may_go_on = is_last and session.state is not State.FAILED
            if may_go_on and oldest <= max(versions) <= newest:
                num_kept += 1
            else:
                num_lost += may_go_on and session.state is State.OPEN
                _deleting(session.id)(database)
    return num_kept, num_lost


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, timeout=PATIENCE_S)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA wal_autocheckpoint=0")  # it would overwrite the log, in which damage is looked for
    database.execute("PRAGMA synchronous=FULL")
    database.executescript(SCHEMA)
    return database


def _all_sessions(database: sqlite3.Connection) -> list[tuple[Session, list[Entry]]]:
    turns: dict[str, list[Entry]] = {}
    for session_id, body in database.execute("SELECT session, body FROM turns ORDER BY session, number"):
        turns.setdefault(session_id, []).append(_decoded(body, Entry))
    bodies = database.execute("SELECT body FROM sessions ORDER BY rowid")
    sessions = [_decoded(body, Session) for (body,) in bodies]
    for session in sessions:
        times = [entry.created for entry in turns.get(session.id, [])]
        session.last_asked = max([session.last_asked, *times])
    return [(session, turns.get(session.id, [])) for session in sessions]


def _encoded(record: Session | Entry) -> bytes:
    body = msgspec.msgpack.encode(record)
    return zlib.crc32(body).to_bytes(CRC_BYTES, "little") + body


def _decoded(row: bytes, kind: type[Record]) -> Record:
    if zlib.crc32(row[CRC_BYTES:]).to_bytes(CRC_BYTES, "little") != row[:CRC_BYTES]:
        raise DamagedSessionsError(f"a {kind.__name__.lower()} of {len(row)} bytes does not fit its checksum")
    return msgspec.msgpack.decode(row[CRC_BYTES:], type=kind)


def _deleting(session_id: str) -> Callable[[sqlite3.Connection], None]:
    def work(database: sqlite3.Connection) -> None:
        database.execute("DELETE FROM turns WHERE session = ?", (session_id,))
        database.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    return work


def _tell(callers: Sequence[asyncio.Future[None]], problem: BaseException | None) -> None:
    """Say to each who still waits what became of its write."""
    for caller in callers:
        if not caller.done() and problem is None:
            caller.set_result(None)
        elif not caller.done() and problem is not None:
            caller.set_exception(problem)
