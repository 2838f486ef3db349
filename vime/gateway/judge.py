"""What a rollout job did before the scripted gateway, judged by the calls that arrived: docs/producer-protocol.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vime.gateway.check import Check
from vime.gateway.messages import WeightManifest
from vime.gateway.scripted import GROUPS, Record

FAULTY = ("not_this_message", "unknown_encoding", "invalid", "too_large", "no_such_call", "forbidden")
OWN = "/v1/groups/own"
PUTS = ("/v1/groups", "/v1/samples")
LATE_PUTS = 2
"""So many calls for a lost lease may be under way when the refusal arrives."""
EARLY_S = 0.1
"""By so much a clock may be off when a call is repeated after Retry-After."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What was seen of the job. `exit_code` None: it had to be killed."""

    records: Sequence[Record]
    manifests: Sequence[WeightManifest]
    lease_timeout_s: float
    committed: int
    exit_code: int | None

    def of(self, *paths: str) -> list[Record]:
        return [record for record in self.records if record.path in paths]

    def refused(self, *codes: str) -> list[Record]:
        return [record for record in self.records if record.has("code") in codes]


def judge(session: Session) -> list[Check]:
    """Return every check, in the order in which a job goes through them."""
    return [Check(name, check(session), action) for name, check, action in CHECKS]


def _registered(session: Session) -> str:
    first = next((record.path for record in session.records if record.method == "POST"), "no call at all")
    return "" if first == "/v1/producers/register" else f"its first call was {first}"


def _authorised(session: Session) -> str:
    return _named(session.refused("unauthorized"), "calls without the token")


def _well_formed(session: Session) -> str:
    wrong = session.refused(*FAULTY)
    return f"{wrong[0].method} {wrong[0].path}: {wrong[0].has('code')}, {wrong[0].has('got')}" if wrong else ""


def _loaded(session: Session) -> str:
    registered = [record.said("engines") or 0 for record in session.of("/v1/producers/register")][-1:] or [0]
    for manifest in session.manifests:
        reports = [
            engines
            for record in session.of("/v1/weights/loaded")
            if record.said("version") == manifest.version and isinstance(engines := record.said("engines"), dict)
        ]
        hashes = [set(engines.values()) for engines in reports]
        if not hashes:
            return f"version {manifest.version} was never reported"
        if wrong := [found for found in hashes if found != {manifest.content_hash}]:
            return f"version {manifest.version}: hashes {sorted(map(str, wrong[0]))}, not {manifest.content_hash}"
        reported = len(set[object]().union(*reports))
        if isinstance(registered[0], int) and reported < registered[0]:
            return f"version {manifest.version}: {reported} engines were reported, {registered[0]} were registered"
    return ""


def _downloaded(session: Session) -> str:
    asked = {record.path for record in session.records}
    has_manifest = any(path.startswith("/v1/weights/") and path != "/v1/weights/loaded" for path in asked)
    return "" if has_manifest else "it asked for no manifest, so it cannot know which weights are served"


def _repeated(session: Session) -> str:
    return _not_sent_again(session, "lost", "response was lost") or _not_sent_again(
        session, "unavailable", "call got 503"
    )


def _outlived(session: Session) -> str:
    return _not_sent_again(session, "hostile", "response was no message (a file: not the manifest's bytes)")


def _not_sent_again(session: Session, fault: str, what: str) -> str:
    for place, record in enumerate(session.records):
        later = session.records[place + 1 :]
        if record.fault == fault and not any((one.path, one.body) == (record.path, record.body) for one in later):
            return f"{record.path}, whose {what}, was not sent again with the same body"
    return ""


def _waited(session: Session) -> str:
    for place, record in enumerate(session.records):
        if record.fault == "unavailable":
            later = session.records[place + 1 :]
            again = next((one for one in later if (one.path, one.body) == (record.path, record.body)), None)
            if again is not None and again.began - record.ended < 1 - EARLY_S:
                return f"{record.path} was repeated after {again.began - record.ended:.2f} s, Retry-After said 1"
    return ""


def _lost_lease(session: Session) -> str:
    refused = session.refused("lease_lost")
    if not refused:
        return "it never came so far: no put was refused with lease_lost"
    for record in refused:
        lease = record.said("lease")
        later = [one for one in session.of(*PUTS) if one.began > record.ended and one.said("lease") == lease]
        if len(later) > LATE_PUTS:
            return f"{len(later)} more puts for a lease that it had lost"
    return ""


def _same_content(session: Session) -> str:
    put: dict[object, object] = {}
    for record in session.of("/v1/groups"):
        if put.setdefault(record.said("lease"), record.body) != record.body:
            return f"two different groups for one lease, {str(record.said('lease'))[:40]}"
    return _named(session.refused("other_sample"), "samples put again with other content")


def _own_keys(session: Session) -> str:
    put: dict[object, object] = {}
    for record in session.of(OWN):
        if put.setdefault(record.said("key"), record.body) != record.body:
            return f"two different groups under the key {str(record.said('key'))[:40]!r}"
    return _named(session.refused("other_content"), "groups put again under a key with other content")


def _confirmed_again(session: Session) -> str:
    refused = session.refused("unconfirmed_version")
    if not refused:
        return "it never came so far: no put was refused with unconfirmed_version"
    for record in refused:
        later = [one for one in session.records if one.began >= record.ended]
        reported = [one for one in later if one.path == "/v1/weights/loaded" and one.status == 200]
        if not reported:
            return "it did not report its hashes again"
        again = [one for one in later if one.path == record.path and one.said("lease") == record.said("lease")]
        if not any(one.status == 200 and one.began >= reported[0].began for one in again):
            return "it did not repeat the put after it had reported its hashes again"
    return ""


def _versions(session: Session) -> str:
    newest = session.manifests[-1].version
    confirmed = [
        record.ended
        for record in session.of("/v1/weights/loaded")
        if record.status == 200 and record.said("version") == newest
    ]
    since: set[object] = set()
    for record in session.of("/v1/leases"):
        prompts = record.has("prompts")
        if confirmed and record.began > confirmed[0] and isinstance(prompts, list):
            since |= {prompt["lease"] for prompt in prompts}
    seen = 0
    for record in session.of(*PUTS):
        if record.said("lease") in since:
            for sample in _samples(record):
                seen += 1
                spans = sample.get("versions")
                if not isinstance(spans, list) or any(span[2] != newest for span in spans):
                    return f"a prompt leased with version {newest} loaded was sampled, it says, with {spans}"
    return "" if seen else f"it never came so far: no sample of version {newest}"


def _heartbeats(session: Session) -> str:
    beats = [record.began for record in session.of("/v1/producers/heartbeat")]
    if not beats:
        return f"no heartbeat in {_span(session):.0f} s"
    registered = [record for record in session.of("/v1/producers/register") if not record.fault]
    began = registered[:1] or session.records[:1]
    left = session.of("/v1/producers/leave")[-1:] or session.records[-1:]
    times = sorted([began[0].began, left[0].began, *beats])
    gap = max(later - earlier for earlier, later in pairwise(times))
    return (
        ""
        if gap <= session.lease_timeout_s
        else f"{gap:.1f} s without one, a lease ends after {session.lease_timeout_s:g}"
    )


def _whole(session: Session) -> str:
    if session.committed < GROUPS:
        return f"{session.committed} of {GROUPS} groups were put whole"
    missing: dict[object, object] = {}
    for record in session.of("/v1/samples"):
        if record.status == 200:
            missing[record.said("lease")] = record.has("missing")
    ended = {record.said("lease") for record in session.of("/v1/leases/drop", "/v1/leases/give-back", "/v1/groups")}
    ended |= {record.said("lease") for record in session.refused("lease_lost")}
    open_groups = [lease for lease, indices in missing.items() if indices and lease not in ended]
    return f"{len(open_groups)} groups were begun sample by sample and not ended" if open_groups else ""


def _left(session: Session) -> str:
    leaves = session.of("/v1/producers/leave")
    if session.exit_code is None:
        return "it did not end after is_exhausted"
    # by their beginnings: a long poll may end later than the call that was made after it
    calls = sorted((one for one in session.records if one.path != "/v1/producers/heartbeat"), key=lambda one: one.began)
    if not leaves or calls[-1].path != "/v1/producers/leave":
        return f"its last call was {calls[-1].path if calls else 'none'}, not leave"
    return "" if session.exit_code == 0 else f"exit code {session.exit_code}"


def _samples(record: Record) -> list[dict[str, object]]:
    samples = record.said("samples") if record.path == "/v1/groups" else [record.said("sample")]
    return [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []


def _named(records: Sequence[Record], what: str) -> str:
    return f"{len(records)} {what}, the first {records[0].method} {records[0].path}" if records else ""


def _span(session: Session) -> float:
    return session.records[-1].ended - session.records[0].began if session.records else 0.0


CHECKS: tuple[tuple[str, Callable[[Session], str], str], ...] = (
    ("registers first", _registered, "Call POST /v1/producers/register before anything else."),
    ("every call has the token", _authorised, "Send Authorization: Bearer $VIME_TOKEN with every call."),
    ("every message is well formed", _well_formed, "Compare the call with GET /v1/openapi.json."),
    ("asks which weights are served", _downloaded, "GET /v1/weights/serving, then its files."),
    ("reports the right hash of every version", _loaded, "Hash what each engine loaded, as the page says."),
    (
        "repeats a call whose response was lost, as it was",
        _repeated,
        "Send the same body again; a lease: same request.",
    ),
    (
        "outlives hostile bytes",
        _outlived,
        "Take a response that is no message of the call for a lost one, and a file with another SHA-256 too.",
    ),
    ("waits for Retry-After", _waited, "Sleep for Retry-After seconds before the call is repeated."),
    ("discards the work of a lost lease", _lost_lease, "After lease_lost forget the lease; lease new prompts."),
    (
        "puts the same content each time",
        _same_content,
        "Keep a group until its put is acknowledged; do not make it anew.",
    ),
    (
        "puts one group under each key of its own",
        _own_keys,
        "A key names one group for the whole life of the run: send it again as it was, or choose another key.",
    ),
    (
        "reports its hashes again when asked",
        _confirmed_again,
        "After unconfirmed_version: report, then repeat the put.",
    ),
    ("names the version that sampled each token", _versions, "Take the version that the engine had at that token."),
    ("sends heartbeats in time", _heartbeats, "POST /v1/producers/heartbeat every quarter of lease_timeout_s."),
    ("puts whole groups", _whole, "Put a sample for each index of the prompt, or end the lease with a reason."),
    ("leaves when no prompt is left", _left, "After is_exhausted: POST /v1/producers/leave, then exit with 0."),
)
