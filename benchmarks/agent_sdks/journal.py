"""What an engine itself says that it generated: a line of JSON for each response, written before the response is sent.

In $VIME_ENGINE_JOURNAL, a file a process. It knows nothing of sessions but the header that names them, and is written
in the engine's process, so that a fault of the server of sessions, the client or the router cannot be in it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

VARIABLE = "VIME_ENGINE_JOURNAL"
ROUTE = "/inference/v1/generate"
SESSION_HEADER = "X-Session-ID"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Journal:
    """Appends to the file of this process. A SIGKILL loses nothing that was written: the kernel has it."""

    def __init__(self) -> None:
        directory = Path(os.environ[VARIABLE])
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()

    def note(self, session: str, request: bytes, response: bytes) -> None:
        asked, said = json.loads(request), json.loads(response)
        choices = [
            {
                "tokens": choice["token_ids"],
                "log_probs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
                "versions": [
                    0 if span["version"] == "default" else int(span["version"])
                    for span in choice["weight_versions"]
                    for _ in range(span["start"], span["end"])
                ],
                "reason": choice["finish_reason"],
            }
            for choice in said["choices"]
        ]
        line = {
            "request": asked["request_id"],
            "session": session,
            "prompt": asked["token_ids"],
            "choices": choices,
        }
        with self._lock:
            os.write(self._file, json.dumps(line).encode() + b"\n")


class Middleware:
    """The journal in front of vLLM's server (--middleware)."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app, self._journal = app, Journal()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        asked: list[bytes] = []
        said: list[bytes] = []
        status = 0

        async def hear() -> Message:
            message = await receive()
            asked.append(message.get("body", b""))
            return message

        async def say(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if message["type"] == "http.response.body":
                said.append(message.get("body", b""))
                if status == 200 and not message.get("more_body"):
                    self._journal.note(session, b"".join(asked), b"".join(said))
            await send(message)

        name = SESSION_HEADER.lower().encode()
        session = next((value.decode() for header, value in scope["headers"] if header.lower() == name), "")
        await self._app(scope, hear, say)
