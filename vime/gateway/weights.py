"""Which weights exist, and which of them each job has loaded."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from vime.gateway.messages import Loaded, WeightManifest
from vime.gateway.refusal import Refusal
from vime.types import Version


class Weights:
    """Manifests of the versions that were released, and the versions that each producer confirmed by hash.

    Confirmations are kept in memory: after a restart of the gateway a job reports its hashes again, as the error of a
    refused put tells it to. Callable from any thread.
    """

    def __init__(self, *manifests: WeightManifest) -> None:
        self._lock = threading.Lock()
        self._manifests = {manifest.version: manifest for manifest in manifests}
        self._hashes = {manifest.version: manifest.content_hash for manifest in manifests}
        self._confirmed: dict[str, set[Version]] = {}

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
        """Note that every engine of a job has loaded a version. One wrong hash refuses all."""
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
            self._confirmed.setdefault(producer, set()).add(loaded.version)

    def forget_confirmations(self) -> None:
        """As after a restart of the gateway."""
        with self._lock:
            self._confirmed.clear()

    def newest(self, producer: str) -> Version:
        """The newest version that a job confirmed; -1: none."""
        with self._lock:
            return max(self._confirmed.get(producer, ()), default=-1)

    def behind(self, producer: str) -> int:
        """By how many versions a job is behind the serving one; -1: it has confirmed none."""
        serving, newest = self.serving, self.newest(producer)
        return -1 if newest < 0 else max(0, serving - newest)

    def has_confirmed(self, producer: str, version: Version) -> bool:
        with self._lock:
            return version in self._confirmed.get(producer, ())

    def lag(self, producer: str) -> str:
        """Why a job gets no prompts; empty when it has the serving version."""
        serving, newest = self.serving, self.newest(producer)
        if serving < 0:
            return "the first weights: none are released yet"
        if newest >= serving:
            return ""
        has = f"its newest confirmed version is {newest}" if newest >= 0 else "it has confirmed none"
        return f"{producer} to load version {serving} and report its hash; {has}"
