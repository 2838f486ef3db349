"""Ports: free ones are free, taken ones are not."""

import socket
from pathlib import Path

import pytest

from vime.utils import network
from vime.utils.network import FIRST, free_port, port_is_free

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


def test_ports_in_a_row_are_all_free_and_nobody_gets_one_of_them_again(monkeypatch):
    monkeypatch.setattr(network, "FIRST", 20_000)
    monkeypatch.setattr(network, "_first_of_connections", lambda: 20_130)
    monkeypatch.setattr(network, "_answered", {20_003})
    monkeypatch.setattr(network, "port_is_free", lambda _host, port: port % 10 > 0)
    found, later = free_port(in_a_row=9), free_port(in_a_row=9)  # a row begins at each 20_0n1, but at 20_001
    assert (found % 10, later % 10) == (1, 1)
    assert len({20_001, found, later}) == 3
    network._answered.update(range(20_005, 20_130, 10))
    with pytest.raises(OSError, match="no 9 free ports in a row"):
        free_port(in_a_row=9)
    with pytest.raises(OSError, match="no 10 free ports in a row among 100 tried from 20000 to 20129"):
        free_port(in_a_row=10)
