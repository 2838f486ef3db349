"""Which idle connections the HTTP server closes when they are too many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vime.utils.http_server import HttpServer


class Transport:
    def __init__(self, num_unsent: int) -> None:
        self.num_unsent, self.is_closed = num_unsent, False

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.is_closed = True


def connection(num_unsent: int) -> Any:
    """A connection without a call, of whose last response so many bytes are not sent."""
    made: Any = HttpToolsProtocol.__new__(HttpToolsProtocol)
    made.cycle, made.transport = None, Transport(num_unsent)
    return made


@pytest.mark.parametrize(("most", "closed"), [(3, []), (2, [0, 0])])
def test_of_too_many_idle_connections_those_are_closed_that_have_their_response(
    monkeypatch: pytest.MonkeyPatch, most: int, closed: list[int]
) -> None:
    monkeypatch.setattr("vime.utils.http_server.MOST_IDLE", most)
    server = HttpServer(Starlette(), lifespan="off")
    connections = [connection(num_unsent) for num_unsent in (0, 10, 0)]
    server.server_state.connections.update(connections)
    asyncio.run(server.on_tick(1))
    assert [one.transport.num_unsent for one in connections if one.transport.is_closed] == closed
