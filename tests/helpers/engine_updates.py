"""Weights for one running engine, and what it says with them beside transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest
import torch

from tests.helpers import tiny_models
from tests.helpers.engines import HEADERS
from vime.backends.vllm_utils.control import FleetControl
from vime.config.lora import AdapterInfo
from vime.rollout.engine_client import read_completions
from vime.types import EngineAddress, PublishLostError
from vime.weights.plan import TensorMeta
from vime.weights.publish import publish
from vime.weights.transports import make_sender

BOUND = 1e-4  # largest difference of a log-probability, fp32 on both sides
PROMPT = [5 + (7 * position) % 100 for position in range(300)]


class Pusher:
    """A fleet of one engine, a sender and a running version number."""

    def __init__(self, address: EngineAddress, transport: str, directory: Path) -> None:
        self.fleet = FleetControl([address], timeout_s=60)
        self._sender = make_sender(transport, bucket_bytes=60_000, directory=directory, timeout_s=60)
        self._sender.connect(self.fleet)
        self.version = 100

    def push(self, model: torch.nn.Module, *, names: set[str] | None = None) -> None:
        self.push_tensors({name: it for name, it in tiny_models.stream(model) if names is None or name in names})

    def push_tensors(self, pairs: Mapping[str, torch.Tensor], adapter: AdapterInfo | None = None) -> None:
        """One update; with `adapter` these are its tensors."""
        metadata = [TensorMeta.of(name, tensor) for name, tensor in pairs.items()]
        self.push_stream(iter(pairs.items()), metadata, adapter)

    def push_stream(
        self,
        stream: Iterator[tuple[str, torch.Tensor]],
        metadata: Sequence[TensorMeta],
        adapter: AdapterInfo | None = None,
    ) -> None:
        self.version += 1
        publish(
            stream,
            metadata,
            version=self.version,
            fleet=self.fleet,
            sender=self._sender,
            pause_mode="keep",
            deadline_s=60,
            adapter=adapter,
        )

    def close(self) -> None:
        self._sender.close()
        self.fleet.close()


VICTIM = """
import sys
from vime.backends.vllm_utils.fake import FakeEngine
import vime.weights.transports
with FakeEngine() as engine:
    print(engine.address.url, flush=True)
    sys.stdin.read()
"""


def kill_one_of_two_in_a_broadcast(left: EngineAddress, model: torch.nn.Module, directory: Path, *, rank: int) -> None:
    """An update over gloo to the engine `left` and to another one, SIGKILLed when half of the tensors were sent. `rank`
    of the killed one in the group, 1 or 2. Its deadline is 60 s."""
    victim = subprocess.Popen([sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert victim.stdout is not None
        engines = [left]
        engines.insert(rank - 1, EngineAddress(name="victim", url=victim.stdout.readline().strip()))
        fleet = FleetControl(engines, timeout_s=60)
        sender = make_sender("gloo", bucket_bytes=60_000, directory=directory, timeout_s=60)
        sender.connect(fleet)
        weights = dict(tiny_models.stream(model))

        def killing() -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(weights.items()):
                if number == len(weights) // 2:
                    victim.kill()
                    victim.wait(60)
                yield pair

        metadata = [TensorMeta.of(*pair) for pair in weights.items()]
        with pytest.raises(PublishLostError):
            publish(killing(), metadata, version=100, fleet=fleet, sender=sender, pause_mode="keep", deadline_s=60)
        sender.close()
        fleet.close()
    finally:
        victim.kill()
        victim.wait(60)


def sample(url: str, prompt: list[int], num_tokens: int, **params: object) -> dict:
    sampling = {"max_tokens": num_tokens, "logprobs": 0, "ignore_eos": True, "detokenize": False, "seed": 3, **params}
    body = {"token_ids": prompt, "sampling_params": sampling}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, headers=HEADERS, timeout=60)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    [read] = read_completions(answer.content, 1, url)  # what a run reads of these bytes
    assert read.token_ids == choice["token_ids"]
    assert read.log_probs == [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice


def difference(choice: dict, model: torch.nn.Module, prompt: list[int], *, temperature: float = 1.0) -> float:
    """Largest difference between the engine's log-probabilities of its own tokens and the model's."""
    tokens = torch.tensor([prompt + choice["token_ids"]])
    with torch.no_grad():
        logp_TV = (model(tokens).logits[0] / temperature).log_softmax(-1)
    return max(
        abs(entry["logprob"] - float(logp_TV[len(prompt) - 1 + position, token]))
        for position, (entry, token) in enumerate(zip(choice["logprobs"]["content"], choice["token_ids"], strict=True))
    )


def prompt_difference(fleet: FleetControl, model: torch.nn.Module) -> float:
    [[got]] = fleet.prompt_log_probs([PROMPT])
    return max(abs(a - b) for a, b in zip(got, tiny_models.log_probs(model, PROMPT), strict=True))
