"""Mode streaming in one process: real producer, ledger, spool and codec, against a scripted engine over HTTP."""

from __future__ import annotations

import contextlib
import sqlite3

from tests.helpers.ledger_cases import Clock
from tests.helpers.rollout_setup import make_args, write_jsonl
from vime.handoff.group_store import GroupStore
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_port import LocalLedgerPort
from vime.handoff.ledger_rounds import RoundDesk
from vime.handoff.ledger_types import LedgerRules, RoundOrder
from vime.handoff.memory import MemoryRows
from vime.handoff.payload import bytes_to_rows, rows_to_bytes
from vime.handoff.receipts import ReceiptBook, stepped_groups
from vime.handoff.spool import SEGMENT_BYTES, Spool
from vime.rollout.convert import to_train_groups
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.portions import Portions
from vime.rollout.producer import GroupProducer
from vime.rollout.read_ahead import ReadAhead
from vime.rollout.transferqueue_rollout import TransferQueueDataSource, generate_rollout
from vime.types import RoundPlan, StepPlan

LETTER = {letter: number for number, letter in enumerate("abcdefghij", start=5)}


class Streaming:
    """What the RolloutManager owns in mode streaming, and the driver's calls to the ledger."""

    def __init__(
        self, directory, engine, model_dir, *flags, rounds=3, staleness=0, is_durable=True, starts=True,
        segment_bytes=SEGMENT_BYTES, round_order=RoundOrder.INDEX, **rules,
    ):  # fmt: skip
        """`starts` False: the producer is started by the test."""
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
        self.port, self.rows = LocalLedgerPort(self._ledger), MemoryRows()
        spool = Spool(directory / "spool", segment_bytes=segment_bytes) if is_durable else None
        self.spool = spool
        self.receipts = ReceiptBook(directory, start_round=0, link=None)
        self.store = GroupStore(self.rows, spool, partition="train")
        has_payload = spool.has if spool is not None else lambda *_: False
        self.report = self._ledger.rounds.restore(None, has_payload)
        prompts = RolloutDataSourceWithBuffer(self.args)
        self.producer = GroupProducer(self.args, source=prompts, ledger=self.port, store=self.store)
        self.ahead = ReadAhead(self.port, self.store, limit=self.args.transferqueue_prefetch_groups)
        self.source = TransferQueueDataSource(
            self.args, prompts=prompts, ledger=self.port, store=self.store, producer=self.producer, ahead=self.ahead,
            portions=Portions(minimum=self.args.train_early_groups),
        )  # fmt: skip

    def __enter__(self):
        if self._starts:
            self.producer.start()
        return self

    def __exit__(self, *_):
        self.producer.stop()
        self.ahead.close()
        self.store.close()
        self._ledger.close()
        self.receipts.close()

    def status(self):
        """Asked through the port like every call: the producer's thread calls the ledger too, and two threads on its
        connection can wait for each other for ever (SQLite calls Python for the checksum of a row)."""
        return self.port.call(Ledger.status)

    def look(self, sql, *values):
        """What stands in the ledger's file, read by a connection of its own."""
        with contextlib.closing(sqlite3.connect(self._file)) as connection:
            return connection.execute(sql, values).fetchall()

    def lease(self, round_id):
        self.leased = generate_rollout(self.args, round_id, self.source)
        return self.leased

    def train(self, round_id):
        """The optimizer steps on the round as one rank gets it, and the engines confirm what it made."""
        groups = to_train_groups(self.args, self.leased.samples, round_id)
        rows = dict(enumerate(bytes_to_rows(rows_to_bytes([row for group in groups for row in group.rows]))))
        step = StepPlan(micro_batches=((tuple(rows),),), num_samples=len(rows), num_tokens=1)
        stepped = stepped_groups(RoundPlan(rollout_id=round_id, steps=(step,)), rows, 0)
        receipt = self.receipts.note(round_id, round_id, stepped)
        self.port.call(RoundDesk.trained, round_id, self.source.lease.fence, receipt)
        self.port.call(RoundDesk.release, round_id + 1)

    def play(self, round_id):
        output = self.lease(round_id)
        self.train(round_id)
        return output


def groups_of(output):
    return [group[0].group_index for group in output.samples]


def wait_until(run, is_so):
    """Return when it is so; the ledger's news and the test's own deadline bound it."""
    seen = -1
    while not is_so():
        run.producer.raise_if_failed()
        seen = run.port.wait_for_news(seen, 0.05)
