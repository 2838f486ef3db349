"""The body of a request to a server of sessions or to its front, read with a bound."""

from __future__ import annotations

from starlette.requests import Request

MOST_BYTES = 1 << 26


class BodyTooLarge(Exception):
    """A body of more than MOST_BYTES; its rest was not read."""

    def __init__(self) -> None:
        super().__init__(f"the body has more than {MOST_BYTES} bytes")


async def read_body(request: Request) -> bytes:
    """Return the body. BodyTooLarge as soon as its length is known, from the header or from what has arrived."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and (len(said) > 15 or int(said) > MOST_BYTES):
        raise BodyTooLarge
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise BodyTooLarge
        parts.append(part)
    return b"".join(parts)
