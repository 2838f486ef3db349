"""Evaluations whose prompts go to jobs outside, over HTTP."""

from pathlib import Path

import pytest

from tests.helpers.gateway_run import HASH, GatewayRun, confirm, lease, sample
from vime.gateway.evaluation import EvalPart, Evaluation
from vime.gateway.messages import EvalSampling, WeightManifest
from vime.gateway.samples import Limits
from vime.gateway.tokens import Scope
from vime.handoff.ledger import Ledger
from vime.types import Sample

LEASES, GROUPS = "/v1/evaluation/leases", "/v1/evaluation/groups"
BOTH = (Scope.TRAIN, Scope.EVAL)


@pytest.fixture
def run(tmp_path: Path):
    run = GatewayRun(tmp_path)
    yield run
    run.close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def evaluation(before_round: int = 0, *, names=("held_out",), prompts: int = 3, clock=None) -> Evaluation:
    """Sets of prompts [1, 5] with two samples each, of the weights of version 0."""
    limits = Limits(
        samples_per_prompt=2, max_staleness=1, lease_timeout_s=30.0, vocab_size=64, max_tokens=64, temperature=1.0
    )
    sampling = EvalSampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8)
    parts = {
        name: EvalPart(
            name=name,
            groups=[
                [Sample(index=2 * number + at, tokens=[1, 5], prompt="p", label=number) for at in range(2)]
                for number in range(prompts)
            ],
            sampling=sampling,
            limits=limits,
        )
        for name in names
    }
    more = {} if clock is None else {"clock": clock}
    return Evaluation(before_round=before_round, version=0, parts=parts, lease_timeout_s=30.0, **more)


def offer(run: GatewayRun, **changes) -> Evaluation:
    run.gateway.evaluations.current = evaluation(**changes)
    return run.gateway.evaluations.current


def prompts_of(client, count: int = 1, request: str = "e") -> list[dict]:
    response = client.post(LEASES, json={"request": request, "count": count})
    assert response.status_code == 200, response.text
    return response.json()["prompts"]


def result_of(prompt: dict, **changes) -> dict:
    return {"lease": prompt["lease"], "samples": [sample(one["index"], **changes) for one in prompt["samples"]]}


def code(response) -> tuple[int, str]:
    return response.status_code, response.json()["code"]


def test_each_prompt_is_evaluated_once_by_several_jobs_and_nothing_of_it_is_in_the_ledger(run: GatewayRun) -> None:
    first, second = run.client("job-a", scopes=BOTH), run.client("job-b", scopes=(Scope.EVAL,))
    current = offer(run, names=("held_out", "other"))
    mine, theirs = prompts_of(first, 2), prompts_of(second, 9)
    assert [(one["set"], one["group"]) for one in mine + theirs] == [
        *(("held_out", number) for number in range(3)),
        *(("other", number) for number in range(3)),
    ]
    assert mine[0]["sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 8}
    assert prompts_of(first, 2) == mine, "the same request: its answer was lost"
    none = first.post(LEASES, json={"request": "more"}).json()
    assert (none["prompts"], none["waits_for"]) == ([], "another evaluation: all prompts of this one are with jobs")
    for client, prompts in ((first, mine), (second, theirs)):
        for prompt in prompts:
            answers = [client.post(GROUPS, json=result_of(prompt)).json() for _ in range(2)]
            assert answers == [{"repeated": False}, {"repeated": True}]
    assert len(current.results) == current.total == 6
    assert [one.label for one in current.results["other", 2]] == [2, 2]
    assert all(one.scalar_reward() == 1.0 for group in current.results.values() for one in group)
    assert run.port.call(Ledger.status).active == 0


def test_a_job_that_stops_calling_loses_its_prompts_and_the_first_result_counts(run: GatewayRun) -> None:
    slow, fast, clock = run.client("slow", scopes=BOTH), run.client("fast", scopes=BOTH), Clock()
    current = offer(run, prompts=2, clock=clock)
    [late, kept] = prompts_of(slow, 2)
    clock.now = 29.0
    assert slow.post("/v1/producers/heartbeat", json={}).status_code == 200
    clock.now = 58.0
    assert prompts_of(fast, 2) == []
    assert slow.post(GROUPS, json=result_of(kept)).json() == {"repeated": False}
    clock.now = 60.0
    [taken] = prompts_of(fast, 2, "again")
    assert (taken["group"], taken["lease"] != late["lease"]) == (late["group"], True)
    assert fast.post(GROUPS, json=result_of(taken)).json() == {"repeated": False}
    assert code(slow.post(GROUPS, json=result_of(late))) == (409, "lease_lost")
    assert current.by == {("held_out", 0): "fast", ("held_out", 1): "slow"}


def test_the_prompts_of_a_job_that_leaves_or_begins_anew_go_to_others(run: GatewayRun) -> None:
    one, other = run.client("one", scopes=BOTH), run.client("other", scopes=BOTH)
    offer(run)
    assert len(prompts_of(one, 3)) == 3
    assert one.post("/v1/producers/leave", json={}).json() == {"given_back": 3}
    assert len(prompts_of(other, 3)) == 3
    assert other.post("/v1/producers/register", json={}).json()["evaluates"] is False  # this run has engines
    assert len(prompts_of(one, 3, "new")) == 3


def test_a_result_must_be_of_the_serving_weights_and_of_the_prompt(run: GatewayRun) -> None:
    client = run.client(scopes=BOTH)
    current = offer(run)
    prompt = prompts_of(client)[0]
    for changes, expected in (
        ({"versions": [[0, 3, 1]]}, (409, "unconfirmed_version")),
        ({"tokens": [2, 5, 7, 8, 9]}, (422, "invalid")),
        ({"reward": {"a": 1.0}}, (422, "invalid")),
    ):
        assert code(client.post(GROUPS, json=result_of(prompt, **changes))) == expected
    assert code(client.post(GROUPS, json={"lease": prompt["lease"]})) == (422, "invalid")
    assert code(client.post(GROUPS, json=result_of(prompt) | {"error": "both"})) == (422, "invalid")
    assert current.results == {}
    told = {"lease": prompt["lease"], "error": "the judge is down"}
    assert client.post(GROUPS, json=told).json() == {"repeated": False}
    assert current.results == {("held_out", 0): "the judge is down"}


def test_a_lease_of_an_evaluation_is_none_of_training_and_neither_of_another_evaluation(run: GatewayRun) -> None:
    client = run.client(scopes=BOTH)
    offer(run)
    [evaluated], [trained] = prompts_of(client), lease(client)
    assert code(client.post(GROUPS, json=result_of(trained))) == (404, "unknown_lease")
    for path in ("/v1/groups", "/v1/leases/drop", "/v1/leases/give-back"):
        call = result_of(evaluated) if path == "/v1/groups" else {"lease": evaluated["lease"], "reason": "r"}
        assert code(client.post(path, json=call)) == (404, "unknown_lease"), path
    offer(run, before_round=5)
    assert code(client.post(GROUPS, json=result_of(evaluated))) == (409, "lease_lost")


def test_a_gateway_that_begins_the_evaluation_again_takes_what_was_leased_before(run: GatewayRun) -> None:
    client = run.client(scopes=BOTH)
    offer(run)
    [prompt] = prompts_of(client)
    again = offer(run)  # as another process would, which has the run's key
    assert client.post(GROUPS, json=result_of(prompt)).json() == {"repeated": False}
    assert len(again.results) == 1
    assert [one["group"] for one in prompts_of(client, 3)] == [1, 2]


def test_scopes(run: GatewayRun) -> None:
    offer(run)
    train, evaluates = run.client("t"), run.client("e", scopes=(Scope.EVAL,))
    assert code(train.post(LEASES, json={"request": "r"})) == (403, "forbidden")
    assert code(evaluates.post("/v1/leases", json={"request": "r"})) == (403, "forbidden")
    assert code(evaluates.get("/v1/producers")) == (403, "forbidden")
    assert evaluates.post("/v1/producers/heartbeat", json={}).status_code == 200


def test_a_job_without_the_weights_gets_none_and_hears_when_no_evaluation_will_come(run: GatewayRun) -> None:
    client = run.client(scopes=BOTH, confirms=False)
    told = client.post(LEASES, json={"request": "r", "wait_s": 0.1}).json()
    assert (told["prompts"], told["waits_for"]) == ([], "an evaluation")
    offer(run)
    assert "confirm" in client.post(LEASES, json={"request": "r", "wait_s": 20}).json()["lags"]
    confirm(client)
    assert len(prompts_of(client)) == 1
    run.weights.release(WeightManifest(version=1, content_hash=f"{HASH}1", location="weights/1"))
    assert client.post(LEASES, json={"request": "s"}).json()["lags"]
    assert run.gateway.not_told(0.0) == ["job-a"]
    run.gateway.evaluations.is_over = True
    run.gateway.job("job-a").is_told = True
    assert run.gateway.not_told(0.0) == ["job-a"], "it would wait for an evaluation for ever"
    assert client.post(LEASES, json={"request": "s", "wait_s": 20}).json()["is_over"]
    assert run.gateway.not_told(0.0) == []
