"""Ledger, spool, checkpoint, metrics and events against what the trainer says it stepped on: each lie is named."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.ledger_cases import issue, lease, open_ledger
from tests.helpers.rows import make_row
from vime.data.claims import RunClaims
from vime.data.payload import samples_to_bytes
from vime.handoff.audit import AuditReport, SavedFacts, audit_run
from vime.handoff.ledger_identity import link_history
from vime.handoff.ledger_types import LEDGER_NAME, Payload, RoundLease
from vime.handoff.receipts import RECEIPTS_NAME, ReceiptFile, SteppedGroup, group_content, row_content
from vime.handoff.spool import Spool
from vime.types import Sample, SampleStatus, VersionSpan

SAVED, ROUNDS = 1, 3  # rounds 0 and 1 are in a checkpoint; 2 is trained, and its payloads are in the spool
LINKS = "links.json"


def answers(group: int, attempt: int) -> list[Sample]:
    """Two answers of two tokens to a prompt of one."""
    return [
        Sample(
            group_index=group, index=2 * group + at, tokens=[5, group, at], response_length=2, loss_mask=[1, 1],
            rollout_log_probs=[-1.0, -1.0], token_policy_versions=[VersionSpan(0, 0, 2)], reward=1.0,
            status=SampleStatus.COMPLETED, attempt=attempt,
        )
        for at in range(2)
    ]  # fmt: skip


def content_of(samples: list[Sample]) -> str:
    """As the producer says it."""
    return group_content((sample.index, sample.tokens, sample.response_length) for sample in samples)


def stepped(lease: RoundLease) -> list[SteppedGroup]:
    """What the optimizer steps on, hashed row by row as a rank does it."""
    return [
        SteppedGroup(
            group.task.group,
            group.task.attempt,
            rows=2,
            tokens=6,
            trainable=4,
            content=sum(
                row_content(row.sample_index, row.tokens, row.response_length)
                for row in (
                    make_row(sample.index, prompt=sample.tokens[:1], response=sample.tokens[1:])
                    for sample in answers(group.task.group, group.task.attempt)
                )
            )
            % 2**64,
        )
        for group in lease.groups
    ]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("receipts")
    ledger, spool, store = open_ledger(run), Spool(run / "spool"), ReceiptFile(run, start_round=0, link=None)
    links = []
    for round_id in range(ROUNDS):
        for task in issue(ledger, 2):
            samples = answers(task.group, task.attempt)
            data = samples_to_bytes(samples)
            [checksum] = spool.append([(task, data)])
            size = {"num_bytes": len(data), "num_tokens": 6, "num_rows": 2}
            versions = {"min_version": round_id, "max_version": round_id}
            ledger.prompts.commit(task, Payload(checksum=checksum, **size, **versions, content=content_of(samples)))
        found = lease(ledger, round_id)
        links.append(store.note(round_id, round_id, stepped(found)))
        ledger.rounds.trained(round_id, found.fence, links[-1])
        ledger.rounds.release(round_id + 1)
        if round_id == SAVED:
            ledger.rounds.durable(round_id)
    (run / LINKS).write_text(json.dumps(links))
    for part in (ledger, spool, store):
        part.close()
    return run


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "run"))


def links_of(run: Path) -> list[str]:
    found: list[str] = json.loads((run / LINKS).read_text())
    return found


def claims_of(run: Path, **others: object) -> Callable[[], RunClaims]:
    claims = RunClaims(
        receipts={round_id: {link} for round_id, link in enumerate(links_of(run))},
        sizes=dict.fromkeys(range(ROUNDS), (4, 8)),  # 2 groups of 2 answers with 2 trainable tokens each
        hashes={version: {f"hash {version}"} for version in range(ROUNDS + 1)},
    )
    return lambda: replace(claims, **others)  # type: ignore[arg-type]


def look(run: Path, *, link: str | None = None, **claims: object) -> AuditReport:
    saved = SavedFacts(round_id=SAVED, mark=None, receipt=link or links_of(run)[SAVED])
    return audit_run(run, saved=saved, claims=claims_of(run, **claims))


def breaches(report: AuditReport) -> list[str]:
    return [str(finding) for finding in report.findings]


def rewrite(run: Path, change: Callable[[int, list[SteppedGroup]], list[SteppedGroup]]) -> list[str]:
    """Receipts of a trainer that stepped on something else, whole and linked; the ledger names them."""
    (run / RECEIPTS_NAME).unlink()
    store = ReceiptFile(run, start_round=0, link=None)
    with closing(open_ledger(run)) as ledger:
        groups = [
            [
                SteppedGroup(
                    group,
                    attempt,
                    2,
                    6,
                    4,
                    int(content_of(answers(group, attempt)), 16),
                )
                for group, attempt in ledger._store.query(
                    "select grp, attempt from prompt_group where round = ? order by grp", round_id
                )
            ]
            for round_id in range(ROUNDS)
        ]
    links = [store.note(round_id, round_id, change(round_id, found)) for round_id, found in enumerate(groups)]
    store.close()
    with closing(sqlite3.connect(run / LEDGER_NAME)) as connection, connection:
        for round_id, link in enumerate(links):
            connection.execute("update history set note = ? where event = 'trained' and round = ?", (link, round_id))
        link_history(connection)
    (run / LINKS).write_text(json.dumps(links))
    return links


def test_what_all_say_alike_is_no_finding(run: Path) -> None:
    report = look(run)
    assert breaches(report) == []
    assert (report.receipts, report.num_unhashed) == ((0, ROUNDS - 1), 0)
    assert rewrite(run, lambda _, groups: groups) == links_of(run)  # the same story has the same links
    assert breaches(look(run)) == []


SAME = SteppedGroup(0, 1, 2, 6, 4, 0)
LIES: dict[str, tuple[Callable[[int, list[SteppedGroup]], list[SteppedGroup]], str]] = {
    "a group that was left out": (
        lambda r, g: g[1:] if r == 1 else g,
        "round 1: leased, but not stepped on: .*[(]2, 1[)]",
    ),
    "a group of another round": (
        lambda r, g: [*g, SAME] if r == 2 else g,
        "stepped on, but not leased: .*[(]0, 1[)]",
    ),
    "another attempt": (
        lambda r, g: [g[0]._replace(attempt=2), g[1]] if r == 1 else g,
        "stepped on, but not leased: .*[(]2, 2[)]",
    ),
    "a row twice": (
        lambda r, g: [g[0]._replace(rows=3, tokens=9), g[1]] if r == 0 else g,
        r"group 0#1: \(rows, tokens\) \(2, 6\) committed, \(3, 9\) stepped on in 0",
    ),
    "other tokens, as many": (
        lambda r, g: [g[0]._replace(content=1), g[1]] if r == 0 else g,
        "group 0#1: the tokens that round 0 stepped on are not those that were committed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_trainer_that_stepped_on_something_else_is_named(run: Path, lie: str) -> None:
    """Also where the spool has no payload any more: rounds 0 and 1 are durable."""
    change, said = LIES[lie]
    links = rewrite(run, change)
    found = breaches(look(run, link=links[SAVED], sizes={}))
    assert any(re.search(said, line) for line in found), found


def test_a_group_that_two_rounds_stepped_on_is_named(run: Path) -> None:
    rewrite(run, lambda r, g: [*g, SAME] if r == 2 else g)
    assert any("the trainer stepped on group 0, as in round 0" in line for line in breaches(look(run, sizes={})))


def test_a_checkpoint_an_event_or_a_metric_that_says_otherwise_is_named(run: Path) -> None:
    links = links_of(run)
    [finding] = breaches(look(run, link=links[0]))
    assert f"round 1: the checkpoint names the receipt {links[0]}, of round 0" in finding
    [finding] = breaches(look(run, link="00" * 8))
    assert f"the checkpoint names the receipt {'00' * 8}, which is not there" in finding
    [finding] = breaches(look(run, receipts={1: {links[0]}}))
    assert f"round 1: the events name the receipts ['{links[0]}'], not {links[1]}" in finding
    [finding] = breaches(look(run, sizes={2: (4, 7)}))
    assert "round 2: (rows, trainable tokens) (4, 8) stepped on, the metrics say (4, 7)" in finding


def test_a_version_that_was_confirmed_with_two_contents_is_named(run: Path) -> None:
    [finding] = breaches(look(run, hashes={1: {"a"}, 2: {"b", "c"}}))
    assert finding == "weights: version 2: was confirmed with two contents: ['b', 'c']"


def test_receipts_that_are_gone_cut_or_damaged_are_named(run: Path) -> None:
    path = run / RECEIPTS_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + ROUNDS
    path.write_bytes(b"".join(lines[:-1]))
    assert any("lacks the line" in line and "the newest one" in line for line in breaches(look(run)))
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    assert any("lacks the line" in line and "the one before round 1" in line for line in breaches(look(run)))
    path.write_bytes(b"".join(lines[1:]))
    assert any("lacks the line" in line and "the one before round 0" in line for line in breaches(look(run)))
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b",4,", b",5,", 1), lines[3]]))
    assert any("line 3 is damaged" in line for line in breaches(look(run)))
    path.unlink()
    assert any("is not there: what the trainer stepped on is unknown" in line for line in breaches(look(run)))


def test_a_ledger_that_was_told_of_a_round_that_no_rank_stepped_on_is_named(run: Path) -> None:
    with closing(sqlite3.connect(run / LEDGER_NAME)) as connection, connection:
        connection.execute("update history set note = ? where event = 'trained' and round = 1", ("00" * 8,))
        link_history(connection)
    assert any(f"round 1: the ledger names the receipt {'00' * 8}" in line for line in breaches(look(run)))


def test_a_payload_whose_tokens_are_not_those_that_were_committed_is_named(run: Path) -> None:
    with closing(sqlite3.connect(run / LEDGER_NAME)) as connection, connection:
        connection.execute("update history set note = ? where event = 'ready' and grp = 4", ("00" * 8,))
        link_history(connection)
    found = breaches(look(run))
    assert any(line.startswith("spool: train/4#1: tokens with the hash") for line in found), found
    assert any(line.startswith("receipts: group 4#1: the tokens that round 2 stepped on are not") for line in found)


def test_without_a_ledger_the_receipts_are_compared_with_the_rest(run: Path) -> None:
    (run / LEDGER_NAME).unlink()
    links = links_of(run)
    saved = SavedFacts(round_id=SAVED, mark=None, receipt=links[SAVED])
    report = audit_run(run, saved=saved, claims=claims_of(run), has_ledger=False)
    assert (breaches(report), report.receipts) == ([], (0, ROUNDS - 1))
    report = audit_run(run, saved=replace(saved, receipt=links[0]), claims=claims_of(run), has_ledger=False)
    assert len(report.findings) == 1


def test_without_a_ledger_the_events_know_which_receipts_there_were(run: Path) -> None:
    """Nothing else does in a run without a checkpoint."""
    (run / LEDGER_NAME).unlink()
    path, links = run / RECEIPTS_NAME, links_of(run)

    def found() -> list[str]:
        return breaches(audit_run(run, saved=None, claims=claims_of(run), has_ledger=False))

    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    [finding] = found()
    assert f"round 2: the events name the receipts ['{links[2]}'], which are not there" in finding
    path.write_bytes(b"\xff\xfe")  # less than a line
    assert [line.split(": ")[1] for line in found()] == ["round 0", "round 1", "round 2"]
    path.unlink()
    assert any("is not there: what the trainer stepped on is unknown" in line for line in found())


def without_ledger(run: Path, **claims: object) -> list[str]:
    """Breaches of a run of mode off or buffer that saved nothing, and whose events are gone."""
    (run / LEDGER_NAME).unlink(missing_ok=True)
    told = claims_of(run, receipts={}, **claims)
    return breaches(audit_run(run, saved=None, claims=told, has_ledger=False))


def test_without_a_ledger_a_group_that_two_rounds_stepped_on_is_named(run: Path) -> None:
    """Where the data source numbers its groups on; one of the user's own may repeat a number."""
    rewrite(run, lambda r, g: [*g, SAME] if r == 2 else g)
    [finding] = without_ledger(run, sizes={}, has_unique_groups=True)
    assert finding == "receipts: round 2: the trainer stepped on group 0, as in round 0"
    assert without_ledger(run, sizes={}) == []


def test_without_a_ledger_a_group_of_a_round_that_was_trained_again_is_no_breach(run: Path) -> None:
    """Round 2 before and after a restart from round 1: the links lead to the second alone."""
    links = links_of(run)
    store = ReceiptFile(run, start_round=SAVED + 1, link=links[SAVED])
    store.note(SAVED + 1, SAVED + 1, [SAME._replace(group=4), SAME._replace(group=9)])
    store.close()
    assert without_ledger(run, sizes={}, trained={0, 1, 2}, has_unique_groups=True) == []


def test_without_a_ledger_the_metrics_know_which_rounds_were_trained(run: Path) -> None:
    """Events may be missing, in a directory of which they were not copied."""
    path = run / RECEIPTS_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    assert without_ledger(run, trained={0, 1, 2}) == []
    path.write_bytes(b"".join(lines[:2]))  # the beginning, and round 0
    lost = [
        f"receipts: round {round_id}: was trained, the metrics say; the trainer has no receipt of it"
        for round_id in range(3)
    ]
    assert without_ledger(run, trained={0, 1, 2}) == lost[1:]
    path.write_bytes(lines[0])
    assert without_ledger(run, trained={0, 1, 2}) == lost
    path.unlink()
    [finding] = without_ledger(run, trained={0, 1, 2})
    assert finding == f"receipts: {RECEIPTS_NAME}: is not there: what the trainer stepped on is unknown"
    assert without_ledger(run) == []  # of a version that wrote none


def test_without_a_ledger_rounds_before_the_receipts_begin_are_not_missed(run: Path) -> None:
    """Rounds 0 to 3 were trained by a version that wrote none, or their receipts lie in another directory."""
    (run / RECEIPTS_NAME).unlink()
    store = ReceiptFile(run, start_round=4, link="ab" * 8)
    assert without_ledger(run, sizes={}, trained={0, 1, 2, 3}) == []
    store.note(4, 4, [SAME])
    store.close()
    assert without_ledger(run, sizes={}, trained={0, 1, 2, 3, 4}) == []


def test_rounds_from_before_there_were_receipts_are_not_found_fault_with(run: Path) -> None:
    (run / RECEIPTS_NAME).unlink()
    with closing(sqlite3.connect(run / LEDGER_NAME)) as connection, connection:
        connection.execute("update history set note = null where event = 'trained'")
        link_history(connection)
    report = audit_run(run, saved=SavedFacts(round_id=SAVED, mark=None, receipt=None), claims=None)
    assert (breaches(report), report.receipts) == ([], None)


def test_groups_that_were_committed_without_a_hash_are_counted(run: Path) -> None:
    with closing(sqlite3.connect(run / LEDGER_NAME)) as connection, connection:
        connection.execute("update history set note = null where event = 'ready' and grp < 3")
        link_history(connection)
    report = look(run)
    assert (breaches(report), report.num_unhashed) == ([], 3)
    assert report.shown() == "the trainer's receipts of rounds 0 to 2 (3 groups committed without a hash)"
