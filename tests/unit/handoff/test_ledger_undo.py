"""Looking at an older checkpoint changes nothing for newer ones, until the run has trained a round from there."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.ledger_cases import checked, groups_of, has_all, issue, lease, make_ready, open_ledger, train
from vime.handoff.audit import SavedFacts, audit_run
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import LedgerFileError, LedgerMark
from vime.handoff.ledger_undo import before_path, lasting_file

NEWEST = 3


def lost(task: object, checksum: int) -> bool:
    """A spool that was compacted: the rounds behind an older checkpoint cannot be trained again as they were."""
    return False


@pytest.fixture
def marks(tmp_path: Path) -> list[LedgerMark]:
    """Of a run with a checkpoint of each of the rounds 0 to 3."""
    ledger, marks = open_ledger(tmp_path), []
    for round_id in range(NEWEST + 1):
        train(ledger, round_id)
        marks.append(ledger.sync())
        ledger.rounds.durable(round_id)
    ledger.close()
    return marks


def facts(round_id: int, marks: list[LedgerMark]) -> SavedFacts:
    return SavedFacts(round_id=round_id, mark=marks[round_id], receipt=None)


def tables(ledger: Ledger) -> list[object]:
    query = ledger._store.query
    return [query(f"select * from {name}") for name in ("prompt_group", "round", "history", "partition")]


def look(directory: Path, mark: LedgerMark, to_round: int) -> Ledger:
    """A resume that has answered some prompts and trained nothing."""
    ledger = open_ledger(directory)
    ledger.rounds.restore(to_round, lost, mark)
    make_ready(ledger, 3, version=to_round + 1)
    lease(ledger, to_round + 1)
    return ledger


def test_a_resume_from_an_older_checkpoint_that_trained_nothing_leaves_the_newer_ones_good(
    tmp_path: Path, marks: list[LedgerMark]
) -> None:
    ledger = open_ledger(tmp_path)
    whole = tables(ledger)
    ledger.close()
    look(tmp_path, marks[1], 1).close()
    assert audit_run(tmp_path, saved=facts(NEWEST, marks)).findings == ()
    look(tmp_path, marks[0], 0).close()  # and from one that is older still
    assert lasting_file(tmp_path / "ledger.db", NEWEST) == before_path(tmp_path / "ledger.db")
    assert lasting_file(tmp_path / "ledger.db", 0) == tmp_path / "ledger.db"
    ledger = open_ledger(tmp_path)
    report = ledger.rounds.restore(NEWEST, lost, marks[NEWEST])
    assert (report.replayed_rounds, report.regenerated) == ((), ())
    now = tables(ledger)
    assert now[0] == whole[0]
    assert now[1] == whole[1]
    assert now[2][: len(whole[2])] == whole[2]
    assert not before_path(tmp_path / "ledger.db").exists()
    assert train(ledger, 4) == [8, 9]
    ledger.close()
    checked(tmp_path, checkpoint_round=NEWEST)


def test_the_first_trained_round_ends_the_way_back_and_the_newer_ones_are_refused_with_the_reason(
    tmp_path: Path, marks: list[LedgerMark]
) -> None:
    ledger = look(tmp_path, marks[1], 1)
    found = lease(ledger, 2)
    assert before_path(tmp_path / "ledger.db").exists()
    ledger.rounds.trained(2, found.fence)
    assert not before_path(tmp_path / "ledger.db").exists()
    ledger.close()
    ledger = open_ledger(tmp_path)
    with pytest.raises(LedgerFileError, match=r"has undone round 2 \(line \d+"):
        ledger.rounds.restore(NEWEST, has_all, marks[NEWEST])
    assert ledger.rounds.restore(1, has_all, marks[1]).replayed_rounds == (2,)
    ledger.close()
    checked(tmp_path, checkpoint_round=1)


def test_rounds_that_wait_to_be_trained_again_are_named_when_a_checkpoint_of_them_is_loaded(
    tmp_path: Path, marks: list[LedgerMark]
) -> None:
    """Their payloads are all there, so nothing was undone; but in the history that goes on they are not trained."""
    ledger = open_ledger(tmp_path)
    ledger.rounds.restore(1, has_all, marks[1])
    ledger.rounds.trained(2, lease(ledger, 2).fence)
    ledger.rounds.release(3)
    with pytest.raises(LedgerFileError, match=r"of round 3, but the run went back to the checkpoint of round 1 \(line"):
        ledger.rounds.restore(NEWEST, has_all, marks[NEWEST])
    ledger.rounds.trained(3, lease(ledger, 3).fence)
    assert ledger.rounds.restore(NEWEST, has_all, marks[NEWEST]).replayed_rounds == ()
    ledger.close()
    checked(tmp_path, checkpoint_round=NEWEST)


def test_a_second_resume_from_the_same_checkpoint_keeps_what_the_first_has_answered(
    tmp_path: Path, marks: list[LedgerMark]
) -> None:
    ledger = look(tmp_path, marks[1], 1)
    leased = groups_of(lease(ledger, 2))
    ledger.close()
    ledger = open_ledger(tmp_path)
    assert ledger.rounds.restore(1, has_all, marks[1]).regenerated == ()
    assert groups_of(lease(ledger, 2)) == leased
    ledger.close()
    ledger = open_ledger(tmp_path)
    ledger.rounds.restore(NEWEST, has_all, marks[NEWEST])
    ledger.close()
    checked(tmp_path, checkpoint_round=NEWEST)


@pytest.mark.parametrize("at", ["copied", "rewritten", "trained"])
def test_a_kill_in_the_middle_leaves_one_of_both_ledgers(tmp_path: Path, marks: list[LedgerMark], at: str) -> None:
    """The copy counts exactly when the ledger says that it is going back, whichever file a kill left behind."""
    before = before_path(tmp_path / "ledger.db")
    ledger = look(tmp_path, marks[1], 1)
    kept = before.read_bytes()
    if at == "trained":
        ledger.rounds.trained(2, lease(ledger, 2).fence)
        before.write_bytes(kept)  # killed between the transaction and the removal
    elif at == "copied":
        ledger.rounds.restore(NEWEST, lost, marks[NEWEST])
        before.write_bytes(kept)  # killed between the copy and the transaction
    ledger.close()
    ledger = open_ledger(tmp_path)
    last = 1 if at == "trained" else NEWEST
    assert audit_run(tmp_path, saved=facts(last, marks)).findings == ()
    ledger.rounds.restore(last, has_all, marks[last])
    assert not before.exists() or at == "trained"
    ledger.close()
    checked(tmp_path, checkpoint_round=last)


def test_the_rules_of_the_run_are_those_it_was_opened_with_also_after_the_way_back(
    tmp_path: Path, marks: list[LedgerMark]
) -> None:
    look(tmp_path, marks[1], 1).close()
    ledger = open_ledger(tmp_path, max_slots=5)
    ledger.rounds.restore(NEWEST, lost, marks[NEWEST])
    assert len(issue(ledger, 9)) == 5
    ledger.close()
    checked(tmp_path, checkpoint_round=NEWEST)


def test_which_ledger_counts_is_refused_by_name_where_the_page_that_says_so_is_damaged(
    tmp_path: Path, marks: list[LedgerMark]
) -> None:
    look(tmp_path, marks[1], 1).close()
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as connection:
        [page] = connection.execute("select rootpage from sqlite_master where name = 'meta'").fetchone()
        [page_bytes] = connection.execute("pragma page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * page_bytes)
        file.write(b"\xff")  # no kind of page of sqlite's
    with pytest.raises(LedgerFileError, match=r"ledger\.db: cannot be read as a ledger: .*malformed"):
        lasting_file(path, NEWEST)


def test_the_audit_looks_at_the_ledger_that_does_not_count_now_too(tmp_path: Path, marks: list[LedgerMark]) -> None:
    """A resume from the older checkpoint goes on in it."""
    look(tmp_path, marks[1], 1).close()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection, connection:
        connection.execute("update prompt_group set num_tokens = num_tokens + 1 where grp = 0")
    [finding] = audit_run(tmp_path, saved=facts(NEWEST, marks)).findings
    assert str(finding) == "file: ledger.db: table prompt_group, row 1/0: does not fit its checksum"
