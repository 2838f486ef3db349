"""A resume finds its ledger by id, not by path, and refuses another one before anything starts."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.ledger_cases import open_ledger, train
from vime.config.parse import Config, parse
from vime.handoff.ledger_types import LedgerFileError
from vime.handoff.queue_view import export_queue, import_queue
from vime.observability.events import EventKind, EventLog
from vime.ray.checkpoint import LEDGER_RUN, RunState, find_latest, read_run_state, save_checkpoint
from vime.ray.ledger_choice import ORIGIN_NAME, choose_ledger
from vime.ray.preflight import preflight
from vime.types import ConfigError


def write_run(run: Path, *, rounds: int = 1, has_id: bool = True) -> Path:
    """A run that saved its last round; answers the checkpoint."""
    ledger = open_ledger(run)
    for round_id in range(rounds):
        train(ledger, round_id)
    mark = ledger.sync() if has_id else None
    ledger.rounds.durable(rounds - 1)
    ledger.close()
    state = RunState(rollout_id=rounds - 1, version=rounds, data_source={LEDGER_RUN: str(run)}, ledger=mark)
    return save_checkpoint(run / "checkpoints", state, lambda _: None)


def test_what_a_checkpoint_keeps_of_its_ledger_is_read_back(tmp_path: Path) -> None:
    state = read_run_state(write_run(tmp_path / "run"))
    ledger = open_ledger(tmp_path / "run")
    assert state.ledger is not None
    assert state.ledger.ledger_id == ledger.sync().ledger_id
    ledger.close()


def test_a_run_directory_that_moved_is_gone_on_with(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    checkpoint = find_latest(tmp_path / "moved" / "checkpoints")
    choice = choose_ledger(tmp_path / "moved", checkpoint)
    assert choice.origin is None
    assert choice.mark is not None
    assert choose_ledger(tmp_path / "new", checkpoint).origin == tmp_path / "moved"  # found beside the checkpoint


def test_a_new_run_at_the_old_path_refuses_the_old_runs_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "old")
    write_run(tmp_path / "run")
    shutil.move(tmp_path / "old" / "checkpoints", tmp_path / "kept")
    checkpoint = find_latest(tmp_path / "kept")
    for run in (tmp_path / "run", tmp_path / "new"):
        with pytest.raises(ConfigError, match=r"--load .*belongs to the ledger \w+ at line .*run/ledger.db: is ledger"):
            choose_ledger(run, checkpoint)


def test_a_damaged_ledger_is_named_also_where_the_one_from_before_going_back_counts(tmp_path: Path) -> None:
    """`ledger.db.before` counts and is whole, but the run opens `ledger.db` to put it back: a flipped bit in the
    definition of an index made that a bare OperationalError after every part had started."""
    newest = write_run(tmp_path, rounds=3)
    ledger = open_ledger(tmp_path)
    ledger.rounds.restore(0, lambda *_: False, None)
    ledger.close()
    assert choose_ledger(tmp_path, newest).origin is None
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.execute("drop index retry_group")
    with pytest.raises(LedgerFileError, match=r"ledger\.db: the ledger is damaged: the definitions of its tables"):
        choose_ledger(tmp_path, newest)


def test_an_imported_queue_is_the_ledger_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = write_run(tmp_path / "run")
    export_queue(tmp_path / "run", tmp_path / "queue.tar")
    import_queue(tmp_path / "copy", tmp_path / "queue.tar")
    assert choose_ledger(tmp_path / "copy", checkpoint).origin is None


def test_a_checkpoint_from_before_ids_is_taken_by_its_path_and_says_so(tmp_path: Path) -> None:
    checkpoint = write_run(tmp_path / "run", has_id=False)
    choice = choose_ledger(tmp_path / "run", checkpoint)
    assert (choice.origin, choice.mark) == (None, None)
    assert "from before ledgers had ids" in choice.note
    assert choose_ledger(tmp_path / "new", checkpoint).origin == tmp_path / "run"
    export_queue(tmp_path / "run", tmp_path / "queue.tar")
    import_queue(tmp_path / "new", tmp_path / "queue.tar")
    with pytest.raises(ConfigError, match="has a queue of its own, but the checkpoint belongs to that of"):
        choose_ledger(tmp_path / "new", checkpoint)
    (tmp_path / "new" / ORIGIN_NAME).write_text(str(tmp_path / "run"))  # as a run writes it that copies the queue
    assert choose_ledger(tmp_path / "new", checkpoint).origin is None
    (tmp_path / "run" / "ledger.db").unlink()
    with pytest.raises(LedgerFileError, match="the ledger is gone"):
        choose_ledger(tmp_path / "run", checkpoint)


def test_a_run_that_has_trained_and_has_no_ledger_does_not_begin_anew(tmp_path: Path) -> None:
    events = EventLog(tmp_path, "driver")
    events.emit(EventKind.ROUND_TRAINED, rollout_id=0, version=1)
    assert choose_ledger(tmp_path, None).origin is None  # of a run in another mode
    events.emit(EventKind.PART_STARTED, part="ledger", waited_s=0.1)
    assert choose_ledger(tmp_path, None).origin is None  # it was killed before it trained
    events.emit(EventKind.ROUND_TRAINED, rollout_id=0, version=1)
    with pytest.raises(ConfigError, match=r"has trained \(events/\), but no ledger.db"):
        choose_ledger(tmp_path, None)


def config(directory: Path, *flags: str) -> Config:
    shape = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "head_dim": 16}
    (directory / "config.json").write_text(json.dumps(shape))
    return parse(["--hf-checkpoint", str(directory), "--transferqueue-mode", "streaming", *flags])


def test_preflight_refuses_another_ledger_and_a_lost_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before Ray starts, and before the run directory is touched."""
    write_run(tmp_path / "one")
    write_run(tmp_path / "two")
    flags = ["--load", str(tmp_path / "one" / "checkpoints"), "--run-dir"]
    with pytest.raises(ConfigError, match="belongs to the ledger"):
        preflight(config(tmp_path, *flags, str(tmp_path / "two")), is_async=False)
    (tmp_path / "one" / "ledger.db").unlink()
    with pytest.raises(LedgerFileError, match="the ledger is gone"):
        preflight(config(tmp_path, *flags, str(tmp_path / "one")), is_async=False)
    old = write_run(tmp_path / "three", has_id=False)
    preflight(config(tmp_path, "--load", str(old), "--run-dir", str(tmp_path / "four")), is_async=False)
    assert "note: --load" in capsys.readouterr().err
