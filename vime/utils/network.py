"""Ports and interfaces of this machine."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections import deque
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
FIRST = 20_000  # Ray gives its workers the ports from 10,002 to 19,999
TRIES = 100
_reserved: deque[socket.socket] = deque(maxlen=256)  # the oldest is let go: its server has long begun to listen
_kept: dict[int, socket.socket] = {}


def address_of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface; ValueError lists the existing ones when it has none."""
    found: dict[str, str] = {
        interface: entry.address
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family is socket.AF_INET
    }
    if name not in found:
        there = ", ".join(f"{interface} ({address})" for interface, address in sorted(found.items()))
        raise ValueError(f"{socket.gethostname()} has no interface {name} with an IPv4 address. It has {there}.")
    return found[name]


def loopback_interface() -> str:
    """Return the name of the interface that only this machine reaches: `lo` on Linux."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == LOOPBACK for entry in entries):
            return str(name)
    raise OSError(f"no network interface of this machine has the address {LOOPBACK}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on this host."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def free_port(host: str = LOOPBACK, *, in_a_row: int = 1) -> int:
    """Return a port for a server of this process or of one that it starts: nobody else gets it while this process lives
    and has not asked for 256 others. `in_a_row`: the first of so many ports of which this is true.

    It lies below those that the kernel gives to outgoing connections. A server may take half a minute to begin to
    listen, and meanwhile thousands of connections are opened here, each of which could have got a port of the kernel's
    own choice. A program that does not ask this function may still take it, so the user of it must report a failure.
    """
    chance = random.SystemRandom()  # seeded runs must not all try the same ports
    for first in chance.sample(range(FIRST, _first_of_connections() - in_a_row + 1), TRIES):
        with contextlib.ExitStack() as row:
            try:
                reserved = [row.enter_context(_reservation(host, port)) for port in range(first, first + in_a_row)]
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            row.pop_all()
            _reserved.extend(reserved)
            return first
    row_of = f"{in_a_row} free ports in a row" if in_a_row > 1 else "free port"
    raise OSError(f"no {row_of} among {TRIES} tried from {FIRST} to {_first_of_connections() - 1}")


def _reservation(host: str, port: int) -> socket.socket:
    """Return a socket that has the port at every address of the machine and never listens. OSError when any other
    socket has it.

    A server may listen beside it, for servers set SO_REUSEADDR and so does this socket; set after it has bound, else it
    could not tell a port that another process has reserved.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.bind(("", port))
    except OSError:
        reserved.close()
        raise
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def kept_port(host: str, backlog: int) -> int:
    """Return a port where this process listens from now on, so that it stays reserved: `listener` hands it over."""
    kept = socket.create_server((host, 0), backlog=backlog)
    port = int(kept.getsockname()[1])
    _kept[port] = kept
    return port


def listener(host: str, port: int, backlog: int) -> socket.socket:
    """Return the socket of a `kept_port`, once; for any other port a new one. OSError when another process listens
    there."""
    return _kept.pop(port, None) or socket.create_server((host, port), backlog=backlog)


def _first_of_connections() -> int:
    """Return the lowest port of outgoing connections; when too few ports are below it, any port may be used."""
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        low = 32_768
    return low if low >= FIRST + 10 * TRIES else 61_000


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on `host:port` now. Connections that linger after a server's end do not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
