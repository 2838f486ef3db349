"""A run whose prompts are answered by a program of ours that uses OpenAI's SDK, unmodified: real Ray, vLLM, megatron.

Each agent makes two turns with a calculator between them. Half of them also start a subagent, a conversation of its
own, which makes their session two rows of one sample. Two workers generate, each with agents of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.helpers.metrics_page import undocumented
from tests.helpers.ports import ports_on_loopback
from tests.helpers.training import Finished, TinyTask, Training
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims
from vime.rollout.record import load_rollout
from vime.sessions.recording import Turn, branches
from vime.sessions.store import Entry, Session, SessionStore
from vime.types import Sample

ROUNDS, GROUPS, SAMPLES = 2, 2, 4
# In the characters that the model knows; a tool is the letter t.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ':' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
AGENT = """
import json, os, pathlib, sys, urllib.request
import openai

client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
session, prompt = os.environ["VIME_SESSION"], os.environ["VIME_PROMPT"]
number = int(session, 16)
assert sys.stdin.read() == ""
tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]
messages = [{"role": "user", "content": prompt}]

def ask(conversation):
    answer = client.chat.completions.create(model="any", messages=conversation, tools=tools)
    conversation.append({"role": "assistant", "content": answer.choices[0].message.content or ""})

ask(messages)
if number % 2:
    ask([{"role": "user", "content": "1+1="}])  # a subagent
messages.append({"role": "tool", "tool_call_id": "call", "content": os.environ["VIME_LABEL"]})
ask(messages)
if number % 3 == 0:  # the others are scored by the run's reward function
    url = f"{os.environ['OPENAI_BASE_URL']}/sessions/{session}/complete"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps({"reward": 0.25}).encode(), headers)).read()
(pathlib.Path(__file__).parent / "said" / session).write_text(json.dumps({"rows": 1 + number % 2}))
"""


@pytest.fixture(scope="module")
def finished(tiny_task: TinyTask, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("agents")
    shutil.copytree(tiny_task.model, directory / "model")
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "said").mkdir()
    (directory / "agent.py").write_text(AGENT)
    flags = [
        *tiny_task.flags(), "--hf-checkpoint", str(directory / "model"), "--rollout-max-context-len", "200",
        "--transferqueue-mode", "streaming", "--num-rollout-workers", "2", "--num-rollout", str(ROUNDS),
        "--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(SAMPLES),
        "--agent-command", f"{sys.executable} {directory / 'agent.py'}",
        "--actor-num-gpus-per-node", "2", "--global-batch-size", str(GROUPS * SAMPLES),
        "--save-debug-rollout-data", str(directory / "rollout_{rollout_id}.jsonl"),
    ]  # fmt: skip
    training = Training("train.py", flags, directory / "run")
    training.wait_for_event("round_trained")
    assert_servers_of_sessions_are_on_loopback(training)
    run = training.finish()
    assert run.code == 0, run.output
    return run


def assert_servers_of_sessions_are_on_loopback(training: Training) -> None:
    """As every other port. Each of the two workers has one, which answers nobody without a key."""
    ports = [port for port in ports_on_loopback(training) if port.owner == "rollout worker"]
    statuses = []
    for port in ports:
        with contextlib.suppress(httpx.TransportError):  # Ray's ports speak HTTP/2
            url = f"http://127.0.0.1:{port.number}/v1/chat/completions"
            statuses.append(httpx.post(url, json={}, timeout=10, trust_env=False).status_code)
    assert statuses == [401, 401]


async def read_sessions(run: Path) -> list[tuple[Session, list[Entry]]]:
    paths = list((run / "sessions").glob("*.sqlite"))
    assert len(paths) == 2, "of each worker one"
    found: list[tuple[Session, list[Entry]]] = []
    for path in paths:
        store = SessionStore(path)
        of_worker = await store.load()
        assert of_worker, "each worker had agents"
        found += of_worker
        await store.close()
    return found


def test_every_promise_of_the_audit_is_kept_and_rows_are_counted_as_samples(finished: Finished) -> None:
    report = audit_run(finished.run_dir, saved=None, claims=partial(read_claims, finished.run_dir))
    assert report.findings == ()
    assert report.groups["trained"] == GROUPS * ROUNDS
    metrics = finished.metrics()
    assert sorted(metrics) == list(range(ROUNDS))
    for line in metrics.values():
        assert line["train/num_samples"] == line["rollout/num_samples"] == GROUPS * SAMPLES
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-3  # what was recorded is what the trainer computes
        # Prompts are shorter than a block of 32 tokens, or begin a block that the turn before them has filled.
        assert 0 <= line["rollout/prefix_cached_share"] < 1
    assert undocumented(name for line in metrics.values() for name in line) == []


def test_rows_are_branches_and_each_trained_token_is_one_that_the_engine_sampled_once(finished: Finished) -> None:
    directory = finished.run_dir.parent
    recorded = {session.id: (session, entries) for session, entries in asyncio.run(read_sessions(finished.run_dir))}
    num_rows = 0
    for round_id in range(ROUNDS):
        of_session: dict[str, list[Sample]] = defaultdict(list)
        rows = [row for group in load_rollout(directory / f"rollout_{round_id}.jsonl") for row in group]
        for row in rows:
            of_session[row.session_id].append(row)
        assert len(of_session) == GROUPS * SAMPLES
        assert finished.metrics()[round_id]["train/num_rows"] == len(rows)
        for name, found in of_session.items():
            said = json.loads((directory / "said" / name).read_text())
            session, entries = recorded[name]
            turns = [entry.turn for entry in entries]
            assert len(turns) == 1 + said["rows"]
            assert len(branches(turns)) == len(found) == said["rows"]
            assert {row.index for row in found} == {session.index}
            assert len({row.reward for row in found}) == 1
            if int(name, 16) % 3 == 0:
                assert found[0].reward == 0.25
            assert sorted(trained_tokens(found)) == sorted(sampled_tokens(turns))
        num_rows += len(rows)
    assert num_rows > GROUPS * SAMPLES * ROUNDS  # half of the sessions, by chance; none has odds of 1 in 65,536


def trained_tokens(rows: list[Sample]) -> list[tuple[int, float, int]]:
    """(token, log-probability, version) of every token with loss mask 1."""
    found = []
    for row in rows:
        tokens = row.tokens[row.prompt_length :]
        versions = [span.version for span in row.token_policy_versions for _ in range(span.start, span.end)]
        cells = zip(tokens, row.rollout_log_probs, versions, row.loss_mask, strict=True)
        found += [(token, log_prob, version) for token, log_prob, version, is_trained in cells if is_trained]
    return found


def sampled_tokens(turns: list[Turn]) -> list[tuple[int, float, int]]:
    """The same of every token that the engine said."""
    found = []
    for turn in turns:
        versions = [span.version for span in turn.versions for _ in range(span.start, span.end)]
        found += list(zip(turn.token_ids, turn.log_probs, versions, strict=True))
    return found
