"""What a directory holds, written into it when it is complete: name, size and hash of every file below.

`manifest.json` is `{"files": {NAME: [BYTES, HASH]}, "hash": HASH}`; the second hash is that of the entries, so that
damage to the manifest can be distinguished from damage to the files. Names are relative and have slashes. A later
reader learns whether each byte is still the one that was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vime.utils.hashing import hash_file, new_hash

MANIFEST = "manifest.json"
NUM_THREADS = 4  # one core hashes faster than most disks read
Entry = tuple[int, str]
"""Size and hash of one file."""


def write_manifest(directory: Path, known: Mapping[str, Entry]) -> None:
    """Name every file below, which is complete. `known`: entries from the writers of files; the other files are hashed
    here.

    Raises OSError when a file has another size than its writer says. Does not flush to the disk.
    """
    sizes = _sizes(directory)
    for name, (num_bytes, _) in known.items():
        if sizes.get(name) != num_bytes:
            raise OSError(f"{name} has {sizes.get(name, 'no')} bytes, but {num_bytes} were written")
    files = {name: known[name] if name in known else hash_file(directory / name) for name in sorted(sizes)}
    (directory / MANIFEST).write_text(json.dumps({"files": files, "hash": _hash_of(files)}, indent=1))


def read_manifest(directory: Path) -> dict[str, Entry]:
    """Return the entries, by name. Raises OSError when there is none, ValueError when it is damaged."""
    try:
        record = json.loads((directory / MANIFEST).read_bytes())
        files = {str(name): (int(num_bytes), str(digest)) for name, (num_bytes, digest) in record["files"].items()}
        is_whole = record["hash"] == _hash_of(files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST}: is damaged: {type(error).__name__} {error}") from error
    if not is_whole:
        raise ValueError(f"{MANIFEST}: is damaged: its entries do not have the hash that stands below them")
    return files


def compare_sizes(directory: Path, files: Mapping[str, Entry]) -> list[str]:
    """Report files that are missing, extra, or of another size: one line per file. Reads no content."""
    found = _sizes(directory)
    findings = [f"{name}: is there, but was not written with the others" for name in found.keys() - files.keys()]
    for name, (num_bytes, _) in files.items():
        if name not in found:
            findings.append(f"{name}: is missing, expected {num_bytes} bytes")
        elif found[name] != num_bytes:
            findings.append(f"{name}: has {found[name]} bytes, expected {num_bytes}")
    return sorted(findings)


def compare_hashes(directory: Path, files: Mapping[str, Entry]) -> list[str]:
    """Report which of these files hold other bytes than were written: one line per file. Files of another size are left
    to `compare_sizes`."""
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hash") as threads:
        found = threads.map(lambda name: _difference(directory, name, files[name]), files)
        return [finding for finding in found if finding is not None]


def find_damage(directory: Path, *, max_bytes: int | None = None) -> list[str]:
    """Report everything that differs from the manifest, one line per file; empty when all is as it was written.

    `max_bytes`: read no more than that, the smallest files first; of the others only the size is compared. Raises
    OSError when there is no manifest.
    """
    try:
        files = read_manifest(directory)
    except ValueError as error:
        return [str(error)]
    return compare_sizes(directory, files) + compare_hashes(directory, _smallest(files, max_bytes))


def share_of(files: Iterable[str], rank: int, num_ranks: int) -> list[str]:
    """Return the names that one of `num_ranks` readers takes."""
    return sorted(files)[rank::num_ranks]


def _difference(directory: Path, name: str, entry: Entry) -> str | None:
    try:
        num_bytes, digest = hash_file(directory / name)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{name}: cannot be read: {error}"
    if num_bytes != entry[0] or digest == entry[1]:
        return None
    return f"{name}: its bytes changed: hash {digest}, expected {entry[1]}"


def _smallest(files: Mapping[str, Entry], max_bytes: int | None) -> dict[str, Entry]:
    if max_bytes is None:
        return dict(files)
    chosen: dict[str, Entry] = {}
    for name, entry in sorted(files.items(), key=lambda item: item[1][0]):
        max_bytes -= entry[0]
        if max_bytes < 0:
            break
        chosen[name] = entry
    return chosen


def _sizes(directory: Path) -> dict[str, int]:
    """Return the size of every file below except the manifest, by its name relative to DIRECTORY."""
    paths = [Path(folder, name) for folder, _, names in os.walk(directory) for name in names]
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}
    sizes.pop(MANIFEST, None)
    return sizes


def _hash_of(files: Mapping[str, Entry]) -> str:
    content = new_hash()
    content.update(json.dumps(sorted(files.items())).encode())
    return content.hexdigest()
