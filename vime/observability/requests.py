"""What somebody asks of a live run: a file in RUN_DIR/requests, which its driver answers with a file beside it.

The driver listens on no port for this. The directory belongs to the run's user alone, and a file of another user is
refused: who may write there could change anything else of the run too (docs/security.md).

    <id>.request.json   made by `vime engines RUN add|drain`; removed by the driver when it has taken it
    <id>.answer.json    replaced by the driver as the work goes on; removed by who asked when it says the end
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from vime.types import ConfigError, DataError

DIRECTORY = "requests"
ASKED, ANSWERED = ".request.json", ".answer.json"
MAX_BYTES = 1 << 16


class FleetRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of the engines of a run."""

    command: Literal["add", "drain"]
    engine: str = ""  # to drain
    count: int = 1  # to add
    within_s: float | None = None  # for the requests of a drained engine to end; None: as long as one may take


class AnswerState(StrEnum):
    WORKING = "working"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


class Answer(msgspec.Struct, frozen=True):
    """How far the driver is, in words for the user."""

    state: AnswerState
    said: str


def open_requests(run: Path) -> None:
    """Take requests from now on, none of those of an earlier start."""
    shutil.rmtree(run / DIRECTORY, ignore_errors=True)
    (run / DIRECTORY).mkdir(mode=0o700)


def ask(run: Path, request: FleetRequest) -> str:
    """Write a request for the driver. Returns its id. ConfigError when this run takes none."""
    name = f"{time.time_ns()}-{os.getpid()}"
    try:
        _write(run / DIRECTORY / f"{name}{ASKED}", msgspec.json.encode(request))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{run}: takes no requests: there is no {DIRECTORY}/ in it. Expected a run whose engines are up and that "
            "is not stopping. Ask again when it has started (`vime engines` shows its engines)."
        ) from error
    except OSError as error:
        raise ConfigError(f"{run / DIRECTORY}: cannot be written: {error}. Ask as the user of the run.") from error
    return name


def withdraw(run: Path, name: str) -> bool:
    """Remove a request. Returns whether the driver had not taken it."""
    try:
        (run / DIRECTORY / f"{name}{ASKED}").unlink()
    except FileNotFoundError:
        return False
    return True


def is_known(run: Path, name: str) -> bool:
    """Whether the driver has the request, or will find it."""
    return any((run / DIRECTORY / f"{name}{suffix}").exists() for suffix in (ASKED, ANSWERED))


def read_answer(run: Path, name: str) -> Answer | None:
    """Return the answer of now; None: not taken yet. An answer that says the end is removed."""
    path = run / DIRECTORY / f"{name}{ANSWERED}"
    try:
        answer = msgspec.json.decode(path.read_bytes(), type=Answer)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise DataError(f"{path}: cannot be read: {error}. Expected the driver's answer. Ask again.") from error
    if answer.state is not AnswerState.WORKING:
        with contextlib.suppress(OSError):
            path.unlink()
    return answer


def waiting_requests(run: Path) -> list[str]:
    """Return the ids of the requests that are not taken, the oldest first."""
    try:
        names = os.listdir(run / DIRECTORY)
    except OSError:
        return []
    return sorted(name.removesuffix(ASKED) for name in names if name.endswith(ASKED))


def take(run: Path, name: str) -> FleetRequest | None:
    """Take a request. None when it was withdrawn. DataError when it is none, or of another user."""
    path = run / DIRECTORY / f"{name}{ASKED}"
    try:
        with path.open("rb") as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read(MAX_BYTES)
    except OSError:
        return None
    answer(run, name, Answer(AnswerState.WORKING, "the run has the request"))  # before it is gone: it is known always
    if not withdraw(run, name):
        with contextlib.suppress(OSError):
            (run / DIRECTORY / f"{name}{ANSWERED}").unlink()
        return None
    if owner not in (os.getuid(), 0):
        raise DataError(f"a file of user {owner}; expected one of the run's user ({os.getuid()}). Ask as that user.")
    try:
        return msgspec.json.decode(content, type=FleetRequest)
    except msgspec.DecodeError as error:
        raise DataError(f"no request: {error}. Ask with `vime engines`, of the same version as the run.") from error


def answer(run: Path, name: str, said: Answer) -> None:
    """Say how far a request is. A disk that is full costs the answer, not the run."""
    with contextlib.suppress(OSError):
        _write(run / DIRECTORY / f"{name}{ANSWERED}", msgspec.json.encode(said))


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
