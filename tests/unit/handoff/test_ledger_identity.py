"""A ledger is known by its id and by the chain over its history, whatever its path."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.ledger_cases import checked, has_all, issue, open_ledger, payload, train
from vime.handoff.audit import audit
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_checksums import SEALED
from vime.handoff.ledger_identity import find_broken_link, first_link, next_link
from vime.handoff.ledger_schema import open_for_reading
from vime.handoff.ledger_types import LedgerFileError, LedgerMark
from vime.handoff.queue_view import export_queue, import_queue


def write(directory: Path, num_rounds: int) -> list[LedgerMark]:
    """A run of so many rounds; answers the mark behind each."""
    ledger = open_ledger(directory)
    marks = [trained(ledger, round_id) for round_id in range(num_rounds)]
    ledger.close()
    return marks


def trained(ledger: Ledger, round_id: int) -> LedgerMark:
    train(ledger, round_id)
    mark = ledger.sync()
    ledger.rounds.durable(round_id)
    return mark


def test_a_link_depends_on_every_column_and_on_the_link_before() -> None:
    line = (1, "issued", 1, 0, 1, None, None, None, "p")
    links = {next_link(first_link("a"), line), next_link(first_link("b"), line)}
    links |= {next_link(first_link("a"), (*line[:at], 7, *line[at + 1 :])) for at in range(len(line))}
    assert len(links) == 2 + len(line)
    assert all(-(2**63) <= link < 2**63 for link in links)


def test_its_own_mark_is_known_wherever_the_ledger_lies_and_however_long_it_went_on(tmp_path: Path) -> None:
    marks = write(tmp_path / "run", 3)
    assert len({mark.ledger_id for mark in marks}) == 1
    (tmp_path / "run").rename(tmp_path / "moved")
    export_queue(tmp_path / "moved", tmp_path / "queue.tar")
    import_queue(tmp_path / "copy", tmp_path / "queue.tar")
    for directory in ("moved", "copy"):
        for round_id in (2, 1, 0):
            shutil.copytree(tmp_path / directory, tmp_path / "look")
            ledger = open_ledger(tmp_path / "look")
            assert ledger.rounds.restore(round_id, has_all, marks[round_id]).replayed_rounds == tuple(
                range(round_id + 1, 3)
            )
            ledger.close()
            shutil.rmtree(tmp_path / "look")


def test_the_mark_of_another_ledger_is_refused_by_its_id(tmp_path: Path) -> None:
    """The same rounds, the same path: two runs that were begun one after the other in one place."""
    [mark] = write(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run")
    [other] = write(tmp_path / "run", 1)
    ledger = open_ledger(tmp_path / "run")
    assert mark.sequence == other.sequence
    with pytest.raises(
        LedgerFileError, match=f"is ledger {other.ledger_id}, but the checkpoint belongs to.*{mark.ledger_id}"
    ):
        ledger.rounds.restore(0, has_all, mark)
    ledger.close()
    report = audit(tmp_path / "run" / "ledger.db", checkpoint_round=0, spool=None, mark=mark)
    [finding] = report.findings
    assert "checkpoint: round 0: the ledger is ledger" in str(finding)


def test_an_older_copy_and_a_copy_that_went_another_way_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    ledger, copy, old = open_ledger(tmp_path / "run"), open_ledger(tmp_path / "copy"), open_ledger(tmp_path / "old")
    mark = trained(ledger, 1)
    copy.prompts.issue("other", 1, request="x")
    trained(copy, 1)
    with pytest.raises(LedgerFileError, match=f"ends at line .*behind line {mark.sequence}: it is an older copy"):
        old.rounds.restore(0, has_all, mark)
    with pytest.raises(LedgerFileError, match=f"went another way before line {mark.sequence}"):
        copy.rounds.restore(1, has_all, mark)
    for opened in (ledger, copy, old):
        opened.close()


def test_a_checkpoint_whose_rounds_were_undone_is_refused_with_the_line_that_undid_them(tmp_path: Path) -> None:
    marks = write(tmp_path, 3)
    ledger = open_ledger(tmp_path)
    ledger.rounds.restore(0, lambda task, checksum: False, marks[0])  # the spool was compacted
    train(ledger, 1)
    with pytest.raises(
        LedgerFileError, match=r"has undone round 1 \(line \d+ of its history\), which the checkpoint carries"
    ):
        ledger.rounds.restore(2, has_all, marks[2])
    ledger.close()


def test_a_ledger_from_before_ids_gets_one_and_its_lines_are_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.handoff.ledger_identity._CHUNK", 7)  # lines that are read at a time
    [_, mark] = write(tmp_path, 2)
    connection = sqlite3.connect(tmp_path / "ledger.db")
    older = (
        "drop table identity",
        "alter table history drop column link",
        "drop index own_group",
        *(f"alter table prompt_group drop column {name}" for name in ("facts", "own_key", "own_content")),
    )
    for statement in (*older, "pragma user_version = 1"):
        connection.execute(statement)
    for table in SEALED:
        connection.execute(f"alter table {table} drop column seal")
    connection.close()
    with pytest.raises(LedgerFileError, match=r"schema 1, this Vime reads .\. Resuming the run migrates it"):
        open_for_reading(tmp_path / "ledger.db")
    ledger = open_ledger(tmp_path)
    assert ledger.sync().ledger_id != mark.ledger_id
    train(ledger, 2)
    ledger.close()
    checked(tmp_path, checkpoint_round=1)


def test_changed_facts_of_a_group_are_found_by_its_seal(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    [task] = issue(ledger, 1)
    ledger.prompts.commit(task, replace(payload(), facts=b"\x00\xff facts"))
    ledger.close()
    checked(tmp_path)
    connection = sqlite3.connect(tmp_path / "ledger.db")
    connection.execute("update prompt_group set facts = x'00fe206661637473'")
    connection.commit()
    connection.close()
    report = audit(tmp_path / "ledger.db", checkpoint_round=None, spool=None)
    assert any("prompt_group" in str(finding) and "checksum" in str(finding) for finding in report.findings)


def test_a_ledger_from_before_facts_gets_the_column_and_seals_that_cover_it(tmp_path: Path) -> None:
    write(tmp_path, 2)
    connection = sqlite3.connect(tmp_path / "ledger.db")
    columns = (f"alter table prompt_group drop column {name}" for name in ("facts", "own_key", "own_content"))
    for statement in ("drop index own_group", *columns, "pragma user_version = 3"):
        connection.execute(statement)
    for table in SEALED:  # of the columns of then
        connection.execute(f"update {table} set seal = 1")
    connection.commit()
    connection.close()
    ledger = open_ledger(tmp_path)
    train(ledger, 2)
    ledger.close()
    checked(tmp_path, checkpoint_round=1)


@pytest.mark.parametrize("column", ["sequence", "event", "round", "num_tokens", "note", "link"])
def test_a_changed_line_of_history_is_found_by_its_link(tmp_path: Path, column: str) -> None:
    write(tmp_path, 2)
    connection = sqlite3.connect(tmp_path / "ledger.db")
    value = "'x'" if column in ("event", "note") else f"coalesce({column}, 0) + 1000000"
    connection.execute(f"update history set {column} = {value} where sequence = 5")
    connection.commit()
    connection.close()
    reader = open_for_reading(tmp_path / "ledger.db")
    assert find_broken_link(reader) == (6 if column == "sequence" else 5)
    reader.close()
    report = audit(tmp_path / "ledger.db", checkpoint_round=1, spool=None)
    assert any("is not linked to the line before it" in str(finding) for finding in report.findings)
