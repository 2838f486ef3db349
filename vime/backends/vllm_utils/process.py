"""One server child under the guard: start, wait until it is ready, notice its end, stop without a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vime.backends.vllm_utils import guard
from vime.types import EngineError, EngineLostError, WaitTimeoutError
from vime.utils.http import HttpFailure, HttpThread, HttpTimeout
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

SHOWN_LOG_LINES = 30
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
POLL_S = 0.1
PROBE_TIMEOUT_S = 2.0
STOP_MARGIN_S = 5.0
GRACE_S = 15.0
GUARD_ENDS_S = 1.0


class ServerProcess:
    """Owner of one child. Not thread-safe: one owner calls start, check and stop."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        ready_url: str,
        grace_s: float = GRACE_S,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command = list(command)
        self._env = dict(env)
        self._ready_url = ready_url
        self._grace_s = grace_s
        self._child: subprocess.Popen[bytes] | None = None
        self._http = HttpThread(f"vime-probe-{name}")

    @property
    def pid(self) -> int:
        """Process id of the guard, which is also the id of the server's session."""
        if self._child is None:
            raise EngineError(f"{self.name} has not been started. Call start() first.")
        return self._child.pid

    def start(self) -> None:
        """Start and return at once; `wait_ready` waits."""
        if self._child is not None:
            raise EngineError(f"{self.name} is started already (pid {self._child.pid}). Make a new one to restart.")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        script = [sys.executable, "-I", "-S", guard.__file__, str(self._grace_s)]
        with self.log_path.open("ab") as log:
            log.write(f"$ {' '.join(self._command)}\n".encode())
            log.flush()
            self._child = subprocess.Popen(
                [*script, *self._command],
                env=self._env,
                stdin=subprocess.PIPE,  # never written to: its end tells the guard that this process is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        logger.info("%s: started, pid %d, log %s", self.name, self._child.pid, self.log_path)

    def wait_ready(self, deadline_s: float, on_poll: Callable[[], None] = lambda: None) -> None:
        """Return when the server responds. EngineLostError when it ends instead; WaitTimeoutError at the deadline.
        `on_poll` is called all the time, and may raise."""
        started = time.monotonic()
        with waiting(f"the server of {self.name} to be ready", deadline_s=deadline_s):
            while True:
                on_poll()
                self.check()
                try:
                    if self._http.call("GET", self._ready_url, deadline_s=PROBE_TIMEOUT_S).status == 200:
                        break
                except HttpFailure:
                    pass  # not listening yet
                if time.monotonic() - started > deadline_s:
                    advice = f"Raise --start-timeout-secs. Its last log lines ({self.log_path}):\n{self.log_tail()}"
                    raise WaitTimeoutError(f"{self.name} to be ready", deadline_s, self.name, advice)
                time.sleep(POLL_S)
        logger.info("%s: ready after %.1f s", self.name, time.monotonic() - started)

    def check(self) -> None:
        """EngineLostError with the last log lines when the child has ended, whatever its exit code."""
        if self._child is None:
            raise EngineError(f"{self.name} is not running: it was never started, or it was stopped.")
        code = self._child.poll()
        if code is not None:
            raise EngineLostError(
                f"{self.name} ended with exit code {code}, expected it to run until it is stopped. Its last log lines "
                f"({self.log_path}):\n{self.log_tail()}"
            )

    def probe(self, url: str, deadline_s: float, headers: Mapping[str, str] | None = None) -> bytes:
        """Return what the child says at `url`. EngineLostError when it has ended, or lives and does not respond within
        `deadline_s`."""
        self.check()
        try:
            with waiting(f"the server of {self.name} to say how it is", deadline_s=deadline_s):
                response = self._http.call("GET", url, headers=headers, deadline_s=deadline_s)
            if response.status == 200:
                return response.content
            got = f"status {response.status}"
        except HttpTimeout as error:
            got = f"{error} (--engine-health-timeout-secs)"
        except HttpFailure as error:
            got = str(error)
            child = self._child  # none when another thread has stopped it meanwhile
            with contextlib.suppress(subprocess.TimeoutExpired):  # the server may be gone, and its guard clears up
                if child is not None:
                    child.wait(GUARD_ENDS_S)
        self.check()  # it may have ended meanwhile, which says more
        raise EngineLostError(
            f"{self.name} lives (pid {self.pid}) but does not work: GET {url} got {got}, expected status 200 at any "
            f"time. It was stopped, waits for a device, or its core died. Last log lines ({self.log_path}):\n"
            f"{self.log_tail()}"
        )

    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def stop(self) -> None:
        """SIGTERM, after `grace_s` SIGKILL, and SIGKILL to the rest of its session. Also twice, and after a crash."""
        self._http.close()
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                with waiting(f"the server of {self.name} to end", deadline_s=self._grace_s + STOP_MARGIN_S):
                    child.wait(self._grace_s + STOP_MARGIN_S)
            except subprocess.TimeoutExpired:
                logger.warning("%s: does not end within %g s of SIGTERM; killing it", self.name, self._grace_s)
        orphans = guard.kill_session(child.pid)
        if orphans:
            logger.warning("%s: killed processes it left behind: %s", self.name, orphans)
        child.wait(STOP_MARGIN_S)
        if child.stdin is not None:
            child.stdin.close()

    def log_tail(self) -> str:
        """Return the last lines of the log file, without the colours that the router writes into it."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(log cannot be read: {error})"
        return COLOUR.sub("", "\n".join(lines[-SHOWN_LOG_LINES:]))


def server_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `changes`, and with this interpreter's scripts first on PATH.

    The first variable is one that no server changes. setproctitle looks for the command line in front of it, and gives
    no title where it was changed; Ray gives its workers their variables in any order. `SPT_NOENV` itself keeps titles
    out of the environment, which tests and chaos read."""
    env = {"SPT_NOENV": "1", **os.environ, **changes}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env
