"""TransferQueue's two actors, which set the keys of the run before they open a socket.

They have TransferQueue's names, which `vime why-stuck` and `ps` show. Rows go over their sockets; Ray only gives the
addresses of these.
"""

from __future__ import annotations

from vime.handoff.queue_keys import QueueKeys, secure_sockets


class TransferQueueController:
    """Knows which rows there are."""

    def __init__(self, keys: QueueKeys, **options: object) -> None:
        secure_sockets(keys)
        from transfer_queue.controller import TransferQueueController as Stock

        self._stock = Stock.__ray_actor_class__(**options)

    def get_zmq_server_info(self) -> object:
        return self._stock.get_zmq_server_info()


class SimpleStorageUnit:
    """Holds rows."""

    def __init__(self, keys: QueueKeys, **options: object) -> None:
        secure_sockets(keys)
        from transfer_queue.storage.simple_storage import SimpleStorageUnit as Stock

        self._stock = Stock.__ray_actor_class__(**options)

    def get_zmq_server_info(self) -> object:
        return self._stock.get_zmq_server_info()
