"""The HTTP server of ours, with bounds for connections that bring nothing: the one place that knows uvicorn.

uvicorn waits for ever for the first byte of a connection and for the rest of a head, and its parser keeps as much of a
head as comes. (Its other parser, h11, has a bound, and took twice as long for a call: docs/log.md, 2026-11-28.)
"""

from __future__ import annotations

import resource
import weakref
from pathlib import Path
from typing import Literal, TypeGuard

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SILENT_S = 60.0
"""A connection without a call under way is closed after so long, or twice as long, with whatever it has sent."""
MOST_IDLE = 4096
"""When more connections (or half of the files that this process may open) have no call under way, all of these are
closed at once: their clients may come again."""
MOST_CONNECTIONS = 8192
"""A call over more connections than this gets 503."""
MOST_HEAD_BYTES = 64 << 10
TICK_S = 0.1  # of uvicorn


class _Connection(HttpToolsProtocol):
    """Refuses a head that has not ended after MOST_HEAD_BYTES."""

    _num_bytes, _is_in_head = 0, False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._is_in_head = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._num_bytes = self._num_bytes + len(data) if self._is_in_head else 0
        if self._num_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head has more than {MOST_HEAD_BYTES} bytes.")


class HttpServer(uvicorn.Server):
    """`stop_s`: how long calls under way have when it ends (None: no limit). `certificate` and `key`: in PEM."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        lifespan: Literal["on", "off"],
        stop_s: int | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                limit_concurrency=MOST_CONNECTIONS,
                log_config=None,
                access_log=False,
                lifespan=lifespan,
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=stop_s,
                ssl_certfile=certificate,
                ssl_keyfile=key,
            )
        )
        self._seen: dict[HttpToolsProtocol, object] = {}

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn every TICK_S. Close idle connections: when they are too many all whose response is sent,
        else each on which nothing has moved since the last look. A call that begins counts, bytes of a head or of a
        body that nobody reads do not."""
        most_idle = min(MOST_IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        is_look_due = counter % max(1, round(SILENT_S / TICK_S)) == 0
        if is_look_due or len(self.server_state.connections) > most_idle:
            idle = {one: _state(one) for one in self.server_state.connections if _is_idle(one)}
            for one, state in idle.items():
                is_sent = one.transport.get_write_buffer_size() == 0
                if (len(idle) > most_idle and is_sent) or (is_look_due and self._seen.get(one) == state):
                    one.transport.abort()
            if is_look_due:
                self._seen = idle
        return await super().on_tick(counter)


def _is_idle(connection: object) -> TypeGuard[HttpToolsProtocol]:
    """Whether no call is under way on it."""
    return isinstance(connection, HttpToolsProtocol) and (
        connection.cycle is None or connection.cycle.response_complete
    )


def _state(connection: HttpToolsProtocol) -> object:
    """Return what changes on an idle connection that lives: its last call, or how much of its response is not sent."""
    last = None if connection.cycle is None else weakref.ref(connection.cycle)
    return last, connection.transport.get_write_buffer_size()
