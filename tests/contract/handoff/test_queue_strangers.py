"""What TransferQueue's ports answer to a process that reaches them and does not know the keys of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.helpers.ports import no_keys, send_pickle
from vime.config.training import QueueConfig
from vime.handoff.queue_client import QueueClient, start_queue, stop_queue
from vime.handoff.queue_keys import QueueKeys, secure_sockets
from vime.types import HandoffError


def keys_of_another_run(socket: zmq.Socket[bytes]) -> None:
    other = QueueKeys.make()
    socket.curve_serverkey = other.server_public
    socket.curve_publickey, socket.curve_secretkey = other.client_public, other.client_secret


@contextlib.contextmanager
def ports_of(address: Any) -> Iterator[list[str]]:
    """Every address at which the queue listens, while a client keeps it alive."""
    client = QueueClient(address, 60.0)
    infos = [actor.get_zmq_server_info.remote().future().result(30) for actor in client._actors.values()]
    yield [info.to_addr(name) for info in infos for name in info.ports]
    client.put("strangers", ["key"], [b"still works"])
    assert client.get("strangers", ["key"]) == [b"still works"]
    client.clear_partition("strangers")
    client.close()


@pytest.mark.parametrize("introduce", [no_keys, keys_of_another_run])
def test_a_stranger_is_turned_away_at_every_port_before_its_pickle_is_read(
    queue_address: Any, introduce: Any, tmp_path: Path
) -> None:
    """3 actors (a controller with 2 ports, 2 units with one each): 4 ports."""
    touched = tmp_path / "touched"
    with ports_of(queue_address) as ports:
        assert len(ports) == 4
        let_in = [send_pickle(port, introduce, touched) for port in ports]
    assert (let_in, touched.exists()) == ([False] * 4, False)


def test_who_knows_the_listeners_public_key_but_is_not_of_the_run_is_turned_away(
    queue_address: Any, tmp_path: Path
) -> None:
    def eavesdropper(socket: zmq.Socket[bytes]) -> None:
        keys_of_another_run(socket)
        socket.curve_serverkey = queue_address.keys.server_public

    with ports_of(queue_address) as ports:
        assert [send_pickle(port, eavesdropper, tmp_path / "touched") for port in ports] == [False] * 4
    assert not (tmp_path / "touched").exists()


def test_the_test_s_pickle_does_its_harm_to_who_lets_it_in(queue_address: Any, tmp_path: Path) -> None:
    """The keys of the run open the door: the other tests fail for want of keys, not for want of a working message."""

    def member(socket: zmq.Socket[bytes]) -> None:
        keys = queue_address.keys
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret

    with ports_of(queue_address) as ports:
        assert send_pickle(ports[-1], member, tmp_path / "touched")  # a storage unit answers what it cannot read
    assert (tmp_path / "touched").exists()


def test_a_process_joins_one_run_after_another(queue_address: Any, ray_cluster: None) -> None:
    import ray

    for address in (queue_address, start_queue(QueueConfig(), remote=ray.remote), queue_address):
        client = QueueClient(address, 60.0)
        client.put("again", ["key"], [b"row"])
        client.close()
        if address is not queue_address:
            stop_queue(address)


def test_keys_are_new_for_each_run_and_are_not_shown(queue_address: Any) -> None:
    keys = QueueKeys.make()
    assert keys != QueueKeys.make()
    assert repr(keys) == "QueueKeys()"
    assert queue_address.keys.server_secret.decode() not in repr(queue_address)


def test_a_transfer_queue_that_opens_sockets_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transfer_queue.controller

    monkeypatch.setattr(transfer_queue.controller, "create_zmq_socket", lambda *_: None)
    with pytest.raises(HandoffError, match=r"another way than release 0\.1\.11"):
        secure_sockets(QueueKeys.make())
