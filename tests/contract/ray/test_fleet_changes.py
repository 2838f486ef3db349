"""Engines that a user adds to a live run or drains: real actors, servers and router; scripted engines in vLLM's
place."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
import ray

from tests.helpers.fleet import Fleet
from tests.helpers.processes import has_ended
from vime.observability.requests import Answer, AnswerState, FleetRequest, ask, read_answer
from vime.ray import placement
from vime.ray.changes import FleetChanges
from vime.types import KEY_HEADER, EngineLostError

pytestmark = pytest.mark.usefixtures("ray_cluster")

BODY = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 0}}


class Asked:
    """A request of a user, and what the run has said to it."""

    def __init__(self, fleet: Fleet, request: FleetRequest) -> None:
        self._fleet, self._name = fleet, ask(fleet.directory, request)
        self.said: list[str] = []
        self.state = AnswerState.WORKING

    def look(self) -> Answer | None:
        answer = None if self.state is not AnswerState.WORKING else read_answer(self._fleet.directory, self._name)
        if answer is not None:
            self.state = answer.state
            if answer.said not in self.said[-1:]:
                self.said.append(answer.said)
        return answer

    def until(self, words: str) -> None:
        """Let the driver do its work until it says this."""

        def has_said() -> bool:
            self.look()
            return words in " ".join(self.said)

        self._fleet.check_until(has_said)

    def end(self) -> str:
        self._fleet.check_until(lambda: (self.look(), self.state is not AnswerState.WORKING)[1])
        return self.said[-1]


@pytest.fixture
def start(start_fleet):
    def started(count: int, *flags: str) -> Fleet:
        fleet = start_fleet(count, *flags)
        fleet.engines.changes = FleetChanges(fleet.config, fleet.directory, fleet.engines, fleet.told.append)
        return fleet

    return started


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def drain(fleet: Fleet, engine: str, within_s: float | None = None) -> Asked:
    return Asked(fleet, FleetRequest(command="drain", engine=engine, within_s=within_s))


def add(fleet: Fleet, count: int = 1) -> Asked:
    return Asked(fleet, FleetRequest(command="add", count=count))


def control(fleet: Fleet, index: int, method: str, route: str) -> httpx.Response:
    address = fleet.engines.find(f"engine-{index}").address
    response = httpx.request(method, address.url + route, headers=address.headers, timeout=60)
    assert response.status_code == 200, response.text
    return response


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0.0)


def num_requests(fleet: Fleet, index: int) -> int:
    return control(fleet, index, "GET", "/vime/requests").json()["in_progress"]


def post(fleet: Fleet, url: str) -> httpx.Response:
    headers = {KEY_HEADER: fleet.engines.generate_key}
    return httpx.post(f"{url}/inference/v1/generate", json=BODY, headers=headers, timeout=60)


def ask_engine(fleet: Fleet, pool: ThreadPoolExecutor, index: int) -> "Future[httpx.Response]":
    """A request that this engine has and does not end before it is resumed."""
    control(fleet, index, "POST", "/pause?mode=keep")
    asked = pool.submit(post, fleet, fleet.engines.find(f"engine-{index}").address.url)
    fleet.check_until(lambda: num_requests(fleet, index) == 1)
    return asked


def draining(start: Callable[..., Fleet], pool: ThreadPoolExecutor) -> tuple[Fleet, Asked]:
    """Two engines, of which engine-1 is being drained and has a request that does not end."""
    fleet = start(2)
    fleet.publish(0)
    ask_engine(fleet, pool, 1)
    drained = drain(fleet, "engine-1")
    drained.until("1 requests to end")
    return fleet, drained


def test_a_drained_engine_ends_its_request_gets_no_other_and_is_not_started_again(start, pool) -> None:
    fleet = start(2)
    fleet.publish(0)
    asked, server = ask_engine(fleet, pool, 1), fleet.server(1)
    drained = drain(fleet, "engine-1")
    drained.until("engine-1 gets no new requests; 1 requests to end")
    assert fleet.routed() == ["engine-0"]
    assert fleet.versions(8) == {"0"}  # engine-1 would not respond
    assert not asked.done()
    control(fleet, 1, "POST", "/resume")
    assert asked.result(timeout=60).status_code == 200
    assert drained.end().startswith("engine-1 is stopped after ")
    assert drained.said[-1].endswith("; 1 of 1 serve.")
    assert drained.state is AnswerState.DONE
    fleet.check_until(lambda: has_ended(server))
    fleet.check_until(lambda: fleet.engines._checks["engine-0"].is_over)
    assert fleet.events() == [("engine_draining", "engine-1"), ("engine_stopped", "engine-1")]
    assert list((fleet.directory / "waits").glob("engine-1.*")) == []  # `vime why-stuck` does not call it dead
    assert fleet.publish(1) == ["engine-0"]
    assert fleet.engines.take_metrics() == {"engines/serving": 1.0, "engines/lost": 0.0, "engines/readmitted": 0.0}


@pytest.mark.nightly
def test_an_update_reaches_a_draining_engine_which_gets_no_new_requests_by_it(start, pool) -> None:
    """Its tokens would else be of an older version than the run expects."""
    fleet = start(2)
    fleet.publish(0)
    asked = ask_engine(fleet, pool, 1)
    drained = drain(fleet, "engine-1")
    drained.until("1 requests to end")
    assert fleet.publish(1) == ["engine-0", "engine-1"]  # with mode `wait`, for which the request goes on
    assert fleet.routed() == ["engine-0"]
    assert asked.result(timeout=60).status_code == 200
    drained.end()
    assert drained.state is AnswerState.DONE


def test_requests_that_outlast_the_deadline_are_answered_by_the_others(start, pool) -> None:
    fleet = start(2)
    fleet.publish(0)
    for index in (0, 1):
        control(fleet, index, "POST", "/pause?mode=keep")
    asked = [pool.submit(post, fleet, fleet.router) for _ in range(8)]
    fleet.check_until(lambda: num_requests(fleet, 0) + num_requests(fleet, 1) == 8)
    its = num_requests(fleet, 1)
    assert its > 0
    drained = drain(fleet, "engine-1", within_s=2)
    assert f"{its} requests had not ended and are sent to others; 1 of 1 serve." in drained.end()
    control(fleet, 0, "POST", "/resume")
    assert [each.result(timeout=60).status_code for each in asked] == [200] * 8


def test_an_engine_that_cannot_be_drained_is_refused_with_the_reason(start, pool) -> None:
    fleet = start(2)
    (fleet.directory / "requests" / "5.request.json").write_text('{"command": "run", "code": "1"}')
    fleet.check_until(lambda: (fleet.directory / "requests" / "5.answer.json").exists())
    assert read_answer(fleet.directory, "5").said.startswith("no request: ")
    early = drain(fleet, "engine-1")
    assert "no other engine serves, and the run could not go on" in early.end()
    assert "no engine serves a version yet" in add(fleet).end()
    fleet.publish(0)
    unknown = drain(fleet, "engine-7")
    assert unknown.end() == "'engine-7': this run has no such engine. Expected one of engine-0, engine-1."
    ask_engine(fleet, pool, 1)
    first, again, last = drain(fleet, "engine-1"), drain(fleet, "engine-1"), drain(fleet, "engine-0")
    first.until("gets no new requests")
    assert "is being drained already" in again.end()
    assert "engine-0 cannot be drained: no other engine serves" in last.end()
    assert {each.state for each in (early, unknown, again, last)} == {AnswerState.REFUSED}
    control(fleet, 1, "POST", "/resume")
    first.end()
    assert "engine-0 cannot be drained" in drain(fleet, "engine-0").end()


def test_engines_that_share_gpus_with_trainers_are_neither_drained_nor_added(start) -> None:
    fleet = start(1, "--colocate")
    assert "drain with --colocate: engines and trainers share GPUs" in drain(fleet, "engine-0").end()
    assert "add with --colocate" in add(fleet).end()


@pytest.mark.nightly
def test_an_engine_that_dies_while_it_is_drained_is_not_started_again(start, pool) -> None:
    fleet, drained = draining(start, pool)
    fleet.server(1).kill()
    assert "(lost: engine-1 ended with exit code" in drained.end()
    assert fleet.events() == [("engine_draining", "engine-1"), ("engine_stopped", "engine-1")]


@pytest.mark.nightly
def test_a_lost_engine_that_is_drained_does_not_come_back(start) -> None:
    fleet = start(2)
    fleet.publish(0)
    fleet.server(1).kill()
    fleet.check_until(lambda: ("engine_starting", "engine-1") in fleet.events())
    drain(fleet, "engine-1").end()
    assert fleet.events()[-1] == ("engine_stopped", "engine-1")
    assert [address.name for address in fleet.engines.addresses] == ["engine-0"]


def test_an_added_engine_gets_prompts_when_it_has_confirmed_the_weights_and_leaves_its_place(start) -> None:
    fleet = start(1)
    fleet.publish(0)
    free = free_cpus()
    added = add(fleet)
    added.until("engine-1 gets weights with the next update")
    assert fleet.routed() == ["engine-0"]
    assert fleet.publish(1) == ["engine-0", "engine-1"]
    assert "engine-1 added: prompts go there" in added.end()
    assert fleet.routed() == ["engine-0", "engine-1"]
    assert fleet.versions(8) == {"1"}
    assert fleet.events() == [("engine_added", "engine-1")]
    assert free_cpus() == pytest.approx(free - 0.5)
    drain(fleet, "engine-0").end()  # the one that the run began with
    assert fleet.versions(4) == {"1"}
    add(fleet).until("engine-2 gets weights")  # a number is given once
    fleet.publish(2)
    drain(fleet, "engine-1").end()
    fleet.check_until(lambda: free_cpus() == pytest.approx(free))
    assert fleet.routed() == ["engine-2"]


@pytest.mark.nightly
def test_an_added_engine_that_is_lost_later_is_started_again_as_any_other(start) -> None:
    fleet = start(1)
    fleet.publish(0)
    assert fleet.new == ["engine-0"]
    added = add(fleet)
    added.until("gets weights")
    fleet.publish(1)
    assert fleet.new == ["engine-1"]
    added.end()
    fleet.server(1).kill()
    fleet.check_until(lambda: fleet.events()[-1:] == [("engine_ready", "engine-1")])
    assert fleet.publish(2) == ["engine-0", "engine-1"]
    assert fleet.new == ["engine-1"]
    fleet.publish(3)
    assert fleet.new == []


def test_an_added_engine_that_dies_before_it_serves_does_not_end_the_run(start) -> None:
    fleet = start(1, "--max-restarts", "0")
    fleet.publish(0)
    free, added = free_cpus(), add(fleet)
    added.until("gets weights")
    fleet.server(1).kill()
    assert "engine-1 was not added: lost: engine-1 ended with exit code" in added.end()
    assert added.state is AnswerState.FAILED
    assert fleet.events() == [("engine_added", "engine-1"), ("engine_stopped", "engine-1")]
    fleet.check_until(lambda: free_cpus() == pytest.approx(free))
    assert fleet.publish(1) == ["engine-0"]


def test_engines_for_which_there_is_no_room_are_refused_by_name_and_none_is_started(start, monkeypatch) -> None:
    monkeypatch.setattr(placement, "PLACE_S", 1.0)
    fleet = start(1)
    fleet.publish(0)
    free = free_cpus()
    added = add(fleet, 9)  # 4.5 CPUs; the cluster has 4
    said = added.end()
    assert added.state is AnswerState.REFUSED
    assert "no node has room for one more engine, which must be on one node (0.5 CPU): " in said
    assert fleet.events() == []
    fleet.check_until(lambda: free_cpus() == pytest.approx(free))


@pytest.mark.nightly
def test_the_last_engine_beside_a_draining_one_ends_the_run(start, pool) -> None:
    fleet, drained = draining(start, pool)
    fleet.server(0).kill()
    with pytest.raises(EngineLostError, match="engine-0"):
        fleet.check_until(lambda: False)
    control(fleet, 1, "POST", "/resume")  # for the thread that asked
    fleet.engines.changes.close()
    drained.look()
    assert drained.state is AnswerState.FAILED
    assert "the run stopped its engines before it was done" in drained.said[-1]
