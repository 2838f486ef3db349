"""Agents as a worker runs them, before a scripted engine: their rows, their failures, and what is left of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.helpers.agent_world import TOKENIZER, AgentWorld, agent_world
from tests.helpers.chat_tokenizers import make_chat_tokenizer
from tests.helpers.processes import assert_ended
from tests.helpers.scripted_engine import Failure, Reply, Request
from vime.agents import server
from vime.agents import task as task_module
from vime.agents.generate import generate
from vime.agents.task import AgentTask
from vime.rollout import engine_client as client_module
from vime.rollout.engine_client import MAX_ATTEMPTS
from vime.rollout.exchanges import recording
from vime.rollout.generation import engine_client, take_prompt_tokens, train_sampling_params
from vime.rollout.group_worker import generate_and_rm_group, unusable_reason
from vime.rollout.loops import rollout_loop
from vime.rollout.plugins import plugin
from vime.rollout.request_priority import set_request_priority
from vime.rollout.rm_hub import close_rewards
from vime.types import Sample, SampleStatus


def answer(request: Request) -> Reply:
    ids = TOKENIZER.encode(f"n{request.number}<|im_end|>")
    cached = 0 if request.number == 0 else 16
    return Reply(token_ids=ids, version=str(request.number), cached_tokens=cached)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AgentWorld]:
    with agent_world(tmp_path, answer) as made:
        yield made


def sample(index: int = 0) -> Sample:
    return Sample(group_index=7, index=index, prompt="1+1=", label="2", tokens=[1], metadata={"level": 3})


def say(client: openai.OpenAI, messages: list[Any], text: str) -> list[Any]:
    """Add a message and the answer to it."""
    asked = [*messages, {"role": "user", "content": text}]
    content = client.chat.completions.create(model="m", messages=asked).choices[0].message.content
    return [*asked, {"role": "assistant", "content": content}]


def two_turns(task: AgentTask) -> float:
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    assert (task.prompt, task.label, task.metadata["level"]) == ("1+1=", "2", 3)
    say(client, say(client, [], "a"), "b")
    return 0.5


async def a_subagent(task: AgentTask) -> None:
    """Two turns, and between them a conversation of its own; the run's reward function scores it."""
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = await asyncio.to_thread(say, client, [], "a")
    await asyncio.to_thread(say, client, [], "search")
    await asyncio.to_thread(say, client, messages, "b")


def raises(task: AgentTask) -> float:
    raise KeyError(task.prompt)


def returns_too_much(task: AgentTask) -> float:
    two_turns(task)
    return 1e39


def returns_text(task: AgentTask) -> str:
    return f"{task.label}"


HOLDS, FREE = threading.Event(), threading.Event()


def holds_its_thread(task: AgentTask) -> float:
    if not HOLDS.is_set():
        HOLDS.set()
        FREE.wait(60)
        return 0.0
    return two_turns(task)


def asks_nothing(task: AgentTask) -> float:
    return 1.0


async def last_number(_args: Any, scored: Sample, **_: object) -> float:
    """The number of the request that gave the last answer: its text ends with it."""
    return float(scored.response.rsplit("n", 1)[1])


HERE = Path(__file__)


def test_a_function_that_goes_on_with_its_conversation_gives_one_row_with_its_reward(world: AgentWorld) -> None:
    [row] = world.generate(world.args("--agent-function", f"{HERE}:two_turns"), sample())
    assert (row.group_index, row.index, row.status, row.reward) == (7, 0, SampleStatus.COMPLETED, 0.5)
    assert (row.prompt, row.label, row.metadata["level"]) == ("1+1=", "2", 3)
    said = TOKENIZER.encode("n0<|im_end|>"), TOKENIZER.encode("n1<|im_end|>")
    trained = [token for token, mask in zip(row.tokens[row.prompt_length :], row.loss_mask, strict=True) if mask]
    assert trained == [*said[0], *said[1]]
    assert row.weight_versions == [0, 1]  # the engine said one for each request
    assert row.response.startswith("n0")
    assert row.response.endswith("n1")


def test_the_chat_template_of_an_agent_gets_the_arguments_of_its_flag_without_apply_chat_template(
    world: AgentWorld,
) -> None:
    template = world.directory / "chat_template.jinja"
    assert template.exists()
    empty_thought = "{% if enable_thinking is false %}<think></think>{% endif %}"
    template.write_text(f"{make_chat_tokenizer('chatml').chat_template}{empty_thought}")
    flags = ("--apply-chat-template-kwargs", '{"enable_thinking": false}')
    world.generate(world.args("--agent-function", f"{HERE}:two_turns", *flags), sample())
    ends = [TOKENIZER.decode(asked["token_ids"]).rpartition("<|im_start|>")[2] for asked in world.engine.requests]
    assert ends == ["assistant\n<think></think>"] * 2


def test_the_server_is_of_no_group_also_not_of_the_one_that_started_it(world: AgentWorld) -> None:
    """Else the first group's record would grow with every agent's requests for as long as the process lives."""
    args = world.args("--agent-function", f"{HERE}:two_turns")

    async def work() -> int:
        with recording(args, sample()) as record:
            await generate(args, sample(), train_sampling_params(args))
            return len(record.exchanges)

    assert rollout_loop().run(work(), name="an agent", timeout_s=60) == 0


def test_a_subagent_is_a_second_row_and_the_reward_function_is_asked_once_about_the_last_one(world: AgentWorld) -> None:
    args = world.args("--agent-function", f"{HERE}:a_subagent", "--custom-rm-path", f"{HERE}:last_number")
    work = generate_and_rm_group(args, [sample(0), sample(1)], train_sampling_params(args))
    rows = rollout_loop().run(work, name="a group", timeout_s=60)
    assert [(row.index, row.metadata["session_row"], row.metadata["session_rows"]) for row in rows] == [
        (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2),
    ]  # fmt: skip
    for first, last in (rows[:2], rows[2:]):
        assert first.reward == last.reward == float(last.response.rsplit("n", 1)[1])
        assert first.response != last.response


async def says_its_prompt(task: AgentTask) -> float:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(task.prompt)}])
    return 1.0


def test_the_agent_of_the_group_that_is_needed_first_gets_the_next_free_place(tmp_path: Path) -> None:
    """One place, taken by group 1. Group 9 waits for it, then group 3 comes, and is answered before it."""
    may_answer = threading.Event()

    def held(request: Request) -> Reply:
        assert may_answer.wait(60)
        return answer(request)

    async def one(args: Any, group: int) -> None:
        set_request_priority(group)
        asked = Sample(group_index=group, index=0, prompt=f"g{group}", tokens=[1])
        await generate(args, asked, train_sampling_params(args))

    async def three(args: Any) -> None:
        tasks = [asyncio.create_task(one(args, 1))]
        slots = engine_client(args)._slots
        while slots._free:
            await asyncio.sleep(0)
        for number, group in enumerate((9, 3), start=1):
            tasks.append(asyncio.create_task(one(args, group)))
            while len(slots._waiting) < number:
                await asyncio.sleep(0)
        may_answer.set()
        await asyncio.gather(*tasks)

    with agent_world(tmp_path, held) as world:
        flags = ("--agent-function", f"{HERE}:says_its_prompt", "--vllm-server-concurrency", "1")
        args = world.args(*flags, "--rollout-num-engines", "1")
        rollout_loop().run(three(args), name="three agents", timeout_s=60)
        asked = [TOKENIZER.decode(request["token_ids"]) for request in world.engine.requests]
    assert [text.partition("g")[2][0] for text in asked] == ["1", "3", "9"]


async def knows_every_turn(_args: Any, scored: Sample, **_: object) -> float:
    """The number of turns, when they are the subagent's and the agent's with what each was asked and said."""
    turns = json.loads(json.dumps(scored.metadata["turns"]))
    told = [(turn["number"], turn["continues"], [one["content"] for one in turn["messages"]]) for turn in turns]
    assert told == [(0, None, ["a"]), (1, None, ["search"]), (2, 0, ["b"])]
    said = [turn["reply"]["content"] for turn in turns]
    assert [text.startswith("n") for text in said] == [True] * 3
    assert [turn["num_tokens"] for turn in turns] == [len(TOKENIZER.encode(f"{text}<|im_end|>")) for text in said]
    assert [turn["versions"] for turn in turns] == [[int(text[1:])] for text in said]
    return float(len(turns))


async def all_know_every_turn(args: Any, scored: list[Sample], **_: object) -> list[float]:
    return [await knows_every_turn(args, sample) for sample in scored]


@pytest.mark.parametrize("flags", [["knows_every_turn"], ["all_know_every_turn", "--group-rm"]])
def test_a_reward_function_is_told_every_turn_of_all_branches_and_the_rows_do_not_keep_them(
    world: AgentWorld, flags: list[str]
) -> None:
    name, *more = flags
    args = world.args("--agent-function", f"{HERE}:a_subagent", "--custom-rm-path", f"{HERE}:{name}", *more)
    work = generate_and_rm_group(args, [sample(0), sample(1)], train_sampling_params(args))
    rows = rollout_loop().run(work, name="a group", timeout_s=60)
    assert [(row.index, row.reward) for row in rows] == [(0, 3.0), (0, 3.0), (1, 3.0), (1, 3.0)]
    assert all(set(row.metadata) == {"level", "session_row", "session_rows"} for row in rows)


class RewardService:
    """A remote reward that is away for its first request, and then says 0.25 times how often it has scored."""

    def __init__(self) -> None:
        self.scored: list[dict[str, Any]] = []
        self.num_refused = 0
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not service.num_refused:
                    service.num_refused += 1
                    self.send_error(503)
                    return
                service.scored.append(body)
                content = json.dumps({"reward": 0.25 * len(service.scored)}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/score"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> RewardService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


def test_a_remote_reward_is_asked_again_and_once_for_each_session_of_several_rows(world: AgentWorld) -> None:
    with RewardService() as service:
        flags = ("--rm-type", "remote_rm", "--rm-url", service.url)
        args = world.args("--agent-function", f"{HERE}:a_subagent", *flags)
        work = generate_and_rm_group(args, [sample(0), sample(1)], train_sampling_params(args))
        rows = rollout_loop().run(work, name="a group", timeout_s=60)
        rollout_loop().run(close_rewards(), name="rewards to close", timeout_s=60)
    assert service.num_refused == 1
    assert sorted(body["index"] for body in service.scored) == [0, 1]
    found = {row.index: row.reward for row in rows}
    assert sorted(found.values()) == [0.25, 0.5]
    assert all(row.reward == found[row.index] for row in rows)
    last = {row.index: row.response for row in rows}  # the branch that ended last
    assert {body["index"]: body["response"] for body in service.scored} == last


async def ranks(_args: Any, scored: list[Sample], **_: object) -> list[float]:
    return [float(place) for place, _ in enumerate(scored)]


def test_a_group_reward_gets_each_session_once_in_the_order_of_the_group(world: AgentWorld) -> None:
    flags = ("--group-rm", "--custom-rm-path", f"{HERE}:ranks")
    args = world.args("--agent-function", f"{HERE}:a_subagent", *flags)
    work = generate_and_rm_group(args, [sample(0), sample(1)], train_sampling_params(args))
    rows = rollout_loop().run(work, name="a group", timeout_s=60)
    assert [(row.index, row.reward) for row in rows] == [(0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0)]


def test_prompt_tokens_that_the_engine_had_already_are_counted_and_told_to_the_agent(world: AgentWorld) -> None:
    take_prompt_tokens()
    world.generate(world.args("--agent-function", f"{HERE}:sees_the_cache"), sample())
    lengths = [len(request["token_ids"]) for request in world.engine.requests]
    taken = take_prompt_tokens()
    assert (taken.asked, taken.cached) == (sum(lengths), 16)  # of two requests; the first finds nothing
    assert taken.metrics() == {"rollout/prefix_cached_share": 16 / sum(lengths)}
    assert take_prompt_tokens().metrics() == {}


def sees_the_cache(task: AgentTask) -> float:
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    usages = [client.chat.completions.create(**ask).usage for _ in range(2)]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [0, 16]
    return 1.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "it raised KeyError: '1+1='"),
        ("returns_text", "it returned '2'; expected a finite number of at most 3.4e+38, or None"),
        ("returns_too_much", "it returned 1e+39; expected a finite number of at most 3.4e+38, or None"),
        ("asks_nothing", "the session has no turn to reward; let it fail instead"),
    ],
)
def test_a_function_that_gives_no_sample_lets_its_sample_fail_and_never_be_zero(
    world: AgentWorld, name: str, reason: str
) -> None:
    args = world.args("--agent-function", f"{HERE}:{name}")
    [row] = world.generate(args, sample())
    assert (row.status, row.reward, row.response_length) == (SampleStatus.FAILED, None, 0)
    assert row.metadata == {"level": 3, "session_reason": reason}
    work = generate_and_rm_group(args, [sample()], train_sampling_params(args))
    group = rollout_loop().run(work, name="a group", timeout_s=60)
    assert unusable_reason(group) == "failed"


def test_a_program_finds_address_key_and_prompt_in_its_environment_and_says_its_reward(world: AgentWorld) -> None:
    source = """
import json, os, urllib.request
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
base, session = os.environ["OPENAI_BASE_URL"], os.environ["VIME_SESSION"]
assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
assert base == os.environ["ANTHROPIC_BASE_URL"] + "/v1"
post(base + "/chat/completions", {"messages": [{"role": "user", "content": os.environ["VIME_PROMPT"]}]})
post(f"{base}/sessions/{session}/complete", {"reward": float(os.environ["VIME_LABEL"])})
"""
    [row] = world.generate(world.command(source), sample())
    assert (row.status, row.reward) == (SampleStatus.COMPLETED, 2.0)
    assert TOKENIZER.decode(row.tokens) == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\nn0<|im_end|>"


def test_a_program_that_ends_with_another_code_than_0_says_why_it_failed(world: AgentWorld) -> None:
    [row] = world.generate(world.command("import sys\nprint('no luck')\nsys.exit(3)\n"), sample())
    assert (row.status, row.reward) == (SampleStatus.FAILED, None)
    assert row.metadata["session_reason"] == "it ended with code 3: no luck"


# 21,842 characters of 6 bytes, 33 of the message, 13 of `VIME_PROMPT=` and the zero: 26 more than the 131,072 of Linux
LONG_MESSAGE: list[dict[str, Any]] = [{"role": "user", "content": "长" * 21_842}]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (LONG_MESSAGE, "VIME_PROMPT is too long for an environment variable: 131,098 bytes, at most 131,072. "),
        ("1+1=\0", "embedded null byte"),
    ],
    ids=["too long", "a zero"],
)
def test_a_program_that_cannot_be_started_with_its_prompt_lets_its_sample_fail(
    world: AgentWorld, prompt: Any, reason: str
) -> None:
    asked = sample()
    asked.prompt = prompt
    [row] = world.generate(world.command("raise SystemExit('started')"), asked)
    assert (row.status, row.reward) == (SampleStatus.FAILED, None)
    assert row.metadata["session_reason"].startswith(f"it could not be started: {reason}")


def test_a_program_for_which_no_file_can_be_opened_lets_its_sample_fail(
    world: AgentWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(task_module.tempfile, "TemporaryFile", no_file)
    [row] = world.generate(world.command("raise SystemExit('started')"), sample())
    assert row.metadata["session_reason"] == "it could not be started: [Errno 24] Too many open files"


ENDLESS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
place = pathlib.Path(__file__).parent / "pids"
place.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
place.with_suffix(".new").rename(place)
time.sleep(600)
"""


def wait_for(path: Path) -> str:
    ends = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < ends, f"{path} does not come"
        time.sleep(0.02)
    return path.read_text()


def test_an_agent_that_asks_nothing_is_named_while_it_runs_and_ended_with_its_children(world: AgentWorld) -> None:
    args = world.command(ENDLESS, "--agent-timeout-secs", "4")
    future = rollout_loop().submit(generate(args, sample(5), train_sampling_params(args)))
    pids = [int(pid) for pid in wait_for(world.directory / "pids").split()]
    known = wait_for(world.directory / "waits" / f"worker.{os.getpid()}.json")
    while "the agent of sample 5, group 7, to end" not in known and not future.done():
        known = (world.directory / "waits" / f"worker.{os.getpid()}.json").read_text()
    [wait] = [one for one in json.loads(known)["waits"] if one["name"] == "the agent of sample 5, group 7, to end"]
    assert (wait["owners"], wait["deadline_s"]) == (["agent"], 4.0)
    [row] = future.result(60)
    assert row.status is SampleStatus.FAILED
    assert row.metadata["session_reason"] == "it ran for longer than 4 s (--agent-timeout-secs)"
    assert_ended(pids)


def test_an_agent_has_its_whole_time_after_it_waited_for_a_thread(
    world: AgentWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    monkeypatch.setattr("vime.agents.task.agent_threads", lambda: pool)
    args = world.args("--agent-function", f"{HERE}:holds_its_thread", "--agent-timeout-secs", "8")
    loaded = plugin(args, "agent_function")  # of a module of its own, not of this one
    assert loaded is not None
    holds, free = (loaded.__globals__[name] for name in ("HOLDS", "FREE"))
    try:
        first = rollout_loop().submit(generate(args, sample(), train_sampling_params(args)))
        assert holds.wait(60)
        second = rollout_loop().submit(generate(args, sample(1), train_sampling_params(args)))
        [late] = first.result(60)
        assert late.status is SampleStatus.FAILED
        done, _ = concurrent.futures.wait([second], timeout=1)
        assert done == set()
        free.set()
        [row] = second.result(60)
        assert (row.status, row.reward) == (SampleStatus.COMPLETED, 0.5), row.metadata
    finally:
        free.set()
        pool.shutdown()


def test_an_agent_for_which_no_thread_is_free_has_failed_and_does_not_end_the_run(
    world: AgentWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    monkeypatch.setattr("vime.agents.task.agent_threads", lambda: pool)
    flags = ("--agent-timeout-secs", "8", "--generate-timeout-secs", "10")
    args, free = world.args("--agent-function", f"{HERE}:two_turns", *flags), threading.Event()
    try:
        pool.submit(free.wait, 60)
        [row] = world.generate(args, sample())
    finally:
        free.set()
        pool.shutdown()
    assert row.status is SampleStatus.FAILED
    assert row.metadata["session_reason"] == "no thread was free for it within 1 s: 256 agents at a time are run"


def test_an_agent_whose_group_is_cancelled_is_ended_with_its_children(world: AgentWorld) -> None:
    args = world.command(ENDLESS)
    future = rollout_loop().submit(generate(args, sample(), train_sampling_params(args)))
    pids = [int(pid) for pid in wait_for(world.directory / "pids").split()]
    future.cancel()
    assert_ended(pids)


WORKER = """
import asyncio, sys
from vime.agents.task import AgentTask, run_command
task = AgentTask(base_url="", anthropic_base_url="", api_key="", session_id="", prompt="")
asyncio.run(run_command(f"{sys.executable} {sys.argv[1]}", task, timeout_s=600))
"""


def test_a_program_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ENDLESS.replace("600", "60"))
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "agent.py")])
    program, child = (int(pid) for pid in wait_for(tmp_path / "pids").split())
    worker.kill()
    worker.wait(30)
    assert_ended([program])
    psutil.Process(child).kill()  # its own child is not known to anybody any more, as docs/agents.md says


def test_a_budget_of_turns_ends_the_session_and_its_row_is_truncated(world: AgentWorld) -> None:
    source = """
import json, os, urllib.error, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
def ask():
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
ask()
try:
    ask()
except urllib.error.HTTPError as error:
    assert (error.code, json.load(error)["error"]["code"]) == (403, "budget_turns")
"""
    [row] = world.generate(world.command(source, "--agent-max-turns", "1"), sample())
    assert (row.status, row.reward) == (SampleStatus.TRUNCATED, None)
    assert row.metadata["session_reason"] == "budget of 1 turns"


def test_the_file_of_a_process_that_has_ended_is_removed_when_another_one_begins(world: AgentWorld) -> None:
    folder = world.directory / server.DIRECTORY
    folder.mkdir()
    host = server.socket.gethostname()
    dead, others = folder / f"{host}.4194305.ab.sqlite", folder / "elsewhere.4194305.ab.sqlite"  # above the largest pid
    for path in (dead, dead.with_name(f"{dead.name}-wal"), others):
        path.touch()
    world.generate(world.args("--agent-function", f"{HERE}:two_turns"), sample())
    names = {path.name for path in folder.iterdir()}
    assert {name for name in names if ".4194305." in name} == {others.name}
    assert [name for name in names if name.startswith(f"{host}.{os.getpid()}.") and name.endswith(".sqlite")]


class Game:
    """An environment that says a number after each completion, until it has heard three."""

    request: Mapping[str, object] = {"max_tokens": 50}
    closed: list[Game] = []  # noqa: RUF012 - of the class on purpose: a test looks at what was closed

    def reset(self, task: AgentTask) -> Sequence[Mapping[str, object]]:
        self.heard: list[object] = []
        return [{"role": "user", "content": f"{task.prompt}{task.label}"}]

    def step(self, message: Mapping[str, object]) -> Sequence[Mapping[str, object]] | None:
        self.heard.append(message["content"])
        return [{"role": "user", "content": str(len(self.heard))}] if len(self.heard) < 3 else None

    def reward(self) -> float | None:
        return len(self.heard) / 4

    def close(self) -> None:
        self.closed.append(self)


class AsyncGame:
    """The same without threads, and scored by the run's reward function."""

    def __init__(self) -> None:
        self._game = Game()

    async def reset(self, task: AgentTask) -> Sequence[Mapping[str, object]]:
        return self._game.reset(task)

    async def step(self, message: Mapping[str, object]) -> Sequence[Mapping[str, object]] | None:
        return self._game.step(message)

    async def reward(self) -> None:
        return None


class CallingGame(Game):
    request: Mapping[str, object] = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}


def engine_record(requests: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """What the engine saw and said last, and every token that it said, from the scripted engine's own list."""
    said = [TOKENIZER.encode(f"n{number}<|im_end|>") for number in range(len(requests))]
    return [*requests[-1]["token_ids"], *said[-1]], [token for ids in said for token in ids]


@pytest.mark.parametrize(("name", "reward"), [("Game", 0.75), ("AsyncGame", None), ("CallingGame", 0.75)])
def test_an_environment_gives_one_row_of_exactly_what_the_engine_saw_and_said(
    world: AgentWorld, name: str, reward: float | None
) -> None:
    [row] = world.generate(world.args("--environment", f"{HERE}:{name}"), sample())
    requests = world.engine.requests
    whole, said = engine_record(requests)
    assert row.tokens == whole
    trained = [token for token, mask in zip(row.tokens[row.prompt_length :], row.loss_mask, strict=True) if mask]
    assert trained == said
    assert (row.status, row.reward, row.weight_versions) == (SampleStatus.COMPLETED, reward, [0, 1, 2])
    assert TOKENIZER.decode(requests[0]["token_ids"]).count("1+1=2") == 1
    assert ("Tools:" in TOKENIZER.decode(requests[0]["token_ids"])) is (name == "CallingGame")
    assert (requests[0]["sampling_params"]["max_tokens"] == 50) is (name == "Game")


def test_an_environment_asks_again_while_no_engine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was lost takes longer to start again than a request to it is repeated."""

    def away(request: Request) -> Reply | Failure:
        return answer(request) if request.number == 0 or request.number > MAX_ATTEMPTS else Failure(503)

    monkeypatch.setattr(client_module, "LONGEST_BACKOFF_S", 0.01)
    with agent_world(tmp_path, away) as world:
        [row] = world.generate(world.args("--environment", f"{HERE}:Game"), sample())
        assert len(world.engine.requests) == MAX_ATTEMPTS + 3
    assert (row.status, row.reward) == (SampleStatus.COMPLETED, 0.75)
    assert row.weight_versions == [0, MAX_ATTEMPTS + 1, MAX_ATTEMPTS + 2]


def test_an_environment_that_has_no_room_for_another_turn_gives_its_reward_for_what_was(world: AgentWorld) -> None:
    [row] = world.generate(world.args("--environment", f"{HERE}:Game", "--agent-max-turns", "2"), sample())
    assert (row.status, row.reward) == (SampleStatus.TRUNCATED, 0.5)
    assert row.metadata["session_reason"] == "budget of 2 turns"


class BrokenReset(Game):
    def reset(self, task: AgentTask) -> Sequence[Mapping[str, object]]:
        raise RuntimeError("no server")


class BrokenStep(Game):
    def step(self, message: Mapping[str, object]) -> Sequence[Mapping[str, object]] | None:
        raise RuntimeError("no server")


class BrokenReward(Game):
    def reward(self) -> float | None:
        raise RuntimeError("no server")


class BadMessage(Game):
    def reset(self, task: AgentTask) -> Sequence[Mapping[str, object]]:
        return [{"role": "user", "content": [{"type": "image_url"}]}]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "it raised RuntimeError: no server") for name in ("BrokenReset", "BrokenStep", "BrokenReward")),
        ("BadMessage", "content of type 'image_url' is not supported"),
    ],
)
def test_an_environment_that_breaks_has_failed_is_closed_and_is_never_a_zero(
    world: AgentWorld, name: str, reason: str
) -> None:
    args = world.args("--environment", f"{HERE}:{name}")
    game: Any = plugin(args, "environment")
    game.closed.clear()
    [row] = world.generate(args, sample())
    assert (row.status, row.reward, row.response_length) == (SampleStatus.FAILED, None, 0)
    assert reason in row.metadata["session_reason"]
    assert [type(one) for one in game.closed] == [game]


class SlowGame(Game):
    """Its step ends after the test says so."""

    may_end = threading.Event()
    order: list[str] = []  # noqa: RUF012 - of the class on purpose: a test looks at it
    is_closed = threading.Event()

    def step(self, message: Mapping[str, object]) -> Sequence[Mapping[str, object]] | None:
        assert self.may_end.wait(60)
        self.order.append("step")
        return None

    def close(self) -> None:
        self.order.append("close")
        self.is_closed.set()


def test_an_environment_that_is_late_has_failed_and_is_closed_after_its_step(world: AgentWorld) -> None:
    args = world.args("--environment", f"{HERE}:SlowGame", "--agent-timeout-secs", "2")
    game: Any = plugin(args, "environment")
    [row] = world.generate(args, sample())
    assert row.status is SampleStatus.FAILED
    assert row.metadata["session_reason"] == "it ran for longer than 2 s (--agent-timeout-secs)"
    assert game.order == []
    game.may_end.set()
    assert game.is_closed.wait(60)
    assert game.order == ["step", "close"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10.0.0.7"), ({"no_proxy": "corp"}, "corp,10.0.0.7"), ({"NO_PROXY": "a,b"}, "a,b,10.0.0.7")],
)
def test_a_program_asks_its_session_without_the_proxy_of_the_environment(given, expected, monkeypatch) -> None:
    """An SDK would send the key of the session to the proxy."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    url = "http://10.0.0.7:4711/s/v1"
    task = AgentTask(base_url=url, anthropic_base_url=url, api_key="k", session_id="s", prompt="p")
    assert {task.environment()[name] for name in ("no_proxy", "NO_PROXY")} == {expected}
