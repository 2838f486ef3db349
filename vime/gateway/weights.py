"""Which weights exist, and which of them each job has loaded."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from vime.gateway.messages import Loaded, WeightManifest
from vime.gateway.refusal import Refusal
from vime.types import ConfigError, Version
from vime.utils.files import sync

MOST_BEGUN = 4
"""Of so many versions that a job has not confirmed it is kept which of its engines have loaded them."""
ENGINES_NAME = "gateway_engines.json"  # in a run directory: producer -> how many engines it registered


class Weights:
    """Manifests of the versions that were released, and which engines of each producer have loaded them.

    What engines have loaded is kept in memory: after a restart of the gateway a job reports its hashes again, as the
    error of a refused put tells it to. How many engines it has is kept in a file of the directory: a job says that
    once, when it begins. Callable from any thread.
    """

    def __init__(self, directory: Path, *manifests: WeightManifest) -> None:
        self._lock = threading.Lock()
        self._registering = threading.Lock()  # of the file
        self._path = directory / ENGINES_NAME
        self._num_engines = _read_counts(self._path)
        self._manifests = {manifest.version: manifest for manifest in manifests}
        self._hashes = {manifest.version: manifest.content_hash for manifest in manifests}
        self._confirmed: dict[str, set[Version]] = {}
        self._reported: dict[str, dict[Version, set[str]]] = {}  # of the newest not confirmed: who has loaded them

    def register(self, producer: str, num_engines: int) -> None:
        """Note how many engines a process has that begins, and that none of them has loaded anything; 0: it does not
        say, and what the process before it reported counts. It is on disk when this returns."""
        with self._registering:
            with self._lock:
                counts = self._num_engines | {producer: num_engines}
            if counts != self._num_engines:
                draft = self._path.with_suffix(".tmp")
                draft.write_bytes(msgspec.json.encode(counts))
                sync(draft)
                draft.replace(self._path)
                sync(self._path.parent)
            with self._lock:
                self._num_engines = counts
                if num_engines:
                    self._confirmed.pop(producer, None)
                    self._reported.pop(producer, None)

    def release(self, manifest: WeightManifest) -> None:
        """Make a version the serving one. A hash never changes."""
        with self._lock:
            known = self._hashes.setdefault(manifest.version, manifest.content_hash)
            if known != manifest.content_hash:
                raise ValueError(f"version {manifest.version} has hash {known}, not {manifest.content_hash}")
            self._manifests.setdefault(manifest.version, manifest)

    def forget(self, version: Version) -> None:
        """The files of an older version are deleted: nobody can load it any more. Its hash stays, so that a job which
        has loaded it can say so again after a restart of the gateway."""
        if version >= self.serving:
            raise ValueError(f"version {version} cannot be forgotten: {self.serving} is served")
        with self._lock:
            self._manifests.pop(version, None)

    @property
    def serving(self) -> Version:
        """The newest version; -1 before the first is released."""
        with self._lock:
            return max(self._hashes, default=-1)

    def manifest(self, version: Version) -> WeightManifest:
        with self._lock:
            found = self._manifests.get(version)
        if found is None:
            raise self._unknown(version)
        return found

    def file(self, version: Version, name: str) -> tuple[Path, os.stat_result]:
        """Return where a file of a version is. The name is looked up, never joined to a path as the caller wrote it."""
        manifest = self.manifest(version)
        known = next((file.name for file in manifest.files if file.name == name), None)
        if known is None:
            raise Refusal(
                404,
                "unknown_file",
                f"version {version} has no such file.",
                got=repr(name[:100]),
                expected=f"one of {[file.name for file in manifest.files][:8]}",
                next_action=f"Take the names from GET /v1/weights/{version}.",
            )
        path = Path(manifest.location, known)
        try:
            return path, path.stat()
        except FileNotFoundError as error:
            raise self._unknown(version) from error

    def _unknown(self, version: Version) -> Refusal:
        with self._lock:
            versions, was_there = sorted(self._manifests), version in self._hashes
        return Refusal(
            404,
            "unknown_version",
            "there are no weights of this version" + (" any more." if was_there else "."),
            got=f"version {version}" + (", whose files are deleted" if was_there else ""),
            expected=f"one of {versions[-8:]}",
            next_action="Ask for `serving`.",
        )

    def confirm(self, producer: str, loaded: Loaded) -> None:
        """Note which engines of a job have loaded a version. One wrong hash refuses all."""
        with self._lock:
            right = self._hashes.get(loaded.version)
        if right is None:
            raise self._unknown(loaded.version)
        wrong = {name: found for name, found in loaded.engines.items() if found != right}
        if wrong:
            name, found = next(iter(wrong.items()))
            raise Refusal(
                409,
                "wrong_hash",
                f"{len(wrong)} engines have not loaded version {loaded.version}.",
                got=f"engine {name[:100]!r} with hash {found}",
                expected=right,
                next_action=f"Load version {loaded.version} again, then report the hashes of all engines.",
            )
        with self._lock:
            confirmed, reported = self._confirmed.setdefault(producer, set()), self._reported.setdefault(producer, {})
            if loaded.version in confirmed:
                return
            names = reported.setdefault(loaded.version, set())
            names.update(loaded.engines)
            if len(names) >= self._num_engines.get(producer, 0):
                confirmed.add(loaded.version)
                del reported[loaded.version]
            for old in sorted(reported)[:-MOST_BEGUN]:
                del reported[old]

    def forget_confirmations(self) -> None:
        """As after a restart of the gateway."""
        with self._lock:
            self._confirmed.clear()
            self._reported.clear()

    def newest(self, producer: str) -> Version:
        """The newest version that a job confirmed; -1: none."""
        with self._lock:
            return max(self._confirmed.get(producer, ()), default=-1)

    def behind(self, producer: str) -> int:
        """By how many versions a job is behind the serving one; -1: it has confirmed none."""
        serving, newest = self.serving, self.newest(producer)
        return -1 if newest < 0 else max(0, serving - newest)

    def has_confirmed(self, producer: str, version: Version) -> bool:
        """Whether as many engines of a job have loaded a version as it registered; one, if it registered none."""
        with self._lock:
            return version in self._confirmed.get(producer, ())

    def lag(self, producer: str) -> str:
        """Why a job gets no prompts; empty when it has the serving version."""
        serving, newest = self.serving, self.newest(producer)
        if serving < 0:
            return "the first weights: none are released yet"
        if newest >= serving:
            return ""
        with self._lock:
            num_reported = len(self._reported.get(producer, {}).get(serving, ()))
            num_engines = self._num_engines.get(producer, 0)
        if num_reported:
            has = f"{num_reported} of its {num_engines} engines have"
        else:
            has = f"its newest confirmed version is {newest}" if newest >= 0 else "it has confirmed none"
        return f"{producer} to load version {serving} and report its hash; {has}"


def _read_counts(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: the number of engines of each job cannot be read: {error}. Expected an object of numbers. "
            "Restore the file, or remove it and start each job again, so that it registers."
        ) from error
