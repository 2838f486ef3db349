"""Trainer ranks: one Ray actor each, and the driver's handle on all of them.

A rank is a thin shell: it fetches its rows through the carrier, hands them to its worker and answers numbers. Every
method that reaches a collective is called on all ranks at once by `Trainers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from vime.config.parse import Config
from vime.handoff.fetch import fetch_round
from vime.handoff.staleness import STALENESS_MAX, STALENESS_MEAN, check_staleness
from vime.observability.events import EventLog
from vime.observability.logs import setup_logging
from vime.ray.backends import make_backend
from vime.ray.carriers import connect_carrier
from vime.ray.cluster import TRAINER_CPUS, num_trainer_ranks
from vime.ray.waits import wait_for
from vime.types import EngineAddress, RankInfo, TrainRow, Version
from vime.utils.network import free_port

if TYPE_CHECKING:
    from vime.ray.publisher import Publisher
    from vime.training.worker import TrainWorker
    from vime.weights.publish import PublishReport


@ray.remote(max_concurrency=2)
class TrainerActor:
    """One trainer rank."""

    def __init__(self, config: Config, rank: int, run_dir: str, queue_address: Any) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        setup_logging(Path(run_dir), f"trainer-{rank}")
        self._config, self._rank, self._run_dir = config, rank, Path(run_dir)
        self._events = EventLog(self._run_dir, f"trainer-{rank}")
        self._carrier = connect_carrier(config, queue_address)
        self._worker: TrainWorker
        self._publisher: Publisher | None = None

    def address(self) -> tuple[str, int]:
        """Where rank 0 lets the others meet."""
        return ray.util.get_node_ip_address(), free_port()

    def start(self, world_size: int, master: tuple[str, int], total_steps: int) -> None:
        """Collective over all ranks. The backend is imported here, so that processes start side by side."""
        from vime.training.worker import TrainWorker

        gpus = ray.get_gpu_ids()
        rank = RankInfo(
            rank=self._rank,
            world_size=world_size,
            local_rank=0 if gpus else self._rank,
            master_address=master[0],
            master_port=master[1],
        )
        self._worker = TrainWorker(self._config, make_backend(self._config, rank), total_steps=total_steps)

    def train(self, rollout_id: int, ticket: Any, version: Version) -> dict[str, float]:
        """Collective over all ranks: one round. `version` is the version of the weights before it."""
        backend, place = self._worker.backend, self._worker.place
        with self._events.span("transferqueue_get_groups", rollout_id=rollout_id):
            plan, rows = fetch_round(
                self._carrier,
                ticket,
                dp_rank=place.dp_rank,
                is_source=place.is_source,
                source_rank=place.source_rank,
                group=backend.replica_group,
                device=backend.device,
            )
        is_replay = self._config.debug.load_debug_rollout_data is not None
        bound = None if is_replay else self._config.queue.transferqueue_max_staleness
        staleness = check_staleness(list(rows.values()), version=version, max_staleness=bound)
        with self._events.span("train_round", rollout_id=rollout_id):
            metrics = self._worker.train_round(plan, rows)
        return {**metrics, **staleness}

    def log_probs(self, rows: list[TrainRow]) -> list[list[float]]:
        """Collective over the model-parallel group: log-probabilities of the response tokens of each row."""
        return [logp_R.tolist() for logp_R in self._worker.log_probs(rows)]

    def publish(self, version: Version, engines: list[EngineAddress]) -> PublishReport | None:
        """Collective over the ranks that hold shards: rank 0 sends, the others take part in the gathering."""
        actor = self._worker.actor
        if not actor.takes_part_in_export:
            return None
        stream = actor.export_weights()
        try:
            if self._rank == 0:
                return self._connected_publisher(engines).publish(stream, actor.weight_metadata(), version)
        finally:
            for _ in stream:  # its collectives are reached by every rank of the replica, also when rank 0 failed
                pass
        return None

    def _connected_publisher(self, engines: list[EngineAddress]) -> Publisher:
        if self._publisher is None:
            from vime.ray.publisher import Publisher

            self._publisher = Publisher(self._config, self._run_dir, engines)
        return self._publisher

    def save(self, directory: str) -> None:
        self._worker.save(Path(directory))

    def save_hf(self, directory: str) -> None:
        from vime.training.export import save_hf

        source = Path(self._config.model.hf_checkpoint).expanduser()
        save_hf(self._worker.actor, Path(directory), source=source)

    def load(self, directory: str) -> None:
        self._worker.load(Path(directory))

    def weights_hash(self) -> str:
        from vime.training.export import weights_hash

        return weights_hash(self._worker.actor)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._carrier.close()
        self._worker.backend.close()


class Trainers:
    """The driver's handle on all ranks. Each call reaches every rank and fails with the first rank's error."""

    def __init__(self, config: Config, run_dir: Path, queue_address: Any) -> None:
        self._config = config
        world = num_trainer_ranks(config)
        gpus = 1 if config.cluster.device == "cuda" else 0
        options: dict[str, Any] = {"num_cpus": TRAINER_CPUS, "num_gpus": gpus}
        self._actors = [
            TrainerActor.options(**options).remote(config, rank, str(run_dir), queue_address) for rank in range(world)
        ]
        self._deadline_s = config.cluster.distributed_timeout_minutes * 60 + 60

    def __len__(self) -> int:
        return len(self._actors)

    def start(self, total_steps: int) -> list[Any]:
        """Begin start-up on every rank; `wait_ready` waits for the answers."""
        [master] = self._wait([self._actors[0].address.remote()], "trainer rank 0 to be placed")
        self._starting = [actor.start.remote(len(self._actors), master, total_steps) for actor in self._actors]
        return self._starting

    def wait_ready(self, on_poll: Callable[[], None] | None = None) -> None:
        self._wait(self._starting, "trainer ranks to build the model", on_poll)

    def train(
        self, rollout_id: int, ticket: Any, version: Version, on_poll: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Metrics of the round. Each rank looked at the staleness of its own rows; the mean weighs ranks equally."""
        answers = self._call("train", rollout_id, ticket, version, on_poll=on_poll)
        return answers[0] | {
            STALENESS_MEAN: sum(answer[STALENESS_MEAN] for answer in answers) / len(answers),
            STALENESS_MAX: max(answer[STALENESS_MAX] for answer in answers),
        }

    def publish(
        self, version: Version, engines: list[EngineAddress], on_poll: Callable[[], None] | None = None
    ) -> PublishReport:
        return self._call("publish", version, engines, on_poll=on_poll)[0]

    def log_probs(self, rows: list[TrainRow]) -> list[list[float]]:
        return self._call("log_probs", rows)[0]

    def save(self, directory: Path) -> None:
        self._call("save", str(directory))

    def save_hf(self, directory: Path) -> None:
        self._call("save_hf", str(directory))

    def load(self, directory: Path) -> None:
        self._call("load", str(directory))

    def weights_hash(self) -> str:
        return self._call("weights_hash")[0]

    def stop(self) -> None:
        refs = [actor.close.remote() for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=20)
        for actor in self._actors:
            ray.kill(actor)

    def _call(self, method: str, *arguments: Any, on_poll: Callable[[], None] | None = None) -> list[Any]:
        refs = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        return self._wait(refs, f"trainer ranks to {method}", on_poll)

    def _wait(self, refs: list[Any], name: str, on_poll: Callable[[], None] | None = None) -> list[Any]:
        return wait_for(refs, name=name, owner="trainer", deadline_s=self._deadline_s, on_poll=on_poll)
