"""Write files to the disk, not only to its cache; lock them."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What `flock` says on Lustre that is mounted without `-o flock`, on NFS without a lock manager, and on others."""


class NoLocksError(OSError):
    """The file system of a file has no locks."""


def lock_file(descriptor: int, operation: int, path: Path) -> None:
    """Call `flock`. BlockingIOError when another process has the lock, NoLocksError when nobody can have one: then two
    processes that write the same files would not know of each other."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in HAS_NO_LOCKS:
            raise
        name = errno.errorcode[error.errno]
        raise NoLocksError(
            f"{path}: the file system has no file locks: flock got {name} ({error.strerror}), expected a lock, which "
            "keeps a second process from writing the same files. Choose a directory on another file system, as a disk "
            "of this node, or mount this one with locks (Lustre: -o flock; NFS: with a lock manager, without nolock)."
        ) from error


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
