"""Where the gateway of a run listens: a file in the run directory, written by the gateway."""

from __future__ import annotations

import json
from pathlib import Path

from vime.types import ConfigError

ADDRESS_NAME = "gateway.json"


def write_address(run_dir: Path, url: str) -> None:
    draft = run_dir / f"{ADDRESS_NAME}.partial"
    draft.write_text(json.dumps({"url": url}) + "\n")
    draft.replace(run_dir / ADDRESS_NAME)


def read_address(run_dir: Path) -> str:
    """Return the URL. ConfigError where no gateway listens."""
    path = run_dir / ADDRESS_NAME
    try:
        return str(json.loads(path.read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {type(error).__name__}. Expected an address, or the directory of a run whose "
            "gateway listens."
        ) from error
