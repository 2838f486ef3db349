"""Write files to the disk, not only to its cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync_tree(directory: Path) -> None:
    """Flush every file and directory below: a rename must not reach the disk before what it names."""
    for folder, _, files in os.walk(directory):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network and user-space file systems have no fsync of directories
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)):
            raise
    finally:
        os.close(descriptor)
