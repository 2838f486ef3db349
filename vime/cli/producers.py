"""`vime producers RUN|ADDRESS`: the external rollout jobs of a run, as its gateway sees them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime.cli.commands import Commands
from vime.gateway.address import read_address
from vime.gateway.messages import Producers, QueueState
from vime.gateway.probe import GatewayProbe
from vime.handoff.ledger_types import EXTERNAL
from vime.types import ConfigError


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser("producers", help="external rollout jobs: who is online, with which weights")
    parser.add_argument("run", metavar="RUN", help="the run directory, or the address of its gateway (http://...)")
    add_token(parser, "read")
    parser.set_defaults(run_command=run_producers)


def add_token(parser: argparse.ArgumentParser, scope: str) -> None:
    parser.add_argument("--token", default="", help=f"with scope {scope} (default: the variable VIME_TOKEN)")


def token_of(arguments: argparse.Namespace) -> str:
    """Return --token or VIME_TOKEN. ConfigError without one."""
    token: str = arguments.token or os.environ.get("VIME_TOKEN", "")
    if not token:
        raise ConfigError("no token: give --token, or set VIME_TOKEN. `vime token make RUN NAME` makes one.")
    return token


def run_producers(arguments: argparse.Namespace) -> None:
    client = GatewayProbe(address_of(arguments.run), token_of(arguments))
    try:
        found, queue = client.get("/v1/producers", Producers), client.get("/v1/queue", QueueState)
    finally:
        client.close()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{queue.ready} groups ready, {queue.active} slots taken, {queue.retry} to be issued again; held: "
        f"{queue.held_tokens:,} tokens, {queue.held_bytes:,} bytes"
    )
    inside = {name: leases for name, leases in queue.leases.items() if not name.startswith(EXTERNAL)}
    for name, leases in sorted(inside.items()):
        console.print(f"worker of the run {name}: {leases} leases")
    if not found.producers:
        console.print("no external job has called since the gateway started")
        return
    table = Table(
        *("producer", "online", "version", "behind", "groups", "groups/s", "leases", "refused", "model", "waits for"),
        box=None,
    )
    for job in found.producers:
        refused = ", ".join(f"{code} {count}" for code, count in sorted(job.refused.items()))
        cells = (
            job.name,
            "yes" if job.is_online else f"no, {job.seconds_since_call:.0f} s",
            "none" if job.newest_version < 0 else str(job.newest_version),
            "" if job.behind < 0 else str(job.behind),
            str(job.committed),
            f"{job.groups_per_s:.3g}",
            str(queue.leases.get(EXTERNAL + job.name, 0)),
            refused or "none",
            f"{job.model} ({job.engines} engines)" if job.model else "",
            job.lags,
        )
        table.add_row(*map(Text, cells))  # what a job says of itself is not markup
    console.print(table)


def address_of(run: str) -> str:
    """Return an address as it is, and that of the gateway of a run directory."""
    if run.startswith(("http://", "https://")):
        return run
    return read_address(Path(run))
