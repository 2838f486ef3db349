"""A server of sessions in a process of its own, for tests that kill it.

python -m tests.helpers.session_server PORT DIRECTORY ENGINE_URL TEMPLATE [PARSER_OF_TOOLS]
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers.chat_tokenizers import END, make_chat_tokenizer
from vime.rollout.engine_client import EngineClient
from vime.sessions.server import make_app
from vime.sessions.service import ReplyParser, Sessions
from vime.sessions.splice import Message
from vime.sessions.store import Call, Reply, SessionStore
from vime.sessions.tokenizer import HfChatTokenizer
from vime.utils.http_server import HttpServer

ADMIN = "admin-of-the-tests"


def main(port: int, directory: Path, engine: str, template: str, tools: str = "") -> None:
    made = make_chat_tokenizer(template)
    tokenizer = HfChatTokenizer(made)
    parse = _vllm_parser(template, tools) if tools else plain_parser(tokenizer, END[template])

    async def sessions() -> Sessions:
        client = EngineClient(engine, max_in_flight=64, timeout_s=60)
        return Sessions(
            SessionStore(directory / "sessions.sqlite"),
            client,
            tokenizer,
            parse,
            context_length=4096,
            sampling_params={"temperature": 1.0, "max_tokens": 256},
            idle_s=600,
        )

    app = make_app(sessions, admin_key=ADMIN, model="m")
    with socket.create_server(("127.0.0.1", port)) as listening:
        HttpServer(app, lifespan="on").run(sockets=[listening])


def plain_parser(tokenizer: HfChatTokenizer, end: str) -> ReplyParser:
    """Everything is content."""

    def parse(_: Sequence[int], ids: Sequence[int], __: Sequence[Message]) -> Reply:
        return Reply(content=tokenizer.decode(ids).removesuffix(end))

    return parse


def _vllm_parser(template: str, tools: str) -> ReplyParser:
    from vime.backends.vllm_utils.reply_parser import make_reply_parser

    parser = make_reply_parser(make_chat_tokenizer(template), tools=tools, reasoning=None)

    def parse(prompt: Sequence[int], ids: Sequence[int], given: Sequence[Message]) -> Reply:
        content, reasoning, calls = parser(prompt, ids, given)
        found = tuple(Call(id=number, name=name, arguments=arguments) for number, name, arguments in calls)
        return Reply(content=content, reasoning=reasoning, calls=found)

    return parse


@contextlib.contextmanager
def session_server(
    port: int, directory: Path, engine: str, template: str, tools: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server and wait for it, 60 s at most."""
    command = [sys.executable, "-m", "tests.helpers.session_server", str(port), str(directory), engine, template, tools]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait(30)


if __name__ == "__main__":
    port, directory, *rest = sys.argv[1:]
    main(int(port), Path(directory), *rest)
