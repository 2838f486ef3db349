"""A session on a real engine: three dialects continue one record, and its log-probabilities are those of the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import uvicorn

from tests.helpers import tiny_models
from tests.helpers.engines import KEYS, engine_config, started
from tests.helpers.session_server import ADMIN, plain_parser
from vime.backends.vllm_utils.engine import EngineProcess
from vime.rollout.engine_client import EngineClient
from vime.sessions.server import make_app
from vime.sessions.service import Sessions, member_samples
from vime.sessions.store import SessionStore
from vime.sessions.tokenizer import HfChatTokenizer
from vime.types import Sample

MODEL = Path(__file__).resolve().parents[3] / "examples/quickstart/model"
# In the 53 characters that this model knows.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ':' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def quickstart_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    yield from started(engine_config(MODEL, 256), tmp_path_factory.mktemp("engine_run"))


@pytest.fixture
def root(quickstart_engine: EngineProcess, tmp_path: Path) -> Iterator[str]:
    """The address of a server of sessions in a thread."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(MODEL)
    made.chat_template = TEMPLATE
    tokenizer = HfChatTokenizer(made)

    async def sessions() -> Sessions:
        return Sessions(
            SessionStore(tmp_path / "sessions.sqlite"),
            EngineClient(quickstart_engine.url, max_in_flight=4, timeout_s=120, key=KEYS.generate),
            tokenizer,
            plain_parser(tokenizer, "<eos>"),
            context_length=256,
            sampling_params={"temperature": 1.0, "max_tokens": 12},
            idle_s=600,
        )

    app = make_app(sessions, admin_key=ADMIN, model="m")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


def test_three_dialects_continue_one_record_whose_log_probabilities_are_the_models(root: str, tmp_path: Path) -> None:
    made = {"group_index": 0, "index": 0}
    session = httpx.post(f"{root}/v1/sessions", json=made, headers={"x-api-key": ADMIN}, timeout=60).json()
    client = openai.OpenAI(base_url=session["base_url"], api_key=session["key"])
    other = anthropic.Anthropic(base_url=session["anthropic_base_url"], api_key=session["key"])
    messages: list[dict[str, object]] = []

    def add(role: str, content: object) -> list[dict[str, object]]:
        messages.append({"role": role, "content": content})
        return messages

    first = client.chat.completions.create(model="m", messages=add("user", "3+4="), logprobs=True)
    add("assistant", first.choices[0].message.content)
    with other.messages.stream(model="m", max_tokens=9, messages=add("user", "5-2=")) as events:
        add("assistant", events.get_final_text())
    client.responses.create(model="m", input=add("user", "1+1="))
    reward = httpx.post(
        f"{root}/v1/sessions/{session['id']}/complete",
        json={"reward": 1.0},
        headers={"x-api-key": session["key"]},
        timeout=60,
    )
    assert reward.json()["turns"] == 3

    (row,) = asyncio.run(_rows(tmp_path / "sessions.sqlite"))
    said = tiny_models.log_probs(tiny_models.load(MODEL), row.tokens)
    recorded = row.rollout_log_probs
    expected = said[len(said) - len(recorded) :]
    assert sum(row.loss_mask) >= 3
    gaps = [abs(a - b) for a, b, is_trained in zip(recorded, expected, row.loss_mask, strict=True) if is_trained]
    assert max(gaps) < 1e-4
    assert row.weight_versions == [0]


async def _rows(path: Path) -> list[Sample]:
    store = SessionStore(path)
    sessions = await store.load()
    await store.close()
    return [sample for session, entries in sessions for sample in member_samples(session, entries)]
