"""The carrier of this run: Ray object refs (mode off) or TransferQueue (mode buffer)."""

from __future__ import annotations

from typing import Any

import ray

from vime.config.parse import Config
from vime.handoff.object_refs import ObjectRefCarrier
from vime.ray.cluster import QUEUE_CPUS
from vime.seams import Carrier


def start_queue(config: Config) -> Any:
    """Start TransferQueue for this run, in the driver and before any actor. Mode off starts and imports nothing."""
    if config.queue.transferqueue_mode == "off":
        return None
    from vime.handoff import queue_client

    return queue_client.start_queue(config.queue, num_cpus=QUEUE_CPUS)


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
