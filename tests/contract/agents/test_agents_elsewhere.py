"""Agents that run elsewhere and ask a run for its samples (--agent-listen), before a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from tests.helpers.agent_world import TOKENIZER, AgentWorld, agent_world
from tests.helpers.scripted_engine import Reply, Request
from vime.agents import server
from vime.agents.generate import _end_elsewhere, generate
from vime.rollout.generation import train_sampling_params
from vime.rollout.group_worker import generate_and_rm_group
from vime.rollout.loops import rollout_loop
from vime.rollout.request_priority import request_priority, set_request_priority
from vime.sessions import offers
from vime.sessions.store import forget_sessions, keep_sessions
from vime.types import Sample, SampleStatus
from vime.utils.network import free_port

EXAMPLE = Path(__file__).parents[3] / "examples" / "agents" / "outside.py"
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def answer(request: Request) -> Reply:
    return Reply(token_ids=TOKENIZER.encode(f"n{request.number}<|im_end|>"), version=str(request.number))


class Listening:
    """A process that generates and listens, and what an agent elsewhere knows of it."""

    def __init__(self, world: AgentWorld) -> None:
        self.world, self.port = world, free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def args(self, *flags: object) -> Any:
        return self.world.args("--agent-listen", f"127.0.0.1:{self.port}", *flags)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {wait_for(self.world.directory / 'agent-key').strip()}"}

    def offer(self, args: Any, sample: Sample) -> Future[list[Sample]]:
        """Begin to generate the sample, and return when it is offered."""
        return self.begin(args, self._generate(args, sample))

    def begin(self, args: Any, work: Any) -> Future[list[Sample]]:
        made = rollout_loop().run(server.agent_server(args), name="the server", timeout_s=60)
        before = len(made.offers._open)
        future = rollout_loop().submit(work)
        until(lambda: len(made.offers._open) > before or future.done())
        return future

    async def _generate(self, args: Any, sample: Sample) -> list[Sample]:
        set_request_priority(sample.group_index)
        return await generate(args, sample, train_sampling_params(args))

    def claim(self, key: str = "", body: object = None, headers: dict[str, str] | None = None) -> httpx.Response:
        more = {"Idempotency-Key": key} if key else {}
        asked = {**(headers or self.headers), **more}
        return httpx.post(f"{self.url}/sessions", json=body, headers=asked, timeout=60)


def until(is_so: Any) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def wait_for(path: Path) -> str:
    until(path.exists)
    return path.read_text()


def play(task: dict[str, Any], end: dict[str, Any]) -> httpx.Response:
    with openai.OpenAI(base_url=task["base_url"], api_key=task["key"]) as client:
        client.chat.completions.create(model="m", messages=CHAT["messages"])  # type: ignore[arg-type]
    return finish(task, end)


def finish(task: dict[str, Any], end: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {task['key']}"}
    return httpx.post(f"{task['base_url']}/sessions/{task['id']}/complete", json=end, headers=headers, timeout=60)


def sample(index: int = 0, group: int = 7) -> Sample:
    return Sample(group_index=group, index=index, prompt="1+1=", label="2", tokens=[1], metadata={"level": 3})


def named(world: AgentWorld, name: str) -> dict[str, Any]:
    """Return the wait of this name when the registry shows it, which it does after a second."""
    path = world.directory / "waits" / f"worker.{os.getpid()}.json"
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = [one for one in json.loads(wait_for(path))["waits"] if one["name"] == name]
        return bool(found)

    until(look)
    return found[0]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    with agent_world(tmp_path, answer) as world:
        yield Listening(world)


def test_a_sample_is_claimed_played_and_completed_by_a_program_that_knows_the_key(listening: Listening) -> None:
    args = listening.args("--agent-max-turns", "3")
    future = listening.offer(args, sample())
    assert stat.S_IMODE((listening.world.directory / "agent-key").stat().st_mode) == 0o600
    task = listening.claim().json()
    told = {"prompt": "1+1=", "label": "2", "metadata": {"level": 3}, "evaluation": False}
    assert {name: task[name] for name in told} == told
    assert task["budget"] == {"turns": 3, "tokens": None, "seconds": 300.0}
    assert (task["base_url"], task["anthropic_base_url"]) == (listening.url, listening.url.removesuffix("/v1"))
    assert play(task, {"reward": 0.5}).status_code == 200
    [row] = future.result(60)
    assert (row.group_index, row.index, row.status, row.reward) == (7, 0, SampleStatus.COMPLETED, 0.5)
    assert (row.prompt, row.label, row.metadata["level"]) == ("1+1=", "2", 3)
    assert TOKENIZER.decode(row.tokens) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nn0<|im_end|>"
    assert finish(task, {"reward": 0.5}).status_code == 200  # its answer may have been lost


def test_the_run_scores_a_session_that_ends_with_reward_null_and_evaluation_is_marked(listening: Listening) -> None:
    args = listening.args("--rm-type", "exact_match")
    group = generate_and_rm_group(args, [sample()], train_sampling_params(args), evaluation=True)
    future = listening.begin(args, group)
    task = listening.claim().json()
    assert task["evaluation"] is True
    assert play(task, {}).status_code == 400
    assert finish(task, {"reward": None}).status_code == 200
    [row] = future.result(60)
    assert (row.status, row.reward) == (SampleStatus.COMPLETED, 0.0)  # "n0" is not "2"


def test_one_key_gets_one_session_and_the_group_that_is_needed_first_is_given_first(listening: Listening) -> None:
    args = listening.args()
    futures = [listening.offer(args, sample(group=group)) for group in (9, 3)]
    first, again, other = (listening.claim(key).json() for key in ("a", "a", "b"))
    assert first == again
    assert first["id"] != other["id"]
    for task in (first, other):
        play(task, {"reward": 1.0 if task is first else 0.0})
    assert [row.reward for future in futures for row in future.result(60)] == [0.0, 1.0]  # group 3 was the first
    assert listening.claim("a").json()["id"] == first["id"]  # also when it has ended


def test_two_requests_of_one_key_that_wait_at_the_same_time_get_one_session(listening: Listening) -> None:
    args = listening.args()
    made = rollout_loop().run(server.agent_server(args), name="the server", timeout_s=60)

    async def ask() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=60, headers={**listening.headers, "Idempotency-Key": "a"}) as client:
            asked = [asyncio.create_task(client.post(f"{listening.url}/sessions")) for _ in range(2)]
            while await asyncio.to_thread(lambda: len(made.offers._news._waiters)) < 2:
                await asyncio.sleep(0.01)
            futures.append(rollout_loop().submit(listening._generate(args, sample())))
            return [(await one).json() for one in asked]

    futures: list[Future[list[Sample]]] = []
    one, two = asyncio.run(ask())
    assert one["id"] == two["id"]
    finish(one, {"failed": "enough"})
    futures[0].result(60)


def test_a_client_that_goes_away_while_it_waits_gets_no_sample(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the sample would be of an agent that never hears of it, and fail."""
    monkeypatch.setattr(offers, "CLAIM_S", 600.0)
    args = listening.args()
    made = rollout_loop().run(server.agent_server(args), name="the server", timeout_s=60)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{listening.url}/sessions", headers=listening.headers, timeout=0.5)
    until(lambda: not made.offers._news._waiters)
    future = listening.offer(args, sample())
    play(listening.claim().json(), {"reward": 0.25})
    assert [row.reward for row in future.result(60)] == [0.25]


def test_without_a_sample_a_request_is_answered_with_204(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "CLAIM_S", 0.2)
    args = listening.args()
    future = listening.offer(args, sample())
    task = listening.claim().json()
    empty = listening.claim()
    assert (empty.status_code, empty.content) == (204, b"")
    finish(task, {"failed": "enough"})
    future.result(60)


def test_a_sample_that_nobody_claims_is_named_goes_back_and_has_not_failed(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "CLAIM_S", 0.2)
    args = listening.args("--rollout-timeout-secs", "4")
    future = listening.offer(args, sample())
    wait = named(listening.world, "a sample to be claimed by an agent outside")
    assert (wait["owners"], wait["deadline_s"]) == (["agent"], 4.0)
    [row] = future.result(60)
    assert (row.status, row.reward, row.tokens) == (SampleStatus.ABORTED, None, [1])
    assert listening.claim().status_code == 204  # it is offered no longer


def test_an_agent_that_claims_a_sample_and_falls_silent_is_named_and_its_sample_has_failed(
    listening: Listening,
) -> None:
    args = listening.args("--agent-timeout-secs", "4")
    future = listening.offer(args, sample(5))
    task = listening.claim().json()
    wait = named(listening.world, "the agent of sample 5, group 7, to end")
    assert (wait["owners"], wait["deadline_s"]) == (["agent"], 4.0)
    [row] = future.result(60)
    assert (row.status, row.reward) == (SampleStatus.FAILED, None)
    reason = "its agent did not end it within 4 s (--agent-timeout-secs), and asked nothing for the last 4 s"
    assert row.metadata["session_reason"] == reason
    assert finish(task, {"reward": 1.0}).status_code == 403


def test_the_time_of_an_agent_begins_with_its_claim(listening: Listening) -> None:
    """The session is older than --agent-timeout-secs when it is claimed."""
    args = listening.args("--agent-timeout-secs", "2")
    future = listening.offer(args, sample())
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 2.5)
    play(listening.claim().json(), {"reward": 0.5})
    assert [row.reward for row in future.result(60)] == [0.5]


def test_a_session_that_ends_in_the_moment_of_its_deadline_has_ended() -> None:
    """Its agent was told that the reward counts. The loop is busy until both times are over, and sees the end first."""

    async def work() -> None:
        live: Any = SimpleNamespace(ended=asyncio.Event())
        asyncio.get_running_loop().call_later(0.01, live.ended.set)
        asyncio.get_running_loop().call_soon(time.sleep, 0.2)
        args: Any = SimpleNamespace(agent_timeout_secs=0.1)
        await _end_elsewhere(args, cast("Any", None), live, "an agent to end")

    asyncio.run(work())


def test_a_sample_waits_for_its_agent_for_longer_than_the_engines_have_for_a_request(listening: Listening) -> None:
    """Else a run with few agents would end while all of them play."""
    args = listening.args("--generate-timeout-secs", "2", "--agent-timeout-secs", "1.5")
    group = generate_and_rm_group(args, [sample()], train_sampling_params(args))
    future = listening.begin(args, group)
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 2.5)
    play(listening.claim().json(), {"reward": 0.5})
    assert [row.reward for row in future.result(60)] == [0.5]


@pytest.mark.parametrize(("how", "reason"), [("failed", "the container died"), ("deleted", "it was deleted")])
def test_an_agent_that_gives_up_lets_its_sample_fail_at_once(listening: Listening, how: str, reason: str) -> None:
    future = listening.offer(listening.args(), sample())
    task = listening.claim().json()
    if how == "failed":
        finish(task, {"failed": reason})
    else:
        httpx.delete(f"{listening.url}/sessions/{task['id']}", headers={"x-api-key": task["key"]})
    [row] = future.result(60)
    assert (row.status, row.metadata["session_reason"]) == (SampleStatus.FAILED, reason)


def test_a_group_that_is_not_wanted_any_more_is_not_offered_and_its_session_has_ended(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "CLAIM_S", 0.2)
    futures = [listening.offer(listening.args(), sample(index)) for index in range(2)]
    task = listening.claim().json()
    for future in futures:
        future.cancel()
    until(lambda: play_status(task) == 403)
    until(lambda: not server._SERVERS[0].offers._open)
    assert listening.claim().status_code == 204


def play_status(task: dict[str, Any]) -> int:
    headers = {"Authorization": f"Bearer {task['key']}"}
    return httpx.post(f"{task['base_url']}/chat/completions", json=CHAT, headers=headers, timeout=60).status_code


def test_the_key_stays_when_the_process_starts_again_and_old_sessions_are_unknown(listening: Listening) -> None:
    args = listening.args()
    future = listening.offer(args, sample())
    headers, old = listening.headers, listening.claim("a").json()
    future.cancel()
    ends()
    future = listening.offer(args, sample())
    assert play_status(old) == 401
    new = listening.claim("a", headers=headers).json()
    assert new["id"] != old["id"]
    play(new, {"reward": 0.75})
    assert [row.reward for row in future.result(60)] == [0.75]


STREAMING = ("--enable-vime-transfer-queue", "--transferqueue-mode", "streaming")


def ends() -> Path:
    """The process ends. Where its sessions lie."""
    ended = server._SERVERS.pop()
    rollout_loop().run(ended.close(), name="the server of sessions to end", timeout_s=30)
    return ended.path


def starts_again(newest: int = 0) -> int:
    """The process ends, and the driver of the next one looks at what it left. How many sessions can go on."""
    return forget_sessions(ends(), newest=newest, oldest=0)[0]


def turn(task: dict[str, Any], *said: str) -> str:
    """The conversation goes on: what the model answers when the user and the model have said this."""
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    with openai.OpenAI(base_url=task["base_url"], api_key=task["key"]) as client:
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content or ""


def test_a_session_goes_on_in_the_next_process_and_its_sample_is_one_row(listening: Listening) -> None:
    """Its agent asks before its group is issued again, and has nothing to do for it."""
    args = listening.args(*STREAMING)
    future = listening.offer(args, sample())
    task = listening.claim().json()
    assert turn(task, "a") == "n0"
    future.cancel()
    assert starts_again() == 1
    other = listening.offer(args, sample(group=9))
    assert turn(task, "a", "n0", "b") == "n1"
    context = server._SERVERS[0].sessions.by_id(task["id"]).context
    assert context is not None
    assert context.run(request_priority) == 7  # it waits for an engine as its group does
    again = rollout_loop().submit(listening._generate(args, sample()))
    assert turn(task, "a", "n0", "b", "n1", "c") == "n2"
    assert finish(task, {"reward": 0.5}).status_code == 200
    [row] = again.result(60)
    assert (row.reward, row.session_id, row.index, row.group_index) == (0.5, task["id"], 0, 7)
    assert [span.version for span in row.token_policy_versions] == [0, 1, 2]
    assert listening.claim().json()["id"] != task["id"]  # the other group's
    other.cancel()


def test_a_session_that_was_completed_before_its_process_ended_is_not_played_again(listening: Listening) -> None:
    args = listening.args(*STREAMING)
    future = listening.offer(args, sample())
    task = listening.claim().json()
    play(task, {"reward": 0.5})
    [row] = future.result(60)
    assert starts_again() == 1
    other = listening.offer(args, sample(group=9))
    held = server._SERVERS[0].sessions.by_id(task["id"])
    assert (held.entries, held.asked) == ([], []), "perhaps nobody asks for it again"
    other.cancel()
    [again] = rollout_loop().run(listening._generate(args, sample()), name="the sample", timeout_s=60)
    assert (again.tokens, again.reward, again.session_id) == (row.tokens, 0.5, task["id"])
    assert finish(task, {"reward": 0.5}).status_code == 200  # its answer may have been lost


def test_a_claim_whose_answer_was_lost_gets_its_session_from_the_next_process(listening: Listening) -> None:
    """Nothing else is given to its key meanwhile, and its session to nobody else."""
    args = listening.args(*STREAMING)
    future = listening.offer(args, sample())
    headers, lost = listening.headers, listening.claim("a").json()
    future.cancel()
    assert starts_again() == 1
    other = listening.offer(args, sample(group=3))
    made = server._SERVERS[0].offers
    claims: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: claims.append(listening.claim("a", headers=headers).json()))
    asking.start()
    until(lambda: made._news._waiters)
    again = rollout_loop().submit(listening._generate(args, sample()))
    asking.join(60)
    assert claims == [lost]
    assert listening.claim("b", headers=headers).json()["id"] != lost["id"]
    play(lost, {"reward": 0.25})
    assert [row.reward for row in again.result(60)] == [0.25]
    other.cancel()


def test_a_session_of_weights_that_do_not_come_again_is_unknown_and_its_sample_is_offered(listening: Listening) -> None:
    args = listening.args(*STREAMING)
    future = listening.offer(args, sample())
    task = listening.claim().json()
    assert [turn(task, "a"), turn(task, "b")] == ["n0", "n1"]
    future.cancel()
    assert starts_again(newest=0) == 0
    again = listening.offer(args, sample())
    assert play_status(task) == 401
    play(listening.claim().json(), {"reward": 0.25})
    assert [row.reward for row in again.result(60)] == [0.25]


def test_a_claimed_session_waits_for_the_next_attempt_of_its_group_in_the_same_process(listening: Listening) -> None:
    args = listening.args(*STREAMING)
    future = listening.offer(args, sample())
    task = listening.claim().json()
    future.cancel()
    until(lambda: server._SERVERS[0]._kept)
    again = rollout_loop().submit(listening._generate(args, sample()))
    play(task, {"reward": 0.5})
    assert [row.reward for row in again.result(60)] == [0.5]


def test_a_worker_that_starts_again_alone_offers_what_nobody_plays(listening: Listening) -> None:
    """No driver has looked at the file: one sample was never claimed, one has failed while its group went on."""
    args = listening.args(*STREAMING)
    futures = [listening.offer(args, sample(index)) for index in range(2)]
    finish(listening.claim().json(), {"failed": "its container died"})
    futures[0].result(60)
    futures[1].cancel()
    ends()
    again = [listening.offer(args, sample(index)) for index in range(2)]
    for reward in (0.25, 0.5):
        play(listening.claim().json(), {"reward": reward})
    assert [row.reward for future in again for row in future.result(60)] == [0.25, 0.5]


def test_a_session_whose_next_attempt_has_begun_is_not_kept(listening: Listening) -> None:
    """The group's lease was lost, and the news of it came after the next attempt had begun."""
    args = listening.args(*STREAMING)
    first, second = (listening.offer(args, sample()) for _ in range(2))
    old, new = (listening.claim().json() for _ in range(2))
    first.cancel()
    until(lambda: play_status(old) == 403)
    assert server._SERVERS[0]._kept == {}
    play(new, {"reward": 0.5})
    assert [row.reward for row in second.result(60)] == [0.5]


def test_another_key_of_agents_ends_the_sessions_that_the_old_one_opens(listening: Listening) -> None:
    args = listening.args(*STREAMING)
    future = listening.offer(args, sample())
    task = listening.claim().json()
    future.cancel()
    assert starts_again() == 1
    (listening.world.directory / "agent-key").unlink()
    again = listening.offer(args, sample())
    assert play_status(task) == 401
    play(listening.claim().json(), {"reward": 0.25})
    assert [row.reward for row in again.result(60)] == [0.25]


def test_a_claim_that_could_not_be_written_is_written_when_it_is_repeated(listening: Listening) -> None:
    args = listening.args(*STREAMING)
    future = listening.offer(args, sample())
    store = server._SERVERS[0].sessions._store
    store._thread.submit(store._database.execute, "PRAGMA query_only=1").result(60)
    assert listening.claim("a").status_code == 500
    store._thread.submit(store._database.execute, "PRAGMA query_only=0").result(60)
    task = listening.claim("a").json()
    future.cancel()
    assert starts_again() == 1
    again = rollout_loop().submit(listening._generate(args, sample()))
    until(lambda: play_status(task) == 200)
    finish(task, {"reward": 0.5})
    assert [row.reward for row in again.result(60)] == [0.5]


def test_a_claim_whose_session_does_not_come_again_gets_another_one_in_the_end(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "CLAIM_S", 0.2)
    args = listening.args(*STREAMING, "--agent-timeout-secs", "8")
    future = listening.offer(args, sample())
    lost = listening.claim("a").json()
    future.cancel()
    assert starts_again() == 1
    other = listening.offer(args, sample(group=9))
    assert listening.claim("a").status_code == 204
    answers: list[httpx.Response] = []
    until(lambda: answers.append(listening.claim("a")) or answers[-1].status_code == 200)
    task = answers[-1].json()
    assert task["id"] != lost["id"]
    play(task, {"reward": 0.5})
    assert [row.reward for row in other.result(60)] == [0.5]


def test_a_damaged_file_is_set_aside_and_its_samples_are_offered_anew(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    args = listening.args(*STREAMING)
    future = listening.offer(args, sample())
    task = listening.claim().json()
    future.cancel()
    path = ends()
    content = bytearray(path.read_bytes())
    content[content.index(task["id"].encode()) + 20] ^= 1
    path.write_bytes(content)
    keep_sessions(path)
    assert "All sessions of agents elsewhere end; the file is damaged.elsewhere.sqlite now" in caplog.text
    assert path.with_name("damaged.elsewhere.sqlite").read_bytes() == content
    again = listening.offer(args, sample())
    assert play_status(task) == 401
    play(listening.claim().json(), {"reward": 0.25})
    assert [row.reward for row in again.result(60)] == [0.25]


def test_the_oldest_of_many_sessions_that_have_ended_is_deleted_also_one_of_the_process_before(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as groups in the making need stay, though otherwise fewer would."""
    monkeypatch.setattr(server, "KEPT_SESSIONS", 1)
    args = listening.args(*STREAMING, "--rollout-batch-size", "1", "--n-samples-per-prompt", "1")
    tasks = []
    for group in (7, 8, 9):
        future = listening.offer(args, sample(group=group))
        tasks.append(listening.claim().json())
        play(tasks[-1], {"reward": 0.5})
        future.result(60)
        if group == 7:
            assert starts_again() == 1
    assert [finish(task, {"reward": 0.5}).status_code for task in tasks] == [401, 200, 200]
    assert server._SERVERS[0]._kept == {}


@pytest.mark.parametrize("flags", [STREAMING, ()])
def test_a_session_whose_rows_were_taken_holds_nothing_of_what_was_said(listening: Listening, flags: Any) -> None:
    """A hundred turns of an agent are 23 MB, and a thousand sessions that have ended are kept."""
    args = listening.args(*flags)
    future = listening.offer(args, sample())
    task = listening.claim().json()
    said = turn(task, "a")
    assert turn(task, "a", said, "b")
    before = finish(task, {"reward": 0.5})
    assert [row.reward for row in future.result(60)] == [0.5]
    (live,) = server._SERVERS[0].sessions.recorded_sessions()
    assert (live.entries, live.asked) == ([], [])
    again = finish(task, {"reward": 0.5})  # its first answer was lost
    assert (again.status_code, again.json()) == (200, before.json())
    assert again.json()["turns"] == 2
    assert again.json()["tokens"] > 0
    assert play_status(task) == 403


def test_a_restart_that_lasts_longer_than_an_agent_may_be_silent_costs_no_session(listening: Listening) -> None:
    args = listening.args(*STREAMING, "--agent-timeout-secs", "4")
    future = listening.offer(args, sample())
    task = listening.claim().json()
    assert turn(task, "a") == "n0"
    future.cancel()
    assert starts_again() == 1
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 4.5)
    other = listening.offer(args, sample(group=9))
    assert turn(task, "a", "n0", "b") == "n1"  # before its group is issued again
    other.cancel()


def test_a_session_of_an_evaluation_ends_with_its_process(listening: Listening, tmp_path: Path) -> None:
    args = listening.args(*STREAMING, "--rm-type", "exact_match")
    group = generate_and_rm_group(args, [sample()], train_sampling_params(args), evaluation=True)
    future = listening.begin(args, group)
    task = listening.claim().json()
    (tmp_path / "killed").mkdir()
    for file in server._SERVERS[0].path.parent.glob("elsewhere.sqlite*"):
        shutil.copy(file, tmp_path / "killed")
    assert forget_sessions(tmp_path / "killed" / "elsewhere.sqlite", newest=0, oldest=0) == (0, 0)
    future.cancel()
    until(lambda: play_status(task) == 403)
    assert starts_again() == 0


def test_without_the_key_nothing_is_given_and_an_agent_cannot_choose_its_group(listening: Listening) -> None:
    future = listening.offer(listening.args(), sample())
    refused = listening.claim(headers={"Authorization": "Bearer no"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unknown_key")
    assert listening.claim(body={"group_index": 0, "index": 0}).status_code == 400
    finish(listening.claim(body={}).json(), {"failed": "enough"})
    future.result(60)


def test_the_addresses_in_an_answer_are_those_of_a_proxy_with_tls_that_passes_on_its_name(listening: Listening) -> None:
    future = listening.offer(listening.args(), sample())
    proxy = {"Host": "agents.example", "X-Forwarded-Proto": "https", **listening.headers}
    task = listening.claim(headers=proxy).json()
    assert task["base_url"] == "https://agents.example/v1"
    finish({**task, "base_url": listening.url}, {"failed": "enough"})
    future.result(60)


def test_the_example_of_the_page_plays_samples_until_the_run_is_away_and_ends_at_sigterm(listening: Listening) -> None:
    """One is told to end while it waits for a sample, the other finds nobody who listens."""
    args = listening.args()
    futures = [listening.offer(args, Sample(group_index=7, index=at, prompt="p", label=f"n{at}")) for at in range(2)]
    key = listening.world.directory / "agent-key"
    command = [sys.executable, str(EXAMPLE), listening.url.removesuffix("/v1"), str(key), "--patience-secs", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        try:
            rewards = [row.reward for future in futures for row in future.result(60)]
            until(lambda: server._SERVERS[0].offers._news._waiters)
            first.terminate()
            assert (first.communicate(timeout=30)[0], first.returncode) == ("2 sessions played\n", 0)
        finally:
            first.kill()
    assert rewards == [1.0, 1.0]  # the engine says n0, then n1
    ends()
    second = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert second.stdout.endswith("0 sessions played\n")
