"""What lies ready is read before its round is whole: shown by taking it out of the queue before the lease."""

import time

import pytest

from tests.helpers.ledger_cases import open_ledger
from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_port import LocalLedgerPort
from vime.handoff.ledger_prompts import PromptDesk
from vime.handoff.ledger_rounds import RoundDesk
from vime.handoff.ledger_types import Payload, RoundOrder
from vime.handoff.memory import MemoryRows
from vime.handoff.payload import samples_to_bytes
from vime.rollout.read_ahead import ReadAhead
from vime.types import HandoffError, Sample, SampleStatus, VersionSpan

DEADLINE_S = 20


class Run:
    def __init__(self, directory, *, limit):
        self.rows = MemoryRows()
        self.store = GroupStore(self.rows, None, partition="train")
        self._ledger = open_ledger(directory, round_order=RoundOrder.INDEX, max_staleness=0)
        self.port = LocalLedgerPort(self._ledger)
        self.ahead = ReadAhead(self.port, self.store, limit=limit)

    def __enter__(self):
        self.ahead.start()
        return self

    def __exit__(self, *_):
        self.ahead.close()
        self._ledger.close()

    def issue(self, count):
        """Through the port: the reading thread calls the ledger too."""
        grant = self.port.call(PromptDesk.issue, "p", count, request="r")
        return [prompt.task for prompt in grant.prompts]

    def finish(self, *tasks):
        for task in tasks:
            sample = Sample(index=task.group, group_index=task.group, prompt="p", tokens=[5])
            sample.append_response_tokens([7], [-0.5], versions=[VersionSpan(version=0, start=0, end=1)])
            sample.status, sample.reward = SampleStatus.COMPLETED, float(task.group)
            data = samples_to_bytes([sample])
            [checksum] = self.store.put([(task, data)])
            payload = Payload(
                checksum=checksum, num_bytes=len(data), num_tokens=2, num_rows=1, min_version=0, max_version=0
            )
            self.port.call(PromptDesk.commit, task, payload)

    def take_round(self, count):
        answer = self.port.call(RoundDesk.lease, 0, version=0, holder="t", count=count)
        return [samples[0].reward for samples in self.ahead.take(answer.lease.groups, next_version=1)]

    def wait_until_held(self, *tasks):
        ends = time.monotonic() + DEADLINE_S
        while set(self.ahead.tasks) != set(tasks) or not all(read.done() for _, read, _ in self.ahead._held.values()):
            assert time.monotonic() < ends, self.ahead.tasks
            time.sleep(0.005)


def test_finished_groups_are_read_while_another_of_their_round_is_not_finished(tmp_path):
    with Run(tmp_path, limit=4) as run:
        slow, *fast = run.issue(3)
        run.finish(*fast)
        run.wait_until_held(*fast)
        run.rows.rows.clear()  # whoever read them now would fail
        run.finish(slow)
        assert run.take_round(3) == [0.0, 1.0, 2.0]
        assert run.ahead.tasks == ()


def test_no_more_groups_than_the_limit_are_held(tmp_path):
    with Run(tmp_path, limit=1) as run:
        [first, second] = run.issue(2)
        run.finish(first, second)
        run.wait_until_held(first)
        run.rows.rows.pop(("train_groups", str(second)))
        with pytest.raises(HandoffError, match="train/1#1"):  # the second is read only now
            run.take_round(2)


def test_a_group_that_could_not_be_read_ahead_is_read_when_it_is_needed(tmp_path):
    with Run(tmp_path, limit=2) as run:
        [only] = run.issue(1)
        get_rows, failures = run.rows.get_rows, [HandoffError("the queue is slow")]

        def fail_once(partition, keys):
            if failures:
                raise failures.pop()
            return get_rows(partition, keys)

        run.rows.get_rows = fail_once
        run.finish(only)
        run.wait_until_held(only)
        assert failures == []
        assert run.take_round(1) == [0.0]


def test_without_a_limit_nothing_is_read_ahead(tmp_path):
    with Run(tmp_path, limit=0) as run:
        tasks = run.issue(2)
        run.finish(*tasks)
        assert run.ahead.tasks == ()
        assert run.take_round(2) == [0.0, 1.0]
