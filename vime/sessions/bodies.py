"""The body of a request to a server of sessions or to its front, read with bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

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
        """Return the body, whose bytes count from their arrival until the block ends."""
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            if self._num_bytes + num_bytes > MOST_HELD_BYTES:
                what = f"{self._num_bytes + num_bytes} bytes of bodies; expected at most {MOST_HELD_BYTES} at a time"
                raise BodyRefused(503, "too_many_bodies", f"{what}. Ask again.")
            self._num_bytes += num_bytes
            held += num_bytes

        try:
            yield await read_body(request, hold)
        finally:
            self._num_bytes -= held


async def read_body(request: Request, hold: Callable[[int], None] = lambda _: None) -> bytes:
    """Return the body. BodyRefused when it is too large, as soon as its length is known, from the header or from what
    has arrived; `hold` is told of each part, and may refuse it. Waits for: the client, BODY_S at most."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and (len(said) > 15 or int(said) > MOST_BYTES):
        raise _too_large()
    body = bytearray()
    try:
        with waiting("the body of a request", CLIENT, deadline_s=BODY_S):
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    if len(body) + len(part) > MOST_BYTES:
                        raise _too_large()
                    hold(len(part))
                    body += part
    except (TimeoutError, ClientDisconnect) as error:
        what = f"{len(body)} bytes of the body have come within {BODY_S:g} s; expected the whole body. Ask again."
        raise BodyRefused(408, "body_missing", what) from error
    return bytes(body)


def _too_large() -> BodyRefused:
    return BodyRefused(413, "too_large", f"the body has more than {MOST_BYTES} bytes")
