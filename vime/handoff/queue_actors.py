"""TransferQueue's two actors, which ask for the keys of the run before they open a socket.

Named as TransferQueue names them, which is how `vime why-stuck` and `ps` show them. Rows go over their sockets; Ray is
asked only where those are.
"""

from __future__ import annotations

import os
from typing import Any

from vime.handoff.queue_keys import QueueKeys, secure_sockets

QUEUE_ENVIRONMENT = {
    "TQ_NUM_THREADS": "2",  # stock: 8 per process
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",  # stock: 8 per client
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "20",  # stock: 200 s, so a dead storage unit shows after ten minutes
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "2",
    "TQ_STORAGE_HANDSHAKE_MAX_RETRIES": "25",  # one a second; stock: 3, too few on a busy machine at start-up
    "TQ_STORAGE_HANDSHAKE_TIMEOUT": "30",  # must outlast the retries, or a failed handshake passes for a success
}


def set_environment() -> None:
    """Said before TransferQueue is imported, and not to Ray: a worker with an environment of its own is started twice,
    which takes a CPU second. What the user's environment says counts."""
    os.environ.update(QUEUE_ENVIRONMENT | os.environ)


class TransferQueueController:
    """Knows which rows there are."""

    def __init__(self, keys: QueueKeys, **options: Any) -> None:
        set_environment()
        secure_sockets(keys)
        from transfer_queue.controller import TransferQueueController as Stock

        self._stock = Stock.__ray_actor_class__(**options)

    def get_zmq_server_info(self) -> Any:
        return self._stock.get_zmq_server_info()


class SimpleStorageUnit:
    """Holds rows."""

    def __init__(self, keys: QueueKeys, **options: Any) -> None:
        set_environment()
        secure_sockets(keys)
        from transfer_queue.storage.simple_storage import SimpleStorageUnit as Stock

        self._stock = Stock.__ray_actor_class__(**options)

    def get_zmq_server_info(self) -> Any:
        return self._stock.get_zmq_server_info()
