"""How rollouts travel in this run: Ray object refs (mode off) or TransferQueue, and where finished groups lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from vime.config.parse import Config
from vime.handoff.group_store import GroupStore
from vime.handoff.ledger_types import SPOOL_NAME
from vime.handoff.object_refs import ObjectRefCarrier
from vime.handoff.spool import Fsync, Spool
from vime.ray.cluster import QUEUE_CPUS
from vime.seams import Carrier


def start_queue(config: Config) -> Any:
    """Start TransferQueue for this run, in the driver and before any actor. Mode off starts and imports nothing."""
    if config.queue.transferqueue_mode == "off":
        return None
    from vime.handoff import queue_client

    return queue_client.start_queue(config.queue, remote=ray.remote, num_cpus=QUEUE_CPUS)


def stop_queue(address: Any) -> None:
    """End the queue's actors, in the driver and after every process has left the queue."""
    from vime.handoff import queue_client

    queue_client.stop_queue(address)


def connect_carrier(config: Config, queue_address: Any) -> Carrier:
    """The carrier as seen from one process; `queue_address` is None in mode off."""
    if queue_address is None:
        return ObjectRefCarrier(
            put=ray.put,
            get=lambda ref: ray.get(ref, timeout=config.queue.transferqueue_timeout_secs),
            extra=config.queue.transfer_queue_extra_data_fields,
        )
    from vime.handoff.bridge import TransferQueueBridge

    return TransferQueueBridge.connect(queue_address, config.queue)


def open_group_store(config: Config, run_dir: Path, queue_address: Any) -> GroupStore:
    """Mode streaming: payloads of finished groups, in TransferQueue and, unless --no-transferqueue-durable, on disk."""
    from vime.handoff.queue_client import QueueClient

    queue = config.queue
    return GroupStore(
        QueueClient(queue_address, queue.transferqueue_timeout_secs),
        Spool(run_dir / SPOOL_NAME, fsync=Fsync(queue.transferqueue_fsync)) if queue.transferqueue_durable else None,
        partition=queue.transferqueue_partition,
    )
