"""The ledger behind Ray is the ledger: same answers, same refusals, and kill -9 of its process changes neither."""

import os
import signal

import pytest

from tests.helpers.ledger_cases import (
    RULES,
    AsLedger,
    checked,
    groups_of,
    issue,
    lease,
    make_ready,
    open_ledger,
    payload,
    train,
)
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import (
    CommitOutcome,
    LateAttemptError,
    LeaseLostError,
    LedgerFileError,
    Task,
    TransitionError,
)
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger
from vime.ray import ledger_actor
from vime.ray.ledger_actor import LedgerClient

DEADLINE_S = 60.0


@pytest.fixture
def client(ray_cluster, tmp_path):

    client = LedgerClient.start(tmp_path, RULES, run_id=tmp_path.name, deadline_s=DEADLINE_S)
    yield client
    client._actor.kill()


def kill(client):
    """kill -9 of the ledger's process; nothing waits for the restart."""
    os.kill(client.pid(), signal.SIGKILL)


def test_a_large_ledger_has_longer_to_be_checked_when_it_opens(ray_cluster, tmp_path, monkeypatch):
    started = LedgerClient.start(tmp_path, RULES, run_id=tmp_path.name, deadline_s=DEADLINE_S)
    started.close()
    started._actor.kill()
    monkeypatch.setattr(ledger_actor, "CHECKED_BYTES_PER_S", 1)
    again = LedgerClient.start(tmp_path, RULES, run_id=f"{tmp_path.name}-2", deadline_s=DEADLINE_S)
    assert again._deadline_s == DEADLINE_S
    assert again._opening_s == DEADLINE_S + (tmp_path / ledger_actor.LEDGER_NAME).stat().st_size
    again._actor.kill()


def test_a_killed_ledger_goes_on_where_it_was(client, tmp_path):
    first = client.pid()
    train(AsLedger(client), 0)
    answered = client.call(PromptLedger.issue, "p", 3, request="x")
    kill(client)
    assert client.call(PromptLedger.issue, "p", 3, request="x") == answered
    assert client.pid() != first
    tasks = [prompt.task for prompt in answered.prompts]
    assert [client.call(PromptLedger.commit, task, payload(task.group, version=1)) for task in tasks] == [
        CommitOutcome.COMMITTED
    ] * 3
    kill(client)
    assert client.call(PromptLedger.commit, tasks[0], payload(tasks[0].group)) is CommitOutcome.DUPLICATE
    found = lease(AsLedger(client), 1)
    kill(client)
    assert client.call(RoundLedger.trained, 1, found.fence)
    kill(client)
    assert not client.call(RoundLedger.trained, 1, found.fence)
    client.call(Ledger.sync)
    client.call(RoundLedger.durable, 1)
    assert client.call(Ledger.status).active == 3  # one ready, and round 1, whose weights are not served
    assert checked(tmp_path, checkpoint_round=1).groups == {"durable": 4, "ready": 1}


def test_when_it_is_closed_its_file_alone_is_the_ledger(client, tmp_path):
    train(AsLedger(client), 0)
    assert (tmp_path / "ledger.db-wal").stat().st_size > 0
    client.close()
    assert not (tmp_path / "ledger.db-wal").exists()
    assert checked(tmp_path).groups == {"trained": 2}
    open_ledger(tmp_path).close()


def test_refusals_keep_their_type(client, tmp_path):
    [task] = issue(AsLedger(client), 1)
    client.call(PromptLedger.abandon, "p")
    with pytest.raises(LateAttemptError, match="came too late"):
        client.call(PromptLedger.commit, task, payload())
    with pytest.raises(LeaseLostError):
        client.call(RoundLedger.trained, 0, 1)
    with pytest.raises(LedgerFileError, match="another process writes it"):
        open_ledger(tmp_path)


def test_a_restore_asks_the_spool_of_the_run(client, tmp_path):
    make_ready(AsLedger(client), 2)
    assert groups_of(lease(AsLedger(client), 0)) == [0, 1]
    report = client.restore(None)  # no spool: every payload counts as lost
    assert report.regenerated == (Task("train", 0, 1), Task("train", 1, 1))
    assert report.replayed_rounds == ()


@pytest.mark.parametrize("method", [Ledger.close, Ledger.expire, RoundLedger.restore, Ledger.__init__, str.upper])
def test_the_ledger_s_process_runs_no_method_that_is_not_on_its_list(client, method):
    with pytest.raises(TransitionError, match=r"the ledger has no call .* expected one of Ledger\.commit_each, "):
        client.call(method)
    assert client.call(Ledger.status).active == 0  # and it goes on


def test_a_client_that_travels_to_another_process_is_a_client_there(client):
    import ray

    @ray.remote(num_cpus=0)
    def status(travelled):
        return travelled.call(RoundLedger.ready, version=0, count=1), travelled.call(Ledger.status).active

    assert ray.get(status.remote(client), timeout=DEADLINE_S) == ((), 0)
