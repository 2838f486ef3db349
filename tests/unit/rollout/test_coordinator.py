"""The coordinator makes rounds of facts: it asks for no answer that nobody must see, and for no key of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ledger_cases import issue, make_ready, open_ledger
from tests.helpers.rollout_setup import make_args
from vime.data.rows import TrainRow, trained_tokens
from vime.handoff.group_store import GroupStore, MemoryStore, StoredGroup
from vime.handoff.ledger import Ledger, LocalLedgerPort
from vime.handoff.ledger_types import RoundOrder, Task
from vime.handoff.round_ledger import RoundLedger
from vime.handoff.spool import Spool
from vime.handoff.ticket import make_ticket, read_rows
from vime.rollout.convert import encoded_group
from vime.rollout.coordinator import RoundCoordinator, TakenGroup
from vime.rollout.early_batches import EarlyBatches
from vime.rollout.worker import WorkerStats, payload_of
from vime.types import (
    HandoffError,
    RoundPlan,
    Sample,
    SampleStatus,
    StaleError,
    StepPlan,
    VersionSpan,
    WaitTimeoutError,
)

ARGS = make_args("--transferqueue-mode", "streaming", "--rollout-batch-size", 2, "--n-samples-per-prompt", 2)


class FakeWorkers:
    """Workers named `ours`. Whoever asks for answers fails, unless a test gives it a store to read them from."""

    waits_for, num_running, spool_bytes = "", 3, 7

    def __init__(self, store: GroupStore | None = None) -> None:
        self.stats, self.restored, self.released, self.forgotten = WorkerStats(), [], [], []
        self.error: Exception | None = None
        self.num_reads = 0
        self._store = store

    def is_ours(self, producer: str) -> bool:
        return producer == "ours"

    def samples(self, groups: Sequence[StoredGroup]) -> list[list[Sample]]:
        if self._store is None:
            raise AssertionError("answers were asked for")
        self.num_reads += 1
        return [self._store.samples(group.task, group.checksum) for group in groups]

    def restore(self, groups: Sequence[StoredGroup]) -> None:
        self.restored += groups
        if self._store is not None:
            self._store.restore(groups)

    def release(self, tasks: Sequence[Task]) -> None:
        self.released += tasks

    def forget(self, tasks: Sequence[Task]) -> None:
        self.forgotten += tasks

    def compact(self, needed: Mapping[Task, int | None]) -> int:
        return len(needed)

    def take_stats(self) -> WorkerStats:
        taken, self.stats = self.stats, WorkerStats()
        return taken

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Scene:
    """A ledger, a queue and a spool in which groups of two answers lie; `length` is that of each answer."""

    def __init__(self, directory: Path, *, staleness: int = 0) -> None:
        self.directory = directory
        self.ledger = open_ledger(directory, round_order=RoundOrder.INDEX, max_staleness=staleness)
        self.port, self.queue = LocalLedgerPort(self.ledger), MemoryStore()
        self.spool = Spool(directory / "spool")
        self.store = GroupStore(self.queue, self.spool, partition="train")

    def finish(
        self,
        count: int,
        *,
        producer: str = "ours",
        length: int = 3,
        version: int = 0,
        oldest: int | None = None,
        removed: Sequence[int] = (),
    ) -> list[Task]:
        """`oldest`: the version of the first token of each answer, if it is another one. `removed`: the places in each
        group of answers that the generate function takes out of the loss."""
        tasks = issue(self.ledger, count)
        for task in tasks:
            samples = [_sample(2 * task.group + at, task, length, version, oldest) for at in range(2)]
            for at in removed:
                samples[at].remove_sample = True
            group = encoded_group(ARGS, samples, producer_id=producer, with_samples=True)
            [checksum] = self.store.put([(task, group)])
            payload = payload_of(group, samples)
            self.ledger.prompts.commit(task, replace(payload, checksum=checksum))
        return tasks

    def coordinator(self, workers: FakeWorkers, args: Any = ARGS, **options: Any) -> RoundCoordinator:
        return RoundCoordinator(args, ledger=self.port, workers=workers, **options)

    def rows(self, groups: Sequence[TakenGroup]) -> list[TrainRow]:
        """The rows as a rank reads them with the handles that the coordinator says."""
        numbers = tuple(range(sum(len(group.facts.rows) for group in groups)))
        step = StepPlan(micro_batches=((numbers,),), num_samples=len(numbers), num_tokens=1)
        ticket = make_ticket(
            RoundPlan(rollout_id=0, steps=(step,)),
            [(group.facts, group.handles) for group in groups],
            partition="train_groups",
        )
        rows = read_rows(self.queue, ticket, 0)[1]
        return [rows[number] for number in numbers]

    def close(self) -> None:
        self.store.close()
        self.ledger.close()


def _sample(index: int, task: Task, length: int, version: int, oldest: int | None = None) -> Sample:
    sample = Sample(group_index=task.group, index=index, prompt="p", tokens=[1], reward=float(index % 2))
    spans = [VersionSpan(version, 0, length)]
    if oldest is not None:
        spans = [VersionSpan(oldest, 0, 1), VersionSpan(version, 1, length)]
    sample.append_response_tokens([7] * length, [-0.5] * length, versions=spans)
    sample.status = SampleStatus.COMPLETED
    return sample


@pytest.fixture
def scene(tmp_path: Path):
    made = Scene(tmp_path)
    yield made
    made.close()


def test_a_round_is_taken_and_told_without_asking_for_an_answer(scene: Scene) -> None:
    scene.finish(2)
    workers = FakeWorkers()
    coordinator = scene.coordinator(workers)
    coordinator.begin(0)
    taken = coordinator.take(2)
    assert [group.task.group for group in taken.groups] == [0, 1]
    assert (workers.restored, taken.begun, taken.left) == ([], frozenset(), list(taken.groups))
    assert [row.sample_index for row in scene.rows(taken.groups)] == [0, 1, 2, 3]
    metrics = coordinator.metrics(taken)
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/response_len_mean"] == 3.0
    assert metrics["transferqueue/spool_bytes"] == 7.0


def test_each_job_outside_has_its_groups_and_the_mean_by_which_their_newest_weights_were_behind(tmp_path: Path) -> None:
    """Round 3 is trained on version 3. Two gateways, one after the other, put the groups of job-a: the name of each
    stands behind the job's, after a dot."""
    scene = Scene(tmp_path, staleness=3)
    scene.finish(1, producer="external/job-a.first", version=3)
    scene.finish(1, producer="external/job-a.second", version=2, oldest=0)
    scene.finish(1, producer="external/job-b.first", version=1, oldest=0)
    scene.finish(1, version=0)
    args = make_args("--transferqueue-mode", "streaming", "--max-staleness", 3)
    coordinator = scene.coordinator(FakeWorkers(), args)
    coordinator.begin(3)
    metrics = coordinator.metrics(coordinator.take(4))
    assert {name: value for name, value in metrics.items() if name.startswith("producers/")} == {
        "producers/job-a/groups": 2.0,
        "producers/job-a/lag": 0.5,  # ((3 - 3) + (3 - 2)) / 2
        "producers/job-b/groups": 1.0,
        "producers/job-b/lag": 2.0,  # 3 - 1
    }
    scene.close()


def test_what_the_coordinator_holds_does_not_grow_with_the_answers(tmp_path: Path) -> None:
    sizes = []
    for length in (3, 3000):
        scene = Scene(tmp_path / str(length))
        scene.finish(2, length=length)
        coordinator = scene.coordinator(FakeWorkers())
        coordinator.begin(0)
        groups = coordinator.take(2).groups
        sizes.append([(group.facts.rows.nbytes, len(group.handles)) for group in groups])
        assert not any(isinstance(value, (list, tuple)) and len(value) >= length for value in _held(groups))
        scene.close()
    assert sizes[0] == sizes[1] == [(2 * 54, 1)] * 2


def _held(groups: Sequence[TakenGroup]) -> list[Any]:
    return [value for group in groups for value in (group.task, group.facts.notes.entries, group.facts.notes.sources)]


def test_asking_again_for_a_round_gives_the_same_groups(scene: Scene) -> None:
    scene.finish(4)
    coordinator = scene.coordinator(FakeWorkers())
    coordinator.begin(0)
    first = coordinator.take(2)
    coordinator.begin(0)
    assert [group.record for group in coordinator.take(2).groups] == [group.record for group in first.groups]


def test_chunks_of_an_earlier_life_are_put_into_the_queue_again_and_no_others(scene: Scene) -> None:
    [old], [new] = scene.finish(1, producer="of the dead"), scene.finish(1)
    scene.queue.clear("train_groups", [f"{old}.0"])  # its queue died with it
    workers = FakeWorkers(scene.store)
    coordinator = scene.coordinator(workers)
    coordinator.begin(0)
    taken = coordinator.take(2)
    assert [group.task for group in workers.restored] == [old]
    assert [group.task for group in taken.groups] == [old, new]
    assert [row.sample_index for row in scene.rows(taken.groups)] == [0, 1, 2, 3]


def test_after_a_restart_a_round_is_read_from_what_the_spool_keeps(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.finish(2)
    scene.close()
    again = Scene(tmp_path)
    again.ledger.rounds.restore(None, again.spool.has)
    workers = FakeWorkers(again.store)
    workers.is_ours = lambda producer: False  # type: ignore[method-assign]
    coordinator = again.coordinator(workers)
    coordinator.begin(0)
    taken = coordinator.take(2)
    assert [row.sample_index for row in again.rows(taken.groups)] == [0, 1, 2, 3]
    assert [[sample.rollout_id for sample in group] for group in coordinator.samples(taken.groups)] == [[0, 0]] * 2
    again.close()


def plugin_args(directory: Path, *flags: str) -> Any:
    """The plug-ins of rounds: the filter has the last word, and rewards are 1 for what it removes and else 0."""
    (directory / "round.py").write_text(
        "def mark(args, groups):\n"
        "    for group in groups:\n"
        "        for place, sample in enumerate(group):\n"
        "            sample.remove_sample = place == 0\n"
        "def post(args, groups):\n"
        "    return [[float(sample.remove_sample) for sample in group] for group in groups]\n"
    )
    values = [f"{directory / 'round.py'}:{flag}" if flag in ("mark", "post") else flag for flag in flags]
    return make_args("--transferqueue-mode", "streaming", "--rollout-batch-size", 2, *values)


def test_the_filter_has_the_last_word_on_what_a_generate_function_removed(scene: Scene, tmp_path: Path) -> None:
    # of each group's answers of 3 tokens the generate function removed the second, the filter the first one instead
    scene.finish(2, removed=[1])
    args = plugin_args(tmp_path, "--rollout-sample-filter-path", "mark")
    coordinator = scene.coordinator(FakeWorkers(scene.store), args)
    coordinator.begin(0)
    taken = coordinator.take(2)
    counted = [int(count) for group in taken.groups for count in trained_tokens(group.facts.rows)]
    assert counted == [row.num_trainable for row in scene.rows(taken.groups)] == [0, 3, 0, 3]


def test_an_answer_that_the_filter_takes_in_again_must_be_as_fresh_as_any(tmp_path: Path) -> None:
    scene = Scene(tmp_path, staleness=3)
    scene.finish(2, removed=[0, 1])
    args = plugin_args(tmp_path, "--max-staleness", "1", "--rollout-sample-filter-path", "mark")
    coordinator = scene.coordinator(FakeWorkers(scene.store), args)
    coordinator.begin(2)
    with pytest.raises(StaleError, match=r"sample 1 of group 0: versions \[0\] in round 2, expected 1\.\.2"):
        coordinator.take(2)
    scene.close()


def test_both_plug_ins_of_a_round_see_the_same_answers_and_later_readers_their_marks(
    scene: Scene, tmp_path: Path
) -> None:
    scene.finish(2)
    flags = ("--rollout-sample-filter-path", "mark", "--custom-reward-post-process-path", "post")
    workers = FakeWorkers(scene.store)
    coordinator = scene.coordinator(workers, plugin_args(tmp_path, *flags))
    coordinator.begin(0)
    taken = coordinator.take(2)
    assert workers.num_reads == 1
    assert [group.facts.rows["reward"].tolist() for group in taken.groups] == [[1.0, 0.0]] * 2
    found = coordinator.samples(taken.groups)  # as --save-debug-rollout-data records them
    assert [[sample.remove_sample for sample in group] for group in found] == [[True, False]] * 2


def test_a_round_for_which_nothing_was_rewarded_has_no_mean_before_the_filter(scene: Scene) -> None:
    scene.finish(2)
    workers = FakeWorkers()
    coordinator = scene.coordinator(workers)
    coordinator.begin(0)
    taken = coordinator.take(2)
    assert "rollout/reward_mean_before_filter" not in coordinator.metrics(taken)
    workers.stats.rewards += [1.0, 0.5]
    assert coordinator.metrics(taken)["rollout/reward_mean_before_filter"] == 0.75


def test_a_group_that_the_ledger_let_pass_too_old_is_refused(tmp_path: Path) -> None:
    scene = Scene(tmp_path, staleness=3)
    scene.finish(2)
    args = make_args("--transferqueue-mode", "streaming", "--max-staleness", 1)
    coordinator = scene.coordinator(FakeWorkers(), args)
    coordinator.begin(2)
    with pytest.raises(StaleError, match=r"sample 0 of group 0: versions \[0\] in round 2, expected 1\.\.2"):
        coordinator._taken(_leased(scene, 2))
    scene.close()


def _leased(scene: Scene, count: int) -> Any:
    answer = scene.ledger.rounds.lease(0, version=0, holder="t", count=count)
    assert answer.lease is not None
    return answer.lease.groups


def test_a_group_without_facts_is_refused_with_its_number(scene: Scene) -> None:
    make_ready(scene.ledger, 2)
    coordinator = scene.coordinator(FakeWorkers())
    coordinator.begin(0)
    with pytest.raises(HandoffError, match="group 0: its facts cannot be read"):
        coordinator.take(2)


def test_an_error_of_the_workers_ends_the_wait_for_a_round(scene: Scene) -> None:
    scene.finish(1)
    workers = FakeWorkers()
    workers.error = HandoffError("the reward raised")
    coordinator = scene.coordinator(workers)
    coordinator.begin(0)
    with pytest.raises(HandoffError, match="the reward raised"):
        coordinator.take(2)


def test_a_round_that_does_not_fill_says_what_the_workers_do(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.rollout.coordinator.NEWS_S", 0.1)
    scene.finish(1)
    args = make_args("--transferqueue-mode", "streaming", "--rollout-timeout-secs", 1)
    coordinator = scene.coordinator(FakeWorkers(), args)
    coordinator.begin(0)
    with pytest.raises(WaitTimeoutError, match=r"round 0: ready groups: 1 of 2.*works on 3 groups"):
        coordinator.take(2)


def test_a_group_that_trainers_began_with_is_not_taken_twice(scene: Scene) -> None:
    first, second = scene.finish(2)
    early_batches = EarlyBatches(minimum=1)
    coordinator = scene.coordinator(FakeWorkers(), early_batches=early_batches)
    coordinator.begin(0)
    ready = scene.port.call(RoundLedger.ready, version=0, count=2, of_round=True)
    early_batches.offer([group for group in ready if group.task == second])
    [early_batch] = coordinator.claim_early_batch()
    taken = coordinator.take(2)
    assert [group.task for group in taken.groups] == [first, second]
    assert taken.groups[1] is early_batch
    assert (taken.begun, [group.task for group in taken.left]) == (frozenset({second.group}), [first])
    assert coordinator.claim_early_batch() == []


def test_the_status_of_the_ledger_is_in_the_metrics(scene: Scene) -> None:
    scene.finish(3)
    workers = FakeWorkers()
    workers.stats.late_groups, workers.stats.put_times_s = 2, [1.0, 2.0]
    coordinator = scene.coordinator(workers)
    coordinator.begin(0)
    metrics = coordinator.metrics(coordinator.take(2))
    assert metrics["transferqueue/ready_groups"] == scene.port.call(Ledger.status).ready == 1
    assert (metrics["transferqueue/late_groups"], metrics["transferqueue/put_latency"]) == (2, 1.5)
