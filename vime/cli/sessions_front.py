"""`vime sessions-front SERVER`: a process that holds the clients of a server of sessions while that is away."""

from __future__ import annotations

import argparse
import logging
import socket
import sys

from vime.cli.commands import Commands
from vime.types import ConfigError
from vime.utils.network import LOOPBACK

BACKLOG = 1024
STOP_S = 5


def add_parsers(commands: Commands) -> None:
    text = "stand before a server of sessions and hold its clients while the server is away"
    parser = commands.add_parser("sessions-front", help=text, description=text)
    parser.add_argument("server", metavar="SERVER", help="the address of the server of sessions (http://HOST:PORT)")
    parser.add_argument(
        "--listen", default=f"{LOOPBACK}:0", help="HOST:PORT; port 0 is a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--patience-secs",
        type=float,
        default=60.0,
        help="after which a request gets 503 when the server is away (default: %(default)g)",
    )
    parser.add_argument(
        "--deadline-secs",
        type=float,
        default=3600.0,
        help="after which a request that the server has and does not answer gets 504 (default: %(default)g)",
    )
    parser.set_defaults(run_command=run_front)


def run_front(arguments: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM; then requests under way have a few seconds."""
    from vime.sessions.front import make_front  # not needed by --help
    from vime.utils.http_server import HttpServer

    server: str = arguments.server.rstrip("/")
    patience_s, deadline_s = arguments.patience_secs, arguments.deadline_secs
    if not server.startswith(("http://", "https://")) or not patience_s > 0 or not deadline_s > 0:
        raise ConfigError(
            f"{arguments.server} --patience-secs {patience_s:g} --deadline-secs {deadline_s:g}: expected "
            "http://HOST:PORT, and more than 0 seconds."
        )
    host, _, port = arguments.listen.rpartition(":")
    try:
        listening = socket.create_server((host, int(port)), backlog=BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--listen {arguments.listen}: {error}. Give HOST:PORT of this machine, or port 0."
        ) from error
    logging.basicConfig(level=logging.WARNING)
    app = make_front(server, patience_s=patience_s, deadline_s=deadline_s)
    sys.stdout.write(f"http://{host}:{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    HttpServer(app, lifespan="on", stop_s=STOP_S).run(sockets=[listening])
