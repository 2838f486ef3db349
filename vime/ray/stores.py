"""Where the rows of this run lie: Ray objects (mode off) or TransferQueue, and where finished groups are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray

from vime.config.parse import Config
from vime.handoff.group_store import GroupStore, ObjectStore, PayloadStore, RoundStore, compact_left_behind
from vime.handoff.ledger_types import SPOOL_NAME, Task
from vime.handoff.spool import Fsync, Spool, worker_spool
from vime.ray.actor import Actor
from vime.ray.cluster import QUEUE_CPUS, has_worker_processes, num_worker_processes
from vime.rollout.prompts import decode_response

if TYPE_CHECKING:
    from vime.handoff.queue_client import ActorClass, QueueActor, QueueAddress


ASKED_S = 5.0


def start_queue(config: Config) -> QueueAddress:
    """Start TransferQueue for this run, in the driver and before any actor. Not called in mode off."""
    from vime.handoff import queue_client

    remote = cast("Callable[[type], ActorClass]", ray.remote)
    return queue_client.start_queue(config.queue, remote=remote, num_cpus=QUEUE_CPUS)


def stop_queue(address: QueueAddress) -> None:
    """End the queue's actors, in the driver and after every process has left the queue."""
    from vime.handoff import queue_client

    queue_client.stop_queue(address)


def actors_of(address: QueueAddress) -> dict[str, QueueActor]:
    """Return the queue's actors by the names that messages give them."""
    units = {f"TransferQueue storage unit {index}": unit for index, unit in enumerate(address.storage_units)}
    return {"TransferQueue controller": address.controller, **units}


def ask_whether_it_lives(actor: QueueActor) -> ray.ObjectRef[int]:
    """Call an actor of the queue; its answer says no more. Not by a method of TransferQueue: to read what that returns,
    the driver would import TransferQueue and torch, for 2 to 5 s in which it could read no other answer."""
    called: Actor[object] = Actor(actor)
    return called.run(id)


def is_dead(address: QueueAddress) -> bool:
    """Return whether an actor of the queue is known to be dead."""
    asked = [ask_whether_it_lives(actor) for actor in actors_of(address).values()]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=ASKED_S)
    for ref in done:
        try:
            ray.get(ref)
        except ray.exceptions.RayError:
            return True
    return False


def connect_store(config: Config, queue_address: QueueAddress | None) -> PayloadStore:
    """Return the payload store of one process; `queue_address` is None in mode off."""
    timeout_s = config.queue.transferqueue_timeout_secs
    if config.queue.has_ledger:
        from vime.handoff.lasting_queue import LastingQueue

        assert queue_address is not None, "the run has a queue"
        return LastingQueue(queue_address, timeout_s)
    if queue_address is None:
        return ObjectStore(
            put=ray.put, get=lambda refs: ray.get(cast("list[ray.ObjectRef[bytes]]", refs), timeout=timeout_s)
        )
    from vime.handoff.queue_client import QueueClient

    return QueueClient(queue_address, timeout_s)


def replace_queue(store: PayloadStore, address: QueueAddress, *, is_filled: bool) -> None:
    """Let a store of mode streaming use another queue, see `LastingQueue.replace`."""
    from vime.handoff.lasting_queue import LastingQueue

    assert isinstance(store, LastingQueue), "mode streaming has one"
    store.replace(address, is_filled=is_filled)


def queue_filled(store: PayloadStore, address: QueueAddress) -> None:
    """Let reads begin there, see `LastingQueue.filled`."""
    from vime.handoff.lasting_queue import LastingQueue

    assert isinstance(store, LastingQueue), "mode streaming has one"
    store.filled(address)


def round_store(config: Config, store: PayloadStore) -> RoundStore:
    """Return the store of whole rounds, each in its own partition (modes off and buffer)."""
    queue = config.queue
    return RoundStore(
        store,
        prefix=queue.transferqueue_partition,
        capacity=queue.transferqueue_max_staleness + 1,
        timeout_s=queue.transferqueue_timeout_secs,
    )


def group_store(config: Config, run_dir: Path, store: PayloadStore, *, worker: int | None = None) -> GroupStore:
    """Return the store of finished groups (mode streaming): in TransferQueue and, unless --no-transferqueue-durable, on
    disk. `worker`: number of a worker in its own process, which has its own spool."""
    queue = config.queue
    spool, directory = None, run_dir / SPOOL_NAME
    if queue.transferqueue_durable:
        place = directory if worker is None else worker_spool(directory, worker)
        spool = Spool(place, fsync=Fsync(queue.transferqueue_fsync))
    decode = partial(decode_response, config.flat.hf_checkpoint)
    return GroupStore(store, spool, partition=queue.transferqueue_partition, directory=directory, decode=decode)


def compact_other_spools(config: Config, run_dir: Path, needed: Mapping[Task, int | None]) -> int:
    """Drop from the spools of earlier starts of this run what no restart can need. Returns the bytes freed."""
    directory = run_dir / SPOOL_NAME
    if not config.queue.transferqueue_durable:
        return 0
    own = [directory]
    if has_worker_processes(config):
        own = [worker_spool(directory, number) for number in range(num_worker_processes(config))]
    return compact_left_behind(directory, own, needed)
