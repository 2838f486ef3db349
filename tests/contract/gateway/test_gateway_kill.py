"""A gateway that is killed with SIGKILL between any two steps of a put; the job repeats its call at the next one."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from tests.helpers.gateway_run import HASH, GatewayProcess, confirm, group_of, job_client, lease, own_of, sample
from vime.gateway.tokens import Scope, TokenFile
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import LedgerRules, Task
from vime.handoff.spool import Spool
from vime.utils.failpoints import Point

RULES = LedgerRules(max_slots=4, max_staleness=1, lease_timeout_s=30.0, num_rounds=3, groups_per_round=2)
# Whether the group counted before the kill. A kill of the ledger itself is tests/contract/ray/test_ledger_actor.py's.
STEPS = {
    Point.SPOOLED: False,
    Point.COMMIT: False,
    Point.COMMITTED: True,
}


def token_of(directory: Path) -> str:
    return TokenFile(directory).make("job-a", (Scope.TRAIN,), seconds=600)


def left_behind(directory: Path) -> tuple[int, list[Task]]:
    """Groups that are ready, and the attempts in the spool, read when no gateway runs."""
    ledger = Ledger(directory / "ledger.db", RULES, clock=time.monotonic)
    spool = Spool(directory / "spool")
    try:
        return ledger.status().ready, [task for task, _, _ in spool.entries()]
    finally:
        spool.close()
        ledger.close()


@pytest.mark.parametrize(
    ("point", "call"),
    [
        *((point, "whole") for point in STEPS),
        (Point.COMMIT, "its last sample"),
        *((point, "of its own") for point in STEPS),
    ],
)
def test_a_put_whose_gateway_was_killed_is_repeated_and_counts_once(tmp_path: Path, point: Point, call: str) -> None:
    first = GatewayProcess(tmp_path, failpoints=f"{point}:1:kill")
    try:
        token = token_of(tmp_path)
        client = job_client(first.url, token)
        confirm(client)
        [prompt] = lease(client)
        path, body = "/v1/groups", group_of(prompt)
        if call == "of its own":
            client.post("/v1/leases/give-back", json={"lease": prompt["lease"], "reason": "not needed"})
            path, body = "/v1/groups/own", own_of()
        elif call != "whole":
            one, last = (sample(entry["index"], float(n)) for n, entry in enumerate(prompt["samples"]))
            assert client.post("/v1/samples", json={"lease": prompt["lease"], "sample": one}).json()["missing"]
            path, body = "/v1/samples", {"lease": prompt["lease"], "sample": last}
        with pytest.raises(httpx.TransportError):
            client.post(path, json=body)
        assert first.wait_until_dead() == -9
    finally:
        first.kill()
    ready, _ = left_behind(tmp_path)
    assert ready == int(STEPS[point])
    second = GatewayProcess(tmp_path)
    try:
        client = job_client(second.url, token)
        response = client.post(path, json=body)
        if response.status_code == 409:  # what a job confirmed is in memory; the error tells it to report again
            assert response.json()["code"] == "unconfirmed_version"
            confirm(client)
            response = client.post(path, json=body)
        put = response.json()
        assert (put["is_committed"], put["repeated"], put["attempt"]) == (True, STEPS[point], 1)
        again = client.post(path, json=body).json()
        assert (again["is_committed"], again["repeated"]) == (True, True)
        if call == "of its own":
            other = client.post(path, json=own_of(reward=5.0))
            assert (other.status_code, other.json()["code"]) == (409, "other_content")
    finally:
        second.kill()
    assert left_behind(tmp_path)[0] == 1


def test_samples_of_a_group_that_is_not_whole_and_leases_outlive_a_kill(tmp_path: Path) -> None:
    first = GatewayProcess(tmp_path)
    try:
        token = token_of(tmp_path)
        client = job_client(first.url, token)
        confirm(client)
        prompt, other = lease(client, 2)
        one, last = (sample(entry["index"], float(n)) for n, entry in enumerate(prompt["samples"]))
        client.post("/v1/samples", json={"lease": prompt["lease"], "sample": one})
        of_another_group = sample(other["samples"][0]["index"])
        client.post("/v1/samples", json={"lease": other["lease"], "sample": of_another_group})
    finally:
        first.kill()
    assert left_behind(tmp_path)[1] == [Task("train", 0, 1), Task("train", 1, 1)]
    second = GatewayProcess(tmp_path)
    try:
        client = job_client(second.url, token)
        confirm(client)
        assert client.post("/v1/producers/heartbeat", json={}).json()["leases"] == [prompt["lease"], other["lease"]]
        assert lease(client, 2) == [prompt, other]  # the same request: the same leases
        put = client.post("/v1/samples", json={"lease": prompt["lease"], "sample": last}).json()
        assert (put["is_committed"], put["missing"]) == (True, [])
    finally:
        second.kill()
    assert left_behind(tmp_path)[0] == 1


def test_a_gateway_that_was_killed_knows_how_many_engines_a_job_has(tmp_path: Path) -> None:
    """A job registers once in its life; what it says after a kill is only which weights its engines have."""
    first = GatewayProcess(tmp_path)
    try:
        token = token_of(tmp_path)
        job_client(first.url, token).post("/v1/producers/register", json={"engines": 2})
    finally:
        first.kill()
    second = GatewayProcess(tmp_path)
    try:
        client = job_client(second.url, token)
        lags = []
        for engine in ("engine-0", "engine-1"):
            call = {"version": 0, "engines": {engine: f"{HASH}0"}}
            assert client.post("/v1/weights/loaded", json=call).status_code == 200
            lags.append(client.post("/v1/producers/heartbeat", json={}).json()["lags"])
        assert (lags[0].endswith("1 of its 2 engines have"), lags[1]) == (True, "")
    finally:
        second.kill()
