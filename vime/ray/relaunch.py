"""Continue a run whose Ray died in a new program under the same pid.

Ray's library ends the process that uses it when a server of Ray is gone (`ray/servers.py::watched_ray`), past every
`except`, and cannot be taken out of it. So the process replaces its program before that: execve keeps the pid, the
terminal and the children. Everything that the old program had started is then a descendant of this process, orphans
included, and is ended by pid; `ray/launch.py` treats the loss like that of any other part.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import psutil

from vime.config.migration import SECRETS, TO_ENVIRONMENT
from vime.types import ClusterError
from vime.utils.processes import read_processes, title, tree

HANDED_ON = "VIME_AFTER_RAY"
"""In the environment of the new program: a `Loss`."""
PR_SET_CHILD_SUBREAPER = 36
END_S, POLL_S = 60.0, 0.02
REAP_S = 60.0
NUM_STREAMS = 3  # stdin, stdout, stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What the old program knew when a server of Ray died: about its attempt, and what `Restarts` had counted."""

    server: str
    run_dir: str
    is_alone: bool
    may_restart: bool
    trained_round: int
    num_restarts: int
    newest_round: int
    found: str | None
    loaded: str | None


class Program:
    """What this process runs now. Made before it starts anything. `loss`: why it replaced another one, None if none.

    `is_alone`: every descendant of this process will be its own. False where children existed before, for example of a
    shell that became this process: then nothing is ended, and a loss of Ray ends the run.
    """

    def __init__(self) -> None:
        handed_on = os.environ.pop(HANDED_ON, None)
        self.loss = None if handed_on is None else Loss(**json.loads(handed_on))
        self._environment = dict(os.environ)  # without what the run adds, such as the token of a Ray that is gone
        self.is_alone = len(tree(os.getpid(), read_processes())) == 1 if self.loss is None else self.loss.is_alone

    def adopt_orphans(self) -> None:
        """Make this process the parent of its orphaned descendants, if all of them will be its own.

        Not before something is started: a process that never reaps its children keeps the dead ones, and the workers of
        another Ray then take their dead raylet for alive."""
        if self.is_alone:
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            threading.Thread(target=_reap_orphans, name="vime-orphans", daemon=True).start()

    def end_what_is_left(self) -> None:
        """End all that the old program had started. Raises ClusterError for what does not end."""
        ends = time.monotonic() + END_S
        while self.loss is not None and self.is_alone:
            try:
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:  # there is none, and every orphan would be one
                return
            _, *left = tree(os.getpid(), read_processes())
            if time.monotonic() > ends:
                names = ", ".join(f"{title(process.pid)} (pid {process.pid})" for process in left)
                raise ClusterError(
                    f"Ray's {self.loss.server} died, and what it left does not end within {END_S:g} s: {names}. "
                    "End it, then continue with --load."
                )
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def hide_secrets(self) -> None:
        """Move a secret from the command line to the environment and start the program anew without it: a command line
        is in every process list, and Ray and wandb store it."""
        words, hidden = without_secrets(sys.orig_argv)
        if hidden:
            for flag, variable in SECRETS.items():
                if variable in hidden:
                    sys.stderr.write(f"note: {flag}: taken as {variable} of the environment, off the command line.\n")
            sys.stderr.flush()
            os.execve(sys.executable, words, {**self._environment, **hidden})

    def replace(self, loss: Loss) -> NoReturn:
        """Run the same command line anew, with `loss`. From any thread. The configuration is that of RUN_DIR, but for
        the variables that flags stand for."""
        for name in os.listdir("/proc/self/fd"):
            if int(name) >= NUM_STREAMS:
                with contextlib.suppress(OSError):  # closed meanwhile
                    os.set_inheritable(int(name), False)  # as Ray's sockets and shared memory are not
        flags = {name: os.environ[name] for name in (*TO_ENVIRONMENT.values(), *SECRETS.values()) if name in os.environ}
        environment = {**self._environment, **flags, HANDED_ON: json.dumps(asdict(loss))}
        os.execve(sys.executable, sys.orig_argv, environment)


def _reap_orphans() -> None:
    """Reap children of other sessions that ended REAP_S ago and that nobody has waited for: each agent's program, which
    has a session of its own, leaves one when it leaves a child behind, and a container has a limit of processes. A
    plug-in's own children are of the session of this process: their codes are for whoever started them."""
    known = set[psutil.Process]()  # that had ended at the last look
    while True:
        time.sleep(REAP_S)
        ended = {child for child in psutil.Process().children() if _is_ended_orphan(child)}
        for child in ended & known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        known = ended


def _is_ended_orphan(child: psutil.Process) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) != os.getsid(0)
    except (psutil.NoSuchProcess, ProcessLookupError):  # whoever started it has reaped it
        return False


def without_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line without the flags of SECRETS, and their values by variable. A flag without a value stays,
    to be refused."""
    kept: list[str] = []
    hidden: dict[str, str] = {}
    for word in words:
        flag, is_joined, value = word.partition("=")
        if flag in SECRETS and is_joined:
            hidden[SECRETS[flag]] = value
        elif kept and kept[-1] in SECRETS and not word.startswith("--"):
            hidden[SECRETS[kept.pop()]] = word
        else:
            kept.append(word)
    return kept, hidden
