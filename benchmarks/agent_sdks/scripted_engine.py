"""A scripted engine that calls tools and keeps a journal (--debug-engine-module benchmarks.agent_sdks.scripted_engine).

A prompt with a tool whose last turn is a user's is answered with a call of it, any other with letters. As in
`vime.backends.vllm_utils.scripted_server` a completion is a function of the prompt and of the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import threading

from transformers import AutoTokenizer

from benchmarks.agent_sdks.chat_model import CALL, END, TOOL
from benchmarks.agent_sdks.journal import ROUTE, SESSION_HEADER, Journal
from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.fake import CompletionRequest, FakeEngine, _Handler
from vime.backends.vllm_utils.scripted_server import _chance, pace

NOISE = 0.1  # nats by which a log-probability is off the uniform distribution's, at most
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ASKING = threading.local()
"""The session that this thread's request names."""


class Caller:
    """Completions that call the tool once. Their tokens are not the tokenizer's own: mostly one a character."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._end = self._tokenizer.convert_tokens_to_ids(END)

    def __call__(self, request: CompletionRequest) -> tuple[list[int], list[float]]:
        chance = _chance(tuple(request.prompt), request.seed, request.sample, request.content_hash or request.version)
        prompt = str(self._tokenizer.decode(request.prompt))
        text = "".join(chance.choices(LETTERS, k=chance.randint(3, 24)))
        if TOOL in prompt and prompt.rsplit("<|im_start|>", 2)[-2].startswith("user"):
            text = CALL.format(letters=text)
        tokens = [*self._encode(text, chance), self._end]
        likely = -math.log(len(self._tokenizer))
        return tokens, [likely + chance.uniform(-NOISE, NOISE) for _ in tokens]

    def _encode(self, text: str, chance: random.Random) -> list[int]:
        """Tokens of pieces of the text, cut anywhere."""
        tokens: list[int] = []
        while text:
            size = chance.randint(1, 4)
            tokens += self._tokenizer(text[:size], add_special_tokens=False)["input_ids"]
            text = text[size:]
        return tokens


class JournalledEngine(FakeEngine):
    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.journal = Journal()
        self._server.RequestHandlerClass = type("Handler", (_Noting,), {"engine": self})

    def handle(self, route: str, query: dict[str, list[str]], body: bytes) -> tuple[int, object]:
        status, result = super().handle(route, query, body)
        if route == ROUTE and status == 200:
            self.journal.note(ASKING.session, body, json.dumps(result).encode())
        return status, result


class _Noting(_Handler):
    def _serve(self) -> None:
        ASKING.session = self.headers.get(SESSION_HEADER, "")
        super()._serve()


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    keys = EngineKeys.from_environment(os.environ)
    with JournalledEngine(
        name="scripted", complete=Caller(arguments.model), host=arguments.host, port=arguments.port, token_s=pace(),
        keys=keys,
    ):  # fmt: skip
        stopped.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
