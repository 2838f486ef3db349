import socket

import pytest

from vime.utils.network import LOOPBACK, kept_port, listener, port_is_free


def test_a_kept_port_is_nobody_else_s_until_it_is_handed_over() -> None:
    port = kept_port(LOOPBACK, backlog=1)
    assert not port_is_free(LOOPBACK, port)
    with pytest.raises(OSError, match="in use"):
        socket.create_server((LOOPBACK, port))
    with listener(LOOPBACK, port, backlog=1) as server, socket.create_connection((LOOPBACK, port), timeout=10):
        assert server.getsockname()[1] == port
    with listener(LOOPBACK, port, backlog=1) as again:  # a new one
        assert again.getsockname()[1] == port
