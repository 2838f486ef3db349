"""Who may ask an engine for what. vLLM's --api-key leaves its control routes (/pause, /collective_rpc, weights) open.

A run has two keys. The one for control never passes through the router, whose own routes nobody can close: whoever
reaches the router can have it send requests, with their headers, to a server of his. What he would learn there is the
other key, which opens generation alone.

`RequireKey` stands in front of vLLM's server (routes.py) and reads the keys from the environment, so that they are on
no command line. Imported by engines: standard library only.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.types import KEY_HEADER, ConfigError

CONTROL_VARIABLE, GENERATE_VARIABLE = "VIME_ENGINE_CONTROL_KEY", "VIME_ENGINE_GENERATE_KEY"
OPEN_ROUTES = frozenset({("GET", "/health")})
"""Without a key: what the router asks to see whether an engine lives."""
GENERATE_PREFIXES = ("/inference/v1/", "/v1/")
GENERATE_ROUTES = frozenset({"/abort_requests"})
REFUSED = {"error": f"this engine belongs to a run of Vime and wants its key in the header {KEY_HEADER}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """The two keys of a run, made by the driver."""

    control: str = field(repr=False)
    generate: str = field(repr=False)

    @classmethod
    def make(cls) -> EngineKeys:
        return cls(control=secrets.token_hex(32), generate=secrets.token_hex(32))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> EngineKeys | None:
        """None when there are none."""
        if CONTROL_VARIABLE not in environment:
            return None
        return cls(control=environment[CONTROL_VARIABLE], generate=environment[GENERATE_VARIABLE])

    @classmethod
    def read(cls, path: str | Path, *, flag: str) -> EngineKeys:
        """The keys of engines that the run does not start. ConfigError names the flag."""
        expected = "Expected a file that `vime engine --keys FILE` made, which its owner alone may read."
        try:
            with Path(path).open() as file:
                mode, told = os.fstat(file.fileno()).st_mode, json.load(file)
            if mode & 0o077:
                raise ConfigError(f"{flag} {path}: others may read it (mode {mode & 0o777:o}). {expected} Change that.")
            return cls(control=str(told["control"]), generate=str(told["generate"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{flag} {path}: cannot be read: {error!r}. {expected}") from error

    def write(self, path: str | Path) -> None:
        """Make the file. FileExistsError when there is one."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"control": self.control, "generate": self.generate}, file)

    def environment(self) -> dict[str, str]:
        return {CONTROL_VARIABLE: self.control, GENERATE_VARIABLE: self.generate}

    def admit(self, method: str, path: str, key: str) -> bool:
        """Whether a request with this key (empty: without one) may pass."""
        if (method, path) in OPEN_ROUTES or _same(key, self.control):
            return True
        return (path in GENERATE_ROUTES or path.startswith(GENERATE_PREFIXES)) and _same(key, self.generate)


def _same(key: str, expected: str) -> bool:
    """Compared in constant time; an empty key is nobody's."""
    return bool(key) and hmac.compare_digest(key.encode(), expected.encode())


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware in front of every route of vLLM's server."""

    def __init__(self, app: Application) -> None:
        keys = EngineKeys.from_environment(os.environ)
        if keys is None:
            raise RuntimeError(f"{CONTROL_VARIABLE} is not set: this server would let everyone in.")
        self._app, self._keys = app, keys

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send_json(send, 401, REFUSED)

    def _admits(self, scope: Message) -> bool:
        name = KEY_HEADER.lower().encode()
        key = next((value.decode("latin-1") for header, value in scope["headers"] if header.lower() == name), "")
        return self._keys.admit(scope.get("method", ""), scope["path"], key)


async def send_json(send: Send, status: int, result: object) -> None:
    """Respond to an HTTP request as an ASGI application."""
    body = json.dumps(result).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
