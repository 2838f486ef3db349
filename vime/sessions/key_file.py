"""The key with which agents elsewhere ask a run for sessions: a file, so that it outlives a restart of the run."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from vime.config.parse import Config
from vime.types import ConfigError

NAME = "agent-key"
"""In the run directory, without --agent-key-file."""
SHORTEST = 32


def key_path(config: Config, run: Path) -> Path:
    """Return where the key of a run with --agent-listen lies."""
    given = config.agents.agent_key_file
    return run / NAME if given is None else Path(given)


def agent_key(path: Path) -> str:
    """Return the key in the file, which is made when it is missing. ConfigError when it is no key, or others may read
    it."""
    expected = f"Expected a key of at least {SHORTEST} characters without spaces, which its owner alone may read"
    advice = f"{expected}. Change that, or name a file that is not there: it is made."
    try:
        _make(path)
        with path.open() as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--agent-key-file {path}: cannot be read: {error}. {advice}") from error
    if mode & 0o077:
        raise ConfigError(f"--agent-key-file {path}: others may read it (mode {mode & 0o777:o}). {advice}")
    if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"--agent-key-file {path}: holds no key ({len(key)} characters). {advice}")
    return key


def _make(path: Path) -> None:
    """Make the file unless there is one. Its name appears with its content: two processes may do this at once."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
