import re
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from tests.helpers.ledger_cases import RULES, Clock, checked, issue, lease, make_ready, open_ledger, payload, train
from vime.handoff import ledger_schema, ledger_store
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_file import Note, fold_in, read_note
from vime.handoff.ledger_schema import MIGRATIONS, close_for_writing, open_for_reading, open_for_writing
from vime.handoff.ledger_store import count_usage
from vime.handoff.ledger_types import LedgerFileError, RoundOrder


def test_a_newer_schema_is_refused_and_an_older_one_is_migrated(tmp_path):
    path = tmp_path / "ledger.db"
    open_ledger(tmp_path).close()
    newer = (*MIGRATIONS, "alter table prompt_group add column note text; create table extra(a)")
    close_for_writing(*open_for_writing(path, migrations=newer), path)
    connection = sqlite3.connect(path)
    assert connection.execute("pragma user_version").fetchone() == (len(MIGRATIONS) + 1,)
    assert connection.execute("select count(note) from prompt_group").fetchone() == (0,)
    connection.close()
    with pytest.raises(LedgerFileError, match=f"schema {len(newer)}, this Vime knows up to {len(MIGRATIONS)}"):
        open_ledger(tmp_path)
    with pytest.raises(LedgerFileError, match=f"schema {len(newer)}"):
        open_for_reading(path)


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "ledger.db"
    open_ledger(tmp_path).close()
    with pytest.raises(LedgerFileError, match="no such table: nowhere"):
        open_for_writing(path, migrations=(*MIGRATIONS, "create table extra(a); insert into nowhere values (1)"))
    open_ledger(tmp_path).close()
    connection = sqlite3.connect(path)
    assert connection.execute("select 1 from sqlite_master where name = 'extra'").fetchone() is None
    connection.close()


def test_another_programs_file_and_no_file_are_refused(tmp_path):
    path = tmp_path / "ledger.db"
    with pytest.raises(LedgerFileError, match="there is no ledger"):
        open_for_reading(path)
    connection = sqlite3.connect(path)
    connection.execute("create table other(a)")
    connection.close()
    for opening in (lambda: open_ledger(tmp_path), lambda: open_for_reading(path)):
        with pytest.raises(LedgerFileError, match="another program"):
            opening()
    path.write_bytes(b"no database at all, but long enough to be looked at as one" * 20)
    for opening in (lambda: open_ledger(tmp_path), lambda: open_for_reading(path)):
        with pytest.raises(LedgerFileError, match="not a database"):
            opening()


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path):
    ledger = open_ledger(tmp_path)
    issue(ledger, 3)
    with pytest.raises(LedgerFileError, match="another process writes it"):
        open_ledger(tmp_path)
    assert checked(tmp_path).groups == {"issued": 3}
    issue(ledger, 1)
    ledger.close()
    ledger.close()
    open_ledger(tmp_path).close()


def test_a_reader_sees_one_moment_while_the_writer_goes_on(tmp_path):
    ledger = open_ledger(tmp_path)
    make_ready(ledger, 4)
    connection = open_for_reading(tmp_path / "ledger.db")
    before = connection.execute("select count(*) from prompt_group where state = 'ready'").fetchone()
    lease(ledger, 0, 4)
    assert connection.execute("select count(*) from prompt_group where state = 'ready'").fetchone() == before == (4,)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("delete from prompt_group")
    connection.close()
    ledger.close()


def test_a_full_disk_is_refused_and_changes_nothing(tmp_path):
    ledger = open_ledger(tmp_path)
    train(ledger, 0)
    before = ledger.status()
    store = ledger._store
    [pages] = store.one("pragma page_count")
    store.connection.execute(f"pragma max_page_count = {pages}")  # sqlite then answers as for a full disk
    producer = f"a producer with a long name {'x' * 500}"

    def fill_up():
        for number in range(2000):
            ledger.prompts.issue(producer, 1, request=str(number), partition="eval/x")

    with pytest.raises(LedgerFileError, match=r"nothing was changed.*full"):
        fill_up()
    assert ledger.status().active == before.active
    told = len(ledger.prompts.heartbeat(producer))
    assert store.one("select count(*) from prompt_group where state = 'issued'") == (told,)
    store.connection.execute(f"pragma max_page_count = {pages + 10000}")
    train(ledger, 1)
    ledger.close()
    checked(tmp_path)


def test_the_running_counts_equal_a_count_of_the_rows(tmp_path):
    ledger = open_ledger(tmp_path, max_tokens=1000)
    train(ledger, 0)
    make_ready(ledger, 3, version=1)
    lease(ledger, 1)
    [task, *_] = issue(ledger, 2)
    ledger.prompts.admit(task, num_tokens=7, num_bytes=9)
    store = ledger._store
    assert store.memory.usage == count_usage(store.connection, store.train_id)
    assert (ledger.status().active, ledger.status().held_tokens, ledger.status().held_groups) == (5, 37, 4)
    ledger.close()


def test_both_levels_of_synchronous_keep_what_was_answered(tmp_path):
    for level in ("NORMAL", "FULL"):
        ledger = Ledger(tmp_path / level / "ledger.db", RULES, clock=Clock(), synchronous=level)
        make_ready(ledger, 2)
        ledger.sync()
        ledger.close()
        assert checked(tmp_path / level).groups == {"ready": 2}
    with pytest.raises(LedgerFileError, match="expected NORMAL or FULL"):
        Ledger(tmp_path / "x.db", RULES, clock=Clock(), synchronous="OFF")


def grows(step):
    """Whether a step of a query plan reads more rows the longer the run is: all of a table, all groups of a partition,
    or an index of all rounds without a bound. The indices of what is moving stay small."""
    if re.match(r"SCAN (prompt_group|g|round|history)\b", step):
        return not re.search(r"INDEX (moving_round|open_group|retry_group|ready_group)$", step)
    return "PRIMARY KEY (partition=?)" in step or re.fullmatch(
        r"SEARCH round USING (COVERING )?INDEX round_version", step
    )


def test_no_statement_of_a_run_grows_with_its_length(tmp_path):
    """Flat to any number of groups: every statement finds its rows by a whole key or in an index of what is moving."""
    ledger, seen = open_ledger(tmp_path, max_tokens=1000), set()
    connection = ledger._store.connection
    connection.set_trace_callback(seen.add)
    for order in RoundOrder:
        ledger._store.rules = replace(ledger._store.rules, round_order=order)
        for _ in range(2):
            round_id = ledger._store.one("select coalesce(max(id), -1) + 1 from round where id >= 0")[0]
            tasks = issue(ledger, 4)
            ledger.prompts.admit(tasks[0], num_tokens=20, num_bytes=80)
            ledger.prompts.retry(tasks[3], "aborted", partial=7)
            ledger.prompts.drop(tasks[2], "filter")
            for task in tasks[:2]:
                ledger.prompts.commit(task, payload(task.group, version=round_id))
            ledger.rounds.trained(round_id, lease(ledger, round_id).fence)
            ledger.rounds.release(round_id + 1)
        ledger.rounds.durable(round_id)
        ledger.sync()
        ledger.needed_payloads()
    connection.set_trace_callback(None)
    statements = [sql for sql in seen if sql.split()[0] in ("select", "update", "insert", "delete")]
    assert len(statements) > 100
    for sql in statements:
        for step in [row[3] for row in connection.execute(f"explain query plan {sql}")]:
            assert not grows(step), (step, sql)
    ledger.close()


def test_a_change_that_cannot_begin_is_refused_like_one_that_cannot_end(tmp_path):
    """Another program holds the file; the ledger's own thread must not end with an error of SQLite."""
    ledger = open_ledger(tmp_path)
    ledger._store.connection.execute("pragma busy_timeout = 10")
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(LedgerFileError, match=r"nothing was changed: database is locked\. Free disk space or check"):
        issue(ledger, 1)
    other.execute("rollback")
    other.close()
    assert [task.group for task in issue(ledger, 1)] == [0]
    ledger.close()


def test_a_log_that_cannot_be_looked_at_refuses_the_change_before_it_is_made(tmp_path, monkeypatch):
    """An error behind the commit would leave prompts that are issued on disk and have no deadline in memory."""
    ledger = open_ledger(tmp_path)
    issue(ledger, 1)
    monkeypatch.setattr(ledger_store, "COMMITS_BETWEEN_LOOKS", 1)
    monkeypatch.setattr(ledger_store, "wal_path", lambda path: path.with_suffix(".gone"))
    before = len(ledger.lent()), ledger.sequence
    with pytest.raises(LedgerFileError, match="nothing was changed"):
        issue(ledger, 1)
    assert (len(ledger.lent()), ledger.sequence) == before
    monkeypatch.undo()
    assert [task.group for task in issue(ledger, 1)] == [1]
    ledger.close()


def test_a_ledger_that_is_closed_beside_a_reader_is_not_called_whole(tmp_path):
    """Its log is part of it still: the file alone would lack the last transitions."""
    path = tmp_path / "ledger.db"
    ledger = open_ledger(tmp_path)
    issue(ledger, 3)
    with closing(open_for_reading(path)):
        issue(ledger, 2)
        ledger.close()
        assert read_note(path) is Note.OPEN
    again = open_ledger(tmp_path)
    again.close()
    assert read_note(path) is Note.CLOSED


def test_a_reader_that_ends_while_a_ledger_is_closed_leaves_one_that_opens(tmp_path, monkeypatch):
    """The writer's connection is the last one then: it folds in the log, and removes it."""
    path = tmp_path / "ledger.db"
    ledger = open_ledger(tmp_path)
    issue(ledger, 3)
    reader = open_for_reading(path)
    issue(ledger, 2)

    def fold_and_lose_the_reader(connection):
        is_whole = fold_in(connection)
        reader.close()
        return is_whole

    with monkeypatch.context() as patch:
        patch.setattr(ledger_schema, "fold_in", fold_and_lose_the_reader)
        ledger.close()
    assert read_note(path) is Note.CLOSED
    open_ledger(tmp_path).close()


def test_a_ledger_that_is_closed_beside_an_idle_reader_is_whole(tmp_path):
    path = tmp_path / "ledger.db"
    ledger = open_ledger(tmp_path)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as idle:
        assert idle.execute("select count(*) from prompt_group").fetchone() == (0,)
        issue(ledger, 3)
        ledger.close()
        assert read_note(path) is Note.CLOSED
    open_ledger(tmp_path).close()
