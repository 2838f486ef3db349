"""Every transferqueue/* and rollout/* number of mode streaming, read back from a history that is known to the last put.

Real worker, coordinator, ledger, spool and conversion; answers come from a table, and reads and writes of the queue
take as long as the test says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import known_history
from tests.helpers.known_history import Answer, History
from tests.helpers.ledger_cases import Clock
from tests.helpers.metrics_page import undocumented
from tests.helpers.rollout_setup import make_args, write_jsonl, write_model_directory
from vime.handoff.group_store import GroupStore, MemoryStore
from vime.handoff.ledger import Ledger, LedgerStatus, LocalLedgerPort
from vime.handoff.ledger_types import LedgerRules, StalePolicy
from vime.handoff.round_ledger import RoundLedger
from vime.handoff.spool import Spool
from vime.handoff.ticket import check_staleness, staleness_metrics
from vime.rollout import coordinator as coordinator_module
from vime.rollout import group_writer
from vime.rollout.convert import group_rows
from vime.rollout.coordinator import RoundCoordinator, TakenRound
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.worker import RolloutWorker
from vime.types import SampleStatus

# Rounds of two groups of two samples, staleness 1: four slots.
ANSWERS = {
    0: [Answer(versions=[0, 0], rewards=[1.0, 0.0])],
    1: [Answer(versions=[0], rewards=[1.0, 1.0])],  # equal rewards: the filter drops it
    2: [
        Answer(versions=[], rewards=[], status=SampleStatus.ABORTED),
        Answer(versions=[0, 0, 0, 0], rewards=[0.0, 1.0], status=SampleStatus.TRUNCATED),
    ],
    3: [Answer(versions=[0, 0], rewards=[0.0, 1.0])],
    4: [Answer(versions=[0, 1], rewards=[1.0, 0.0])],  # the weights moved under it
    5: [Answer(versions=[1], rewards=[1.0, 0.0])],
    6: [Answer(versions=[0], rewards=[1.0, 0.0])],  # so slow that nobody may train it
    7: [Answer(versions=[2, 2, 2], rewards=[1.0, 0.0])],
}
PUT_S = {0: 1.0, 2: 2.0, 3: 6.0, 4: 0.5, 5: 1.5, 6: 3.0, 7: 5.0}
GET_S = 0.25


class TimedStore(MemoryStore):
    """Each put takes PUT_S of its group."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Any]:
        [key] = keys  # "train/3#1.0"
        self._clock.time += PUT_S[int(key.partition("/")[2].partition("#")[0])]
        return super().put(partition, keys, chunks)


class TimedWorker(RolloutWorker):
    """Each question whose payload lies where takes so long that a round's two groups take GET_S."""

    clock: Clock

    def is_ours(self, producer: str) -> bool:
        self.clock.time += GET_S / 2
        return super().is_ours(producer)


class FakeTime:
    """In the place of the module `time`."""

    def __init__(self, clock: Clock) -> None:
        self.monotonic: Callable[[], float] = clock


class Run:
    """What the RolloutManager owns, and what the driver would say to the ledger."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        data = write_jsonl(directory / "prompts.jsonl", [{"input": letter, "label": letter} for letter in "abcdefghi"])
        self.args = make_args(
            "--hf-checkpoint", write_model_directory(directory / "model"), "--prompt-data", data,
            "--label-key", "label", "--rm-type", "exact_match", "--rollout-batch-size", 2,
            "--over-sampling-batch-size", 4, "--n-samples-per-prompt", 2, "--rollout-timeout-secs", 30,
            "--transferqueue-mode", "streaming", "--max-staleness", 1,
            "--dynamic-sampling-filter-path", "vime.rollout.filter_hub.check_reward_nonzero_std",
            "--custom-generate-function-path", "tests.helpers.known_history.generate",
        )  # fmt: skip
        rules = LedgerRules(max_slots=4, max_staleness=1, lease_timeout_s=60.0, stale_policy=StalePolicy.RETRY)
        self._ledger = Ledger(directory / "ledger.db", rules, clock=Clock())
        self.port, self.spool = LocalLedgerPort(self._ledger), directory / "spool"
        self.store = GroupStore(TimedStore(clock), Spool(self.spool), partition="train")
        prompts = RolloutDataSourceWithBuffer(self.args)
        self.worker = TimedWorker(self.args, source=prompts, ledger=self.port, store=self.store)
        self.worker.clock = clock
        self.coordinator = RoundCoordinator(self.args, ledger=self.port, workers=self.worker)
        self.taken: TakenRound

    def let_go(self, *groups: int, ready: int, in_flight: int) -> None:
        """Let these groups be answered, and wait until the ledger stands as it must then."""
        known_history.HISTORY.let_go(*groups)
        seen = -1
        while not ((status := self.status()).ready == ready and sum(status.producers.values()) == in_flight):
            self.worker.raise_if_failed()
            seen = self.port.wait_for_news(seen, 0.05)
        while self.worker.num_running != in_flight:  # a group counts in the statistics a moment after it is committed
            self.worker.raise_if_failed()
            time.sleep(0.001)

    def status(self) -> LedgerStatus:
        """Through the port, as in tests/helpers/streaming.py."""
        status: LedgerStatus = self.port.call(Ledger.status)
        return status

    def close(self) -> None:
        self.worker.close()
        self._ledger.close()

    def lease(self, round_id: int) -> dict[str, float]:
        """The metrics of the round, with those that trainer ranks would add."""
        self.coordinator.begin(round_id)
        self.taken = self.coordinator.take(2)
        metrics = self.coordinator.metrics(self.taken)
        samples = self.coordinator.samples(self.taken.groups)
        rows = [row for group in samples for row in group_rows(self.args, group)]
        return {**metrics, **staleness_metrics(check_staleness(rows, version=round_id, max_staleness=1))}

    def train(self, round_id: int) -> None:
        self.port.call(RoundLedger.trained, round_id, self.taken.lease.fence)
        self.port.call(RoundLedger.release, round_id + 1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    clock = Clock()
    monkeypatch.setattr(known_history, "HISTORY", History(answers=ANSWERS))
    monkeypatch.setattr(group_writer, "time", FakeTime(clock))
    monkeypatch.setattr(group_writer, "LINGER_S", 0.0)  # one group a write
    monkeypatch.setattr(coordinator_module, "time", FakeTime(clock))
    run = Run(tmp_path, clock)
    run.worker.start()
    yield run
    run.close()


def queue_metrics(metrics: dict[str, float]) -> dict[str, float]:
    prefix = "transferqueue/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def test_a_known_history_is_told_number_by_number(run: Run) -> None:
    run.let_go(0, ready=1, in_flight=3)
    run.let_go(1, ready=1, in_flight=3)  # dropped; its slot went to group 4
    run.let_go(2, ready=2, in_flight=2)  # aborted, asked again, answered
    run.let_go(3, ready=3, in_flight=1)  # group 4 alone
    metrics = run.lease(0)  # groups 0 and 2, ready first
    assert queue_metrics(metrics) == {
        "ready_groups": 1,  # group 3
        "inflight_groups": 1,  # group 4
        "retry_groups": 0,  # group 2 was asked again
        "dropped_groups": 1,  # group 1
        "stale_dropped_groups": 0,
        "late_groups": 0,
        "put_latency": 3.0,  # groups 0, 2, 3: (1 + 2 + 6) / 3
        "get_latency": 0.25,
        "producer_lag": 0.0,
        "sample_staleness/mean": 0.0,
        "sample_staleness/max": 0.0,
        "spool_bytes": sum(path.stat().st_size for path in run.spool.glob("*.vsp")),
    }
    expected = {
        "reward_mean": 0.5,  # 1, 0, 0, 1
        "reward_std": 0.5,
        "reward_mean_before_filter": 0.625,  # groups 0 to 3: (1 + 0) + (1 + 1) + (0 + 1) + (0 + 1) = 5 of 8
        "response_len_mean": 3.0,  # 2, 2, 4, 4
        "response_len_p50": 2.0,
        "response_len_p95": 4.0,
        "response_len_max": 4.0,
        "truncated_ratio": 0.5,  # group 2
        "num_samples": 4,
        "num_tokens": 12,
        "num_groups": 2,
        "removed_samples": 0,
        "dropped_groups": 1,
        "dropped_zero_std_1": 1,
        "version_oldest": 0,
        "version_newest": 0,
    }
    assert metrics.items() >= {f"rollout/{name}": value for name, value in expected.items()}.items()

    run.train(0)  # two slots: groups 5 and 6
    run.let_go(4, ready=2, in_flight=2)
    run.let_go(5, ready=3, in_flight=1)  # group 6 alone
    metrics = run.lease(1)  # groups 3 (version 0) and 4 (versions 0 and 1), on weights 1
    told = queue_metrics(metrics)
    assert (told["ready_groups"], told["inflight_groups"], told["dropped_groups"]) == (1, 1, 0)
    assert told["put_latency"] == 1.0  # groups 4 and 5: (0.5 + 1.5) / 2
    assert told["producer_lag"] == 0.5  # newest tokens: 0, 0, 1, 1 on weights 1
    assert (told["sample_staleness/mean"], told["sample_staleness/max"]) == (1.0, 1.0)  # oldest tokens: all 0
    assert (metrics["rollout/version_oldest"], metrics["rollout/version_newest"]) == (0, 1)

    run.train(1)  # two slots: groups 7 and 8
    run.let_go(6, ready=2, in_flight=2)
    run.let_go(7, ready=3, in_flight=1)
    run.worker.stop()  # or it would ask for the group that is sent back at once
    metrics = run.lease(2)  # group 5; group 6, of version 0, is 2 behind and sent back; group 7
    told = queue_metrics(metrics)
    assert (told["ready_groups"], told["inflight_groups"]) == (0, 1)  # group 8
    assert (told["stale_dropped_groups"], told["retry_groups"], told["dropped_groups"]) == (1, 1, 0)
    assert told["put_latency"] == 4.0  # groups 6 and 7: (3 + 5) / 2
    assert told["producer_lag"] == 0.5  # 2 - 1 twice, 2 - 2 twice
    assert (told["sample_staleness/mean"], told["sample_staleness/max"]) == (0.5, 1.0)

    assert queue_metrics(run.lease(2))["stale_dropped_groups"] == 0  # counted once
    assert undocumented(metrics) == []
