"""Every call of the protocol, cut at any byte of request and response: sent again as it was, it counts once."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.contract.gateway.test_gateway_evaluation import GROUPS, LEASES, offer, prompts_of, result_of
from tests.helpers.gateway_run import HASH, GatewayRun, group_of, lease, own_of, sample
from vime.gateway.app import CALLS, Call
from vime.gateway.tokens import Scope
from vime.handoff.audit import audit
from vime.handoff.ledger import Ledger

CUTS = 6
"""Of the request, and as many of the response."""
Body = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[GatewayRun]:
    run = GatewayRun(tmp_path)
    offer(run)
    yield run
    run.close()
    report = audit(tmp_path / "ledger.db", checkpoint_round=None, spool=tmp_path / "spool")
    assert report.findings == ()


def first(client: httpx.Client) -> Body:
    return lease(client)[0]


def leased(client: httpx.Client, **body: object) -> Body:
    """A body that names no lease, of a job that has one."""
    first(client)
    return body


def sampled(client: httpx.Client) -> Body:
    prompt = first(client)
    return {"lease": prompt["lease"], "sample": sample(prompt["samples"][0]["index"])}


def ends(client: httpx.Client) -> Body:
    return {"lease": first(client)["lease"], "reason": "r"}


BODIES: dict[str, Callable[[httpx.Client], Body]] = {
    "/v1/producers/register": lambda client: leased(client, model="m", engines=1),
    "/v1/producers/heartbeat": leased,
    "/v1/producers/leave": leased,
    "/v1/producers/end": lambda client: leased(client, producer="job-a"),
    "/v1/leases": lambda _: {"request": "r", "count": 2},
    "/v1/leases/drop": ends,
    "/v1/leases/give-back": ends,
    "/v1/groups": lambda client: group_of(first(client)),
    "/v1/groups/own": lambda _: own_of(),
    "/v1/samples": sampled,
    "/v1/weights/loaded": lambda _: {"version": 0, "engines": {"e": f"{HASH}0"}},
    LEASES: lambda _: {"request": "r", "count": 2},
    GROUPS: lambda client: result_of(prompts_of(client)[0]),
}


def state(run: GatewayRun) -> tuple[object, ...]:
    """Everything that a call may change."""
    status, current = run.port.call(Ledger.status), run.gateway.evaluations.current
    return (
        status.ready, status.retry, status.active, status.producers, len(list(run.spool.entries())),
        sorted(current.results), sorted(current._leased), run.weights.newest("job-a"),
    )  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.path)
def test_a_call_that_is_cut_at_any_byte_counts_once(run: GatewayRun, call: Call) -> None:
    client = run.client(scopes=(Scope.TRAIN, Scope.EVAL))
    caller = run.client("keeper", scopes=(Scope.ADMIN,), confirms=False) if Scope.ADMIN in call.scopes else client
    made = BODIES[call.path](client)
    host, port = run.server.url.removeprefix("http://").split(":")
    body = json.dumps(made).encode()
    head = f"POST {call.path} HTTP/1.1\r\nhost: x\r\nauthorization: {caller.headers['authorization']}\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    before = state(run)
    for cut in [*range(1, len(request), len(request) // CUTS), len(request) - 1]:
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(request[:cut])
    assert caller.get("/v1/openapi.json").status_code == 200  # the gateway has seen those connections
    assert state(run) == before, "half a call is none"
    whole = caller.post(call.path, json=made)
    after, said = state(run), whole.json()
    assert whole.status_code == 200, whole.text
    for cut in range(0, len(whole.content) + 120, len(whole.content) // CUTS + 20):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(request)
            got = b""
            while len(got) < cut:
                got += connection.recv(cut - len(got)) or b" " * cut
    packed = {"content-type": "application/msgpack", "accept": "application/json"}
    again = caller.post(call.path, content=msgspec.msgpack.encode(made), headers=packed)
    assert (again.status_code, state(run)) == (200, after)
    told = {"repeated": True, "given_back": 0}  # what a second answer says in place of the first
    assert again.json() == said | {name: told[name] for name in said if name in told}
