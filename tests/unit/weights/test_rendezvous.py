"""The store where torch's processes meet: on one address, and torch's own on every one, which is why it is not used."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from vime.utils.network import free_port
from vime.weights.rendezvous import meet, open_store

TIMEOUT = timedelta(seconds=30)


def listens_on(port: int) -> set[str]:
    connections = psutil.Process(os.getpid()).net_connections("tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port}


def test_a_store_listens_on_its_own_address_only_where_torch_s_listens_on_all():
    store = open_store("127.0.0.1", 0, 1, timeout=TIMEOUT)
    assert listens_on(store.port) == {"127.0.0.1"}
    stock = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    assert listens_on(stock.port) & {"::", "0.0.0.0"}  # what the store of our own is for


def test_two_ranks_meet_at_the_store_of_rank_0():
    port, seen = free_port(), {}

    def join() -> None:
        store = meet("127.0.0.1", port, rank=1, world_size=2, timeout=TIMEOUT)
        seen["word"] = store.get("word")

    other = threading.Thread(target=join)
    other.start()
    store = meet("127.0.0.1", port, rank=0, world_size=2, timeout=TIMEOUT)
    store.set("word", "here")
    other.join(30)
    assert seen == {"word": b"here"}


def test_a_port_that_is_taken_is_said_and_not_shared():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", taken.getsockname()[1], 1, timeout=TIMEOUT)
