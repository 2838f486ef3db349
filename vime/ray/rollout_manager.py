"""RolloutManager: the Ray actor that owns prompts, generation, rewards and the hand-over to training."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from vime.batching.flops import RoundWork
from vime.config.parse import Config
from vime.config.queue_checks import BUFFER, STREAMING
from vime.handoff.group_store import GroupStore
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import RoundLease
from vime.observability.events import open_events, span
from vime.observability.logs import setup_logging
from vime.ray.carriers import connect_carrier, open_group_store
from vime.ray.checkpoint import LEDGER_RUN
from vime.ray.cluster import data_parallel_size, limit_threads, yield_to_trainers
from vime.ray.ledger_actor import LedgerClient
from vime.rollout import sample_book  # by its module: Ray copies what an actor's class names itself
from vime.rollout.evaluate import eval_data_sets
from vime.rollout.generation import use_engine_key
from vime.rollout.metrics import sample_metrics
from vime.rollout.plugins import load_data_source, load_rollout_function
from vime.rollout.portions import Portions
from vime.rollout.producer import GroupProducer
from vime.rollout.read_ahead import ReadAhead
from vime.rollout.record import load_rollout, save_rollout, save_samples
from vime.rollout.transferqueue_rollout import TransferQueueDataSource
from vime.rollout.vllm_rollout import close_generation, generation_progress
from vime.seams import calling_plugin
from vime.types import ConfigError, PluginError, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, TrainGroup, TrainRow
from vime.utils.failpoints import Point, failpoint
from vime.utils.heap import collect_garbage, collect_when_asked

if TYPE_CHECKING:
    from vime.ray.planning import PlannedRound

NUM_PROBES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerInfo:
    """What the driver learns when the data source stands."""

    num_prompts: int
    num_too_long: int = 0  # prompts that were left out


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRound:
    """One round, handed to the carrier: the ticket to fetch it with, and what it was like."""

    rollout_id: int
    ticket: Any
    metrics: dict[str, float]
    probe: tuple[TrainRow, ...] = ()  # a few rows, where tokens may be older than the weights that train them
    work: RoundWork | None = None  # None when nothing is trained
    cursor: dict[str, Any] = field(default_factory=dict)  # state of the data source after this round was drawn
    lease: RoundLease | None = None  # mode streaming: the ledger's word that these groups are this round's
    num_begun: int = 0  # portions that the trainers have already; the ticket holds the other groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """A sample as text: independent of the token ids that training gets."""

    prompt: str | None  # None for a list of chat messages
    response: str


@ray.remote(max_concurrency=4)
class RolloutManager:
    """Prompt -> scored group -> carrier. One round at a time; `progress` and `clear` may be asked meanwhile."""

    def __init__(self, config: Config, run_dir: str, queue_address: Any) -> None:
        limit_threads(config)
        yield_to_trainers(config)
        self._config, self._run_dir = config, Path(run_dir)
        setup_logging(self._run_dir, "rollout-manager")
        open_events(self._run_dir, "rollout-manager")
        sample_book.BOOK.open(self._run_dir, max_bytes=config.tracking.keep_samples_mib << 20)
        self._queue_address = queue_address
        self._texts: dict[int, dict[int, SampleText]] = {}  # round -> sample index; of the last rounds only
        self._source: Any = None  # a run that replays recorded rounds has none
        self._producer: GroupProducer | None = None  # mode streaming
        self._store: GroupStore | None = None
        self._portion_lock = threading.Lock()  # of `_begun`, held until a claimed portion lies in the queue
        self._begun: list[PlannedRound] = []  # portions of the round in hand

    def prepare(self, resumed: dict[str, Any] | None = None) -> ManagerInfo:
        """Load plug-ins and prompts; everything wrong with them is said here, before engines are waited for. `resumed`:
        the data cursor of the checkpoint that the run goes on from."""
        args = self._config.flat
        self._generate = load_rollout_function(args)
        self._carrier = connect_carrier(self._config, self._queue_address)
        from vime.ray.planning import RoundPlanner  # brings torch, which the driver can do without

        self._planner = RoundPlanner(self._config)
        eval_data_sets(args)
        if self._config.debug.load_debug_rollout_data:
            return ManagerInfo(num_prompts=0)
        self._source = load_data_source(args)
        if self._config.queue.transferqueue_mode == STREAMING and not hasattr(self._source, "group_at"):
            raise ConfigError(
                f"--data-source-path {args.data_source_path}: {type(self._source).__name__} has no group_at(index). In "
                "mode streaming a prompt may be answered again after a restart, so a data source must know every "
                "group by its number. Add the method, or use mode buffer."
            )
        if resumed is not None and hasattr(self._source, "recognise"):
            self._source.recognise(resumed)
        too_long = int(getattr(self._source, "num_too_long", 0))
        collect_when_asked()
        return ManagerInfo(num_prompts=len(self._source), num_too_long=too_long)

    def connect(self, config: Config, engine_key: str) -> None:
        """Take the configuration that knows the router's address, and what its engines ask for."""
        self._config = config
        use_engine_key(engine_key)

    def open_stream(self, ledger: LedgerClient) -> None:
        """Mode streaming: connect to the ledger, the queue and the spool. Called after `connect`."""
        self._ledger = ledger
        self._store = open_group_store(self._config, self._run_dir, self._queue_address)
        args = self._config.flat
        self._producer = GroupProducer(args, source=self._source, ledger=ledger, store=self._store)
        queue = self._config.queue
        self._ahead = ReadAhead(ledger, self._store, limit=queue.transferqueue_prefetch_groups)
        portions = Portions(minimum=queue.train_early_groups, row_multiple=data_parallel_size(self._config))
        self._source = TransferQueueDataSource(
            args,
            prompts=self._source,
            ledger=ledger,
            store=self._store,
            producer=self._producer,
            ahead=self._ahead,
            portions=portions,
        )

    def produce(self, is_on: bool) -> None:
        """The engines serve: answer prompts from now on, whatever the trainers do. Or answer none any more; with
        --partial-rollout what is under way is kept, if the engines still answer."""
        assert self._producer is not None
        if is_on:
            self._producer.start()
        else:
            self._producer.stop()

    def forget(self, lease: RoundLease) -> None:
        """The round's payloads need not be in the queue any more."""
        if hasattr(self._source, "ack_samples"):
            self._source.ack_samples(lease)

    def compact(self) -> int:
        """Drop from the spool what no restart can need; answers the bytes freed."""
        assert self._store is not None
        return self._store.compact(self._ledger.call(Ledger.needed_payloads))

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where a checkpoint's `GeneratedRound.cursor` points."""
        if not self._config.debug.load_debug_rollout_data:
            self._source.load(state)

    def generate(self, rollout_id: int) -> GeneratedRound:
        """Generate (or replay) one round, convert it, plan it, put it."""
        from vime.rollout.convert import to_train_groups  # brings torch, which the driver can do without

        collect_garbage()
        began = time.monotonic()
        with span("generate_round", rollout_id=rollout_id):
            output = _samples(self._config, self._generate, self._source, rollout_id)
        metrics = {**output.metrics, "perf/rollout_time": time.monotonic() - began}
        # which prompts were drawn up to this round; in mode streaming: where the ledger is that knows it
        cursor: dict[str, Any] = {} if self._source is None else self._source.save(rollout_id)
        if self._producer is not None:
            cursor |= {LEDGER_RUN: str(self._run_dir)}
        failpoint(Point.CONVERT)
        with self._portion_lock:
            begun, self._begun = self._begun, []
        left, num_begun = output.samples, 0
        if self._producer is not None and (done := self._source.begun_groups):
            left = [group for group in left if group[0].group_index not in done]
            num_begun = len(begun)
        with span("convert_round", rollout_id=rollout_id):
            groups = to_train_groups(self._config.flat, left, rollout_id)
        self._texts[rollout_id] = _texts(output.samples)
        self._texts.pop(rollout_id - 2, None)  # one round trains while the next is generated
        sample_book.BOOK.write_round(rollout_id, output.samples)
        if self._config.debug.debug_rollout_only:
            return GeneratedRound(rollout_id=rollout_id, ticket=None, metrics=metrics)
        with span("plan_round", rollout_id=rollout_id):
            rows = [row for group in groups for row in group.rows]
            planned = self._planner.plan(rollout_id, rows, begun[:num_begun])
        failpoint(Point.PUT)
        began = time.monotonic()
        with span("transferqueue_put_group", rollout_id=rollout_id, num_groups=len(groups)):
            ticket = self._carrier.put(planned.plan, groups)
        if self._config.queue.transferqueue_mode == BUFFER:  # mode streaming has put each group before
            metrics["transferqueue/put_latency"] = (time.monotonic() - began) / len(groups)
        failpoint(Point.STORED)
        lease = self._source.lease if self._producer is not None else None
        if lease is not None and self._config.queue.transferqueue_ack_on_train_data:
            self.forget(lease)
        may_be_stale = self._config.queue.transferqueue_max_staleness > 0
        return GeneratedRound(
            rollout_id=rollout_id,
            ticket=ticket,
            metrics=metrics | planned.metrics,
            work=planned.work,
            probe=_probe(groups) if may_be_stale else (),
            lease=lease,
            cursor=cursor,
            num_begun=num_begun,
        )

    def portion(self, rollout_id: int) -> Any:
        """Ticket of finished groups of the round that `generate` waits for beside this, for the trainers to begin with.
        None when the round is whole, or failed: `generate` says."""
        from vime.rollout.convert import to_train_groups

        while self._source.portions.wait(rollout_id, self._config.rollout.rollout_timeout_secs):
            with self._portion_lock:
                claimed = self._source.claim_portion()
                if not claimed:
                    continue
                groups = to_train_groups(self._config.flat, claimed, rollout_id)
                planned = self._planner.plan(
                    rollout_id, [row for group in groups for row in group.rows], is_portion=True
                )
                self._begun.append(planned)
                with span("transferqueue_put_group", rollout_id=rollout_id, num_groups=len(groups)):
                    return self._carrier.put(planned.plan, groups, portion=len(self._begun))
        return None

    def clear(self, ticket: Any) -> None:
        """Every rank has read this round or portion: it leaves the carrier, which makes room for the next."""
        self._carrier.clear(ticket)

    def texts_of(self, rollout_id: int, indices: list[int]) -> list[SampleText | None]:
        """What the samples of a recent round said as text; None for one that is not there any more."""
        texts = self._texts.get(rollout_id, {})
        return [texts.get(index) for index in indices]

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate with the serving weights; the samples go to RUN_DIR/eval."""
        output = self._generate(self._config.flat, rollout_id, self._source, evaluation=True)
        if not isinstance(output, RolloutFnEvalOutput):
            raise PluginError(
                f"--rollout-function-path {self._config.rollout.rollout_function_path}: answered "
                f"{type(output).__name__} to evaluation=True, expected RolloutFnEvalOutput."
            )
        for name, samples in output.data.items():
            save_samples(self._run_dir / "eval" / f"{name}_{rollout_id}.jsonl", samples)
        return dict(output.metrics)

    def progress(self) -> str:
        """One line about the round in hand, for the screen."""
        return generation_progress()

    def close(self) -> None:
        if self._producer is not None:
            self._producer.stop()
            self._ahead.close()
        close_generation()
        sample_book.BOOK.close()
        if self._store is not None:
            self._store.close()
        self._carrier.close()


def _samples(config: Config, generate: Any, source: Any, rollout_id: int) -> RolloutFnTrainOutput:
    """A round as it is generated, or as it was recorded."""
    debug = config.debug
    if debug.load_debug_rollout_data:
        samples = load_rollout(Path(debug.load_debug_rollout_data.format(rollout_id=rollout_id)))
        return RolloutFnTrainOutput(samples=samples, metrics=_replay_metrics(config.flat, samples))
    path = config.rollout.rollout_function_path
    is_ours = path.startswith("vime.")  # what it lets through nobody foresaw, and it is not the user's to correct
    with contextlib.nullcontext() if is_ours else calling_plugin(f"--rollout-function-path {path}", generate):
        output = generate(config.flat, rollout_id, source)
    if not isinstance(output, RolloutFnTrainOutput):
        raise PluginError(
            f"--rollout-function-path {path}: answered {type(output).__name__}, expected RolloutFnTrainOutput."
        )
    if debug.save_debug_rollout_data:
        save_rollout(Path(debug.save_debug_rollout_data.format(rollout_id=rollout_id)), output.samples)
    return output


def _texts(groups: list[list[Sample]]) -> dict[int, SampleText]:
    return {
        sample.index: SampleText(
            prompt=sample.prompt if isinstance(sample.prompt, str) else None, response=sample.response
        )
        for group in groups
        for sample in group
    }


def _probe(groups: list[TrainGroup]) -> tuple[TrainRow, ...]:
    """NUM_PROBES rows that train, spread over the round."""
    rows = [row for group in groups for row in group.rows if row.num_trainable]
    return tuple(rows[:: max(1, len(rows) // NUM_PROBES)][:NUM_PROBES])


def _replay_metrics(args: Any, groups: list[list[Sample]]) -> dict[str, float]:
    return sample_metrics(args, [sample for group in groups for sample in group], "rollout")
