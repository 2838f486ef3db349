"""Which weights exist, and which of them each job has loaded."""

from __future__ import annotations

import threading

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
        self._confirmed: dict[str, set[Version]] = {}

    def release(self, manifest: WeightManifest) -> None:
        """Make a version the serving one. A hash never changes."""
        with self._lock:
            known = self._manifests.setdefault(manifest.version, manifest)
        if known.content_hash != manifest.content_hash:
            raise ValueError(f"version {manifest.version} has hash {known.content_hash}, not {manifest.content_hash}")

    @property
    def serving(self) -> Version:
        """The newest version; -1 before the first is released."""
        with self._lock:
            return max(self._manifests, default=-1)

    def manifest(self, version: Version) -> WeightManifest:
        with self._lock:
            found, versions = self._manifests.get(version), sorted(self._manifests)
        if found is None:
            raise Refusal(
                404,
                "unknown_version",
                "there are no weights of this version.",
                got=f"version {version}",
                expected=f"one of {versions[-8:]}",
                next_action="Ask for `serving`.",
            )
        return found

    def confirm(self, producer: str, loaded: Loaded) -> None:
        """Note that every engine of a job has loaded a version. One wrong hash refuses all."""
        manifest = self.manifest(loaded.version)
        wrong = {name: found for name, found in loaded.engines.items() if found != manifest.content_hash}
        if wrong:
            name, found = next(iter(wrong.items()))
            raise Refusal(
                409,
                "wrong_hash",
                f"{len(wrong)} engines have not loaded version {loaded.version}.",
                got=f"engine {name[:100]!r} with hash {found}",
                expected=manifest.content_hash,
                next_action=f"Load {manifest.location} again, then report the hashes of all engines.",
            )
        with self._lock:
            self._confirmed.setdefault(producer, set()).add(loaded.version)

    def newest(self, producer: str) -> Version:
        """The newest version that a job confirmed; -1: none."""
        with self._lock:
            return max(self._confirmed.get(producer, ()), default=-1)

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
