"""The directory of one run: its layout, and the lock that lets only one live run write into it.

    RUN_DIR/config.json command.sh run.lock events/ logs/ waits/ eval/ samples/ mismatch/ checkpoints/ metrics.jsonl

Called by the driver before any process starts; every other process gets the path and reads `layout` names from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from vime.observability.events import EventKind
from vime.types import ConfigError, DataError
from vime.utils.files import NoLocksError, lock_file
from vime.utils.waits import DIRECTORY as WAITS

TOUCHED_S = 60.0  # a live process touches its file in `waits/` more often, also on a busy machine
SUBDIRECTORIES = ("events", "logs", "eval", "checkpoints")
LOCK_NAME = "run.lock"
EARLIER = "earlier-starts"
OF_A_START = (
    *("config.json", "command.sh", "events", "logs", WAITS, "eval", "samples", "spool"),
    *("metrics.jsonl", "receipts.jsonl", "machine.json", "trace.json", "wandb", "tensorboard", "report.html"),
)


class RunDir:
    """A claimed run directory. The claim is a file lock: it ends with the process, also after kill -9."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def create(
        cls, path: str | None, config_json: str, *, resume: bool = False, argv: Sequence[str] | None = None
    ) -> RunDir:
        """Make and claim `path` (empty: runs/<date>-<time>), and write config.json and command.sh.

        Refused with ConfigError: a path that another live run holds; an earlier run's directory unless `resume`
        (--load), because its metrics and events would be mixed with this run's; a path that cannot be written. What a
        start left that failed before anything was trained is moved to earlier-starts/.
        """
        root = Path(path).expanduser().resolve() if path else _fresh_path()
        try:
            for name in SUBDIRECTORIES:
                (root / name).mkdir(parents=True, exist_ok=True)
            lock = claim(root, "--run-dir")
        except OSError as error:
            raise ConfigError(
                f"--run-dir {root}: cannot be made: {error}. Expected a directory that can be written; choose another."
            ) from error
        if (root / "config.json").exists() and not resume:
            if found := traces_of_training(root):
                os.close(lock)
                raise ConfigError(
                    f"--run-dir {root}: holds an earlier run (it has {found}), and its metrics and events would be "
                    f"mixed with this run's. Choose another directory, or continue that run with --load "
                    f"{root / 'checkpoints'}."
                )
            _set_aside(root)
            for name in SUBDIRECTORIES:
                (root / name).mkdir(exist_ok=True)
        shutil.rmtree(root / WAITS, ignore_errors=True)  # of processes that are gone
        sign(lock, root)
        (root / "config.json").write_text(config_json)
        _write_command(root / "command.sh", sys.orig_argv if argv is None else argv)
        return cls(root, lock)

    def close(self) -> None:
        """Release the claim; the files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def is_run_dir(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "events").is_dir()


def traces_of_training(root: Path) -> str:
    """Return the files that show that a run has generated, evaluated, trained or saved here; empty after a failed
    start."""
    for name, mark in (
        ("metrics.jsonl", "{"),
        ("receipts.jsonl", '"groups":'),
    ):  # receipts begin with a line of no round
        if (root / name).is_file() and mark in (root / name).read_text(errors="replace"):
            return name
    for pattern in ("checkpoints/iter_*", "eval/*", "samples/*", "spool/*"):
        if found := next(root.glob(pattern), None):
            return str(found.relative_to(root))
    marks = [f'"{kind}"' for kind in (EventKind.ROUND_GENERATED, EventKind.ROUND_TRAINED, EventKind.CHECKPOINT_SAVED)]
    for file in (root / "events").glob("*.jsonl"):
        if any(mark in line for line in file.read_text(errors="replace").splitlines() for mark in marks):
            return str(file.relative_to(root))
    return ""


def _set_aside(root: Path) -> None:
    """Move what a failed start left, also its logs, to earlier-starts/1, 2, ..., so that nothing is lost."""
    number = 1 + sum(1 for _ in (root / EARLIER).glob("*"))
    aside = root / EARLIER / str(number)
    aside.mkdir(parents=True)
    for entry in root.iterdir():
        if entry.name in OF_A_START or entry.name.startswith("ledger."):  # other files are not ours
            entry.rename(aside / entry.name)


def check_run_dir(path: Path) -> None:
    """ConfigError when `path` holds no run."""
    if not is_run_dir(path):
        what = "is no directory" if not path.is_dir() else "is a directory without config.json and events/"
        raise ConfigError(
            f"{path}: {what}; expected the run directory of a Vime run. Runs are in runs/ unless --run-dir."
        )


def is_alive(run: Path) -> bool:
    """Whether a process holds the run directory: its lock ends with it. A node that sees the files without their locks
    looks whether one of `waits/` was touched of late, which each process of a live run does every few seconds."""
    try:
        lock = os.open(run / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        lock_file(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, run / LOCK_NAME)
    except BlockingIOError:
        return True
    except NoLocksError:
        return _is_touched(run)
    finally:
        os.close(lock)
    return False


def read_config(run: Path) -> dict[str, object]:
    """Return the configuration of the run by section. DataError when its config.json is damaged."""
    path = run / "config.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}. Expected what a run writes when it starts.") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}: is a JSON {type(record).__name__}. Expected what a run writes when it starts.")
    return record


def config_value(config: Mapping[str, object], section: str, knob: str, otherwise: object = None) -> object:
    """Return a knob from the result of `read_config`; `otherwise` where the run's version of Vime did not have it."""
    part = config.get(section)
    return part.get(knob, otherwise) if isinstance(part, Mapping) else otherwise


def _fresh_path() -> Path:
    """runs/<date>-<time> under the working directory; a number is added when two runs start in one second."""
    stem = Path("runs").resolve() / time.strftime("%Y%m%d-%H%M%S")
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def _is_touched(run: Path) -> bool:
    for file in (run / WAITS).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if abs(time.time() - file.stat().st_mtime) < TOUCHED_S:
                return True
    return False


def claim(root: Path, flag: str) -> int:
    """Lock run.lock in `root`, which is made when missing, without waiting. Returns the descriptor of the lock.
    ConfigError names the run that holds it, or says that the file system has no locks: nothing else would keep two runs
    on two nodes apart. A lock is free when its process has ended, in whatever way."""
    root.mkdir(parents=True, exist_ok=True)
    lock = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, root / LOCK_NAME)
    except NoLocksError as error:
        os.close(lock)
        raise ConfigError(f"{flag} {error}") from error
    except BlockingIOError:
        owner = os.read(lock, 4096).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ConfigError(
            f"{flag} {root}: belongs to a run that is alive ({owner}). Choose another directory, or stop that run."
        ) from None
    return lock


def sign(lock: int, run_dir: Path) -> None:
    """Write the holder into a lock."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {os.uname().nodename}, run directory {run_dir}\n".encode(), 0)


@contextlib.contextmanager
def claimed_checkpoints(save: str | None) -> Iterator[Callable[[Path], None]]:
    """Hold the directory that this run saves into, `--save` or RUN_DIR/checkpoints, so that no second run deletes what
    it is writing. The run calls the returned function with its directory when there is one."""
    with contextlib.ExitStack() as stack:

        def hold(directory: Path, flag: str) -> int:
            try:
                lock = claim(directory, flag)
            except OSError as error:
                raise ConfigError(
                    f"{flag} {directory}: cannot be written: {error}. Expected a directory that can be written; choose "
                    "another."
                ) from error
            stack.callback(os.close, lock)
            return lock

        given = None if save is None else hold(Path(save), "--save")
        yield lambda run_dir: sign(hold(run_dir / "checkpoints", "--run-dir") if given is None else given, run_dir)


def _write_command(path: Path, argv: Sequence[str]) -> None:
    """Write a script that runs this command again, from the same working directory."""
    path.write_text(f"#!/usr/bin/env bash\ncd {shlex.quote(os.getcwd())}\nexec {shlex.join(argv)}\n")
    path.chmod(0o755)
