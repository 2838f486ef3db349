"""Any bytes, any message, and valid messages with a few changes, to every call of the gateway, by tokens of every
scope: no fault, nothing shown of others, nothing stored but what the caller may store."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.gateway.test_gateway_evaluation import GROUPS, LEASES, evaluation, prompts_of, result_of
from tests.helpers.fuzz import changed, say
from tests.helpers.gateway_run import HASH, GatewayRun, confirm, group_of, job_client, lease, own_of, sample
from vime.gateway.app import CALLS, FILE, VIEWS, Call
from vime.gateway.messages import ErrorBody, WeightFile, WeightManifest
from vime.gateway.tokens import Scope

EXAMPLES = int(os.environ.get("VIME_FUZZ_EXAMPLES", "25"))
"""For each call and kind of input; 200 are over 10,000 in all (scripts/nightly.sh)."""
JSON, MSGPACK = "application/json", "application/msgpack"
PATHS = [call.path for call in CALLS]
NAMES = sorted({field for call in CALLS for field in call.takes.__struct_fields__} - {"wait_s"})
# A call may wait for as long as it says, so these are small, or none that can be waited for.
WAITS = st.sampled_from([0, 0.001, 0.01, -1, -0.0, 301, 10**30, float("nan"), float("inf"), "0", None, True])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*NAMES, "tokens", "x"]), inner),
    max_leaves=12,
)
MESSAGES = st.builds(
    lambda body, wait: body | wait,
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    st.just({}) | st.builds(lambda wait_s: {"wait_s": wait_s}, WAITS),
)
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
END = "/v1/producers/end"
SECRET = "secret"  # in every name and text that the other job has brought
DAY_S = 86400.0  # a night's inputs take longer than the tokens of other tests last
FILE_BYTES = bytes(range(256)) * 4


class World:
    """A run in which another job has leases, a group of its own and an open evaluation's prompt, which nobody else may
    learn of. Slots and rounds do not end, so that every input meets a gateway that could carry it out."""

    def __init__(self, directory: Path) -> None:
        files = directory / "weights"
        files.mkdir()
        (files / "f").write_bytes(FILE_BYTES)
        file = WeightFile(name="f", num_bytes=len(FILE_BYTES), sha256="0")
        manifest = WeightManifest(version=0, content_hash=f"{HASH}0", location=str(files), files=[file])
        self.run = GatewayRun(
            directory, manifest=manifest, limits={"calls_per_s": 1e6, "failures_per_s": 1e6}, lease_timeout_s=3600.0,
            max_slots=10**6, num_rounds=None, groups_per_round=0,
        )  # fmt: skip
        self.run.gateway.evaluations.current = evaluation(prompts=10**4)
        self.other = self._client(f"{SECRET}-job", Scope.TRAIN, Scope.EVAL)
        [prompt] = lease(self.other, request=f"{SECRET}-request")
        [evaluated] = prompts_of(self.other, request=f"{SECRET}-request")
        self.secrets = [prompt["lease"], evaluated["lease"]]
        own = own_of(f"{SECRET}-key", response=f"{SECRET}-response") | {"prompt": f"{SECRET}-prompt"}
        assert self.other.post("/v1/groups/own", json=own).status_code == 200
        self.kept = [task for task, *_ in self.run.spool.entries()]
        self.client = self._client("job-a", Scope.TRAIN, Scope.EVAL)
        self.reader = self._client("reader", Scope.READ)
        self.admin = self._client("keeper", Scope.ADMIN)
        self.nobody = job_client(self.run.server.url, "none")
        self.codes: Counter[tuple[str, int]] = Counter()
        self.inputs, self.own = 0, 0  # `own`: entries of the spool that the fuzzed job has brought itself

    def _client(self, name: str, *scopes: Scope) -> httpx.Client:
        return self.run.client(name, scopes=scopes, confirms=Scope.TRAIN in scopes, seconds=DAY_S)

    def holds(self, response: httpx.Response, *, may_store: bool = False) -> httpx.Response:
        self.inputs += 1
        self.codes[response.request.url.path, response.status_code] += 1
        assert response.status_code < 500, response.text
        assert "Traceback" not in response.text
        assert not any(secret in response.text for secret in self.secrets)
        views = [client.headers["authorization"] for client in (self.reader, self.admin)]
        assert response.request.headers["authorization"] in views or SECRET not in response.text
        if response.status_code not in (200, 206):
            is_packed = response.headers["content-type"] == MSGPACK
            decode = msgspec.msgpack.decode if is_packed else msgspec.json.decode
            body = decode(response.content, type=ErrorBody)
            assert all((body.code, body.what, body.got, body.expected, body.next))
        if not may_store:
            assert self.stored() == len(self.kept) + self.own
        return response

    def stored(self) -> int:
        return len(list(self.run.spool.entries()))

    def client_of(self, path: str) -> httpx.Client:
        return self.admin if path == END else self.client

    def send(self, path: str, body: object, *, packed: bool) -> httpx.Response:
        try:
            content = msgspec.msgpack.encode(body) if packed else json.dumps(body).encode()
        except (
            OverflowError,
            TypeError,
            UnicodeEncodeError,
        ):  # msgpack has no such integer, no half of a pair of surrogates; JSON no bytes
            content = b"\xc1"
        kind = MSGPACK if packed else JSON
        return self.client_of(path).post(path, content=content, headers={"content-type": kind})

    def is_untouched(self) -> None:
        """The other job has what it had."""
        held = self.other.post("/v1/producers/heartbeat", json={}).json()["leases"]
        assert held == self.secrets[:1]
        assert [one["lease"] for one in prompts_of(self.other, request=f"{SECRET}-request")] == self.secrets[1:]
        by = self.run.gateway.evaluations.current.by
        assert f"{SECRET}-job" not in by.values()
        assert [task for task, *_ in self.run.spool.entries()][: len(self.kept)] == self.kept


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("fuzz"))
    yield world
    world.is_untouched()
    world.run.close()
    say(pytestconfig, f"{world.inputs} inputs")


@pytest.mark.parametrize("path", PATHS)
@FUZZ
@given(content=st.binary(max_size=200), kind=st.sampled_from([JSON, MSGPACK, "text/plain", ""]), reads=st.booleans())
def test_any_bytes(world: World, path: str, content: bytes, kind: str, reads: bool) -> None:
    client = world.reader if reads else world.client_of(path)
    world.holds(client.post(path, content=content, headers={"content-type": kind}))


@pytest.mark.parametrize("path", PATHS)
@FUZZ
@given(body=MESSAGES, packed=st.booleans())
def test_any_message(world: World, path: str, body: dict[str, object], packed: bool) -> None:
    world.holds(world.send(path, body, packed=packed))


CHANGES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "values": st.lists(VALUES | st.binary(max_size=24), max_size=2),
        "wait": WAITS,
    }
)


def _leased(world: World) -> dict[str, Any]:
    world.client.post("/v1/producers/leave", json={})
    [prompt] = lease(world.client, request=f"r{world.inputs}")
    return prompt


def _evaluated(world: World) -> dict[str, Any]:
    world.client.post("/v1/producers/leave", json={})
    [prompt] = prompts_of(world.client, request=f"e{world.inputs}")
    return prompt


def _ends(world: World) -> dict[str, Any]:
    return {"lease": _leased(world)["lease"], "reason": "r"}


def _sample(world: World) -> dict[str, Any]:
    prompt = _leased(world)
    index = prompt["samples"][0]["index"]
    return {"lease": prompt["lease"], "sample": sample(index), "more_rows": [sample(index)]}


VALID: dict[str, Callable[[World], dict[str, Any]]] = {
    "/v1/producers/register": lambda _: {"model": "m", "engines": 1},
    "/v1/producers/heartbeat": lambda _: {},
    "/v1/producers/leave": lambda _: {},
    END: lambda _: {"producer": "job-b", "revoke": True},
    "/v1/leases": lambda world: {"request": f"n{world.inputs}", "count": 1, "wait_s": 0.01},
    "/v1/leases/drop": _ends,
    "/v1/leases/give-back": _ends,
    "/v1/groups": lambda world: group_of(_leased(world), loss_mask=[1, 1, 0], extra={}),
    "/v1/groups/own": lambda world: own_of(f"k{world.inputs}") | {"wait_s": 0.01},
    "/v1/samples": _sample,
    "/v1/weights/loaded": lambda _: {"version": 0, "engines": {"e": f"{HASH}0"}},
    LEASES: lambda world: {"request": f"n{world.inputs}", "count": 1, "wait_s": 0.01},
    GROUPS: lambda world: result_of(_evaluated(world)),
}
"""What each call takes when it is right, with a lease of the caller's own."""


@pytest.mark.parametrize("call", CALLS, ids=PATHS)
def test_a_valid_message_with_any_changes(world: World, call: Call) -> None:
    """Such bodies reach every check: about half of them are done, the others are refused as what they are."""

    @settings(FUZZ, max_examples=2 * EXAMPLES)
    @given(changes=CHANGES, packed=st.booleans())
    def sent(changes: dict[str, Any], packed: bool) -> None:
        body = changed(VALID[call.path](world), **changes)
        world.holds(world.send(call.path, body, packed=packed), may_store=True)
        world.own = world.stored() - len(world.kept)

    world.client.post("/v1/producers/register", json={})  # inputs before may have registered any number of engines
    confirm(world.client)
    assert world.holds(world.send(call.path, VALID[call.path](world), packed=False), may_store=True).status_code == 200
    sent()
    world.is_untouched()


TEXT = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="?#"), max_size=30)
HEADER = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=120).map(str.strip)


@FUZZ
@given(path=TEXT, reads=st.booleans())
def test_any_path_and_version(world: World, path: str, reads: bool) -> None:
    client = world.reader if reads else world.client
    for prefix in ("/", "/v1/", "/v1/weights/", "/v1/weights/0/files/"):
        world.holds(client.get(prefix + path.replace("%", "%25").lstrip("/")))


RANGES = st.builds(
    lambda first, last: f"bytes={first}-{last}", *2 * [st.integers(-1, 2 * len(FILE_BYTES)) | st.just("") | HEADER]
)


@FUZZ
@given(
    wanted=HEADER | RANGES,
    condition=st.none() | HEADER | st.just("etag"),
    others=st.dictionaries(st.sampled_from(["accept", "content-type", "x-forwarded-for", "cookie"]), HEADER),
    body=st.binary(max_size=50),
)
def test_any_header_of_a_view(
    world: World, wanted: str, condition: str | None, others: dict[str, str], body: bytes
) -> None:
    file = FILE.format(version=0, name="f")
    headers = {"range": wanted, **others}
    if condition == "etag":  # the file's own: then the range counts
        condition = world.client.head(file).headers.get("etag") or world.client.get(file).headers["etag"]
    if condition is not None:
        headers["if-range"] = condition
    for path in (file, *(path.format(version=0) for path, *_ in VIEWS)):
        for client in (world.client, world.reader, world.admin):
            world.holds(client.request("GET", path, headers=headers, content=body))


@FUZZ
@given(header=HEADER)
def test_any_token_opens_nothing(world: World, header: str) -> None:
    for path in PATHS:
        response = world.nobody.post(path, json={}, headers={"authorization": header})
        assert response.status_code == 401, response.text
        world.holds(response)
    for path in (*(path for path, *_ in VIEWS), FILE):
        assert world.nobody.get(path, headers={"authorization": header}).status_code == 401
