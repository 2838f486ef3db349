"""Ports: free ones are free, taken ones are not."""

import socket

from vime.utils.network import free_port, port_is_free


def test_a_free_port_is_free_and_a_listening_one_is_not():
    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)
