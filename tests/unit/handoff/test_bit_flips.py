"""One flipped bit in what is read of a ledger or a spool is named by the audit and by a resume: 65 of 120 were resumed
from in silence, and 59 audited clean."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers import bit_flips
from tests.helpers.ledger_cases import issue, open_ledger, train
from vime.handoff.audit import audit
from vime.handoff.ledger_checksums import SEALED, find_faults
from vime.handoff.ledger_schema import check_content, expected_schema, open_for_reading
from vime.handoff.ledger_types import LedgerFileError


def test_random_flips_in_ledger_and_spool_are_named_or_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m tests.helpers.bit_flips` makes 120 and 60, with other seeds."""
    monkeypatch.setattr(bit_flips, "NUM_ROUNDS", 12)
    monkeypatch.setattr(bit_flips, "SAVED", 9)
    counts, bad = bit_flips.run_trial(tmp_path, num_ledger=20, num_spool=10, seed=3)
    assert bad == []
    assert counts["spool audit named"] == counts["spool resume named"] == 10
    assert counts["ledger.db audit named"] > 0
    assert counts["ledger.db audit named"] + counts["ledger.db audit harmless"] == 20


@pytest.fixture
def ledger_run(tmp_path: Path) -> Path:
    ledger = open_ledger(tmp_path)
    train(ledger, 0)
    issue(ledger, 2)
    ledger.close()
    return tmp_path


COLUMNS = [(table, column) for table, (_, columns) in SEALED.items() for column in columns]


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_a_changed_column_of_any_table_is_found(ledger_run: Path, table: str, column: str) -> None:
    """By the row's checksum, whoever changed it."""
    with closing(sqlite3.connect(ledger_run / "ledger.db", isolation_level=None)) as connection:
        [found] = connection.execute(f"select typeof({column}) from {table} limit 1").fetchone()
        value = f"'x' || {column}" if found == "text" else f"coalesce({column}, 0) + 1000"
        where = "id = 0" if table == "round" else "true"
        connection.execute(f"update {table} set {column} = {value} where {where}")
    with closing(open_for_reading(ledger_run / "ledger.db")) as reader:
        faults = find_faults(reader, expected_schema())
        with pytest.raises(LedgerFileError, match=f"the ledger is damaged: table {table}, row .*its checksum"):
            check_content(reader, ledger_run / "ledger.db")
    assert any(f"table {table}, row" in fault for fault in faults)
    checks = {finding.check for finding in audit(ledger_run / "ledger.db", checkpoint_round=None, spool=None).findings}
    assert "file" in checks


@pytest.mark.parametrize(
    "change", ["drop index ready_group", "create table other(a)", "create index other on round(holder)"]
)
def test_a_definition_that_is_not_the_ledgers_is_found(ledger_run: Path, change: str) -> None:
    with closing(sqlite3.connect(ledger_run / "ledger.db")) as connection:
        connection.execute(change)
    with (
        closing(open_for_reading(ledger_run / "ledger.db")) as reader,
        pytest.raises(LedgerFileError, match="definitions of its tables"),
    ):
        check_content(reader, ledger_run / "ledger.db")


def test_every_row_that_a_run_writes_is_sealed_and_a_whole_ledger_passes(ledger_run: Path) -> None:
    with closing(open_for_reading(ledger_run / "ledger.db")) as reader:
        assert find_faults(reader, expected_schema()) == []
        for table in SEALED:
            assert reader.execute(f"select count(*) from {table} where seal is null").fetchone() == (0,)


def test_the_whole_file_is_read_after_a_kill_and_not_after_a_clean_end(ledger_run: Path) -> None:
    """A flip in a page that opening does not read: refused where a process was killed; after a clean end a resume's
    preflight looks (`vime/ray/ledger_choice.py`)."""
    with closing(sqlite3.connect(ledger_run / "ledger.db", isolation_level=None)) as connection:
        connection.execute("update prompt_group set reason = 'x' where grp = 0")
    copy = ledger_run.with_name("killed")
    shutil.copytree(ledger_run, copy)
    open_ledger(ledger_run).close()
    (copy / "ledger.db.lock").write_text("open\n")
    (copy / "ledger.db-wal").touch()
    with pytest.raises(LedgerFileError, match="the ledger is damaged: table prompt_group, row 1/0"):
        open_ledger(copy)
