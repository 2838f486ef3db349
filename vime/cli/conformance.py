"""`vime conformance ADDRESS` tests a gateway, `vime conformance --producer CMD` a rollout job."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from rich.console import Console

from vime.cli.commands import Commands
from vime.cli.producers import add_token, token_of
from vime.gateway.check import Check
from vime.gateway.conformance import check_gateway
from vime.gateway.judge import PUTS, Session, judge
from vime.gateway.scripted import GROUPS, PRODUCER, ScriptedGateway
from vime.types import ConfigError
from vime.utils.waits import waiting

POLL_S, STOP_S = 0.1, 20.0


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "conformance",
        help="test a gateway, or a rollout job, against docs/producer-protocol.md; exit 1 when a check fails",
        description="With ADDRESS: test that gateway. It leases up to three prompts and puts two groups of made-up "
        "tokens, so use a run that nobody needs. With --producer: run a job before a gateway that loses responses, is "
        "unavailable, ends leases and changes the weights.",
    )
    parser.add_argument("address", nargs="?", default="", metavar="ADDRESS", help="http://HOST:PORT of the gateway")
    add_token(parser, "train")
    parser.add_argument(
        "--other-token", default="", help="of a second producer: it must not touch the first one's leases"
    )
    parser.add_argument(
        "--producer", default="", metavar="CMD", help="a shell command; VIME_GATEWAY and VIME_TOKEN are set for it"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="with --producer: checkpoint whose weights are served (default: made up)",
    )
    parser.add_argument(
        "--lease-timeout",
        type=float,
        default=5.0,
        help="with --producer: seconds after which a lease ends (default: 5)",
    )
    parser.add_argument("--timeout", type=float, default=180.0, help="with --producer: seconds in all (default: 180)")
    parser.set_defaults(run_command=run_conformance)


def run_conformance(arguments: argparse.Namespace) -> int:
    """Print the table of checks. Returns 0 when all are good, else 1."""
    if bool(arguments.address) == bool(arguments.producer):
        raise ConfigError("expected either the ADDRESS of a gateway or --producer CMD.")
    if arguments.producer:
        checks = check_producer(
            arguments.producer,
            model=arguments.model,
            lease_timeout_s=arguments.lease_timeout,
            timeout_s=arguments.timeout,
        )
    else:
        checks = check_gateway(arguments.address, token_of(arguments), arguments.other_token)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for check in checks:  # one line each, whatever the width: a log is read as well
        console.print(f"{'pass' if check.is_good else 'FAIL'}  {check.name}")
        if not check.is_good:
            console.print(f"      found: {check.found[:300]}")
            console.print(f"      do:    {check.action}")
    failed = sum(not check.is_good for check in checks)
    console.print(f"{len(checks)} checks, {failed} failed")
    return int(failed > 0)


def check_producer(command: str, *, model: Path | None, lease_timeout_s: float, timeout_s: float) -> list[Check]:
    """Run a command before the scripted gateway until it has gone through the script, and judge it."""
    server_log = logging.getLogger("uvicorn.error")
    former, server_log.disabled = server_log.disabled, True  # it names every response that the script loses
    with tempfile.TemporaryDirectory(prefix="vime-conformance-") as directory:
        gateway = ScriptedGateway(Path(directory), model=model, lease_timeout_s=lease_timeout_s)
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env={**os.environ, "VIME_GATEWAY": gateway.server.url, "VIME_TOKEN": gateway.token},
                start_new_session=True,
            )
            try:
                exit_code = _watch(process, gateway, timeout_s)
            finally:
                _end(process)
        finally:
            gateway.close()  # a job may have its last response, and have ended, before that call is noted
            server_log.disabled = former
        session = Session(
            records=tuple(gateway.records),
            manifests=gateway.manifests,
            lease_timeout_s=lease_timeout_s,
            committed=gateway.committed,
            exit_code=exit_code,
        )
    return judge(session)


def _watch(process: subprocess.Popen[bytes], gateway: ScriptedGateway, timeout_s: float) -> int | None:
    """Wait for the script's end, tell the job that no prompt is left, and return its exit code; None when it did not
    end within STOP_S after that."""
    ends, newest = time.monotonic() + timeout_s, gateway.manifests[-1].version
    with waiting("a producer to go through the script", "producer", deadline_s=timeout_s):
        while process.poll() is None and time.monotonic() < ends:
            puts = [record.began for record in gateway.records if record.path in PUTS]  # its engines may start late
            lasted = time.monotonic() - puts[0] if puts else 0.0
            is_through = gateway.committed >= GROUPS and gateway.gateway.weights.has_confirmed(PRODUCER, newest)
            if is_through and lasted > 2 * gateway.lease_timeout_s:  # long enough to need heartbeats
                break
            time.sleep(POLL_S)
    gateway.finish()
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started; it has a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_S / 4)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
