"""Rollout jobs beside a run of mode external: processes that know an address and a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.helpers.training import Training
from vime.gateway.tokens import Scope, TokenFile
from vime.utils.network import free_port


def gateway_address() -> str:
    """HOST:PORT for --transferqueue-address: a restart of the run listens there again."""
    return f"127.0.0.1:{free_port()}"


def make_token(run_dir: Path, name: str, *scopes: Scope) -> str:
    """Return a token of a run, which need not have started."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return TokenFile(run_dir).make(name, scopes or (Scope.TRAIN, Scope.EVAL), seconds=3600)


def produce(run_dir: Path, address: str, name: str, flags: Sequence[str], *, run: Path) -> Training:
    """Start `vime produce` with directory `run_dir`; `run` is the directory of the run that it produces for."""
    command = ("-m", "vime", "produce", f"http://{address}")
    return Training(command, flags, run_dir, variables={"VIME_TOKEN": make_token(run, name)})
