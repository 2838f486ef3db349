"""Size and hash of what a rank wrote into a checkpoint, computed on the machine that wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from vime.protocols import PendingSave
from vime.training.roles import LEARNING, role_folder
from vime.types import CheckpointError, Role, describe
from vime.utils.hashing import hash_file
from vime.utils.manifest import Entry

SHARD = re.compile(r"__(\d+)_\d+\.distcp")
"""The file name pattern of rank (1) in torch's distributed checkpoint, which both backends use."""


def hash_files(
    directory: Path, roles: Iterable[Role], pending: Iterable[PendingSave], *, rank: int
) -> dict[str, Entry]:
    """Return size and hash of RANK's files of the roles that learn, by their names below DIRECTORY, which is complete;
    rank 0 also returns those of the tables of contents. Files that PENDING, which has ended, did not hash while writing
    are read: their bytes are still in this machine's memory, so no network has to fetch them."""
    known = {path: entry for save in pending for path, entry in save.hashes.items()}
    entries: dict[str, Entry] = {}
    try:
        for folder in [role_folder(directory, role) for role in roles if role in LEARNING]:
            for path in folder.iterdir():
                shard = SHARD.fullmatch(path.name)
                if path.is_file() and (int(shard[1]) if shard else 0) == rank:
                    entries[path.relative_to(directory).as_posix()] = known[path] if path in known else hash_file(path)
    except OSError as error:
        raise CheckpointError.unwritable(directory, describe(error)) from error
    return entries
