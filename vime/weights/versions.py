"""Where a policy version is made, and when it counts as served.

`trained` is the number of optimizer rounds that made the trainer's weights. `serving` is the newest version that every
engine has confirmed by name and by content hash: None until the first publish. Always serving <= trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime.types import EngineReport, PublishError, Version


def check_reports(
    reports: Sequence[EngineReport], *, version: Version, content_hash: str, engines: Sequence[str] | None = None
) -> None:
    """Raise PublishError unless every engine names this version and this content hash.

    `engines` are the names that must have reported; None accepts any, but at least one.
    """
    if not reports:
        raise PublishError(f"version {version}: no engine reported what it serves. Expected at least one report.")
    if engines is not None and sorted(report.engine for report in reports) != sorted(engines):
        raise PublishError(
            f"version {version}: reports came from {sorted(report.engine for report in reports)}, expected one from "
            f"each of {sorted(engines)}."
        )
    wrong = [
        f"{report.engine} serves version {report.version} with hash {report.content_hash} "
        f"({report.num_tensors} tensors)"
        for report in reports
        if (report.version, report.content_hash) != (version, content_hash)
    ]
    if wrong:
        raise PublishError(
            f"weight update not confirmed: expected version {version} with hash {content_hash}, but "
            f"{'; '.join(wrong)}. The engine must not serve: restart it and publish again."
        )


class VersionLedger:
    """The version numbers of a run, owned by the driver."""

    def __init__(self) -> None:
        self._trained: Version = 0
        self._serving: Version | None = None

    @property
    def trained(self) -> Version:
        """Return the version of the trainer's weights."""
        return self._trained

    @property
    def serving(self) -> Version | None:
        """Return the newest version that every engine confirmed; None before the first."""
        return self._serving

    def advance(self) -> Version:
        """Count one finished optimizer round: the trainer's weights are a new version."""
        self._trained += 1
        return self._trained

    def confirm(self, reports: Sequence[EngineReport], expected_hash: str) -> Version:
        """Accept a publish of `trained` only when every engine names this version and this content hash."""
        check_reports(reports, version=self._trained, content_hash=expected_hash)
        self._serving = self._trained
        return self._trained

    def restore(self, version: Version) -> None:
        """Continue at a checkpoint's version. Engines serve nothing of it until the next publish."""
        if version < 0:
            raise ValueError(f"a version counts optimizer rounds from 0, got {version}")
        if self._trained != 0 or self._serving is not None:
            raise ValueError(f"restore({version}) on a ledger at version {self._trained}: restore before training")
        self._trained = version
