"""The secret of a run's queue: TransferQueue decodes nothing from a peer that cannot prove that it has the keys.

TransferQueue unpickles what arrives on its sockets, so a peer that may send may run code. Its sockets therefore use
CURVE (ZeroMQ RFC 26): libzmq encrypts every message and drops a peer without the keys before a byte of it reaches
Python. The driver makes new keys for each run, and Ray passes them to the actors as an argument.

`secure_sockets` is the only hook: TransferQueue 0.1.11 makes each of its TCP sockets with `create_zmq_socket`, where a
ROUTER listens and a DEALER connects.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from vime.handoff.queue_modules import load_modules
from vime.types import HandoffError

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
HOOK = "create_zmq_socket"
HOOKED = tuple(
    f"transfer_queue.{name}"
    for name in ("utils.zmq_utils", "controller", "storage.simple_storage", "storage.managers.base")
)
"""Every module of TransferQueue 0.1.11 that has the function by name."""
DOMAIN = b"vime-queue"
ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""The address at which libzmq asks whether a peer is allowed (ZeroMQ RFC 27)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueKeys:
    """One key pair for all listening sockets and one for all connecting ones, in the text form of ZeroMQ (Z85)."""

    server_public: bytes = field(repr=False)
    server_secret: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> QueueKeys:
        (server_public, server_secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )


def secure_sockets(keys: QueueKeys) -> None:
    """Make every socket that TransferQueue opens in this process from now on require and present these keys.

    HandoffError when TransferQueue is not built as expected: no socket may listen without the keys.
    """
    modules = load_modules(*HOOKED)
    found = {id(getattr(module, HOOK, None)) for module in modules}
    if len(found) != 1 or not hasattr(modules[0], HOOK):
        raise HandoffError(
            f"TransferQueue makes its sockets in another way than release 0.1.11 ({HOOK} in {', '.join(HOOKED)}), so "
            "they cannot be closed to other peers. Install the release that setup.py names."
        )
    current = getattr(modules[0], HOOK)
    create: Callable[..., Socket] = getattr(
        current, "without_keys", current
    )  # a process may join the queue of one run after another's

    def create_with_keys(ctx: Context, socket_type: int, *arguments: object, **options: object) -> Socket:
        socket = create(ctx, socket_type, *arguments, **options)
        _require_keys(socket, ctx, keys) if socket_type == zmq.ROUTER else _show_keys(socket, keys)
        return socket

    create_with_keys.without_keys = create  # type: ignore[attr-defined]
    for module in modules:
        setattr(module, HOOK, create_with_keys)


def _require_keys(socket: Socket, context: Context, keys: QueueKeys) -> None:
    """Set the keys on a listening socket. Without a server at ZAP_ADDRESS libzmq refuses every peer."""
    _start_key_check(context, z85.decode(keys.client_public))
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def _show_keys(socket: Socket, keys: QueueKeys) -> None:
    """Set the keys on a connecting socket. libzmq ignores the keys on one within its process (inproc)."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


def _start_key_check(context: Context, client_public: bytes) -> None:
    """Start this context's thread that checks peers for libzmq, once. It ends with the context."""
    socket: Socket = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    socket.linger = 0
    try:
        socket.bind(ZAP_ADDRESS)
    except zmq.ZMQError:  # it runs already: the context has a second listening socket
        socket.close()
        return
    threading.Thread(target=_check_peers, args=(socket, client_public), name="vime-queue-keys", daemon=True).start()


def _check_peers(socket: Socket, client_public: bytes) -> None:
    """Consumes: libzmq's requests, one for each connection. Waits for: the next. Ends with the context."""
    while True:
        try:
            question = socket.recv_multipart()
        except zmq.ContextTerminated:
            socket.close()
            return
        # version, request id, domain, address, identity, mechanism, and CURVE's one credential: the peer's public key
        mechanism, *credentials = question[5:]
        is_known = mechanism == b"CURVE" and any(hmac.compare_digest(key, client_public) for key in credentials)
        status, text = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        socket.send_multipart([*question[:2], status, text, b"", b""])
