"""The part of an audit that uses the trainer's evidence: do its receipts agree with the ledger, the checkpoint, the
metrics and the events?

A producer wrote the hash of a group's tokens into the ledger's history when it committed the group. A rank of the
trainer hashed the tokens again when an optimizer step used them (`receipts.py`). The two are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.data.claims import RunClaims
from vime.handoff.audit_history import Finding
from vime.handoff.receipts import RECEIPTS_NAME, Receipts, RoundReceipt, read_receipts

CHECK = "receipts"
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class CommittedGroup:
    """A group of a round as the ledger knows it. `content`: as its producer committed it; "" when it was not kept."""

    rows: int
    tokens: int
    content: str


@dataclass(frozen=True, slots=True)
class LedgerRound:
    """A round that is trained in the ledger. `receipt`: the link stored with that transition; "" without one."""

    receipt: str
    version: int
    groups: Mapping[tuple[int, int], CommittedGroup]  # by (group, attempt)


@dataclass(frozen=True, slots=True)
class SavedReceipt:
    """What the newest checkpoint names: its round, and the link of that round."""

    round_id: int
    link: str | None


@dataclass(frozen=True, slots=True)
class ReceiptsAudit:
    """The findings. `rounds`: the first and the last with a receipt of the trainer, None without receipts;
    `num_unhashed`: groups of them whose producer gave no hash of their tokens."""

    findings: tuple[Finding, ...]
    rounds: tuple[int, int] | None = None
    num_unhashed: int = 0


def audit_receipts(
    run: Path,
    rounds: Mapping[int, LedgerRound] | None,
    saved: SavedReceipt | None,
    read_claims: Callable[[], RunClaims] | None,
) -> ReceiptsAudit:
    """Compare everything. `rounds`: those trained in the ledger, None in a run without a ledger. They are read before
    this is called, so that each has its receipt by now; claims are read last."""
    told = {} if rounds is None else {round_id: row.receipt for round_id, row in rounds.items() if row.receipt}
    receipts = read_receipts(run / RECEIPTS_NAME)
    claims = RunClaims(receipts={}, sizes={}, hashes={}) if read_claims is None else read_claims()
    if receipts is None:
        findings = list(_find_versions(claims))
        if any((told, saved is not None and saved.link is not None, claims.receipts, claims.trained)):
            findings.append(_breach(RECEIPTS_NAME, "is not there: what the trainer stepped on is unknown"))
        return ReceiptsAudit(tuple(findings))
    findings = [_breach(RECEIPTS_NAME, fault) for fault in receipts.faults]
    last = receipts.newest if rounds is None else (told[max(told)] if told else None)
    walk = _Walk(receipts, last)
    findings += walk.findings
    if rounds is not None:
        findings += _compare_ledger(rounds, walk)
    findings += _find_repeated(walk, has_unique_groups=rounds is not None or claims.has_unique_groups)
    findings += _compare_checkpoint(saved, walk, has_ledger=rounds is not None)
    findings += _compare_claims(claims, walk, saved)
    findings += _find_lost(claims, walk, has_ledger=rounds is not None)
    findings += _find_versions(claims)
    shown = (min(walk.rounds), max(walk.rounds)) if walk.rounds else None
    known = {} if rounds is None else {round_id: row for round_id, row in rounds.items() if round_id in walk.rounds}
    num_unhashed = sum(not group.content for row in known.values() for group in row.groups.values())
    return ReceiptsAudit(tuple(findings), shown, num_unhashed)


class _Walk:
    """The way from the newest link back to the first: the rounds that made the present weights."""

    def __init__(self, receipts: Receipts, link: str | None) -> None:
        self.receipts = receipts
        self.rounds: dict[int, RoundReceipt] = {}
        self.findings: list[Finding] = []
        # the first round that must have a receipt; where no way leads back to it, the findings say so
        self.begun = max((begun.round_id for begun in receipts.beginnings.values()), default=0)
        after: int | None = None  # the round that the walk came from
        while link is not None and link not in receipts.beginnings:
            line = receipts.lines.get(link)
            if line is None:
                what = "the newest one" if after is None else f"the one before round {after}"
                self.findings.append(_breach(RECEIPTS_NAME, f"lacks the line {link}, {what}"))
                return
            if after is not None and line.round_id != after - 1:
                self.findings.append(_breach(f"round {line.round_id}", f"is linked to as the one before {after}"))
                return
            self.rounds[line.round_id] = line
            after, link = line.round_id, line.previous
        if link is not None and after is not None:
            self.begun = receipts.beginnings[link].round_id
            if self.begun != after:
                self.findings.append(_breach(f"round {after}", f"is the first, but the run began at {self.begun}"))


def _compare_ledger(rounds: Mapping[int, LedgerRound], walk: _Walk) -> Iterator[Finding]:
    for round_id, row in sorted(rounds.items()):
        line = walk.rounds.get(round_id)
        if line is None:
            if row.receipt and not walk.findings:
                yield _breach(f"round {round_id}", "is trained in the ledger, and the trainer has no receipt of it")
            continue
        if line.link != row.receipt:
            yield _breach(f"round {round_id}", f"the ledger names the receipt {row.receipt or 'none'}, not {line.link}")
        if line.version != row.version:
            yield _breach(
                f"round {round_id}", f"the trainer stepped on weights {line.version}, leased for {row.version}"
            )
        yield from _compare_groups(round_id, row, line)
    extra = [round_id for round_id in walk.rounds if round_id not in rounds]
    if extra:
        yield _breach(f"rounds {sorted(extra)[:_MAX_SHOWN]}", "the trainer stepped on them; the ledger knows nothing")


def _compare_groups(round_id: int, row: LedgerRound, line: RoundReceipt) -> Iterator[Finding]:
    stepped = {(group.group, group.attempt): group for group in line.groups}
    missing, added = sorted(row.groups.keys() - stepped.keys()), sorted(stepped.keys() - row.groups.keys())
    if missing:
        yield _breach(
            f"round {round_id}", f"leased, but not stepped on: (group, attempt) {missing[:_MAX_SHOWN]}, {len(missing)}"
        )
    if added:
        yield _breach(
            f"round {round_id}", f"stepped on, but not leased: (group, attempt) {added[:_MAX_SHOWN]}, {len(added)}"
        )
    for key in sorted(row.groups.keys() & stepped.keys()):
        committed, found = row.groups[key], stepped[key]
        sizes = (committed.rows, committed.tokens), (found.rows, found.tokens)
        if sizes[0] != sizes[1]:
            yield _breach(
                f"group {key[0]}#{key[1]}", f"(rows, tokens) {sizes[0]} committed, {sizes[1]} stepped on in {round_id}"
            )
        elif committed.content and committed.content != f"{found.content:016x}":
            yield _breach(
                f"group {key[0]}#{key[1]}",
                f"the tokens that round {round_id} stepped on are not those that were committed: "
                f"{found.content:016x}, committed {committed.content}",
            )


def _find_repeated(walk: _Walk, *, has_unique_groups: bool) -> Iterator[Finding]:
    if not has_unique_groups:
        return
    seen: dict[int, int] = {}
    for round_id, line in sorted(walk.rounds.items()):
        for group in line.groups:
            if group.group in seen:
                yield _breach(
                    f"round {round_id}", f"the trainer stepped on group {group.group}, as in round {seen[group.group]}"
                )
            seen[group.group] = round_id


def _compare_checkpoint(saved: SavedReceipt | None, walk: _Walk, *, has_ledger: bool) -> Iterator[Finding]:
    if saved is None or saved.link is None:
        return
    line = walk.rounds.get(saved.round_id)
    known = walk.receipts.lines.get(saved.link)
    if known is None:
        if not any(begun.after == saved.link for begun in walk.receipts.beginnings.values()):
            yield _breach(
                f"round {saved.round_id}", f"the checkpoint names the receipt {saved.link}, which is not there"
            )
    elif known.round_id != saved.round_id:
        yield _breach(
            f"round {saved.round_id}", f"the checkpoint names the receipt {saved.link}, of round {known.round_id}"
        )
    elif has_ledger and line is not None and line.link != saved.link:
        yield _breach(
            f"round {saved.round_id}", f"the checkpoint names the receipt {saved.link}, the ledger {line.link}"
        )


def _compare_claims(claims: RunClaims, walk: _Walk, saved: SavedReceipt | None) -> Iterator[Finding]:
    """Compare with metrics and events of rounds that were followed by another one: their lines are written by then."""
    for round_id, line in sorted(walk.rounds.items()):
        totals = (sum(group.rows for group in line.groups), sum(group.trainable for group in line.groups))
        sizes = claims.sizes.get(round_id)
        if sizes is not None and sizes != totals:
            yield _breach(f"round {round_id}", f"(rows, trainable tokens) {totals} stepped on, the metrics say {sizes}")
        is_over = round_id + 1 in walk.rounds or (saved is not None and round_id <= saved.round_id)
        links = claims.receipts.get(round_id)
        if is_over and links and line.link not in links:
            yield _breach(f"round {round_id}", f"the events name the receipts {sorted(links)}, not {line.link}")


def _find_lost(claims: RunClaims, walk: _Walk, *, has_ledger: bool) -> Iterator[Finding]:
    """Find rounds whose receipt is not there: it was written before the event that names it, and before the metrics. A
    round that was trained again has several events; one is enough. With a ledger the ledger shows what is missing."""
    if has_ledger:
        return
    lost = {
        round_id: f"the events name the receipts {sorted(links)}, which are not there"
        for round_id, links in claims.receipts.items()
        if links.isdisjoint(walk.receipts.lines)
    }
    if not walk.findings:
        missing = {round_id for round_id in claims.trained - walk.rounds.keys() if round_id >= walk.begun}
        lost = dict.fromkeys(missing, "was trained, the metrics say; the trainer has no receipt of it") | lost
    for round_id, message in sorted(lost.items()):
        yield _breach(f"round {round_id}", message)


def _find_versions(claims: RunClaims) -> Iterator[Finding]:
    for version, hashes in sorted(claims.hashes.items()):
        if len(hashes) > 1:
            yield Finding("weights", f"version {version}", f"was confirmed with two contents: {sorted(hashes)}")


def _breach(subject: str, message: str) -> Finding:
    return Finding(CHECK, subject, message)
