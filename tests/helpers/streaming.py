"""Mode streaming in one process: real worker, coordinator, ledger and spool, against a scripted engine over HTTP."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests.helpers.ledger_cases import Clock
from tests.helpers.rollout_setup import make_args, write_jsonl
from vime.data.rows import trained_tokens
from vime.handoff.group_store import GroupStore, MemoryStore, groups_partition
from vime.handoff.ledger import Ledger, LocalLedgerPort
from vime.handoff.ledger_types import LedgerRules, RoundOrder
from vime.handoff.receipts import ReceiptFile, stepped_groups
from vime.handoff.round_ledger import RoundLedger
from vime.handoff.spool import SEGMENT_BYTES, Spool
from vime.handoff.ticket import make_ticket, read_rows
from vime.rollout.coordinator import RoundCoordinator, TakenGroup, TakenRound
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.early_batches import EarlyBatches
from vime.rollout.worker import RolloutWorker
from vime.types import RoundPlan, Sample, StepPlan

LETTER = {letter: number for number, letter in enumerate("abcdefghij", start=5)}


@dataclass(frozen=True)
class Leased:
    """A round as the RolloutManager has it. Its answers are read when a test asks, and only then."""

    taken: TakenRound
    metrics: Mapping[str, float]
    coordinator: RoundCoordinator

    @property
    def groups(self) -> Sequence[TakenGroup]:
        return self.taken.groups

    @cached_property
    def samples(self) -> list[list[Sample]]:
        return self.coordinator.samples(self.taken.groups)


class Streaming:
    """What the RolloutManager owns in mode streaming, and the driver's calls to the ledger."""

    def __init__(
        self, directory, engine, model_dir, *flags, rounds=3, staleness=0, is_durable=True, starts=True,
        segment_bytes=SEGMENT_BYTES, round_order=RoundOrder.INDEX, **rules,
    ):  # fmt: skip
        """`starts` False: the worker is started by the test."""
        self._starts = starts
        data = write_jsonl(directory / "prompts.jsonl", [{"input": letter, "label": letter} for letter in LETTER])
        self.args = make_args(
            "--hf-checkpoint", model_dir, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", engine.port,
            "--prompt-data", data, "--label-key", "label", "--rm-type", "exact_match", "--rollout-batch-size", 2,
            "--over-sampling-batch-size", 2, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 8,
            "--rollout-timeout-secs", 30, "--transferqueue-mode", "streaming", "--max-staleness", staleness, *flags,
        )  # fmt: skip
        self.clock, self._file = Clock(), directory / "ledger.db"
        bounds = LedgerRules(
            max_slots=2 * (staleness + 1), max_staleness=staleness, lease_timeout_s=10.0, round_order=round_order,
            num_rounds=rounds, groups_per_round=2, **rules,
        )  # fmt: skip
        self._ledger = Ledger(self._file, bounds, clock=self.clock)
        self.port, self.queue = LocalLedgerPort(self._ledger), MemoryStore()
        spool = Spool(directory / "spool", segment_bytes=segment_bytes) if is_durable else None
        self.spool = spool
        self.receipts = ReceiptFile(directory, start_round=0, link=None)
        self.store = GroupStore(self.queue, spool, partition="train")
        has_payload = spool.has if spool is not None else lambda *_: False
        self.report = self._ledger.rounds.restore(None, has_payload)
        prompts = RolloutDataSourceWithBuffer(self.args)
        self.worker = RolloutWorker(self.args, source=prompts, ledger=self.port, store=self.store)
        self.coordinator = RoundCoordinator(
            self.args,
            ledger=self.port,
            workers=self.worker,
            early_batches=EarlyBatches(minimum=self.args.train_early_groups),
        )

    def __enter__(self):
        if self._starts:
            self.worker.start()
        return self

    def __exit__(self, *_):
        self.worker.close()
        self.coordinator.close()
        self._ledger.close()
        self.receipts.close()

    def status(self):
        """Asked through the port like every call: the worker's thread calls the ledger too, and two threads on its
        connection can wait for each other for ever (SQLite calls Python for the checksum of a row)."""
        return self.port.call(Ledger.status)

    def lease_ends(self):
        """When the lease of each round in hand ends, on the ledger's clock."""
        return [holding.deadline for holding in list(self._ledger._store.memory.holdings.values())]

    def look(self, sql, *values):
        """What stands in the ledger's file, read by a connection of its own."""
        with contextlib.closing(sqlite3.connect(self._file)) as connection:
            return connection.execute(sql, values).fetchall()

    def lease(self, round_id):
        self.coordinator.begin(round_id)
        self.taken = self.coordinator.take(self.args.rollout_batch_size)
        return Leased(self.taken, self.coordinator.metrics(self.taken), self.coordinator)

    def read(self, round_id):
        """The round as the one rank of this run gets it: the ticket, the plan, and the rows by key."""
        rows = np.concatenate([group.facts.rows for group in self.taken.groups])
        trainable = int(trained_tokens(rows).sum())
        step = StepPlan(micro_batches=((tuple(range(len(rows))),),), num_samples=len(rows), num_tokens=trainable)
        ticket = make_ticket(
            RoundPlan(rollout_id=round_id, steps=(step,)),
            [(group.facts, group.handles) for group in self.taken.groups],
            partition=groups_partition("train"),
        )
        return (ticket, *read_rows(self.queue, ticket, 0))

    def train(self, round_id):
        """The optimizer steps on the round, its rows leave the queue, and the engines confirm what it made."""
        ticket, plan, rows = self.read(round_id)
        self.queue.clear(ticket.partition, ticket.handles)
        receipt = self.receipts.note(round_id, round_id, stepped_groups(plan, rows, 0))
        self.port.call(RoundLedger.trained, round_id, self.taken.lease.fence, receipt)
        self.port.call(RoundLedger.release, round_id + 1)

    def play(self, round_id):
        output = self.lease(round_id)
        self.train(round_id)
        return output


def groups_of(leased):
    return [group.task.group for group in leased.groups]


def attempts_of(leased):
    return {group.task.group: group.task.attempt for group in leased.groups}


def wait_until(run, is_so):
    """Return when it is so; the ledger's news and the test's own deadline bound it."""
    seen = -1
    while not is_so():
        run.worker.raise_if_failed()
        seen = run.port.wait_for_news(seen, 0.05)
