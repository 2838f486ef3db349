"""The example that plays tasks of `verifiers`, before a server of sessions: on a stand-in of that package, and on the
package itself where VERIFIERS_PYTHON names a Python that has it (and `uv` beside it), as its docstring says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.chat_tokenizers import make_chat_tokenizer
from tests.helpers.scripted_engine import Reply, Request, ScriptedEngine
from tests.helpers.session_server import ADMIN, session_server
from vime.sessions.tokenizer import HfChatTokenizer
from vime.utils.http import HttpThread
from vime.utils.network import free_port

PROGRAM = Path(__file__).parents[3] / "examples" / "agents" / "verifiers_taskset.py"
TOKENIZER = HfChatTokenizer(make_chat_tokenizer("chatml"))
REAL = os.environ.get("VERIFIERS_PYTHON", "")
CONFIG = {"taskset": {"id": "sums"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
TASKSET = """
import verifiers.v1 as vf

__all__ = ["SumsTaskset"]

class Data(vf.TaskData):
    answer: str

class SumTask(vf.Task[Data, vf.State]):
    @vf.reward
    async def right(self, trace) -> float:
        if self.data.answer == "none":
            raise ValueError("no answer is known")
        return float(self.data.answer in trace.last_reply)

class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for prompt, answer in (("1+1=", "2"), ("2+2=", "4"), ("0/0=", "none")):
            yield SumTask(Data(prompt=prompt, answer=answer), self.config.task)
"""
STAND_IN = """
import asyncio, contextlib, json, os, types, urllib.request

N = types.SimpleNamespace
TASKS = [("1+1=", "2"), ("2+2=", "4"), ("0/0=", "none")]
EvalClientConfig = ModelContext = N

def resolve_env_config(data):
    return N(**data)

class Taskset(list):
    bounded = True

    def include(self, *, idx):
        return [self[int(place)] for place in idx]

class Env:
    taskset = Taskset(N(data=N(prompt_text=prompt, prompt=prompt), answer=answer) for prompt, answer in TASKS)

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, ctx):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": task.data.prompt}]}
        headers = {"Authorization": "Bearer " + os.environ[ctx.client.api_key_var], "Content-Type": "application/json"}
        url = ctx.client.base_url + "/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        answer = json.load(await asyncio.to_thread(urllib.request.urlopen, request))
        said = answer["choices"][0]["message"]["content"]
        ok = task.answer != "none"
        errors = [] if ok else [N(type="TaskError", message="no answer is known")]
        trace = N(reward=float(task.answer in said), agent=N(trainable=True), errors=errors)
        return N(ok=ok, errors=[], traces=[trace])

def load_environment(config):
    assert config.taskset == {"id": "sums"}, config
    return Env()
"""


class World:
    def __init__(self, directory: Path, kind: str, port: int, engine: ScriptedEngine) -> None:
        self.directory, self.engine = directory, engine
        self._python, self._root = REAL if kind == "real" else sys.executable, f"http://127.0.0.1:{port}/v1"
        (directory / "config.json").write_text(json.dumps(CONFIG))
        (directory / "sums.py").write_text(TASKSET)
        if kind != "real":
            (directory / "verifiers").mkdir()
            (directory / "verifiers" / "__init__.py").touch()
            (directory / "verifiers" / "v1.py").write_text(STAND_IN)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(self._python).parent}:{os.environ['PATH']}"
        return subprocess.run(
            [self._python, str(PROGRAM), str(self.directory / "config.json"), *arguments],
            env={**os.environ, "PYTHONPATH": str(self.directory), "PATH": path, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def play(self, label: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
        """Return the program's end and the session's."""
        made = self._call("POST", "", ADMIN, {"group_index": 0, "index": 0})
        known = {"OPENAI_BASE_URL": self._root, "OPENAI_API_KEY": str(made["key"]), "VIME_SESSION": str(made["id"])}
        ended = self.run(VIME_LABEL=label, **known)
        return ended, self._call("GET", f"/{made['id']}", str(made["key"]))

    def _call(self, method: str, path: str, key: str, body: object = None) -> dict[str, object]:
        http = HttpThread("sessions of the test", headers={"x-api-key": key})
        try:
            content = None if body is None else json.dumps(body).encode()
            return dict(json.loads(http.call(method, f"{self._root}/sessions{path}", content, deadline_s=30).content))
        finally:
            http.close()


def answer(request: Request) -> Reply:
    """The digits of the prompt added up, in words: `1+1=` gives `it is 2`."""
    asked = TOKENIZER.decode(request.token_ids).rpartition("user\n")[2]
    total = sum(int(letter) for letter in asked if letter.isdecimal())
    return Reply(token_ids=TOKENIZER.encode(f"it is {total}<|im_end|>"))


KINDS = ["stand-in", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="VERIFIERS_PYTHON is not set"))]


@pytest.fixture(params=KINDS)
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    port = free_port()
    with (
        ScriptedEngine(answer) as engine,
        session_server(port, tmp_path, f"http://127.0.0.1:{engine.port}", "chatml"),
    ):
        yield World(tmp_path, request.param, port, engine)


def test_tasks_become_prompts_and_a_label_that_finds_each_again(world: World) -> None:
    ended = world.run("--write-prompts", str(world.directory / "prompts.jsonl"))
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (world.directory / "prompts.jsonl").read_text().splitlines()]
    assert lines == [
        {"input": "1+1=", "label": "0"},
        {"input": "2+2=", "label": "1"},
        {"input": "0/0=", "label": "2"},
    ]


def test_a_task_is_played_and_its_reward_reaches_the_session(world: World) -> None:
    ended, session = world.play("1")
    assert ended.returncode == 0, ended.stderr
    assert (session["state"], session["reward"], session["turns"]) == ("complete", 1.0, 1)
    [request] = world.engine.requests
    assert "2+2=" in TOKENIZER.decode(request["token_ids"])


def test_a_task_that_fails_ends_the_program_with_why_and_gives_no_reward(world: World) -> None:
    ended, session = world.play("2")
    assert ended.returncode == 1
    assert "no answer is known" in ended.stderr
    assert (session["state"], session["reward"]) == ("open", None)


def test_a_python_without_the_package_is_told_what_to_install() -> None:
    ended = subprocess.run(
        [sys.executable, "-I", "-S", str(PROGRAM), "config.json"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "-m pip install verifiers==0.4.0 uv" in ended.stderr
