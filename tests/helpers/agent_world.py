"""What an agent needs of a worker's process, without a run: an engine, a model's tokenizer, a run directory."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.chat_tokenizers import make_chat_tokenizer
from tests.helpers.rollout_setup import make_args
from tests.helpers.scripted_engine import Script, ScriptedEngine
from vime.agents import server
from vime.agents.generate import generate
from vime.config.agent_checks import GENERATE
from vime.rollout.generation import close_clients, train_sampling_params
from vime.rollout.loops import rollout_loop
from vime.sessions.tokenizer import HfChatTokenizer
from vime.types import Sample
from vime.utils import waits

TOKENIZER = HfChatTokenizer(make_chat_tokenizer("chatml"))


class AgentWorld:
    """Made by `agent_world`."""

    def __init__(self, directory: Path, engine: ScriptedEngine) -> None:
        self.directory, self.engine = directory, engine

    def args(self, *flags: object) -> Any:
        common = ("--hf-checkpoint", self.directory, "--custom-generate-function-path", GENERATE)
        router = ("--vllm-router-ip", "127.0.0.1", "--vllm-router-port", self.engine.port)
        return make_args(*common, *router, *flags)

    def command(self, source: str, *flags: object) -> Any:
        (self.directory / "agent.py").write_text(source)
        return self.args("--agent-command", f"{sys.executable} {self.directory / 'agent.py'}", *flags)

    def generate(self, args: Any, sample: Sample) -> list[Sample]:
        work = generate(args, sample, train_sampling_params(args))
        return rollout_loop().run(work, name="an agent", timeout_s=60)


@contextlib.contextmanager
def agent_world(directory: Path, answer: Script) -> Iterator[AgentWorld]:
    make_chat_tokenizer("chatml").save_pretrained(directory)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "hidden_size": 32, "vocab_size": 300, "num_hidden_layers": 2,
                    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 192,
                    "max_position_embeddings": 512})
    )  # fmt: skip
    waits.open_registry(directory, "worker")
    with ScriptedEngine(answer) as engine:
        yield AgentWorld(directory, engine)
        while server._SERVERS:
            rollout_loop().run(server._SERVERS.pop().close(), name="the server of sessions to end", timeout_s=30)
        close_clients()
    waits.close_registry()
