"""A gateway with a script of faults, before which `vime conformance --producer` runs a job. Nothing of a run is needed:
the calls, the ledger and the spool are those of a run, the prompts and the weights are made up, and nobody trains.

The faults: each call once loses its response, once gets bytes that are no message in its place (a file: one byte is
another), and each POST once finds the gateway unavailable; one group's lease ends before it is put; once the gateway
has forgotten the confirmations, as after a restart; and a second version comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vime.data.rows import FACTS, GroupFacts
from vime.gateway import tokens
from vime.gateway.app import make_app
from vime.gateway.messages import WeightFile, WeightManifest
from vime.gateway.refusal import Refusal
from vime.gateway.samples import Limits
from vime.gateway.server import GatewayServer
from vime.gateway.service import Gateway
from vime.gateway.weights import Weights
from vime.handoff.group_store import EncodedGroup, GroupStore, MemoryStore
from vime.handoff.ledger import Ledger, LocalLedgerPort
from vime.handoff.ledger_types import EXTERNAL, LedgerRules, Payload, Task
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger
from vime.handoff.spool import Spool
from vime.types import ConfigError, Sample

PRODUCER = "candidate"
SAMPLES, GROUPS = 2, 8
LOST_LEASE, FORGETS, SECOND_VERSION = 2, 4, 5
"""Numbers of groups, from 0: before its put the lease ends; before its put confirmations are forgotten; after it comes
version 1."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""What safetensors writes -> what torch writes."""
HOSTILE = (
    (200, bytes(range(255, 127, -1)) * 8),  # neither UTF-8 nor msgpack
    (200, b"<html><body>Welcome to the hotel's network. Please accept the terms.</body></html>"),
    (502, b'{"message": "no upstream server"}'),
    (200, b"[" * 100_000),  # deeper than a parser that calls itself goes
    (200, b"[]"),
    (200, b"\x81\xa8producer\xa2\xff\xfe"),  # msgpack, but for one text
    (200, b""),
)
"""Status and bytes that stand in place of a response. Each path gets the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One call as the gateway saw it. `status` and `response` are what it would have sent; 0 when it did not run."""

    began: float
    ended: float
    method: str
    path: str
    body: object
    status: int
    response: object
    fault: str = ""
    """"lost": the caller never got the response; "hostile": it got other bytes; "unavailable": the call was not carried
    out."""

    def has(self, name: str) -> object:
        """Return a field of the response; None when it has no such field."""
        return self.response.get(name) if isinstance(self.response, dict) else None

    def said(self, name: str) -> object:
        """Return a field of the body; None when it has no such field."""
        return self.body.get(name) if isinstance(self.body, dict) else None


class _Tensor(msgspec.Struct):
    """What the header of a safetensors file says of one."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class ScriptedGateway:
    """`model`: a directory with safetensors that the job can load; without one a few tensors are made up."""

    def __init__(self, directory: Path, *, model: Path | None = None, lease_timeout_s: float = 5.0) -> None:
        self.directory, self.lease_timeout_s = directory, lease_timeout_s
        rules = LedgerRules(
            max_slots=GROUPS, max_staleness=1, lease_timeout_s=lease_timeout_s, num_rounds=1, groups_per_round=GROUPS
        )
        self._ledger = Ledger(directory / "ledger.db", rules, clock=time.monotonic)
        self._port = LocalLedgerPort(self._ledger)
        self._store = GroupStore(MemoryStore(), Spool(directory / "spool"), partition="train")
        self.manifests = [*write_versions(directory / "weights", model)]
        config = {} if model is None or not (model / "config.json").is_file() else _json(model / "config.json")
        found = tokens.TokenFile(directory)
        self.token = found.make(PRODUCER, (tokens.Scope.TRAIN,), seconds=86400)
        self.gateway = Gateway(
            ledger=self._port,
            store=self._store,
            writer=self,
            prompts=self,
            encode=_encoded,
            weights=Weights(directory, self.manifests[0]),
            limits=Limits(
                samples_per_prompt=SAMPLES, max_staleness=1, lease_timeout_s=lease_timeout_s,
                vocab_size=int(str(config.get("vocab_size", 2**31 - 1))), max_tokens=1 << 20,
                temperature=1.0,
            ),
            lease_key=found.lease_key,
        )  # fmt: skip
        self.records: list[Record] = []
        self._faults: dict[str, set[str]] = {}  # path -> faults that were made
        self._num_hostile = 0
        self._made: set[str] = set()
        self.server = GatewayServer(self._wrapped(make_app(self.gateway, found)), "127.0.0.1:0")
        self.server.start()

    @property
    def committed(self) -> int:
        job = self.gateway.jobs.get(PRODUCER)
        return 0 if job is None else job.committed

    def finish(self) -> None:
        """Say from now on that no prompt is left."""
        self._port.call(RoundLedger.release, 1)

    def close(self) -> None:
        self.gateway.is_stopping = True
        self.server.stop()
        self._store.close()
        self._ledger.close()

    def group_at(self, group_index: int) -> list[Sample]:
        """Return the samples of a prompt: three tokens that any vocabulary has."""
        return [
            Sample(
                group_index=group_index,
                index=group_index * SAMPLES + number,
                prompt="abc",
                tokens=[5, 6, 7],
                label="a",
            )
            for number in range(SAMPLES)
        ]

    async def put(self, task: Task, group: EncodedGroup, payload: Payload) -> float:
        """Store and commit a group, as the writer of a rollout worker does."""
        [checksum] = await asyncio.to_thread(self._store.put, [(task, group)])
        await self._port.call_async(PromptLedger.commit, task, replace(payload, checksum=checksum))
        return 0.0

    def _wrapped(self, app: ASGIApp) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            began = time.monotonic()
            body = await _body(receive)
            fault = self._fault(scope["method"], scope["path"], body)
            if fault == "unavailable":
                await _refuse(send)
                self._note(began, scope, body, 503, b"", fault)
                return
            sent: list[Message] = []
            status = 0
            is_file = "/files/" in scope["path"]
            bodies = [body]

            async def received() -> Message:
                return {"type": "http.request", "body": bodies.pop()} if bodies else await receive()

            async def gather(message: Message) -> None:
                nonlocal status
                if not is_file:  # they may be as large as a model
                    sent.append(message)
                status = message.get("status", status)
                if fault == "hostile" and is_file and message.get("body"):
                    message = {**message, "body": bytes([message["body"][0] ^ 1]) + message["body"][1:]}
                if not fault or (fault == "hostile" and is_file):
                    await send(message)

            await app(scope, received, gather)
            content = b"".join(message.get("body", b"") for message in sent)
            self._note(began, scope, body, status, content, fault)
            if fault == "lost":  # the response begins and never ends: the server then cuts the connection
                head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000000")]}
                await send(head)
            elif fault == "hostile" and not is_file:
                await self._send_hostile(send)
            if scope["path"] in ("/v1/groups", "/v1/samples") and self.committed > SECOND_VERSION:
                self.gateway.weights.release(self.manifests[1])

        return call

    def _fault(self, method: str, path: str, body: bytes) -> str:
        """Return the fault of this call. Makes those that happen before it."""
        if path in ("/v1/groups", "/v1/samples"):
            self._before_a_put(body)
        made = self._faults.setdefault(path, set())
        if path.endswith(("leave", "heartbeat", "openapi.json")):
            return ""
        for fault in ("lost", "hostile", "unavailable") if method == "POST" else ("lost", "hostile"):
            if fault not in made:
                made.add(fault)
                return fault
        return ""

    async def _send_hostile(self, send: Send) -> None:
        status, content = HOSTILE[self._num_hostile % len(HOSTILE)]
        self._num_hostile += 1
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _before_a_put(self, body: bytes) -> None:
        lease = str(_decoded(body).get("lease", ""))
        if lease in self._made:
            return
        self._made.add(lease)
        number = len(self._made) - 1
        if number == LOST_LEASE:
            self._port.call(PromptLedger.abandon, EXTERNAL + PRODUCER)
        elif number == FORGETS:
            self.gateway.weights.forget_confirmations()

    def _note(self, began: float, scope: Scope, body: bytes, status: int, content: bytes, fault: str) -> None:
        self.records.append(
            Record(
                began=began,
                ended=time.monotonic(),
                method=scope["method"],
                path=scope["path"],
                body=_decoded(body),
                status=status,
                response=_decoded(content),
                fault=fault,
            )
        )


def _encoded(_: str, samples: list[Sample]) -> tuple[EncodedGroup, Payload]:
    content = msgspec.json.encode([[int(token) for token in sample.tokens] for sample in samples])
    versions = [span.version for sample in samples for span in sample.token_policy_versions]
    facts = GroupFacts(group_index=samples[0].group_index, rows=np.zeros(0, FACTS))
    payload = Payload(
        checksum=0,
        num_bytes=len(content),
        num_tokens=sum(len(sample.tokens) for sample in samples),
        num_rows=len(samples),
        min_version=min(versions),
        max_version=max(versions),
    )
    return EncodedGroup(facts=facts, chunks=(content,)), payload


def write_versions(directory: Path, model: Path | None) -> Iterator[WeightManifest]:
    """Write two versions. The second differs from the first in one byte of its first tensor, the least significant."""
    files = sorted(model.glob("*.safetensors")) if model is not None else []
    if model is not None and not files:
        raise ConfigError(f"--model {model}: has no *.safetensors. Name a checkpoint that the job can load.")
    for version in (0, 1):
        target = directory / str(version)
        target.mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, target / file.name)
        if not files:
            _write_made_up(target / "model-00001-of-00001.safetensors")
        if version == 1:
            first = min(target.glob("*.safetensors"))
            start, header = _header(first)
            place = start + min(entry.data_offsets[0] for entry in header.values())
            with first.open("r+b") as data:
                data.seek(place)
                [byte] = data.read(1)
                data.seek(place)
                data.write(bytes([byte ^ 1]))
        yield describe_version(target, version)


def describe_version(directory: Path, version: int) -> WeightManifest:
    """Write tensors.json beside the safetensors of a directory, and return the manifest."""
    entries, digest = [], hashlib.blake2b(digest_size=16)
    for file in sorted(directory.glob("*.safetensors")):
        start, header = _header(file)
        with file.open("rb") as data:
            for name, entry in header.items():
                begin, end = entry.data_offsets
                dtype, shape = DTYPES[entry.dtype], entry.shape
                head = f"{name}\n{dtype}\n{','.join(map(str, shape))}\n".encode()
                digest.update(len(head).to_bytes(4, "little") + head)
                data.seek(start + begin)
                for left in range(end - begin, 0, -(1 << 20)):
                    digest.update(data.read(min(left, 1 << 20)))
                entries.append({"name": name, "dtype": dtype, "shape": shape, "file": file.name})
    listed = {"version": version, "content_hash": digest.hexdigest(), "tensors": entries}
    (directory / "tensors.json").write_bytes(msgspec.json.encode(listed))
    files = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as data:
            sha256 = hashlib.file_digest(data, "sha256").hexdigest()
        files.append(WeightFile(name=path.name, num_bytes=path.stat().st_size, sha256=sha256))
    return WeightManifest(
        version=version, content_hash=digest.hexdigest(), location=str(directory.resolve()), files=files
    )


def _header(file: Path) -> tuple[int, dict[str, _Tensor]]:
    """Return where the data of a safetensors file begin, and its tensors."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        header = msgspec.json.decode(data.read(length), type=dict[str, msgspec.Raw])
    found = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items() if name != "__metadata__"}
    return 8 + length, found


def _write_made_up(path: Path) -> None:
    tensors = {
        "b.weight": ("F32", [2, 3], bytes(range(24))),
        "a.weight": ("BF16", [4], bytes(range(8))),
        "scale": ("F32", [], bytes(4)),
    }
    header: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = msgspec.json.encode(header)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data for *_, data in tensors.values()))


async def _body(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return body


async def _refuse(send: Send) -> None:
    refusal = Refusal(
        503,
        "unavailable",
        "the gateway cannot store this now.",
        got="a fault of the script",
        expected="space on the disk",
        next_action="Repeat the same call after Retry-After.",
        retry_after_s=1,
    )
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(refusal.body)})


def _decoded(content: bytes) -> dict[str, object]:
    """Return a message of either encoding; empty when it is none."""
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        try:
            found = decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _json(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found
