"""The scripted engine as a process: `python -m vime.backends.vllm_utils.scripted_server`, vLLM's place in a real run.

`--debug-engine-module vime.backends.vllm_utils.scripted_server` starts it instead of vLLM, with vLLM's command line
(of which it reads --model, --host, --port and what says that it is on several nodes), as the same child of the same
actor behind the same router. Everything but the model is real: weights arrive and are hashed, pauses and aborts happen,
completions carry versions. It starts in a second, so that fault tests can afford hundreds of runs, and at a set pace,
so that a long tail can be benchmarked.

A completion is a function of the prompt, the request's seed if it has one, the sample's number and the weights (their
hash): the same weights complete alike in every run, other weights otherwise, but equally long, so that two schedules of
training can be compared on the same work. Environment:

    VIME_SCRIPTED_TOKENS_PER_SECOND   of each sequence, however many there are; unset: completions come at once
    VIME_SCRIPTED_REQUESTS_AT_ONCE    of the engine, others wait; unset: all of them
    VIME_SCRIPTED_LOADS_FIRST         any text: it responds when it can take weights, as vLLM does; unset: earlier
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import math
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.fake import CompletionRequest, FakeEngine
from vime.config.hf_config import num_tokenizer_ids, read_model_shape, read_record
from vime.types import ConfigError

PACE = "VIME_SCRIPTED_TOKENS_PER_SECOND"
AT_ONCE = "VIME_SCRIPTED_REQUESTS_AT_ONCE"
LOADS_FIRST = "VIME_SCRIPTED_LOADS_FIRST"
MEET_POLL_S = 0.1
MEDIAN_SHARE = 1 / 8
"""Median length of a completion, as a share of max_tokens."""
SPREAD = math.log(4) / 1.2816
"""Standard deviation of the logarithm of the length. 1.2816 is the normal distribution's 90th percentile, so the 90th
percentile of lengths is four medians, half of max_tokens: of a round that is generated all at once, the last tenth of
completions takes half of the time, as measured on reasoning workloads (Seer, arXiv 2511.14617: up to 50 %). 2.7 % of
the completions are cut at max_tokens."""
NOISE = 0.1  # nats by which a log-probability is off the uniform distribution's, at most


class LongTailed:
    """Completions of random tokens, the end token last, of log-normal length."""

    def __init__(self, model: str) -> None:
        known, tokenized = read_model_shape(model).vocab_size, num_tokenizer_ids(model)
        ends = read_record(model).get("eos_token_id")
        self._ends: list[int] = ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else []
        self._words = [token for token in range(min(known, tokenized or known)) if token not in self._ends]

    def __call__(self, request: CompletionRequest) -> tuple[list[int], list[float]]:
        asked = (tuple(request.prompt), request.seed, request.sample)
        length = max(1, round(request.max_tokens * MEDIAN_SHARE * math.exp(SPREAD * _chance(*asked).gauss())))
        chance = _chance(*asked, request.content_hash or request.version)
        is_cut = length > request.max_tokens
        tokens = chance.choices(self._words, k=request.max_tokens + 1 if is_cut else length)
        if self._ends and not is_cut:
            tokens[-1] = self._ends[0]
        likely = -math.log(len(self._words))
        return tokens, [likely + chance.uniform(-NOISE, NOISE) for _ in tokens]


def _chance(*key: object) -> random.Random:
    return random.Random(hashlib.blake2b(repr(key).encode(), digest_size=16).digest())


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="A scripted engine with vLLM's routes.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="model directory: its config.json says which tokens there are")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port", type=int)
    parser.add_argument("--headless", action="store_true", help="a part of an engine on a further node")
    arguments, _ = parser.parse_known_args(argv)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    if arguments.headless:
        return follow(arguments.master_addr, arguments.master_port, stopped)
    try:
        complete, token_s, at_once = LongTailed(arguments.model), pace(), requests_at_once()
    except ConfigError as error:
        sys.stderr.write(f"refused: {error}\n")
        return error.exit_code
    engine = FakeEngine(
        name="scripted",
        complete=complete,
        host=arguments.host,
        port=arguments.port,
        token_s=token_s,
        requests_at_once=at_once,
        keys=EngineKeys.from_environment(os.environ),
        argv=sys.argv[1:] if argv is None else argv,
        num_workers=arguments.tensor_parallel_size,
    )
    if os.environ.get(LOADS_FIRST):
        importlib.import_module("vime.weights.transports")
    with gathered(arguments.nnodes - 1, arguments.master_addr, arguments.master_port, stopped), engine:
        # what the first weights need, while the trainer builds its model
        threading.Thread(target=importlib.import_module, args=("vime.weights.transports",), daemon=True).start()
        stopped.wait()
    return 0


@contextlib.contextmanager
def gathered(num_followers: int, host: str | None, port: int | None, stopped: threading.Event) -> Iterator[None]:
    """The block begins when the engine's parts on all further nodes have come, and none is needed in it: like vLLM's
    server, this one does not notice when one goes."""
    with contextlib.ExitStack() as stack:
        if num_followers:
            listening = stack.enter_context(socket.create_server((host or "", port or 0)))
            listening.settimeout(MEET_POLL_S)
        while num_followers and not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                stack.enter_context(listening.accept()[0])
                num_followers -= 1
        yield


def follow(host: str, port: int, stopped: threading.Event) -> int:
    """Be a part of an engine on a further node, until SIGTERM or SIGINT: like vLLM's, it stays when the first is
    gone."""
    with contextlib.ExitStack() as stack:
        is_there = False
        while not stopped.wait(MEET_POLL_S):
            if not is_there:
                with contextlib.suppress(OSError):  # it does not listen yet
                    stack.enter_context(socket.create_connection((host, port), timeout=MEET_POLL_S))
                    is_there = True
    return 0


def pace() -> float:
    """Seconds a token takes; 0 when none is set."""
    text = os.environ.get(PACE, "")
    if not text:
        return 0.0
    try:
        tokens_per_second = float(text)
    except ValueError:
        tokens_per_second = 0.0
    if not 0 < tokens_per_second < math.inf:
        raise ConfigError(f"{PACE}={text!r}: expected a number of tokens above 0. Change or unset it.")
    return 1 / tokens_per_second


def requests_at_once() -> int | None:
    """Requests that the engine works on at a time; None: all that it has."""
    text = os.environ.get(AT_ONCE, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{AT_ONCE}={text!r}: expected a whole number above 0. Change or unset it.")
    return int(text)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the end of the interpreter: it ends threads that delete a gloo group whose sender is gone, which aborts the
    # process, and groups that are left may use a core until somebody kills it.
    os._exit(code)
