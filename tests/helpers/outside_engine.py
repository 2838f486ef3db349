"""`vime engine` as somebody runs it who is no part of a run: a process of its own, ready when the block begins."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from vime.backends.vllm_utils.access import EngineKeys
from vime.types import KEY_HEADER
from vime.utils.network import free_port

READY_S = 240.0


class OutsideEngine:
    """One engine. `start` again after `kill`: another process at the same address."""

    def __init__(
        self,
        directory: Path,
        flags: Sequence[str],
        *,
        name: str = "outside",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.place, self.keys = f"127.0.0.1:{free_port()}", directory / "keys"
        self._flags, self._environment = list(flags), {**os.environ, **(variables or {})}
        self._log, self._said = directory / f"{name}.log", directory / f"{name}.out"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OutsideEngine:
        self.start()
        return self

    def start(self) -> None:
        command = [sys.executable, "-m", "vime", "engine", "--listen", self.place, "--keys", str(self.keys)]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*command, "--log", str(self._log), *self._flags],
                env=self._environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> str:
        """Return the flags that it says a run needs."""
        assert self._process is not None
        ends = time.monotonic() + READY_S
        while "ready: " not in (said := self._said.read_text()):
            assert self._process.poll() is None, said
            assert time.monotonic() < ends, said
            time.sleep(0.1)
        return said.partition("ready: ")[2].strip()

    def get(self, route: str) -> dict[str, object]:
        return self._asked("GET", route, None)

    def post(self, route: str, body: object) -> dict[str, object]:
        return self._asked("POST", route, body)

    def _asked(self, method: str, route: str, body: object) -> dict[str, object]:
        headers = {KEY_HEADER: EngineKeys.read(self.keys, flag="--keys").control}
        response = httpx.request(method, f"http://{self.place}{route}", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def stop(self) -> int:
        """End it as its owner does. Returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
