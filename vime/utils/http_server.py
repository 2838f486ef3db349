"""The HTTP server of ours, with bounds for connections that bring nothing: the one place that knows uvicorn.

uvicorn waits for ever for the first byte of a connection and for the rest of a head. The parser is h11: it refuses a
head of more than 64 KiB, where uvicorn's faster one has no bound.
"""

from __future__ import annotations

import resource
import weakref
from pathlib import Path
from typing import Literal, TypeGuard

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

SILENT_S = 60.0
"""A connection without a call under way is closed after so long, or twice as long, with whatever it has sent."""
MOST_IDLE = 4096
"""When more connections (or half of the files that this process may open) have no call under way, all of these are
closed at once: their clients may come again."""
MOST_CONNECTIONS = 8192
"""A call over more connections than this gets 503."""
TICK_S = 0.1  # of uvicorn


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
                http="h11",
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
        self._seen: dict[H11Protocol, object] = {}

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


def _is_idle(connection: object) -> TypeGuard[H11Protocol]:
    """Whether no call is under way on it."""
    return isinstance(connection, H11Protocol) and (connection.cycle is None or connection.cycle.response_complete)


def _state(connection: H11Protocol) -> object:
    """Return what changes on an idle connection that lives: its last call, or how much of its response is not sent."""
    last = None if connection.cycle is None else weakref.ref(connection.cycle)
    return last, connection.transport.get_write_buffer_size()
