"""The client of our own rollout jobs, with a real gateway."""

import asyncio
import hashlib
import http.server
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from tests.helpers.gateway_run import HASH, GatewayRun, confirm, group_of, lease
from tests.helpers.lossy_proxy import LossyProxy
from vime.gateway import messages as m
from vime.gateway.client import GatewayClient, RefusedError
from vime.gateway.scripted import HOSTILE
from vime.gateway.tokens import Scope
from vime.handoff.round_ledger import RoundLedger
from vime.types import VimeError
from vime.utils.http import HttpSession
from vime.utils.http import Response as HttpResponse

Result = TypeVar("Result")


def test_a_gateway_that_forgot_the_weights_is_told_to_the_job_at_once(tmp_path: Path) -> None:
    """Repeated by the client alone, the call would be refused until the job gives up: nobody reports the weights while
    every prompt of the job waits in such a call."""
    run = GatewayRun(tmp_path)
    try:
        token = run.tokens.make("job-a", (Scope.TRAIN,), seconds=600)
        job = run.client("job-a")
        put = msgspec.convert(group_of(lease(job)[0]), m.PutGroup)
        run.weights.forget_confirmations()

        async def call() -> m.Put:
            client = GatewayClient(run.server.url, token, patience_s=3.0)
            try:
                return await client.call("/v1/groups", put, m.Put)
            finally:
                await client.close()

        with pytest.raises(RefusedError) as refused:
            asyncio.run(call())
        assert refused.value.code == "unconfirmed_version"
        confirm(job)
        assert asyncio.run(call()).is_committed
    finally:
        run.close()


def test_a_call_is_repeated_when_the_server_wants_it_and_a_wait_that_is_no_number_of_seconds_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = m.ErrorBody(code="unavailable", what="", got="", expected="", next="", may_repeat=True)
    headers = ["7", "Sat, 28 Nov 2026 12:00:00 GMT", "-5", "99999"]
    waited: list[float] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            content = msgspec.msgpack.encode(refused if headers else m.Left(given_back=0))
            self.send_response(503 if headers else 200)
            self.send_header("Content-Length", str(len(content)))
            if headers:
                self.send_header("Retry-After", headers.pop(0))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    async def note(seconds: float) -> None:
        waited.append(seconds)

    async def call(url: str) -> None:
        client = GatewayClient(url, "token")
        monkeypatch.setattr(asyncio, "sleep", note)
        await client.call("/v1/producers/leave", m.Leave(), m.Left)
        monkeypatch.undo()
        await client.close()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        asyncio.run(call(f"http://127.0.0.1:{served.server_address[1]}"))
        served.shutdown()
    assert waited == [7.0, 0.2, 0.4, 60.0]


def test_a_queue_that_is_full_for_longer_than_a_gateway_may_be_away_is_waited_for(tmp_path: Path) -> None:
    """A round may train for longer than the patience; the job took the run for over, and said so."""
    run = GatewayRun(tmp_path, max_tokens=10)  # a group has 2 samples of 5 tokens
    try:
        first, second = lease(run.client("job-a"), 2)
        assert run.client("job-a").post("/v1/groups", json=group_of(first)).status_code == 200
        put = msgspec.convert(group_of(second), m.PutGroup)

        async def call() -> m.Put:
            client = GatewayClient(
                run.server.url, run.tokens.make("job-a", (Scope.TRAIN,), seconds=600), patience_s=0.5
            )
            try:
                calling = asyncio.create_task(client.call("/v1/groups", put, m.Put))
                done, _ = await asyncio.wait([calling], timeout=3.5)  # `Retry-After` is 1 s
                assert not done, calling.exception()
                taken = run.port.call(RoundLedger.lease, 0, version=0, holder="t", count=1).lease
                run.port.call(RoundLedger.trained, 0, taken.fence)
                async with asyncio.timeout(30):
                    return await calling
            finally:
                await client.close()

        assert asyncio.run(call()).is_committed
    finally:
        run.close()


PART = 1000
SIZES = {"empty": 0, "small": 7, "whole": 2 * PART, "large": 5 * PART + 1}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    directory = tmp_path / "published"
    directory.mkdir()
    made = {name: bytes((place * 7 + place // 251) % 256 for place in range(size)) for name, size in SIZES.items()}
    for name, content in made.items():
        (directory / name).write_bytes(content)
    return made


def manifest_of(directory: Path, files: dict[str, bytes]) -> m.WeightManifest:
    entries = [
        m.WeightFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in files.items()
    ]
    return m.WeightManifest(version=0, content_hash=f"{HASH}0", location=str(directory / "published"), files=entries)


def with_client(run: GatewayRun, url: str, use: Callable[[GatewayClient], Coroutine[None, None, Result]]) -> Result:
    async def used() -> Result:
        client = GatewayClient(url, run.tokens.make("job-a", (Scope.TRAIN,), seconds=600), patience_s=30.0)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(used())


async def download(client: GatewayClient, into: Path) -> None:
    manifest = await client.get("/v1/weights/serving", m.WeightManifest)
    for file in manifest.files:
        await client.download(manifest.version, file, into)


def test_files_are_downloaded_in_parts_and_whole_whichever_responses_are_lost(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first response of every part is lost: also in the middle of a file."""
    monkeypatch.setattr("vime.gateway.client.PART_BYTES", PART)
    run = GatewayRun(tmp_path, manifest=manifest_of(tmp_path, files))
    seen: set[tuple[str, str]] = set()

    def loses(path: str, number: int) -> bool:
        part = (path, proxy.ranges[number])
        is_new = part not in seen
        seen.add(part)
        return is_new

    proxy = LossyProxy(run.server.url, loses)
    into = tmp_path / "held"
    into.mkdir()
    try:
        with_client(run, proxy.url, lambda client: download(client, into))
    finally:
        proxy.close()
        run.close()
    assert {path.name: path.read_bytes() for path in into.iterdir()} == files
    ranges = [
        part for path, part in zip([path for path, _ in proxy.calls], proxy.ranges, strict=True) if "large" in path
    ]
    # 5,001 bytes in parts of 1,000, each asked for again after its response was lost
    assert ranges == [f"bytes={at}-{min(at + 999, 5000)}" for at in range(0, 5001, 1000) for _ in range(2)]


def test_other_bytes_than_the_manifest_says_are_no_file_of_the_job(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.gateway.client.PART_BYTES", PART)
    run = GatewayRun(tmp_path, manifest=manifest_of(tmp_path, files))
    into = tmp_path / "held"
    into.mkdir()
    try:
        content = bytearray(files["large"])
        content[2500] ^= 1
        (tmp_path / "published" / "large").write_bytes(content)
        with pytest.raises(VimeError, match="SHA-256"):
            with_client(run, run.server.url, lambda client: download(client, into))
    finally:
        run.close()
    assert sorted(path.name for path in into.iterdir()) == ["empty", "small", "whole"]


def test_a_page_of_a_proxy_in_place_of_a_part_is_a_lost_response_and_no_part(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.gateway.client.PART_BYTES", PART)
    run, pages = GatewayRun(tmp_path, manifest=manifest_of(tmp_path, files)), [b"<html>x</html>", b"x" * PART]
    real, into = HttpSession.call, tmp_path / "held"
    into.mkdir()

    async def proxied(self: HttpSession, *words: Any, **options: Any) -> HttpResponse:
        response = await real(self, *words, **options)
        is_part = "Range" in options["headers"]
        return HttpResponse(200, pages.pop(), "text/html") if pages and is_part else response

    monkeypatch.setattr(HttpSession, "call", proxied)
    try:
        with_client(run, run.server.url, lambda client: download(client, into))
    finally:
        run.close()
    assert pages == []
    assert {path.name: path.read_bytes() for path in into.iterdir()} == files


@pytest.mark.parametrize(("status", "content"), HOSTILE, ids=range(len(HOSTILE)))
def test_bytes_that_are_no_message_are_a_lost_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, content: bytes
) -> None:
    run, bodies = GatewayRun(tmp_path), [content]
    real = HttpSession.call

    async def garbled(self: HttpSession, *words: Any, **options: Any) -> HttpResponse:
        response = await real(self, *words, **options)
        return HttpResponse(status, bodies.pop(), "application/json") if bodies else response

    monkeypatch.setattr(HttpSession, "call", garbled)
    try:
        register = m.Register(model="mine")
        registered = with_client(
            run, run.server.url, lambda job: job.call("/v1/producers/register", register, m.Registered)
        )
        assert (registered.producer, bodies) == ("job-a", [])
    finally:
        run.close()


def test_a_message_of_another_protocol_is_said_at_once(tmp_path: Path) -> None:
    run = GatewayRun(tmp_path)
    try:
        register = m.Register(model="mine")
        with pytest.raises(VimeError, match=r"is no Left: .*another version"):
            with_client(run, run.server.url, lambda job: job.call("/v1/producers/register", register, m.Left))
    finally:
        run.close()
