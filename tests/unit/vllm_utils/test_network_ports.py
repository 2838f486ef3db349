"""Ports: free ones are free, taken ones are not."""

import socket
from pathlib import Path

import pytest

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
