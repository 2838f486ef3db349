"""RolloutManager: the Ray actor that owns prompts, generation, rewards and the transfer of rows to training."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import ray
from numpy.typing import NDArray

from vime.batching.flops import RoundWork
from vime.config.deadlines import rollout_deadline_s
from vime.config.parse import Args, Config
from vime.config.queue_checks import BUFFER
from vime.data.rows import GroupFacts, TrainRow, check_versions, trained_tokens
from vime.gateway.messages import SAMPLE_FAILED
from vime.handoff.group_store import Handle, PayloadStore, StoredGroup, groups_partition, round_partition
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import RoundLease
from vime.handoff.ticket import RoundTicket, make_ticket, read_some
from vime.observability.events import open_events, span
from vime.observability.logs import setup_logging
from vime.observability.samples import RoundGroup
from vime.protocols import DataSource, RolloutFunction, calling_plugin
from vime.ray.checkpoint import LEDGER_RUN
from vime.ray.cluster import data_parallel_size, has_worker_processes, limit_threads, yield_to_trainers
from vime.ray.ledger_actor import LedgerClient
from vime.ray.stores import (
    compact_other_spools,
    connect_store,
    group_store,
    queue_filled,
    replace_queue,
    round_store,
)
from vime.rollout import sample_recorder  # by its module: Ray copies what an actor's class names itself
from vime.rollout.convert import encoded_group, set_custom_rewards
from vime.rollout.coordinator import RoundCoordinator, TakenGroup, Workers
from vime.rollout.early_batches import EarlyBatches
from vime.rollout.evaluate import eval_data_sets, eval_groups, judged, mark_failed
from vime.rollout.generation import use_engine_key
from vime.rollout.metrics import sample_metrics
from vime.rollout.plugins import load_data_source, load_rollout_function
from vime.rollout.record import load_rollout, save_rollout, save_samples
from vime.rollout.reward_errors import mark
from vime.rollout.sample_rows import by_sample
from vime.rollout.vllm_rollout import close_generation, generation_progress
from vime.rollout.worker import PromptsByNumber, RolloutWorker
from vime.types import (
    ConfigError,
    EngineReport,
    PendingText,
    PluginError,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    Sample,
    Version,
)
from vime.utils.failpoints import Point, failpoint
from vime.utils.heap import collect_garbage, collect_when_asked

if TYPE_CHECKING:
    from vime.handoff.queue_client import QueueAddress
    from vime.ray.planning import PlannedRound

logger = logging.getLogger(__name__)
NUM_PROBES = 4
PROCESS = "rollout-manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerInfo:
    """What the driver learns when the data source is ready."""

    num_prompts: int
    num_too_long: int = 0  # prompts that were left out


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRound:
    """One round whose rows are stored: the ticket to read them with, and its facts."""

    rollout_id: int
    ticket: RoundTicket | None  # None when nothing is trained
    metrics: dict[str, float]
    probe: tuple[TrainRow, ...] = ()  # a few rows, where tokens may be older than the weights that train them
    work: RoundWork | None = None  # None when nothing is trained
    cursor: dict[str, object] = field(default_factory=dict)  # state of the data source after this round was drawn
    lease: RoundLease | None = None  # mode streaming: assigns these groups to this round
    num_begun: int = 0  # early batches that the trainers have already; the ticket holds the other groups


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRound:
    """The groups of a round before planning, in every mode: facts of each group and the handles of its chunks."""

    groups: Sequence[tuple[GroupFacts, Sequence[Handle]]]
    partition: str
    metrics: Mapping[str, float]
    generated_s: float  # until its last group was there; not what it took to encode and store the round
    cursor: dict[str, object]
    to_be_read: Sequence[RoundGroup]  # for `vime samples`
    lease: RoundLease | None = None
    begun: Sequence[PlannedRound] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """A sample as text: independent of the token ids that training gets."""

    prompt: str | None  # None for a list of chat messages
    response: str
    images: Mapping[str, object] | None = None  # `Sample.multimodal_inputs`


MakeText = Callable[[], SampleText]
MAX_CALLS = 6  # at a time in the RolloutManager; of them two bring a queue, of which the first may have died


class RolloutManager:
    """Prompt -> scored group -> ticket. One round at a time; `progress` and `clear` may be asked meanwhile."""

    def __init__(self, config: Config, run_dir: str, queue_address: QueueAddress | None) -> None:
        limit_threads(config)
        yield_to_trainers(config)
        self._config, self._run_dir = config, Path(run_dir)
        setup_logging(self._run_dir, PROCESS)
        self._events = open_events(self._run_dir, PROCESS)
        sample_recorder.RECORDER.open(self._run_dir, max_bytes=config.tracking.keep_samples_mib << 20)
        self._queue_address, self._engine_key = queue_address, ""
        self._texts: dict[int, dict[int, MakeText]] = {}  # round -> sample index; of the last rounds only
        self._taken: dict[int, Sequence[TakenGroup]] = {}  # mode streaming, whose samples lie elsewhere: the same
        self._source: DataSource | None = None  # a run that replays recorded rounds has none
        self._coordinator: RoundCoordinator | None = None  # mode streaming
        self._early_lock = threading.Lock()  # of `_begun`, held until a claimed early batch has its ticket
        self._begun: list[PlannedRound] = []  # early batches of the round in hand

    def prepare(self, resumed: dict[str, object] | None = None) -> ManagerInfo:
        """Load plug-ins and prompts, and report everything that is wrong with them before the wait for engines.
        `resumed`: the data cursor of the checkpoint that the run continues from."""
        args = self._config.flat
        self._generate = load_rollout_function(args)
        self._store: PayloadStore = connect_store(self._config, self._queue_address)
        self._rounds = round_store(self._config, self._store)
        from vime.ray.planning import RoundPlanner  # brings torch, which the driver can do without

        self._planner = RoundPlanner(self._config)
        eval_data_sets(args)
        if self._config.debug.load_debug_rollout_data:
            collect_when_asked()
            return ManagerInfo(num_prompts=0)
        self._source = load_data_source(args)
        if self._config.queue.has_ledger and not hasattr(self._source, "group_at"):
            raise ConfigError(
                f"--data-source-path {args.data_source_path}: {type(self._source).__name__} has no group_at(index). In "
                "mode streaming a prompt may be generated again after a restart, so a data source must know every "
                "group by its number. Add the method, or use mode buffer."
            )
        if resumed is not None and hasattr(self._source, "recognise"):
            self._source.recognise(resumed)
        too_long = int(getattr(self._source, "num_too_long", 0))
        collect_when_asked()
        return ManagerInfo(num_prompts=len(self._source), num_too_long=too_long)

    def node(self) -> str:
        """The node of this process, as Ray names it."""
        return str(ray.get_runtime_context().get_node_id())

    def connect(self, config: Config, engine_key: str) -> None:
        """Take the configuration that knows the router's address, and what its engines ask for."""
        self._config = config
        use_engine_key(engine_key)
        self._engine_key = engine_key

    def open_stream(self, ledger: LedgerClient) -> None:
        """Mode streaming: connect to the ledger and the spool. Called after `connect`."""
        self._ledger = ledger
        args = self._config.flat
        workers: Workers
        if has_worker_processes(self._config):
            from vime.ray.workers import RemoteWorkers

            workers = RemoteWorkers(
                self._config,
                self._run_dir,
                self._queue_address,
                ledger,
                engine_key=self._engine_key,
                events=self._events,
            )
        else:
            store = group_store(self._config, self._run_dir, self._store)
            workers = RolloutWorker(args, source=cast("PromptsByNumber", self._source), ledger=ledger, store=store)
        self._coordinator = RoundCoordinator(
            args,
            ledger=ledger,
            workers=workers,
            early_batches=EarlyBatches(
                minimum=self._config.queue.train_early_groups, row_multiple=data_parallel_size(self._config)
            ),
        )

    def produce(self, is_on: bool) -> None:
        """Begin to generate, because the engines serve now; the trainers do not stop it. Or end it; with
        --partial-rollout completions in flight are kept, if the engines still respond."""
        assert self._coordinator is not None
        if is_on:
            self._coordinator.workers.start()
        else:
            self._coordinator.workers.stop()

    def serve_to_jobs(self, version: Version) -> EngineReport:
        """Mode external: offer a version, whose files are written, to the jobs outside."""
        from vime.ray.workers import RemoteWorkers

        assert self._coordinator is not None
        assert isinstance(self._coordinator.workers, RemoteWorkers), "mode external has them"
        return self._coordinator.workers.serve_to_jobs(version)

    def replace_queue(self, address: QueueAddress) -> None:
        """Mode streaming: store in another queue from now on, and put there what trainers have still to read. Reads
        wait meanwhile."""
        from vime.ray.workers import RemoteWorkers

        assert self._coordinator is not None
        workers = self._coordinator.workers
        replace_queue(self._store, address, is_filled=False)  # also that of a worker in this process
        if isinstance(workers, RemoteWorkers):
            workers.replace_queue(address)
        # what is committed from here on was put into the new queue, or is in the memory of its worker
        unread = self._ledger.call(Ledger.unread_payloads)
        found = set(workers.put_again(unread))
        left = [StoredGroup(task, crc) for task, crc in unread.items() if crc is not None and task not in found]
        if left:
            workers.restore(left)
        queue_filled(self._store, address)
        logger.info("another queue: %d groups put from memory, %d from the spool", len(found), len(left))

    def compact(self) -> int:
        """Drop from the spool what no restart can need. Returns the bytes freed."""
        assert self._coordinator is not None
        needed = self._ledger.call(Ledger.needed_payloads)
        freed = self._coordinator.workers.compact(needed)
        return freed + compact_other_spools(self._config, self._run_dir, needed)

    def load_state(self, state: dict[str, object]) -> None:
        """Continue where a checkpoint's `GeneratedRound.cursor` points."""
        if self._source is not None:
            self._source.load(state)

    def generate(self, rollout_id: int) -> GeneratedRound:
        """Produce one round: generate (or replay, or lease) its groups, plan it, and return where its rows lie."""
        collect_garbage()
        found = self._lease(rollout_id) if self._coordinator is not None else self._generate_round(rollout_id)
        metrics = {**found.metrics, "perf/rollout_time": found.generated_s}
        sample_recorder.RECORDER.write_round(rollout_id, found.to_be_read)
        if self._config.debug.debug_rollout_only:
            return GeneratedRound(rollout_id=rollout_id, ticket=None, metrics=metrics)
        rows = np.concatenate([facts.rows for facts, _ in found.groups])
        planned = self._plan(rollout_id, rows, found.begun)
        ticket = make_ticket(planned.plan, found.groups, partition=found.partition)
        failpoint(Point.STORED)
        return GeneratedRound(
            rollout_id=rollout_id,
            ticket=ticket,
            metrics=metrics | planned.metrics,
            work=planned.work,
            probe=self._probe(ticket, planned),
            lease=found.lease,
            cursor=found.cursor,
            num_begun=len(found.begun),
        )

    def _generate_round(self, rollout_id: int) -> FoundRound:
        """Encode and store the samples of a rollout function, or of a record (modes off and buffer)."""
        config, args, began = self._config, self._config.flat, time.monotonic()
        with span("generate_round", rollout_id=rollout_id):
            output = _samples(config, self._generate, self._source, rollout_id)
        generated_s = time.monotonic() - began
        # which prompts were drawn up to this round
        cursor: dict[str, object] = {} if self._source is None else self._source.save(rollout_id)
        with span("convert_round", rollout_id=rollout_id):
            place = round_partition(config.queue.transferqueue_partition, rollout_id)
            groups = [
                encoded_group(args, samples, partition_id=place, producer_id=PROCESS) for samples in output.samples
            ]
            facts = [group.facts for group in groups]
            set_custom_rewards(args, facts, lambda: output.samples)
        if not (config.debug.debug_rollout_only or config.debug.load_debug_rollout_data):
            check_versions(facts, rollout_id, config.queue.transferqueue_max_staleness)
        if config.agreement.on_train_rollout_diff != "ignore":  # else nobody asks for them
            self._texts[rollout_id] = _texts(output.samples)
        self._texts.pop(rollout_id - 2, None)  # one round trains while the next is generated
        metrics, partition = dict(output.metrics), ""
        handles: list[list[Handle]] = [[] for _ in groups]
        if not config.debug.debug_rollout_only:
            began = time.monotonic()
            with span("transferqueue_put_group", rollout_id=rollout_id, num_groups=len(groups)):
                partition, handles = self._rounds.put(rollout_id, groups)
            if config.queue.transferqueue_mode == BUFFER:
                metrics["transferqueue/put_latency"] = (time.monotonic() - began) / len(groups)
        return FoundRound(
            groups=list(zip(facts, handles, strict=True)),
            partition=partition,
            metrics=metrics,
            generated_s=generated_s,
            cursor=cursor,
            to_be_read=[RoundGroup.of(samples) for samples in output.samples],
        )

    def _lease(self, rollout_id: int) -> FoundRound:
        """Lease the next finished groups, whose rows lie in the queue already (mode streaming)."""
        config, coordinator, began = self._config, self._coordinator, time.monotonic()
        assert coordinator is not None
        assert self._source is not None
        with span("generate_round", rollout_id=rollout_id):
            coordinator.begin(rollout_id)
            taken = coordinator.take(config.rollout.rollout_batch_size)
        generated_s = time.monotonic() - began
        with self._early_lock:
            begun, self._begun = self._begun, []
        self._keep_taken(rollout_id, taken.groups)
        if config.debug.save_debug_rollout_data:
            path = Path(config.debug.save_debug_rollout_data.format(rollout_id=rollout_id))
            save_rollout(
                path,
                coordinator.samples(taken.groups),
                partition_id=groups_partition(config.queue.transferqueue_partition),
                producer_ids=[group.facts.notes.producer for group in taken.groups],
            )
        return FoundRound(
            groups=[(group.facts, group.handles) for group in taken.left],
            partition=groups_partition(config.queue.transferqueue_partition),
            metrics=coordinator.metrics(taken),
            generated_s=generated_s,
            # the prompts' own state, to recognise them; where the queue stands is in the ledger
            cursor={**self._source.save(rollout_id), LEDGER_RUN: str(self._run_dir)},
            to_be_read=[_to_be_read(coordinator, group) for group in taken.groups],
            lease=taken.lease,
            begun=begun if taken.begun else [],
        )

    def _plan(self, rollout_id: int, rows: NDArray[np.void], begun: Sequence[PlannedRound] = ()) -> PlannedRound:
        failpoint(Point.CONVERT)
        with span("plan_round", rollout_id=rollout_id):
            planned = self._planner.plan(rollout_id, rows, begun)
        failpoint(Point.PUT)
        return planned

    def _probe(self, ticket: RoundTicket, planned: PlannedRound) -> tuple[TrainRow, ...]:
        """A few trained rows, where tokens may be older than the weights that train them."""
        if self._config.queue.transferqueue_max_staleness == 0:
            return ()
        trained = np.flatnonzero(trained_tokens(planned.rows)).tolist()
        numbers = trained[:: max(1, len(trained) // NUM_PROBES)][:NUM_PROBES]
        return tuple(read_some(self._store, ticket, numbers).values())

    def early_batch(self, rollout_id: int) -> RoundTicket | None:
        """Return a ticket of finished groups of the round that `generate` waits for in another thread, for the trainers
        to begin with. None when the round is whole or failed: `generate` reports which."""
        coordinator = self._coordinator
        assert coordinator is not None
        while coordinator.early_batches.wait(rollout_id, rollout_deadline_s(self._config)):
            with self._early_lock:
                claimed = coordinator.claim_early_batch()
                if not claimed:
                    continue
                rows = np.concatenate([group.facts.rows for group in claimed])
                planned = self._planner.plan(rollout_id, rows, is_early_batch=True)
                self._begun.append(planned)
                partition = groups_partition(self._config.queue.transferqueue_partition)
                found = [(group.facts, group.handles) for group in claimed]
                return make_ticket(planned.plan, found, partition=partition)
        return None

    def _keep_taken(self, rollout_id: int, groups: Sequence[TakenGroup]) -> None:
        """Of the last rounds only: one trains while the next is generated, and its texts may be asked for."""
        assert self._coordinator is not None
        self._taken[rollout_id] = groups
        for old in [known for known in self._taken if known <= rollout_id - 2]:
            self._coordinator.workers.release([group.task for group in self._taken.pop(old)])

    def clear(self, ticket: RoundTicket) -> None:
        """Remove this round or early batch from the queue, which frees capacity: every rank has read it. In mode
        streaming the spool keeps it until a checkpoint contains the round."""
        if self._coordinator is None:
            self._rounds.clear(ticket.partition)
        else:
            self._store.clear(ticket.partition, ticket.handles)

    def texts_of(self, rollout_id: int, indices: list[int]) -> list[SampleText | None]:
        """Return the text of the samples of a recent round; None for one that is not there any more."""
        texts = self._texts.get(rollout_id, {})
        if self._coordinator is not None:
            wanted = set(indices)
            groups = [
                group
                for group in self._taken.get(rollout_id, ())
                if not wanted.isdisjoint(group.facts.rows["sample_index"].tolist())
            ]
            texts = _texts(self._coordinator.samples(groups))
        return [texts[index]() if index in texts else None for index in indices]

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate with the serving weights; the samples go to RUN_DIR/eval."""
        if not self._config.cluster.num_engines:
            output = self._evaluated_outside(rollout_id)
        else:
            output = self._evaluated_here(rollout_id)
        for name, samples in output.data.items():
            save_samples(self._run_dir / "eval" / f"{name}_{rollout_id}.jsonl", samples)
        return dict(output.metrics)

    def _evaluated_outside(self, rollout_id: int) -> RolloutFnEvalOutput:
        """Mode external without engines. Waits for: jobs outside."""
        from vime.ray.workers import RemoteWorkers

        assert self._coordinator is not None
        assert isinstance(self._coordinator.workers, RemoteWorkers)
        began = time.monotonic()
        results = self._coordinator.workers.evaluate(rollout_id)
        data: dict[str, list[Sample]] = {}
        metrics: dict[str, float] = {}
        for one, prompts in eval_data_sets(self._config.flat):
            groups = eval_groups(one, prompts, rollout_id)
            for number, prompted in enumerate(groups):
                result = results[one.name, number]
                if isinstance(result, str) and result.startswith(SAMPLE_FAILED):
                    mark_failed(prompted, result.removeprefix(SAMPLE_FAILED))
                elif isinstance(result, str):
                    mark(prompted, result)
                else:
                    groups[number] = result
            data[one.name], of_set = judged(one, prompts, groups, time.monotonic() - began)
            metrics |= of_set
        return RolloutFnEvalOutput(data=data, metrics=metrics)

    def _evaluated_here(self, rollout_id: int) -> RolloutFnEvalOutput:
        source = cast("DataSource", self._source)  # an evaluation draws nothing from it
        output = self._generate(self._config.flat, rollout_id, source, evaluation=True)
        if not isinstance(output, RolloutFnEvalOutput):
            raise PluginError(
                f"--rollout-function-path {self._config.rollout.rollout_function_path}: returned "
                f"{type(output).__name__} for evaluation=True, expected RolloutFnEvalOutput."
            )
        return output

    def progress(self) -> str:
        """One line about the round in hand, for the screen."""
        return generation_progress()

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.workers.stop()
        close_generation()
        sample_recorder.RECORDER.close()
        if self._coordinator is not None:
            self._coordinator.workers.close()
            self._coordinator.close()
        self._store.close()


def _samples(
    config: Config, generate: RolloutFunction, source: DataSource | None, rollout_id: int
) -> RolloutFnTrainOutput:
    """A round as it is generated, or as it was recorded."""
    debug = config.debug
    if debug.load_debug_rollout_data:
        samples = load_rollout(Path(debug.load_debug_rollout_data.format(rollout_id=rollout_id)))
        return RolloutFnTrainOutput(samples=samples, metrics=_replay_metrics(config.flat, samples))
    assert source is not None, "prompts are loaded unless recorded rounds are replayed"
    path = config.rollout.rollout_function_path
    is_ours = path.startswith("vime.")  # an error that escapes from it is unforeseen, and the user cannot correct it
    with contextlib.nullcontext() if is_ours else calling_plugin(f"--rollout-function-path {path}", generate):
        output = generate(config.flat, rollout_id, source)
    if not isinstance(output, RolloutFnTrainOutput):
        raise PluginError(
            f"--rollout-function-path {path}: returned {type(output).__name__}, expected RolloutFnTrainOutput."
        )
    if debug.save_debug_rollout_data:
        save_rollout(
            Path(debug.save_debug_rollout_data.format(rollout_id=rollout_id)),
            output.samples,
            partition_id=round_partition(config.queue.transferqueue_partition, rollout_id),
            producer_ids=[PROCESS] * len(output.samples),
        )
    return output


def _texts(groups: list[list[Sample]]) -> dict[int, MakeText]:
    """Return what makes the text of each sample of one row: a row of several is not found by the sample's index."""
    rows = [of_one for group in groups for of_one in by_sample(group)]
    return {of_one[0].index: _make_text(of_one[0]) for of_one in rows if len(of_one) == 1}


def _make_text(sample: Sample) -> MakeText:
    """Return what makes the sample's text. A text that nobody has read stays token ids until then, 4 bytes each; the
    sample itself is not held."""
    # The prompt of a session's row is made of the messages of its agent, which may be other than its task's text.
    is_text = isinstance(sample.prompt, str) and "session_row" not in sample.metadata
    prompt = str(sample.prompt) if is_text else None
    pending, images = vars(sample).get("response"), sample.multimodal_inputs
    if not isinstance(pending, PendingText):
        return partial(SampleText, prompt=prompt, response=sample.response, images=images)
    tokens, decode = np.array(pending.tokens, dtype=np.int32), pending.decode
    return lambda: SampleText(prompt=prompt, response=decode(tokens.tolist()), images=images)


def _to_be_read(coordinator: RoundCoordinator, group: TakenGroup) -> RoundGroup:
    num_tokens = int(group.facts.rows["total_length"].sum())
    return RoundGroup(group_index=group.task.group, num_tokens=num_tokens, read=lambda: coordinator.samples([group])[0])


def _replay_metrics(args: Args, groups: list[list[Sample]]) -> dict[str, float]:
    return sample_metrics(args, [sample for group in groups for sample in group], "rollout")
