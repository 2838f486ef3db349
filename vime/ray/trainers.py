"""Trainer ranks: one Ray actor each, and the driver's handle on all of them.

A rank is a thin shell: it reads its rows by key, hands them to its worker and returns numbers. Every method that
reaches a collective is called on all ranks at once by `Trainers`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray import ObjectRef

from vime.config.deadlines import start_deadline_s, update_deadline_s
from vime.config.parse import Config
from vime.config.queue_checks import BUFFER
from vime.data.rows import TrainRow
from vime.handoff.receipts import add_up, stepped_groups
from vime.handoff.ticket import RoundTicket, check_staleness, fetch_round, staleness_metrics
from vime.observability.events import open_events, span
from vime.observability.logs import setup_logging
from vime.ray.actor import Options, sent_once, start_actor
from vime.ray.backends import make_backend
from vime.ray.checkpoint_damage import refuse_any_damage
from vime.ray.cluster import (
    TRAINER_CPUS,
    keep_collectives_on_interface,
    limit_threads,
    listen_host,
    num_trainer_ranks,
)
from vime.ray.placement import Places
from vime.ray.publisher import Publishing
from vime.ray.rank_rounds import RankRound, RoundToTrain, TrainedRound, merged_columns
from vime.ray.ranks_save import RanksSave
from vime.ray.stores import connect_store, replace_queue
from vime.ray.waits import Wait, all_results, wait_for
from vime.training.roles import needed_roles, shared_roles
from vime.types import EngineAddress, RankInfo, Role, RoundPlan, SamplingRule, Version, WaitTimeoutError
from vime.utils.device import visible_device
from vime.utils.failpoints import Point, failpoint
from vime.utils.heap import FreedMemory
from vime.utils.imports import without_collector
from vime.utils.manifest import Entry, compare_hashes, share_of
from vime.utils.network import kept_port
from vime.utils.waits import doing, waiting
from vime.weights.publish import PublishReport, Sent, joined

logger = logging.getLogger(__name__)

GRACE_S = 60.0  # beyond the weight update's own deadline, so that its more detailed error arrives first

STOP_S = 20.0

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from vime.handoff.group_store import PayloadStore
    from vime.handoff.queue_client import QueueAddress
    from vime.protocols import PendingSave
    from vime.training.columns import ArrayColumns, Columns
    from vime.training.early import BegunRound
    from vime.training.evidence import MeasuredMismatch
    from vime.training.worker import TrainWorker

GET_LATENCY = "transferqueue/get_latency"  # mode streaming: measured where groups are leased
PEAK_MEMORY = "perf/peak_memory"  # GiB, of the rank that held most

MAX_CALLS = 4  # at a time in a rank: a round, a checkpoint being written, another queue, and `close`


class TrainerActor:
    """One trainer rank, playing `roles`."""

    def __init__(
        self, config: Config, rank: int, run_dir: str, queue_address: QueueAddress | None, roles: tuple[Role, ...]
    ) -> None:
        limit_threads(config)
        keep_collectives_on_interface(config)
        name = f"{'trainer' if Role.ACTOR in roles else roles[0]}-{rank}"
        setup_logging(Path(run_dir), name)
        self._config, self._rank, self._run_dir, self._roles = config, rank, Path(run_dir), roles
        open_events(self._run_dir, name)
        self._store = connect_store(config, queue_address)
        self._worker: TrainWorker
        self._publishing = Publishing(config, self._run_dir, self._rank)
        self._pending_saves: list[PendingSave] = []
        self._saved = Path()  # where they go
        self._begun: BegunRound | None = None
        self._freed = FreedMemory()

    def start(self, world_size: int, master: tuple[str, int], total_steps: int) -> str:
        """Collective over all ranks; returns the device's name. The backend is imported here, so that processes start
        side by side."""
        with without_collector():
            from vime.training.device import device_name, make_deterministic
            from vime.training.worker import TrainWorker

        if self._config.debug.reference_mode:
            make_deterministic()
        gpus = ray.get_gpu_ids()
        rank = RankInfo(
            rank=self._rank,
            world_size=world_size,
            local_rank=visible_device(gpus) if gpus else self._rank,
            master_address=master[0],
            master_port=master[1],
        )
        with doing("building the models"):
            backend = make_backend(self._config, rank)
            self._worker = TrainWorker(self._config, backend, total_steps=total_steps, roles=self._roles)
        return device_name(backend.device)

    def compute(self, rollout_id: int, ticket: RoundTicket) -> ArrayColumns:
        """Compute the columns of roles other than the policy. Collective over all ranks; {} where a peer returns the
        same."""
        from vime.training.columns import to_arrays

        plan, rows = _fetch(self._worker, self._store, ticket, rollout_id)
        with span("compute_columns", rollout_id=rollout_id):
            columns = self._worker.forward_columns(plan, rows)
        return to_arrays(columns) if self._worker.place.speaks else {}

    def begin(self, rollout_id: int, ticket: RoundTicket, version: Version) -> None:
        """Collective over all ranks of the policy: forward and backward over an early batch of a round that is not
        whole yet. Early batches left over from another round are dropped."""
        from vime.training.early import BegunRound

        plan, rows = _fetch(self._worker, self._store, ticket, rollout_id)
        if self._begun is None or self._begun.rollout_id != rollout_id:
            self._begun = BegunRound(self._config, self._worker, rollout_id)
        bound = self._config.queue.transferqueue_max_staleness
        check_staleness(list(rows.values()), version=version, max_staleness=bound)
        with span("train_early_batch", rollout_id=rollout_id):
            self._begun.begin(plan, rows)

    def train(self, work: RoundToTrain) -> RankRound | MeasuredMismatch:
        """Collective over all ranks of the policy: one round. Returns how far trainer and engine are apart when that
        exceeds the threshold: then no weight has moved."""
        from vime.training.columns import RETURN, from_arrays, to_arrays
        from vime.training.device import peak_memory_gib
        from vime.training.mismatch import Judge, LogprobMismatch

        worker, began = self._worker, time.monotonic()
        rollout_id, version = work.rollout_id, work.version
        failpoint(Point.FETCH)
        plan, rows = _fetch(worker, self._store, work.ticket, rollout_id)
        fetch_s = time.monotonic() - began
        failpoint(Point.FORWARD)
        is_replay = self._config.debug.load_debug_rollout_data is not None
        bound = None if is_replay else self._config.queue.transferqueue_max_staleness
        begun = self._begun if work.num_begun else None
        if begun is not None and begun.is_spent:  # trained once, and found to disagree
            plan, rows = begun.joined()
        every_row = list(rows.values()) if begun is None or begun.is_spent else begun.rows_with(rows)
        staleness = check_staleness(every_row, version=version, max_staleness=bound)
        threshold = self._config.agreement.train_rollout_diff_threshold if work.is_judged else None
        judge = Judge(version=version, threshold=threshold)
        columns: Columns = {}
        try:
            with span("train_round", rollout_id=rollout_id):
                if begun is not None and not begun.is_spent:
                    assert len(begun) == work.num_begun, "the driver waits for each early batch before the round"
                    metrics = begun.finish(plan, rows, judge)
                    plan, rows = begun.joined()
                else:
                    columns = worker.compute_columns(plan, rows, from_arrays(work.given, rows))
                    metrics = worker.update(plan, rows, columns, judge)
                self._begun = None
        except LogprobMismatch as error:
            return error.measured
        taught = {RETURN: columns[RETURN]} if RETURN in columns and Role.CRITIC not in self._roles else {}
        return RankRound(
            metrics={**metrics, PEAK_MEMORY: peak_memory_gib(worker.backend.device)},
            staleness=staleness,
            fetch_s=fetch_s,
            taught=to_arrays(taught) if worker.place.speaks else {},
            stepped=stepped_groups(plan, rows, worker.place.dp_rank) if worker.place.is_source else [],
        )

    def learn(self, rollout_id: int, ticket: RoundTicket, given: ArrayColumns) -> dict[str, float]:
        """Collective over all ranks of the critic: its steps of a round, by columns of the policy's ranks."""
        from vime.training.columns import from_arrays

        plan, rows = _fetch(self._worker, self._store, ticket, rollout_id)
        with span("train_round", rollout_id=rollout_id):
            return self._worker.update(plan, rows, from_arrays(given, rows))

    def log_probs(self, rows: list[TrainRow], rule: SamplingRule | None = None) -> list[list[float]]:
        """Collective over the model-parallel group: log-probabilities of the response tokens of each row."""
        with doing("log-probabilities of given rows"):
            return [logp_R.tolist() for logp_R in self._worker.log_probs(rows, rule)]

    def publish(self, version: Version, engines: list[EngineAddress]) -> Sent:
        """Collective over the ranks that hold shards, or over all where several send: `Publishing.publish`."""
        actor = self._worker.actor
        if self._config.cluster.device == "cpu":
            self._freed.give_back()  # now, because the engines are about to take memory
        if not (actor.takes_part_in_export or self._publishing.needs_every_rank):
            return None
        with span("publish_weights", version=version):
            return self._publishing.publish(actor, version, engines)

    def publish_files(self, version: Version) -> str | None:
        """Write the weights for jobs outside of the run and return their content hash, on rank 0. Collective like
        `publish`."""
        from vime.training.export import save_published
        from vime.weights.published import version_directory

        actor = self._worker.actor
        if not actor.takes_part_in_export:
            return None
        source = Path(self._config.model.hf_checkpoint).expanduser()
        with span("publish_files", version=version):
            stream = actor.export_weights()
            try:
                if self._rank == 0:
                    directory = version_directory(self._run_dir, version)
                    return save_published(actor, directory, stream, version=version, source=source)
            finally:
                for _ in stream:  # as in `publish`
                    pass
        return None

    def save(self, directory: str, in_background: bool) -> None:
        with span("save_checkpoint"):
            self._saved = Path(directory)
            self._pending_saves = self._worker.save(self._saved, in_background=in_background)

    def finish_save(self, deadline_s: float) -> dict[str, Entry]:
        """Wait, while other calls run, for the bytes that `save` left to write. Returns size and hash of this rank's
        files."""
        for pending in self._pending_saves:
            pending.wait(deadline_s)
        from vime.training.saved_files import hash_files

        return hash_files(self._saved, self._worker.engines, self._pending_saves, rank=self._rank)

    def save_hf(self, directory: str) -> None:
        from vime.training.export import save_hf

        source = Path(self._config.model.hf_checkpoint).expanduser()
        with span("export_hf"):
            lora = self._config.lora
            adapter = lora.described if lora.trains_adapter and not lora.lora_merge else None
            save_hf(self._worker.actor, Path(directory), source=source, adapter=adapter)

    def load(self, directory: str) -> None:
        with span("load_checkpoint"):
            self._worker.load(Path(directory))

    def set_asleep(self, is_asleep: bool) -> None:
        with doing("going to sleep" if is_asleep else "waking up"):
            (self._worker.sleep if is_asleep else self._worker.wake_up)()

    def rest(self) -> None:
        with doing("making room for a weight update"):
            self._worker.rest()

    def name_gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def weights_hash(self) -> str:
        from vime.training.export import weights_hash

        with doing("hashing the weights"):
            return weights_hash(self._worker.actor, trains_adapter=self._config.lora.trains_adapter)

    def compare_share(self, directory: Path, files: dict[str, Entry], num_ranks: int) -> list[str]:
        """Return what is wrong with those files of a checkpoint that this rank of so many has to read."""
        with doing("reading the checkpoint's files"):
            return compare_hashes(directory, {name: files[name] for name in share_of(files, self._rank, num_ranks)})

    def meeting_place(self) -> tuple[str, int]:
        """Return the rendezvous address of this rank, which is rank 0 and listens there from now on."""
        host = listen_host(self._config)
        return host, kept_port(host, backlog=max(128, num_trainer_ranks(self._config)))

    def replace_queue(self, address: QueueAddress) -> None:
        """Read in another queue, in which this round's rows lie. Called while another thread may wait for it."""
        replace_queue(self._store, address, is_filled=True)

    def close(self) -> None:
        self._publishing.close()
        self._store.close()
        self._worker.backend.close()


def _fetch(
    worker: TrainWorker, store: PayloadStore, ticket: RoundTicket, rollout_id: int
) -> tuple[RoundPlan, dict[int, TrainRow]]:
    """Fetch the round's plan and the rows of this rank. Collective over the replica."""
    backend, place = worker.backend, worker.place
    with span("transferqueue_get_groups", rollout_id=rollout_id):
        return fetch_round(
            store,
            ticket,
            dp_rank=place.dp_rank,
            is_source=place.is_source,
            source_rank=place.source_rank,
            group=backend.replica_group,
            device=backend.device,
        )


WITH_WEIGHTS_ALONE = (TrainerActor.publish, TrainerActor.log_probs, TrainerActor.weights_hash, TrainerActor.set_asleep)


class Ranks:
    """Trainer ranks that form one world in the layout of the run and play `roles`. Each call reaches every rank and
    fails with the first rank's error."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        queue_address: QueueAddress | None,
        roles: tuple[Role, ...],
        place_of: Callable[[int], Options],
    ) -> None:
        gpus = 1 if config.cluster.device == "cuda" else 0
        options: Options = {"num_cpus": TRAINER_CPUS, "num_gpus": gpus, "max_concurrency": MAX_CALLS}
        self._actors = [
            start_actor(TrainerActor, {**options, **place_of(rank)}, config, rank, str(run_dir), queue_address, roles)
            for rank in range(num_trainer_ranks(config))
        ]
        self._name = "trainer" if Role.ACTOR in roles else str(roles[0])
        self._config = config
        self._running: Sequence[object] = []  # the call that the ranks are in, or that nobody waits for any more
        self._is_asleep = self._is_resting = False
        self.before_wake: Callable[[], None] = lambda: None  # frees what others have of the GPUs

    def __len__(self) -> int:
        return len(self._actors)

    def start(self, total_steps: int, on_poll: Callable[[], None] | None = None) -> None:
        """Begin start-up on every rank; `wait_ready` waits for it."""
        deadline_s = self._config.cluster.start_timeout_secs
        placed = self._begun([self._actors[0].ask(TrainerActor.meeting_place)])
        [master] = self._wait(placed, f"{self._name} rank 0 to be placed", deadline_s, on_poll)
        self._starting = self._begun(
            [actor.ask(TrainerActor.start, len(self._actors), master, total_steps) for actor in self._actors]
        )

    def wait_ready(self, on_poll: Callable[[], None] | None = None) -> str:
        """Return the name of rank 0's device."""
        deadline_s = start_deadline_s(self._config)
        return self._wait(self._starting, f"{self._name} ranks to build the model", deadline_s, on_poll)[0]

    def sleep(self) -> None:
        """Give device memory back until the next call."""
        if not self._is_asleep:
            self.call(TrainerActor.set_asleep, True)
            self._is_asleep, self._is_resting = True, False

    def rest(self) -> None:
        """Keep the weights alone on the device, until a call needs more than them."""
        if not self._is_resting:
            self.call(TrainerActor.rest)
            self._is_resting = True

    def call(self, method: Callable[Concatenate[TrainerActor, P], R], *arguments: P.args, **named: P.kwargs) -> list[R]:
        """Return every rank's result; see `begin`."""
        return self.begin(method, *arguments, **named)()

    def begin(
        self, method: Callable[Concatenate[TrainerActor, P], R], *arguments: P.args, **named: P.kwargs
    ) -> Wait[R]:
        """Begin a call; the returned function waits for the ranks."""
        self._settle()
        if self._is_asleep or (self._is_resting and method not in WITH_WEIGHTS_ALONE):
            self._is_asleep = self._is_resting = False
            self.before_wake()
            self.call(TrainerActor.set_asleep, False)
        refs = self._begun([actor.ask(method, *arguments, **named) for actor in self._actors])

        def wait(*, on_poll: Callable[[], None] | None = None, deadline_s: float | None = None) -> list[R]:
            whole_s = self._config.cluster.train_timeout_secs if deadline_s is None else deadline_s
            return self._wait(refs, f"{self._name} ranks to {method.__name__}", whole_s, on_poll)

        return wait

    def replace_queue(self, address: QueueAddress) -> list[ObjectRef[None]]:
        """Let every rank read in another queue, whatever call it is in."""
        return [actor.ask(TrainerActor.replace_queue, address) for actor in self._actors]

    def save(self, directory: Path, *, in_background: bool) -> dict[ObjectRef[dict[str, Entry]], str]:
        """Return when every rank has written, or in the background copied, its state. The result waits until every
        rank's bytes are on disk, and names the ranks' processes."""
        self.call(TrainerActor.save, str(directory), in_background)
        deadline_s = self._config.cluster.train_timeout_secs
        return {
            actor.ask(TrainerActor.finish_save, deadline_s): f"{self._name}-{rank}"
            for rank, actor in enumerate(self._actors)
        }

    def stop(self, grace_s: float = STOP_S) -> None:
        if grace_s:
            refs = [actor.ask(TrainerActor.close) for actor in self._actors]
            with waiting(f"{self._name} ranks to close", self._name, deadline_s=grace_s):
                ray.wait(refs, num_returns=len(refs), timeout=grace_s)
        for actor in self._actors:
            actor.kill()

    def _begun(self, refs: list[ObjectRef[R]]) -> list[ObjectRef[R]]:
        self._running = refs
        return refs

    def _wait(
        self, refs: list[ObjectRef[R]], name: str, deadline_s: float, on_poll: Callable[[], None] | None = None
    ) -> list[R]:
        results = wait_for(refs, name=name, owner=self._name, deadline_s=deadline_s, on_poll=on_poll)
        self._running = []
        return results

    def _settle(self) -> None:
        """Wait for the end of a call that the driver had given up (an engine died in a publish): the collectives of two
        calls must not mix."""
        if not self._running:
            return
        deadline_s = update_deadline_s(self._config) + GRACE_S
        with waiting(f"{self._name} ranks to end the call before", self._name, deadline_s=deadline_s):
            refs = cast("list[ObjectRef[object]]", self._running)
            _, pending = ray.wait(refs, num_returns=len(refs), timeout=deadline_s)
        if pending:
            name = f"{len(pending)} of {len(self)} {self._name} ranks to end the call before"
            raise WaitTimeoutError(name, deadline_s, self._name, "See RUN_DIR/logs.")
        self._running = []


class Trainers:
    """The driver's handle on all trainer ranks: those of the policy, and one world for each of --separate-roles, whose
    columns it moves."""

    def __init__(self, config: Config, run_dir: Path, queue_address: QueueAddress | None, places: Places) -> None:
        self._config = config
        self._is_buffered = config.queue.transferqueue_mode == BUFFER
        self.device_name = ""  # of the policy's ranks; known when they are ready
        shared = shared_roles(config)
        self._policy = Ranks(config, run_dir, queue_address, shared, partial(places.of_rank, 0))
        apart = [role for role in needed_roles(config) if role not in shared]
        self._separate = {
            role: Ranks(config, run_dir, queue_address, (role,), partial(places.of_rank, world))
            for world, role in enumerate(apart, start=1)
        }

    def share_gpus(self, before_wake: Callable[[], None]) -> None:
        """`before_wake` frees the GPUs of the policy's ranks; called before a call that needs them."""
        self._policy.before_wake = before_wake

    def gpus(self, on_poll: Callable[[], None] | None = None) -> list[list[str]]:
        """Return what Ray gave each rank of the policy, which no model has been built on yet."""
        return self._policy.begin(TrainerActor.name_gpus)(
            on_poll=on_poll, deadline_s=self._config.cluster.start_timeout_secs
        )

    @property
    def _all(self) -> list[Ranks]:
        return [self._policy, *self._separate.values()]

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def start(self, total_steps: int, on_poll: Callable[[], None] | None = None) -> None:
        """Begin start-up everywhere; `wait_ready` waits for it."""
        for ranks in self._all:
            ranks.start(total_steps, on_poll)

    def wait_ready(self, on_poll: Callable[[], None] | None = None) -> None:
        self.device_name = self._policy.wait_ready(on_poll)
        for ranks in self._separate.values():
            ranks.wait_ready(on_poll)

    def begin(self, rollout_id: int, ticket: RoundTicket, version: Version) -> None:
        """Train an early batch of a round that is not whole yet."""
        self._policy.call(TrainerActor.begin, rollout_id, sent_once(ticket), version)

    def train(
        self,
        rollout_id: int,
        ticket: RoundTicket,
        version: Version,
        *,
        is_judged: bool,
        num_begun: int = 0,
        on_poll: Callable[[], None] | None = None,
    ) -> TrainedRound | list[MeasuredMismatch]:
        """Train the round. Returns its results, or every rank's MeasuredMismatch when trainer and engine are too far
        apart.

        `num_begun`: the early batches of it that `begin` got. Each rank checked the staleness of its own rows. Replicas
        have equally many ranks, so their rows together give the mean of the round.
        """
        given = self._given(rollout_id, ticket)
        # As one argument: each further one is serialized for each rank.
        work = RoundToTrain(
            rollout_id=rollout_id, ticket=ticket, version=version, given=given, is_judged=is_judged, num_begun=num_begun
        )
        said = self._policy.begin(TrainerActor.train, sent_once(work))(on_poll=on_poll)
        results = [result for result in said if isinstance(result, RankRound)]
        if not results:
            return [result for result in said if not isinstance(result, RankRound)]
        learned: dict[str, float] = {}
        if Role.CRITIC in self._separate:
            taught = sent_once(given | merged_columns([result.taught for result in results]))
            learned = self._separate[Role.CRITIC].call(TrainerActor.learn, rollout_id, sent_once(ticket), taught)[0]
        metrics = {
            **learned,
            **results[0].metrics,
            **staleness_metrics([staleness for result in results for staleness in result.staleness]),
            PEAK_MEMORY: max(result.metrics[PEAK_MEMORY] for result in results),
            **({GET_LATENCY: max(result.fetch_s for result in results)} if self._is_buffered else {}),
        }
        return TrainedRound(metrics=metrics, stepped=add_up(group for result in results for group in result.stepped))

    def _given(self, rollout_id: int, ticket: RoundTicket) -> ArrayColumns:
        """Return the columns of roles that have ranks of their own."""
        given: ArrayColumns = {}
        if self._separate:
            sent = sent_once(ticket)
            waits = [ranks.begin(TrainerActor.compute, rollout_id, sent) for ranks in self._separate.values()]
            for columns in all_results(waits):
                given |= merged_columns(columns)
        return given

    def publish(
        self, version: Version, engines: list[EngineAddress], on_poll: Callable[[], None] | None = None
    ) -> PublishReport:
        deadline_s = update_deadline_s(self._config) + GRACE_S
        wait = self._policy.begin(TrainerActor.publish, version, engines)
        return joined(wait(on_poll=on_poll, deadline_s=deadline_s))

    def publish_files(self, version: Version, on_poll: Callable[[], None] | None = None) -> str:
        """Write the weights into RUN/published; return their content hash."""
        deadline_s = update_deadline_s(self._config) + GRACE_S
        wait = self._policy.begin(TrainerActor.publish_files, version)
        content_hash = wait(on_poll=on_poll, deadline_s=deadline_s)[0]
        assert content_hash is not None, "rank 0 writes"
        return content_hash

    def replace_queue(self, address: QueueAddress) -> list[ObjectRef[None]]:
        """Let every rank read in another queue; does not wait for them."""
        return [ref for ranks in self._all for ref in ranks.replace_queue(address)]

    def log_probs(self, rows: list[TrainRow], rule: SamplingRule | None = None) -> list[list[float]]:
        return self._policy.call(TrainerActor.log_probs, rows, rule)[0]

    def save(self, directory: Path, *, in_background: bool = False) -> RanksSave:
        owed: dict[ObjectRef[dict[str, Entry]], str] = {}
        for ranks in _learning(self._policy, self._separate):
            owed |= ranks.save(directory, in_background=in_background)
        return RanksSave(owed)

    def save_hf(self, directory: Path) -> None:
        self._policy.call(TrainerActor.save_hf, str(directory))

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint, unless any of its files is not as it was written: the policy's ranks share the reading of
        all files."""

        def compare(directory: Path, files: dict[str, Entry]) -> list[str]:
            results = self._policy.call(TrainerActor.compare_share, directory, files, len(self._policy))
            return sorted(finding for findings in results for finding in findings)

        refuse_any_damage(checkpoint, compare)
        for ranks in _learning(self._policy, self._separate):
            ranks.call(TrainerActor.load, str(checkpoint / "model"))

    def weights_hash(self) -> str:
        return self._policy.call(TrainerActor.weights_hash)[0]

    def sleep(self) -> None:
        """Free the device memory of every rank (--offload-train); its next call wakes it up."""
        for ranks in self._all:
            ranks.sleep()

    def rest(self) -> None:
        """Free what a weight update does not need: the optimizer's state and gradients of the policy's ranks."""
        self._policy.rest()

    def stop(self, grace_s: float = STOP_S) -> None:
        """Stop every rank. `grace_s` 0, after a failed start: at once."""
        for ranks in self._all:
            ranks.stop(grace_s)


def _learning(policy: Ranks, separate: Mapping[Role, Ranks]) -> list[Ranks]:
    return [policy, *(ranks for role, ranks in separate.items() if role is Role.CRITIC)]
