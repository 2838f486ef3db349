"""The gateway's HTTP server: one thread with an event loop of its own."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from starlette.types import ASGIApp

from vime.types import ClusterError, ConfigError
from vime.utils.http_server import HttpServer
from vime.utils.waits import waiting

START_S, STOP_S = 30.0, 10.0
BACKLOG = 1024


class GatewayServer:
    """`address` HOST:PORT; port 0 takes a free one. `certificate` and `key`: files in PEM, both for TLS or none."""

    def __init__(self, app: ASGIApp, address: str, *, certificate: Path | None = None, key: Path | None = None) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or (certificate is None) != (key is None):
            raise ConfigError(
                f"--transferqueue-address {address!r}, certificate {certificate}, key {key}: expected HOST:PORT, and "
                "both files or none."
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--transferqueue-address {address}: cannot be listened on: {error}. Choose a free port, or port 0."
            ) from error
        scheme = "https" if certificate is not None else "http"
        self.url = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
        self._server = HttpServer(app, lifespan="off", stop_s=int(STOP_S / 2), certificate=certificate, key=key)
        self._thread = threading.Thread(target=self._serve, name="vime-gateway", daemon=True)

    def start(self) -> None:
        """Waits for: the server to accept calls."""
        self._thread.start()
        pause = threading.Event()
        with waiting("the gateway to start", deadline_s=START_S):
            for _ in range(int(START_S / 0.02)):
                if self._server.started:
                    return
                if not self._thread.is_alive():
                    break
                pause.wait(0.02)
        raise ClusterError(f"{self.url}: the gateway did not start within {START_S:g} s. See the log of its process.")

    def stop(self) -> None:
        """End calls in progress, then the server. Calling it again does nothing."""
        self._server.should_exit = True
        with waiting("the gateway to stop", deadline_s=STOP_S):
            self._thread.join(STOP_S)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])
