"""A gateway with TLS: jobs that know its certificate authority put groups over https, and nobody else gets through."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.certificates import Certificates
from tests.helpers.external_run import ExternalRun, Producer, javascript_words, python_words
from tests.helpers.gateway_run import HASH, ROOT, GatewayRun, group_of
from vime.gateway.tokens import Scope
from vime.handoff.ledger import Ledger

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on the PATH: it makes the certificates"),
    pytest.mark.timeout(240),
]
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH: its packages are not ours")

# In a process of its own, as `vime produce` is: aiohttp reads SSL_CERT_FILE when it is imported.
OUR_CLIENT = """
import asyncio, json, sys
import msgspec
from vime.gateway import messages as m
from vime.gateway.client import GatewayClient

async def main(url, token, group):
    client = GatewayClient(url, token, patience_s=PATIENCE_S)
    try:
        loaded = m.Loaded(version=0, engines={"engine": group["hash"]})
        await client.call("/v1/weights/loaded", loaded, m.Confirmed)
        leased = await client.call("/v1/leases", m.LeasePrompts(request="r"), m.Prompts)
        [prompt] = leased.prompts
        samples = [{**group["sample"], "index": one.index} for one in prompt.samples]
        put = msgspec.convert({"lease": prompt.lease, "samples": samples}, m.PutGroup)
        print((await client.call("/v1/groups", put, m.Put)).is_committed)
    finally:
        await client.close()

asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificates, Certificates]:
    """Those of the gateway, and some of an authority that nobody here trusts."""
    directory = tmp_path_factory.mktemp("tls")
    return Certificates.make(directory / "ours"), Certificates.make(directory / "others")


@pytest.fixture
def run(tmp_path: Path, certificates: tuple[Certificates, Certificates]) -> Iterator[GatewayRun]:
    run = GatewayRun(tmp_path, certificates=certificates[0])
    yield run
    run.close()


def our_client(
    run: GatewayRun, url: str, *, patience_s: float = 600.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Lease a prompt and put its group by `GatewayClient`."""
    [sample, *_] = group_of({"lease": "", "samples": [{"index": 0}]})["samples"]
    token = run.tokens.make("job", (Scope.TRAIN,), seconds=600)
    program = OUR_CLIENT.replace("PATIENCE_S", str(patience_s))
    words = [sys.executable, "-c", program, url, token, json.dumps({"hash": f"{HASH}0", "sample": sample})]
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"} | variables
    return subprocess.run(
        words, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=60
    )


def test_our_client_puts_a_group_over_https_and_gives_up_at_once_where_the_authority_is_unknown(
    run: GatewayRun, certificates: tuple[Certificates, Certificates]
) -> None:
    ours, others = certificates
    assert run.server.url.startswith("https://")
    unknown = our_client(run, run.server.url, SSL_CERT_FILE=str(others.authority))
    assert (unknown.returncode, "SSL_CERT_FILE" in unknown.stderr) == (1, True), unknown.stderr
    nobody = our_client(run, run.server.url)
    assert (nobody.returncode, "CERTIFICATE_VERIFY_FAILED" in nobody.stderr) == (1, True), nobody.stderr
    assert run.gateway.jobs == {}, "no token was sent to a server that nobody vouches for"
    done = our_client(run, run.server.url, SSL_CERT_FILE=str(ours.authority))
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
    assert run.port.call(Ledger.status).ready == 1


def test_plain_http_to_the_port_fails_and_carries_nothing_out(
    run: GatewayRun, certificates: tuple[Certificates, Certificates]
) -> None:
    plain = run.server.url.replace("https://", "http://")
    token = run.tokens.make("job", (Scope.TRAIN,), seconds=600)
    headers = {"authorization": f"Bearer {token}"}
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{plain}/v1/producers/register", json={}, headers=headers, timeout=20)
    failed = our_client(run, plain, patience_s=1.0, SSL_CERT_FILE=str(certificates[0].authority))
    assert (failed.returncode, "GatewayAwayError" in failed.stderr) == (1, True), failed.stderr
    assert run.gateway.jobs == {}
    trusts = ssl.create_default_context(cafile=certificates[0].authority)
    secure = httpx.post(f"{run.server.url}/v1/producers/register", json={}, headers=headers, verify=trusts, timeout=20)
    assert secure.json()["producer"] == "job"


FETCH = "fetch(process.argv[1]).then(() => console.log('came'), (error) => console.log(error.cause.code))"


def refused_by_python(url: str, authority: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the HTTP library of producer.py refuses the server."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(url, timeout=20)
    return True


def refused_by_javascript(url: str, authority: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the `fetch` of producer.mjs refuses the server."""
    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", str(authority))
    done = subprocess.run(["node", "-e", FETCH, url], capture_output=True, text=True, timeout=60, check=True)
    return "UNABLE_TO_VERIFY" in done.stdout


@pytest.mark.parametrize(
    ("words", "variable", "is_refused"),
    [
        pytest.param(python_words, "SSL_CERT_FILE", refused_by_python, id="py"),
        pytest.param(javascript_words, "NODE_EXTRA_CA_CERTS", refused_by_javascript, id="js", marks=needs_node),
    ],
)
def test_the_producers_of_others_put_groups_over_https_where_a_variable_names_the_authority(
    tmp_path: Path,
    certificates: tuple[Certificates, Certificates],
    monkeypatch: pytest.MonkeyPatch,
    words: Callable[[str, Path], list[str]],
    variable: str,
    is_refused: Callable[[str, Path, pytest.MonkeyPatch], bool],
) -> None:
    ours, others = certificates
    run = ExternalRun(tmp_path, num_rounds=1, certificates=ours)
    token = run.run.tokens.make("job", (Scope.TRAIN,), seconds=600)
    producer = None
    try:
        url = run.run.server.url
        assert is_refused(f"{url}/v1/openapi.json", others.authority, monkeypatch)
        run.start()
        producer = Producer(words(url, run.model_directory), tmp_path, token, **{variable: str(ours.authority)})
        run.wait()
        assert producer.wait() == 0, producer.log.read_text()
        assert len(run.trained) == 2
    finally:
        if producer is not None:
            producer.close()
        run.close()
