"""The output of a process: its log goes to RUN_DIR/logs/<process>.log, warnings also to the screen, and its waits to
RUN_DIR/waits."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from pathlib import Path
from typing import TextIO

from vime.utils.waits import open_registry

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
NOISY = (
    "httpx", "httpcore", "urllib3", "asyncio", "filelock", "matplotlib", "fontTools", "PIL", "h5py", "numba",
    "megatron", "transformers", "datasets", "tensorboard", "wandb", "git", "transfer_queue",
)  # fmt: skip


class _LogHandler(logging.FileHandler):
    """Prints only one line when the disk is full; the code that needs the disk reports what the run does about it."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            sys.stderr.write(f"WARNING {self.baseFilename} cannot be written: {error}\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what the full disk has not taken
            super().close()


class _ScreenHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, so that a progress bar can keep its own lines."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logging(run_dir: Path, process: str, *, level: int = logging.INFO) -> Path:
    """Route the log of this process and keep its waits on disk. Returns the log file. Called once per process; a second
    call replaces the first."""
    path = Path(run_dir) / "logs" / f"{process}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = _LogHandler(path)
    to_file.setFormatter(logging.Formatter(FORMAT))
    to_screen = _ScreenHandler()
    to_screen.setLevel(logging.WARNING)
    to_screen.setFormatter(logging.Formatter(f"%(levelname)s {process}: %(message)s"))
    root = logging.getLogger()
    for handler in [kept for kept in root.handlers if isinstance(kept, _LogHandler | _ScreenHandler)]:
        root.removeHandler(handler)
        handler.close()
    for handler in (to_file, to_screen):
        root.addHandler(handler)
    root.setLevel(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    # A Python warning is for developers: it belongs in the file, once per place, not between a user's rounds.
    logging.getLogger("py.warnings").setLevel(logging.WARNING)
    to_screen.addFilter(lambda record: record.name != "py.warnings")
    warnings.simplefilter("once", DeprecationWarning)
    open_registry(Path(run_dir), process)
    return path
