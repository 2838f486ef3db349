import json
import os
import sqlite3
import tarfile

import pytest

from tests.helpers.ledger_cases import issue, lease, open_ledger
from vime.cli import queue
from vime.cli.main import main
from vime.data.payload import samples_to_bytes
from vime.handoff.ledger_types import Payload
from vime.handoff.queue_view import export_queue, import_queue
from vime.handoff.spool import Spool, SpoolReader
from vime.types import HandoffError, Sample
from vime.utils.manifest import write_manifest


def fill(ledger, spool, count, version=0):
    for task in issue(ledger, count):
        data = samples_to_bytes([Sample(group_index=task.group, tokens=[1, 2, 3])])
        [checksum] = spool.append([(task, data)])
        size = {"num_bytes": len(data), "num_tokens": 3, "num_rows": 1}
        versions = {"min_version": version, "max_version": version}
        ledger.prompts.commit(task, Payload(checksum=checksum, **size, **versions))


@pytest.fixture
def run(tmp_path):
    """Round 0 durable, round 1 leased, one group ready, one in flight, one dropped."""
    directory = tmp_path / "run"
    ledger, spool = open_ledger(directory), Spool(directory / "spool")
    fill(ledger, spool, 5)
    ledger.rounds.trained(0, lease(ledger, 0).fence)
    ledger.rounds.release(1)
    ledger.rounds.durable(0)
    lease(ledger, 1)
    dropped, _ = issue(ledger, 2)
    ledger.prompts.drop(dropped, "all rewards [equal]")
    ledger.close()
    spool.close()
    checkpoint = directory / "checkpoints" / "iter_0000000"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run_state.json").write_text(json.dumps({"rollout_id": 0}))
    (directory / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("0\n")
    return directory


def test_audit_of_a_healthy_run_ends_with_zero(run, capsys):
    assert main(["audit", str(run)]) == 0
    out = capsys.readouterr().out
    assert "2 groups durable, 6 tokens" in out
    assert "checkpoint of round 0, spool read" in out
    assert "every promise kept" in out


def test_audit_of_a_breach_ends_with_three_and_names_it(run, capsys):
    connection = sqlite3.connect(run / "ledger.db")
    connection.execute("update prompt_group set round = 1 where grp = 0")
    connection.commit()
    connection.close()
    assert main(["audit", str(run)]) == 3
    err = capsys.readouterr().err
    assert "rounds: round 1" in err
    assert "breaches in" in err


def test_audit_reads_the_checkpoint_that_the_marker_names_where_the_run_saved(run, capsys):
    marker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    marker.write_text("none\n")
    assert main(["audit", str(run)]) == 3  # round 0 is durable, and no checkpoint carries it
    assert "the newest checkpoint is of round -1" in capsys.readouterr().err
    marker.write_text("iter_0000000\n")
    os.rename(run / "checkpoints", run / "elsewhere")
    (run / "config.json").write_text(json.dumps({"model": {"save": str(run / "elsewhere")}}))
    assert main(["audit", str(run)]) == 0
    (run / "elsewhere" / "iter_0000000" / "run_state.json").unlink()
    assert main(["audit", str(run)]) == 3


def test_a_run_that_moved_between_two_looks_is_looked_at_again(run, capsys, monkeypatch):
    """The marker was read, then round 0 became durable: a breach that a second look does not see."""
    seen, read = [], queue.newest_checkpoint

    def late(directory):
        seen.append(None)
        return None if len(seen) == 1 else read(directory)

    monkeypatch.setattr(queue, "newest_checkpoint", late)
    assert main(["audit", str(run)]) == 0
    assert len(seen) == 2
    monkeypatch.setattr(queue, "newest_checkpoint", lambda directory: None)
    assert main(["audit", str(run)]) == 3  # seen by both looks
    assert "the newest checkpoint is of round -1" in capsys.readouterr().err


def test_a_segment_that_goes_while_it_is_read_is_a_finding_and_no_traceback(run):
    reader = SpoolReader(run / "spool")
    [(task, checksum, place), *_] = reader.entries()
    place.path.unlink()
    with pytest.raises(HandoffError, match=f"is gone, and with it the payload of group {task}"):
        reader.read(task, checksum)


def test_ls_counts_groups_by_state_and_says_who_works_on_what(run, capsys):
    assert main(["queue", "ls", str(run)]) == 0
    out = capsys.readouterr().out
    assert ["train", "durable", "2", "groups", "6", "tokens"] in [line.split() for line in out.splitlines()]
    assert "dropped: 1 groups, all rewards [equal]" in out
    assert "in flight: 1 groups at p" in out
    assert "round 1: leased, 2 groups, t" in out
    assert "version served: 1" in out


def test_show_tells_the_story_of_one_group(run, capsys):
    assert main(["queue", "show", str(run), "2"]) == 0
    out = capsys.readouterr().out
    assert "state: leased" in out
    assert [word for word in ("issued", "ready", "leased") if f": {word} attempt 1" in out] == [
        "issued",
        "ready",
        "leased",
    ]
    assert "1 rows, 3 tokens" in out
    assert main(["queue", "show", str(run), "99"]) == 3
    assert "no group train/99 was issued" in capsys.readouterr().err


def test_a_queue_that_was_exported_and_imported_is_the_same_queue(run, tmp_path, capsys):
    file, copy = tmp_path / "queue.tar", tmp_path / "copy"
    assert main(["queue", "export", str(run), str(file)]) == 0
    assert "the ledger and 3 payloads" in capsys.readouterr().out  # 2 leased, 1 ready; durable ones are not needed
    assert main(["queue", "import", str(copy), str(file)]) == 0
    os.rename(run / "checkpoints", copy / "checkpoints")
    assert main(["audit", str(copy)]) == 0
    ledger, spool = open_ledger(copy), Spool(copy / "spool")
    assert ledger.rounds.restore(0, spool.has).replayed_rounds == (1,)
    ledger.close()
    spool.close()
    for command in (["export", str(run), str(file)], ["import", str(copy), str(file)]):
        assert main(["queue", *command]) == 3
    assert "has a queue already" in capsys.readouterr().err


def test_a_live_queue_can_be_exported(tmp_path):
    run = tmp_path / "run"
    ledger, spool = open_ledger(run), Spool(run / "spool")
    fill(ledger, spool, 3)
    assert export_queue(run, tmp_path / "queue.tar") == 3
    fill(ledger, spool, 1)
    ledger.close()
    assert import_queue(tmp_path / "copy", tmp_path / "queue.tar") == 3


def test_a_file_that_is_no_whole_queue_is_refused_and_leaves_nothing(run, tmp_path):
    copy, file, broken = tmp_path / "copy", tmp_path / "queue.tar", tmp_path / "broken.tar"
    export_queue(run, file)
    with tarfile.open(file) as source, tarfile.open(broken, "w") as target:  # the same without its payloads
        for name in source.getnames()[:2]:
            target.addfile(source.getmember(name), source.extractfile(name))
    with pytest.raises(HandoffError, match="no payload of group train/"):
        import_queue(copy, broken)
    with tarfile.open(broken, "w") as target:
        target.add(run / "ledger.db", "../ledger.db")
    with pytest.raises(HandoffError, match="no exported queue"):
        import_queue(copy, broken)
    broken.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(HandoffError, match=r"cannot be imported|no exported queue"):
        import_queue(copy, broken)
    assert list(copy.iterdir()) == []


COMMANDS = [(["audit"], []), (["queue", "ls"], []), (["queue", "show"], ["0"]), (["queue", "export"], ["queue.tar"])]


@pytest.mark.parametrize(("command", "more"), COMMANDS)
def test_a_run_without_a_ledger_is_refused(tmp_path, capsys, command, more):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "events").mkdir()
    more = [str(tmp_path / word) if word.endswith("tar") else word for word in more]
    assert main([*command, str(tmp_path), *more]) == 3
    assert "there is no ledger" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "more"), COMMANDS)
def test_a_path_that_is_no_run_is_refused_as_such(tmp_path, capsys, command, more):
    (tmp_path / "file").write_text("")
    for name in ("mistyped", "file", ""):
        assert main([*command, str(tmp_path / name), *more]) == 2
        assert "expected the run directory of a Vime run" in capsys.readouterr().err


def test_a_queue_is_not_exported_into_a_directory_that_is_not_there(run, capsys):
    assert main(["queue", "export", str(run), str(run / "nowhere" / "queue.tar")]) == 3
    assert f"no directory {run / 'nowhere'} that can be written" in capsys.readouterr().err


def test_audit_names_the_checkpoint_whose_bytes_changed(run, capsys):
    checkpoint = run / "checkpoints" / "iter_0000000"
    assert main(["audit", str(run)]) == 0
    assert "without a manifest, whose bytes cannot be checked: iter_0000000" in capsys.readouterr().out
    (checkpoint / "weights").write_bytes(b"aaaa")
    write_manifest(checkpoint, {})
    assert main(["audit", str(run)]) == 0
    assert "checkpoints read to the last byte: iter_0000000" in capsys.readouterr().out
    (checkpoint / "weights").write_bytes(b"aaab")
    assert main(["audit", str(run)]) == 3
    assert "checkpoint: iter_0000000: weights: its bytes changed" in capsys.readouterr().err
