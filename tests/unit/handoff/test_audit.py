"""A healthy history has no finding; and each breach that is made by hand is named by its check."""

import shutil
import sqlite3

import pytest

from tests.helpers.ledger_cases import groups_of, issue, lease, open_ledger
from tests.helpers.rows import make_row
from vime.data.payload import record_size, samples_to_bytes
from vime.handoff.audit import SavedFacts, audit, audit_run
from vime.handoff.group_store import encode_group
from vime.handoff.ledger_identity import LINE
from vime.handoff.ledger_types import LedgerFileError, Payload, Task
from vime.handoff.spool import Spool
from vime.types import Sample, SampleStatus

CHECKPOINT = 1  # of the run below: rounds 0 and 1 are durable, 2 is trained, 3 is leased


def store(spool, task, version):
    rows = [make_row(2 * task.group + at, group_index=task.group) for at in range(2)]
    data = encode_group(rows).record
    [checksum] = spool.append([(task, data)])
    _, num_tokens = record_size(data)
    assert num_tokens == 10  # 2 rows of 2 + 3
    return Payload(
        checksum=checksum,
        num_bytes=len(data),
        num_tokens=num_tokens,
        num_rows=2,
        min_version=version,
        max_version=version,
    )


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A run with every state in it: rounds 0-1 durable, 2 trained, 3 leased, 2 groups ready, 1 issued, 1 to retry, 1
    dropped, 1 evaluated, and one restart."""
    directory = tmp_path_factory.mktemp("healthy")
    ledger, spool = open_ledger(directory, max_slots=12), Spool(directory / "spool")

    def fill(count, version, partition="train"):
        for task in issue(ledger, count, partition=partition):
            ledger.prompts.commit(task, store(spool, task, version))

    for round_id in range(3):
        fill(2, round_id)
        found = lease(ledger, round_id)
        ledger.rounds.trained(round_id, found.fence)
        ledger.rounds.release(round_id + 1)
    ledger.rounds.durable(0)
    ledger.rounds.restore(0, spool.has)
    for round_id in (1, 2):
        found = lease(ledger, round_id)
        ledger.rounds.trained(round_id, found.fence)
        ledger.rounds.release(round_id + 1)
    ledger.rounds.durable(1)
    fill(4, 3)
    lease(ledger, 3)
    dropped, retried, _ = issue(ledger, 3)
    ledger.prompts.drop(dropped, "filter")
    [partial] = spool.append([(retried, samples_to_bytes([cut_sample(retried.group)]))])
    ledger.prompts.retry(retried, "aborted", partial=partial)
    fill(1, 3, "eval/x")
    ledger.prompts.drop(Task("eval/x", 0, 1), "evaluated")
    needed = ledger.needed_payloads()
    spool.compact(lambda task, checksum: needed.get(task, -1) in (None, checksum))
    ledger.close()
    spool.close()
    return directory


@pytest.fixture
def run(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "run")
    return tmp_path / "run"


def cut_sample(group):
    return Sample(group_index=group, index=0, tokens=[1], status=SampleStatus.ABORTED)


def look(directory, checkpoint_round=CHECKPOINT):
    return audit(
        directory / "ledger.db",
        checkpoint_round=checkpoint_round,
        spool=directory / "spool",
    )


def test_a_healthy_run_has_no_finding_and_its_groups_are_counted(run):
    report = look(run)
    assert report.findings == ()
    assert report.groups == {
        "durable": 4, "trained": 2, "leased": 2, "ready": 2, "issued": 1, "retry": 1, "dropped": 1, "eval/x dropped": 1,
    }  # fmt: skip
    assert report.tokens["durable"] == 40
    assert (report.num_rounds, report.num_lines > 40) == (4, True)


def tell(event, group=None, attempt=None, *, partition=1, round_id=None, tokens=None, note=None):
    """A false line of history."""
    values = [9999, event, partition, group, attempt, round_id, tokens, tokens, note]
    return f"insert into history({LINE}) values ({', '.join('null' if v is None else repr(v) for v in values)})"


def rule(name, old, new):
    return f"update history set note = replace(note, '\"{name}\": {old}', '\"{name}\": {new}') where event = 'opened'"


GROUP_2 = "where partition = 1 and grp = 2"  # the first group of round 1
READY = "where partition = 1 and grp = 9"
BREACHES = [
    ("cursor", "delete from prompt_group where partition = 1 and grp = 12", "groups [12] never issued"),
    ("cursor", "update partition set next_group = 5 where id = 1", "beyond the cursor"),
    ("history", f"update prompt_group set state = 'ready' {GROUP_2}", "('ready', 1, 1)"),
    ("history", f"update prompt_group set attempt = 2 {GROUP_2}", "the history says ('durable', 1, 1)"),
    ("history", tell("guessed"), "'guessed' is unknown"),
    ("terminal", tell("trained", round_id=2, tokens=20), "trained twice (round 2)"),
    ("terminal", tell("dropped", 2, 1, note="x"), "dropped while durable"),
    ("terminal", tell("ready", 12, 9, tokens=1), "ready while issued at attempt 1"),
    ("terminal", tell("dropped", 77, 1, note="x"), "without ever being issued"),
    ("terminal", tell("loosened", round_id=2), "undone without a restart"),
    ("terminal", "update round set state = 'trained' where id = 3", "leased in round 3, which is trained"),
    ("rounds", f"update prompt_group set round = 2 {GROUP_2}", "round 2: groups"),
    ("rounds", f"update prompt_group set position = 7 {GROUP_2}", "round 1: groups [3, 2] of 2"),
    ("rounds", tell("leased", 2, 1, round_id=9, note="9"), "for round 9 and for round 1"),
    ("rounds", tell("trained", round_id=77, tokens=0), "trained without a lease"),
    ("rounds", "delete from round where id = 1", "round 2: the round before it is gone"),
    ("rounds", "update round set state = 'replay' where id = 1", "trained before round 1"),
    ("rounds", "update prompt_group set round = null where state = 'leased'", "leased, but in no round"),
    ("checkpoint", "update round set state = 'durable' where id = 2", "the newest checkpoint is of round 1"),
    ("checkpoint", "update round set state = 'leased' where id = 1", "the checkpoint of round 1 carries it"),
    ("staleness", "update prompt_group set min_version = 0 where round = 3", "versions 0 to 3 in round 3 on version 3"),
    ("staleness", "update prompt_group set max_version = 9 where round = 3", "versions 3 to 9 in round 3"),
    ("bound", rule("max_slots", 12, 6), "7 slots held, max_slots is 6"),  # 2 leased, 2 ready, 3 issued
    ("bound", rule("max_tokens", "null", 15), "20 tokens held"),
    ("tokens", f"update prompt_group set num_tokens = 11 {GROUP_2}", "11 tokens"),
    ("tokens", "update history set num_tokens = 19 where event = 'trained'", "trained 19 tokens, its groups hold 20"),
    ("spool", f"update prompt_group set checksum = 1 {READY}", "its payload cannot be read"),
    ("spool", f"update prompt_group set num_bytes = 1 {READY}", "committed: 1 bytes"),
    (
        "spool",
        "update prompt_group set partial_checksum = 1 where state = 'retry'",
        "continues tokens that cannot be",
    ),
    ("eval", "update prompt_group set state = 'trained', round = 2 where partition = 2", "trained in round 2; only"),
    ("eval", tell("leased", 0, 1, partition=2, round_id=3, note="3"), "leased for training in round 3"),
]


@pytest.mark.parametrize(("check", "breach", "words"), BREACHES)
def test_a_breach_made_by_hand_is_named(run, check, breach, words):
    connection = sqlite3.connect(run / "ledger.db", isolation_level=None)
    assert connection.execute(breach).rowcount > 0
    connection.close()
    named = [str(finding) for finding in look(run).findings]
    assert any(text.startswith(f"{check}: ") and words in text for text in named), named


def test_a_missing_segment_is_named(run):
    newest = sorted((run / "spool").glob("*.vsp"))[-1]
    newest.unlink()
    checks = {finding.check for finding in look(run).findings}
    assert checks == {"spool"}


def test_a_run_that_keeps_a_spool_and_has_none_any_more_lacks_every_payload_that_may_be_needed(run):
    shutil.rmtree(run / "spool")
    saved = SavedFacts(round_id=CHECKPOINT, mark=None, receipt=None)
    assert {finding.check for finding in audit_run(run, saved=saved, has_spool=True).findings} >= {"spool"}
    assert "spool" not in {finding.check for finding in audit_run(run, saved=saved, has_spool=False).findings}


def test_a_checkpoint_that_the_ledger_does_not_reach_is_named(run):
    named = [str(finding) for finding in look(run, checkpoint_round=7).findings]
    assert any("the ledger ends at round 3" in text for text in named)


def test_what_is_no_ledger_is_refused(tmp_path):
    with pytest.raises(LedgerFileError, match="there is no ledger"):
        audit(tmp_path / "ledger.db", checkpoint_round=None, spool=None)


def test_a_live_run_can_be_looked_at(tmp_path):
    ledger, spool = open_ledger(tmp_path), Spool(tmp_path / "spool")
    for task in issue(ledger, 3):
        ledger.prompts.commit(task, store(spool, task, 0))
    assert groups_of(lease(ledger, 0)) == [0, 1]
    report = look(tmp_path, checkpoint_round=None)
    assert (report.findings, report.groups) == ((), {"leased": 2, "ready": 1})
    ledger.close()
    spool.close()
