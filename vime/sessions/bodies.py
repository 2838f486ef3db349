"""The body of a request to a server of sessions or to its front, read with bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from vime.utils.waits import CLIENT, waiting

MOST_BYTES = 1 << 26
MOST_HELD_BYTES = 1 << 30
BODY_S = 60.0


class BodyRefused(Exception):
    """A body that is not read, or not to its end. SDKs repeat 408 and 503."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class HeldBodies:
    """The bodies of all requests under way have MOST_HELD_BYTES together."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Return the body, whose bytes count until the block ends. One that does not say how long it is counts as the
        longest until it is there."""
        counted = MOST_BYTES if "transfer-encoding" in request.headers else _said(request)
        if self._num_bytes + counted > MOST_HELD_BYTES:
            what = f"{counted} bytes of body beside {self._num_bytes} of others; expected at most {MOST_HELD_BYTES}"
            raise BodyRefused(503, "too_many_bodies", f"{what} at a time. Ask again.")
        self._num_bytes += counted
        try:
            body = await read_body(request)
            self._num_bytes += len(body) - counted
            counted = len(body)
            yield body
        finally:
            self._num_bytes -= counted


async def read_body(request: Request) -> bytes:
    """Return the body. BodyRefused when it is too large, as soon as its length is known, from the header or from what
    has arrived. Waits for: the client, BODY_S at most."""
    _said(request)
    body = bytearray()
    try:
        with waiting("the body of a request", CLIENT, deadline_s=BODY_S):
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise _too_large()
    except (TimeoutError, ClientDisconnect) as error:
        what = f"{len(body)} bytes of the body have come within {BODY_S:g} s; expected the whole body. Ask again."
        raise BodyRefused(408, "body_missing", what) from error
    return bytes(body)


def _said(request: Request) -> int:
    """Return the length that the header says; 0 when it says none."""
    said = request.headers.get("content-length", "")
    if not said.isdecimal():
        return 0
    if len(said) > 15 or int(said) > MOST_BYTES:
        raise _too_large()
    return int(said)


def _too_large() -> BodyRefused:
    return BodyRefused(413, "too_large", f"the body has more than {MOST_BYTES} bytes")
