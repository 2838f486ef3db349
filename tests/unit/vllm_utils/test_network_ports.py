"""Ports: free ones are free, taken ones are not."""

import contextlib
import errno
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vime.utils import network
from vime.utils.network import FIRST, TRIES, free_port, port_is_free

LOWEST_OF_CONNECTIONS = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_a_free_port_is_free_and_a_listening_one_is_not():
    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)


@pytest.mark.skipif(LOWEST_OF_CONNECTIONS < FIRST + 1000, reason="this machine has no ports below those of connections")
def test_a_free_port_is_none_that_an_outgoing_connection_may_get_before_its_server_listens():
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        assert max(ports) < connection.getsockname()[1]


def test_no_process_gets_a_port_that_another_one_has_until_that_one_ends(monkeypatch):
    """Between a server's start and its first listening lie seconds: two processes must not choose the same port."""
    monkeypatch.setattr(network, "_reserved", [])
    some = free_port(in_a_row=TRIES)
    while network._reserved:  # a row that no server and no other process of this machine has
        network._reserved.pop().close()
    chosen = f"network.FIRST, network._first_of_connections = {some}, lambda: {some + TRIES}"
    program = f"from vime.utils import network; {chosen}; print([network.free_port() for _ in range(50)], flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = json.loads(other.stdout.readline())
        monkeypatch.setattr(network, "FIRST", some)
        monkeypatch.setattr(network, "_first_of_connections", lambda: some + TRIES)
        ours = [free_port() for _ in range(40)]
        assert set(theirs).isdisjoint(ours)
        other.communicate("end", timeout=30)
    assert set(theirs) & {free_port() for _ in range(20)}, "at most ten that were not theirs are left"


@pytest.mark.parametrize("where", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_a_server_listens_at_the_port_it_was_given_and_a_second_does_not(where):
    port = free_port()
    with socket.create_server((where, port)):
        with pytest.raises(OSError, match="in use"):
            socket.create_server((where, port))
        with pytest.raises(OSError, match="in use"):
            network._reservation("127.0.0.1", port)


def test_what_is_no_taken_port_is_not_called_one(monkeypatch):
    def no_more_files(*_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(network.socket, "socket", no_more_files)
    with pytest.raises(OSError, match="too many open files"):
        free_port()


def test_ports_in_a_row_are_all_free_and_nobody_gets_one_of_them_again(monkeypatch):
    monkeypatch.setattr(network, "FIRST", 20_000)
    monkeypatch.setattr(network, "_first_of_connections", lambda: 20_130)
    monkeypatch.setattr(network, "_reserved", [])
    asked, taken = [], {20_003}

    class Reservation(contextlib.closing):
        def __init__(self, _host, port):
            asked.append(port)
            if port in taken or port % 10 == 0:
                raise OSError(errno.EADDRINUSE, "in use")
            super().__init__(self)
            self.port = port
            taken.add(port)

        def close(self):
            taken.remove(self.port)

    monkeypatch.setattr(network, "_reservation", Reservation)
    found, later = free_port(in_a_row=9), free_port(in_a_row=9)  # a row begins at each 20_0n1, but at 20_001
    assert (found % 10, later % 10) == (1, 1)
    assert len({20_001, found, later}) == 3
    assert taken == {20_003, *range(found, found + 9), *range(later, later + 9)}, "those of no whole row are let go"
    assert [each.port for each in network._reserved] == [*range(found, found + 9), *range(later, later + 9)]
    taken.update(range(20_005, 20_130, 10))
    with pytest.raises(OSError, match="no 9 free ports in a row"):
        free_port(in_a_row=9)
    with pytest.raises(OSError, match="no 10 free ports in a row among 100 tried from 20000 to 20129"):
        free_port(in_a_row=10)
