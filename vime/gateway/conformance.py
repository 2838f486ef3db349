"""Tests of a gateway from outside: whether it keeps what docs/producer-protocol.md promises to a job.

It leases up to three prompts and puts three groups of made-up tokens, which the run may train on. With a token of scope
`eval`, while an evaluation is open to jobs, it puts a made-up result of one prompt too.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np

from vime.gateway import messages as m
from vime.gateway.check import Check
from vime.gateway.probe import GatewayProbe
from vime.types import ClusterError
from vime.utils.http import Response

Kind = TypeVar("Kind", bound=m.Message)
Body = Mapping[str, object]
BUSY = (429, 503)
BUSY_S, LEASE_S = 30.0, 20.0
NEVER = 2**31 - 1
"""A version that no run has."""
HOSTILE: tuple[tuple[str, bytes], ...] = (
    ("no JSON", b"\x00\xff\xfe{]"),
    ("deeply nested", b"[" * 50_000),
    ("a list", b"[1, 2]"),
    ("a huge number", b'{"request": "r", "count": 1' + b"0" * 400 + b"}"),
    ("NaN", b'{"request": "r", "count": NaN}'),
    ("invalid UTF-8", b'{"request": "\xff"}'),
    ("an unknown field", b'{"request": "r", "cuont": 1}'),
    ("a wrong type", b'{"request": 5}'),
)


class Broken(Exception):
    """A promise that the gateway did not keep; the message is what was found."""


def check_gateway(address: str, token: str, other_token: str = "") -> list[Check]:
    """Run every check; a later one goes on where an earlier one failed, if it can."""
    candidate = Candidate(address, token, other_token)
    checks = []
    try:
        candidate.client.call("GET", "/v1/openapi.json")  # raises when nothing responds there at all
        for name, run, action in CHECKS:
            try:
                run(candidate)
                checks.append(Check(name))
            except Broken as error:
                checks.append(Check(name, str(error), action))
            except ClusterError:
                checks.append(Check(name, "the connection was closed without a response", action))
            except (LookupError, TypeError) as error:  # a message that lacks what the schema promises
                checks.append(Check(name, f"the response has another form: {error!r}", action))
    finally:
        candidate.close()
    return checks


class Candidate:
    """The gateway that is tested, and what earlier checks learned of it."""

    def __init__(self, address: str, token: str, other_token: str) -> None:
        self.client = GatewayProbe(address, token)
        self.other = GatewayProbe(address, other_token) if other_token else None
        self.stranger = GatewayProbe(address, "vime_0000000000000000_" + "0" * 64)
        self.nobody = GatewayProbe(address, "")
        self.token, self.address = token, address
        self.facts: m.Registered | None = None
        self.manifest: m.WeightManifest | None = None
        self.is_dry = False  # a lease was waited for in vain: later ones are not waited for again

    def close(self) -> None:
        for client in (self.client, self.other, self.stranger, self.nobody):
            if client is not None:
                client.close()

    def post(self, path: str, body: Body, client: GatewayProbe | None = None) -> Response:
        """Send a message; again while the gateway is busy, as the protocol asks."""
        ends = time.monotonic() + BUSY_S
        while True:
            response = (client or self.client).call("POST", path, json.dumps(body).encode())
            if response.status not in BUSY or time.monotonic() > ends:
                return response
            time.sleep(1.0)

    def done(self, path: str, body: Body, kind: type[Kind]) -> Kind:
        """Return the message of a call that must succeed."""
        return _message(self.post(path, body), kind)

    def refused(self, path: str, body: Body, status: int, code: str, why: str) -> m.ErrorBody:
        """Check that a call is refused like this."""
        return _error(self.post(path, body), status, code, why)

    def lease(self) -> m.Prompt:
        """Return a prompt."""
        wait_s = 0.0 if self.is_dry else LEASE_S
        call = {"request": f"conformance-{uuid.uuid4().hex}", "wait_s": wait_s}
        prompts = self.done("/v1/leases", call, m.Prompts)
        self.is_dry = not prompts.prompts
        if self.is_dry:
            raise Broken(
                f"no prompt within {wait_s:g} s; it waits for: {prompts.waits_for or 'nothing, it is exhausted'}"
            )
        return prompts.prompts[0]

    def samples(self, prompt: m.Prompt | m.EvalPrompt, **changes: object) -> list[dict[str, object]]:
        """Return made-up samples of a prompt: its last token once more."""
        version = 0 if self.manifest is None else self.manifest.version
        token = prompt.tokens[-1] if prompt.tokens else 0
        made: dict[str, object] = {
            "tokens": [*(prompt.tokens or [token]), token], "response_length": 1, "log_probs": [-1.0],
            "versions": [[0, 1, version]], "reward": 0.0,
            "extra": {} if self.facts is None else {name: [-1.0] for name in self.facts.extra_fields},
        }  # fmt: skip
        return [{"index": sample.index, **made, **changes} for sample in prompt.samples]

    def own_group(self, key: str, **changes: object) -> dict[str, object]:
        """Return a group for a prompt of the job's own."""
        places = range(1 if self.facts is None else self.facts.samples_per_prompt)
        samples = [m.PromptSample(index=place, metadata={}) for place in places]
        prompt = m.Prompt(lease="", group=0, attempt=0, prompt="", tokens=[], label=None, samples=samples)
        return {"key": key, "prompt": "vime conformance", "wait_s": LEASE_S, "samples": self.samples(prompt, **changes)}

    def give_back(self, prompt: m.Prompt) -> Response:
        return self.post("/v1/leases/give-back", {"lease": prompt.lease, "reason": "vime conformance"})


def _message(response: Response, kind: type[Kind]) -> Kind:
    if response.status != 200:
        raise Broken(response.described()[:200])
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.MsgspecError as error:
        raise Broken(f"the response is no {kind.__name__}: {error}") from error


def _error(response: Response, status: int, code: str, why: str) -> m.ErrorBody:
    if response.status != status:
        raise Broken(f"{why}: expected {status} {code}, got {response.described()[:150]}")
    try:
        error = msgspec.json.decode(response.content, type=m.ErrorBody)
    except msgspec.MsgspecError as failure:
        raise Broken(f"{why}: the body is no ErrorBody: {failure}") from failure
    if error.code != code:
        raise Broken(f"{why}: expected code {code}, got {error.code}")
    return error


def _expect(is_kept: bool, found: str) -> None:
    if not is_kept:
        raise Broken(found)


def _tokens(gateway: Candidate) -> None:
    for client, who in ((gateway.nobody, "without a token"), (gateway.stranger, "with an unknown token")):
        for path in ("/v1/producers/heartbeat", "/v1/leases", "/v1/groups"):
            _error(gateway.post(path, {}, client), 401, "unauthorized", f"{path} {who}")
        _error(client.call("GET", "/v1/weights/serving"), 401, "unauthorized", f"GET /v1/weights/serving {who}")


def _schema(gateway: Candidate) -> None:
    response = gateway.client.call("GET", "/v1/openapi.json")
    _expect(response.status == 200, response.described()[:200])
    paths = json.loads(response.content)["paths"]
    missing = [path for path in ("/v1/leases", "/v1/groups", "/v1/samples", "/v1/weights/loaded") if path not in paths]
    _expect(not missing, f"it lacks {missing}")
    _error(gateway.client.call("GET", "/v1/nothing"), 404, "no_such_call", "a call that does not exist")


def _register(gateway: Candidate) -> None:
    gateway.facts = gateway.done("/v1/producers/register", {"model": "conformance", "engines": 1}, m.Registered)
    again = gateway.done("/v1/producers/register", {"model": "conformance", "engines": 1}, m.Registered)
    _expect(gateway.facts == again, f"registered again: {again}")
    _expect(gateway.facts.protocol == m.PROTOCOL, f"protocol {gateway.facts.protocol}")


def _weights(gateway: Candidate) -> None:
    gateway.manifest = _message(gateway.client.call("GET", "/v1/weights/serving"), m.WeightManifest)
    _error(gateway.client.call("GET", f"/v1/weights/{NEVER}"), 404, "unknown_version", "a version that does not exist")
    version = gateway.manifest.version
    for name in ("nothing", "..%2f..%2fetc%2fpasswd"):
        response = gateway.client.call("GET", f"/v1/weights/{version}/files/{name}")
        _expect(response.status == 404, f"a file that the manifest does not name: {response.described()[:100]}")
    for file in gateway.manifest.files:
        if file.name == "tensors.json":
            content = gateway.client.call("GET", f"/v1/weights/{version}/files/{file.name}").content
            _expect(len(content) == file.num_bytes, f"{file.name} has {len(content)} bytes, not {file.num_bytes}")
            listed = json.loads(content)["content_hash"]
            _expect(listed == gateway.manifest.content_hash, f"{file.name} has hash {listed}, the manifest another one")


def _hashes(gateway: Candidate) -> None:
    if gateway.manifest is None:
        raise Broken("it has told of no weights")
    call = {"version": gateway.manifest.version, "engines": {"a": gateway.manifest.content_hash, "b": "wrong"}}
    gateway.refused("/v1/weights/loaded", call, 409, "wrong_hash", "one engine of two with a wrong hash")
    unknown = {"version": NEVER, "engines": {"a": "x"}}
    gateway.refused("/v1/weights/loaded", unknown, 404, "unknown_version", "a version that does not exist")
    call["engines"] = {"a": gateway.manifest.content_hash}
    gateway.done("/v1/weights/loaded", call, m.Confirmed)
    gateway.done("/v1/weights/loaded", call, m.Confirmed)


def _every_engine(gateway: Candidate) -> None:
    if gateway.manifest is None:
        raise Broken("it has told of no weights")
    version, alive = gateway.manifest.version, []
    gateway.done("/v1/producers/register", {"model": "conformance", "engines": 2}, m.Registered)
    for engine in ("a", "b"):
        call = {"version": version, "engines": {engine: gateway.manifest.content_hash}}
        gateway.done("/v1/weights/loaded", call, m.Confirmed)
        alive.append(gateway.done("/v1/producers/heartbeat", {}, m.Alive))
    _expect(bool(alive[0].lags), "one engine of two is taken for both")
    is_newer = alive[1].serving != version  # it was released meanwhile
    _expect(is_newer or not alive[1].lags, f"both engines have the weights, and it says: {alive[1].lags}")


def _hostile(gateway: Candidate) -> None:
    for what, content in HOSTILE:
        for path in ("/v1/leases", "/v1/groups"):
            _error(gateway.client.call("POST", path, content), 400, "not_this_message", f"{what} to {path}")
    packed = {"Content-Type": "application/msgpack"}
    response = gateway.client.call("POST", "/v1/leases", b"\xc1\xff", headers={**packed, "Accept": "application/json"})
    _error(response, 400, "not_this_message", "no msgpack")
    response = gateway.client.call("POST", "/v1/leases", b"{}", headers={"Content-Type": "text/plain"})
    _error(response, 415, "unknown_encoding", "text/plain")


def _oversize(gateway: Candidate) -> None:
    """A body that is only announced: it must be refused before it is sent."""
    if gateway.facts is None:
        raise Broken("it did not register the job")
    parts = urlsplit(gateway.client.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=BUSY_S)
    try:
        connection.putrequest("POST", "/v1/groups")
        connection.putheader("Authorization", f"Bearer {gateway.token}")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(gateway.facts.max_body_bytes + 1))
        connection.endheaders()
        try:
            response = connection.getresponse()
            found = Response(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise Broken(f"no response to a body of max_body_bytes + 1 that was announced: {error!r}") from error
    finally:
        connection.close()
    _error(found, 413, "too_large", "a body of max_body_bytes + 1")


def _leases(gateway: Candidate) -> None:
    call = {"request": f"conformance-{uuid.uuid4().hex}", "wait_s": LEASE_S}
    first, again = (gateway.done("/v1/leases", call, m.Prompts).prompts for _ in range(2))
    _expect(bool(first), "no prompt")
    _expect(first == again, f"the same request returned {[p.lease for p in first]}, then {[p.lease for p in again]}")
    held = gateway.done("/v1/producers/heartbeat", {}, m.Alive).leases
    _expect(first[0].lease in held, "a heartbeat does not list the lease")
    gateway.give_back(first[0])


def _split(gateway: Candidate) -> None:
    prompt = gateway.lease()
    samples = gateway.samples(prompt)
    wrong: list[tuple[str, list[dict[str, object]]]] = [
        ("a sample twice", [samples[0]] * 2),
        ("an index of another group", [*samples[:-1], samples[-1] | {"index": NEVER}]),
        ("log_probs of another length", gateway.samples(prompt, log_probs=[-1.0, -1.0])),
        ("a log-probability above 0", gateway.samples(prompt, log_probs=[1.0])),
        ("no prompt", gateway.samples(prompt, response_length=len(prompt.tokens or [0]) + 1)),
        ("versions that do not tile", gateway.samples(prompt, versions=[])),
    ]
    if len(samples) > 1:
        wrong.append(("a group without its last sample", samples[:-1]))
    for what, given in wrong:
        body = {"lease": prompt.lease, "samples": given}
        gateway.refused("/v1/groups", body, 422, "invalid", what)
    body = {"lease": prompt.lease, "samples": gateway.samples(prompt, versions=[[0, 1, NEVER]])}
    error = gateway.refused("/v1/groups", body, 409, "unconfirmed_version", "tokens of a version that nobody confirmed")
    _expect(
        error.may_repeat, "unconfirmed_version must say may_repeat: the same put is right after the hashes are reported"
    )
    gateway.give_back(prompt)


def _repeated_put(gateway: Candidate) -> None:
    """With packed columns, in base64."""
    prompt = gateway.lease()
    samples = [
        plain | {"tokens": _base64("<i4", cast("list[int]", plain["tokens"])), "log_probs": _base64("<f4", [-1.0])}
        for plain in gateway.samples(prompt)
    ]
    for what, wrong in (("5 bytes of tokens", bytes(5)), ("a packed token below 0", b"\xff" * 8)):
        given = [sample | {"tokens": base64.b64encode(wrong).decode()} for sample in samples]
        gateway.refused("/v1/groups", {"lease": prompt.lease, "samples": given}, 422, "invalid", what)
    body: dict[str, object] = {"lease": prompt.lease, "samples": samples}
    first, again = (gateway.done("/v1/groups", body, m.Put) for _ in range(2))
    _expect((first.is_committed, first.repeated) == (True, False), f"the first put: {first}")
    _expect((again.is_committed, again.repeated) == (True, True), f"the same put again: {again}")
    other = body | {"samples": gateway.samples(prompt, reward=1.0)}
    later = gateway.done("/v1/groups", other, m.Put)
    _expect(later.repeated, f"other content after the group was committed must not count: {later}")


def _base64(kind: str, numbers: Sequence[float]) -> str:
    return base64.b64encode(np.asarray(numbers, kind).tobytes()).decode()


def _sample_by_sample(gateway: Candidate) -> None:
    prompt = gateway.lease()
    for place, sample in enumerate(gateway.samples(prompt)):
        left = [other.index for other in prompt.samples[place + 1 :]]
        body = {"lease": prompt.lease, "sample": sample}
        put = gateway.done("/v1/samples", body, m.Put)
        _expect((put.missing, put.is_committed) == (left, not left), f"sample {place}: {put}")
        _expect(gateway.done("/v1/samples", body, m.Put).repeated, f"sample {place} again does not say repeated")
        if left:
            other = {"lease": prompt.lease, "sample": sample | {"reward": 1.0}}
            gateway.refused("/v1/samples", other, 409, "other_sample", "other content under an index that is stored")


def _own(gateway: Candidate) -> None:
    key, path = f"conformance-{uuid.uuid4().hex}", "/v1/groups/own"
    whole = gateway.own_group(key)
    if (size := len(gateway.own_group(key, index=0)["samples"])) > 1:  # type: ignore[arg-type]
        gateway.refused(path, gateway.own_group(key, index=0), 422, "invalid", f"{size} samples of one index")
    first, again = (gateway.done(path, whole, m.Put) for _ in range(2))
    _expect((first.is_committed, first.repeated) == (True, False), f"the first put: {first}")
    _expect((again.group, again.repeated) == (first.group, True), f"the same key again: {again}")
    gateway.refused(path, gateway.own_group(key, reward=1.0), 409, "other_content", "other content under a key")
    _expect(gateway.done(path, whole, m.Put).repeated, "the same key after a refused one does not say repeated")


def _evaluation(gateway: Candidate) -> None:
    call, put = {"request": f"conformance-{uuid.uuid4().hex}"}, "/v1/evaluation/groups"
    response = gateway.post("/v1/evaluation/leases", call)
    if response.status == 403:
        _error(response, 403, "forbidden", "a token without scope eval")
        return
    first = _message(response, m.EvalPrompts)
    if not first.prompts:
        _expect(bool(first.waits_for) != first.is_over, f"no prompt, and it does not say why: {first}")
        return
    again = gateway.done("/v1/evaluation/leases", call, m.EvalPrompts)
    _expect(first.prompts == again.prompts, "the same request returned other prompts")
    prompt = first.prompts[0]
    whole: dict[str, object] = {"lease": prompt.lease, "samples": gateway.samples(prompt)}
    wrong: list[tuple[str, Body]] = [
        ("neither samples nor an error", {"lease": prompt.lease}),
        ("samples and an error", whole | {"error": "both"}),
        ("a sample twice", whole | {"samples": gateway.samples(prompt)[:1] * 2}),
    ]
    for what, body in wrong:
        gateway.refused(put, body, 422, "invalid", what)
    old = whole | {"samples": gateway.samples(prompt, versions=[[0, 1, NEVER]])}
    gateway.refused(put, old, 409, "unconfirmed_version", "tokens of a version that nobody confirmed")
    forged = prompt.lease[:-1] + ("A" if prompt.lease[-1] != "A" else "B")
    gateway.refused(put, whole | {"lease": forged}, 404, "unknown_lease", "a lease that was altered")
    counted = [gateway.done(put, whole, m.Evaluated).repeated for _ in range(2)]
    _expect(counted == [False, True], f"the same result twice said repeated {counted}")


def _late(gateway: Candidate) -> None:
    prompt = gateway.lease()
    ended = [_message(gateway.give_back(prompt), m.Ended).repeated for _ in range(2)]
    _expect(ended == [False, True], f"giving back twice said repeated {ended}")
    body = {"lease": prompt.lease, "samples": gateway.samples(prompt)}
    for _ in range(2):
        gateway.refused("/v1/groups", body, 409, "lease_lost", "a put for a lease that was given back")


def _foreign(gateway: Candidate) -> None:
    prompt = gateway.lease()
    forged = prompt.lease[:-1] + ("A" if prompt.lease[-1] != "A" else "B")
    cases = [(gateway.client, forged, "a lease that was altered")]
    if gateway.other is not None:
        cases.append((gateway.other, prompt.lease, "a lease of another producer"))
    for client, lease, what in cases:
        end = {"lease": lease, "reason": "mine"}
        for path, body in (
            ("/v1/groups", {"lease": lease, "samples": gateway.samples(prompt)}),
            ("/v1/samples", {"lease": lease, "sample": gateway.samples(prompt)[0]}),
            ("/v1/leases/drop", end),
            ("/v1/leases/give-back", end),
        ):
            _error(gateway.post(path, body, client), 404, "unknown_lease", f"{path} with {what}")
    held = gateway.done("/v1/producers/heartbeat", {}, m.Alive).leases
    _expect(prompt.lease in held, "the lease is gone after others tried to end it")
    gateway.give_back(prompt)


def _leave(gateway: Candidate) -> None:
    prompt = gateway.lease()
    given = gateway.done("/v1/producers/leave", {}, m.Left).given_back
    _expect(given >= 1, f"leave gave {given} leases back")
    held = gateway.done("/v1/producers/heartbeat", {}, m.Alive).leases
    _expect(prompt.lease not in held, "the lease is still held after leave")


CHECKS: tuple[tuple[str, Callable[[Candidate], None], str], ...] = (
    ("no call without a valid token", _tokens, "Check the token before anything else: 401."),
    ("describes itself", _schema, "Serve the schema, and refuse what it does not name with an ErrorBody."),
    ("registers, also twice", _register, "Return the same facts again."),
    ("serves weights by version", _weights, "Serve what the manifest names, refuse the rest with 404."),
    ("confirms the right hash only", _hashes, "Compare the hash of every engine; one wrong one refuses all."),
    (
        "waits for every engine that was registered",
        _every_engine,
        "Count the engines by name; a job lags until as many as it registered have the weights.",
    ),
    ("hostile bytes and unknown fields are refused", _hostile, "Answer 400 or 415; never a fault of your own."),
    ("refuses what is too large before it is sent", _oversize, "Look at content-length first: 413."),
    ("the same request returns the same leases", _leases, "Keep the leases of a request while they are held."),
    ("split and impossible groups are refused", _split, "Check the samples against the prompt: 422, nothing stored."),
    ("a repeated put counts once", _repeated_put, "Answer a committed attempt with repeated; read packed columns."),
    ("a group is ready with its last sample", _sample_by_sample, "Store each sample by index; other content: 409."),
    ("a group of a job's own counts once under its key", _own, "Keep key and content; other content: 409."),
    ("an evaluated prompt counts once", _evaluation, "Keep the first result of a prompt; check it as a group."),
    ("a late put is refused", _late, "An attempt that ended takes no group: 409 lease_lost."),
    ("no lease of somebody else can be used", _foreign, "Tie a lease to its producer, by a signature."),
    ("leave gives every lease back", _leave, "Issue the groups again at once."),
)
