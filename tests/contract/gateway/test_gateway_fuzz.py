"""Any bytes, any message, to every call of the gateway: no fault, nothing shown of others, nothing stored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.gateway_run import GatewayRun, lease
from vime.gateway.app import CALLS, FILE, VIEWS
from vime.gateway.messages import ErrorBody

EXAMPLES = int(os.environ.get("VIME_FUZZ_EXAMPLES", "40"))
"""For each call and kind of input; 400 are over 10,000 in all."""
JSON = "application/json"
PATHS = [call.path for call in CALLS]
# Without `wait_s`: a lease may wait for as long as it says.
NAMES = sorted({field for call in CALLS for field in call.takes.__struct_fields__} - {"wait_s"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*NAMES, "tokens", "x"]), inner),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class World:
    """A run in which another job has a lease that nobody else may learn of."""

    def __init__(self, directory: Path) -> None:
        self.run = GatewayRun(directory, limits={"calls_per_s": 1e6, "failures_per_s": 1e6}, lease_timeout_s=3600.0)
        self.other = self.run.client("the-other-job")
        [self.secret] = lease(self.other, request="secret-request")
        self.client = self.run.client("job-a")
        self.stored = len(list(self.run.spool.entries()))

    def holds(self, response: httpx.Response) -> None:
        assert response.status_code < 500, response.text
        assert "Traceback" not in response.text
        assert self.secret["lease"] not in response.text
        assert "the-other-job" not in response.text
        if response.status_code != 200:
            body = msgspec.msgpack.decode(response.content, type=ErrorBody) if is_msgpack(response) else error(response)
            assert all((body.code, body.what, body.got, body.expected, body.next))
        assert len(list(self.run.spool.entries())) == self.stored


def is_msgpack(response: httpx.Response) -> bool:
    return response.headers["content-type"] == "application/msgpack"


def error(response: httpx.Response) -> ErrorBody:
    return msgspec.json.decode(response.content, type=ErrorBody)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("fuzz"))
    yield world
    assert world.other.post("/v1/producers/heartbeat", json={}).json()["leases"] == [world.secret["lease"]]
    world.run.close()


@pytest.mark.parametrize("path", PATHS)
@FUZZ
@given(content=st.binary(max_size=200), kind=st.sampled_from([JSON, "application/msgpack", "text/plain", ""]))
def test_any_bytes(world: World, path: str, content: bytes, kind: str) -> None:
    world.holds(world.client.post(path, content=content, headers={"content-type": kind}))


@pytest.mark.parametrize("path", PATHS)
@FUZZ
@given(body=BODIES, packed=st.booleans())
def test_any_message(world: World, path: str, body: dict[str, object], packed: bool) -> None:
    try:
        content = msgspec.msgpack.encode(body) if packed else json.dumps(body).encode()
    except (OverflowError, UnicodeEncodeError):  # an integer or half of a pair of surrogates that msgpack has not
        content = b"\xc1"
    world.holds(
        world.client.post(path, content=content, headers={"content-type": "application/msgpack" if packed else JSON})
    )


@FUZZ
@given(path=st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="?#"), max_size=30))
def test_any_path_and_version(world: World, path: str) -> None:
    for prefix in ("/", "/v1/", "/v1/weights/", "/v1/weights/0/files/"):
        world.holds(world.client.get(prefix + path.replace("%", "%25").lstrip("/")))


@FUZZ
@given(header=st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=120))
def test_any_token_opens_nothing(world: World, header: str) -> None:
    for path in PATHS:
        response = httpx.post(f"{world.run.server.url}{path}", json={}, headers={"authorization": header.strip()})
        assert response.status_code == 401, response.text
        world.holds(response)
    for path in (*(path for path, *_ in VIEWS), FILE):
        assert httpx.get(f"{world.run.server.url}{path}").status_code == 401
