"""One weight update: publish -> confirm -> release, in this order and no other.

    fill a bucket                                      while the engines still generate
    pause every engine, clearing its prefix cache      no token of the new version may rest on KV of the old one
    start, load buckets, finish as the new version     the transport's part
    reports: version and content hash of each engine   computed by the engine over what it received
    compare with the hash of what was sent             a difference stops here
    resume                                             only after a confirmed update

By `shm` and `ipc` a bucket is one call to each engine: with the first the engine pauses and starts, with the last it
finishes and reports. By the other transports all buckets are one call. Resume is a call by itself.

A failed update leaves the engines paused: vLLM cannot recover a half-loaded model, and resuming one lets it
generate from a mixture of versions or die at the next request. The owner of the engines must replace them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vime.protocols import EngineControl, UpdateResponse
from vime.types import EngineReport, PublishError, PublishLostError, Version, WaitTimeoutError, may_pass
from vime.utils.failpoints import Point, failpoint
from vime.weights.versions import check_reports

if TYPE_CHECKING:  # the driver reads `PublishReport` and can do without torch
    import torch

    from vime.config.lora import AdapterInfo
    from vime.weights.plan import TensorMeta
    from vime.weights.update_info import UpdateInfo
    from vime.weights.wire import WeightSender

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What one confirmed update moved and how long its parts took, seconds."""

    version: Version
    content_hash: str
    engine_reports: tuple[EngineReport, ...]
    num_tensors: int
    num_bytes: int
    pause_s: float  # from the engines' pause to their resume: nothing is generated
    confirm_s: float

    def metrics(self) -> dict[str, float]:
        return {
            "weights/version": float(self.version),
            "weights/publish_bytes": float(self.num_bytes),
            "weights/confirm_time": self.confirm_s,
            "perf/pause_time": self.pause_s,
        }


Sent = PublishReport | PublishLostError | None
"""What one trainer rank says of an update. None: it has sent nothing. An error: each of its engines was lost."""


def joined(sent: Sequence[Sent]) -> PublishReport:
    """Return one report for what all ranks have sent of one version. PublishLostError when no engine of any sender is
    left, PublishError when two senders had different weights."""
    reports = {rank: report for rank, report in enumerate(sent) if isinstance(report, PublishReport)}
    if not reports:
        errors = [error for error in sent if isinstance(error, PublishLostError)]
        assert errors, "each engine has a sender"
        raise errors[0]
    first = next(iter(reports.values()))
    if any(report.content_hash != first.content_hash for report in reports.values()):
        each = ", ".join(f"rank {rank}: {report.content_hash}" for rank, report in reports.items())
        raise PublishError(
            f"version {first.version}: trainer ranks sent different weights ({each}), expected the same of all: "
            "they should hold one model. Go on from the newest checkpoint, and look for a rank with "
            "other hardware or other packages."
        )
    return replace(
        first,
        engine_reports=tuple(told for report in reports.values() for told in report.engine_reports),
        pause_s=max(report.pause_s for report in reports.values()),
        confirm_s=max(report.confirm_s for report in reports.values()),
    )


def publish(
    stream: Iterator[tuple[str, torch.Tensor]],
    metadata: Sequence[TensorMeta],
    *,
    version: Version,
    fleet: EngineControl,
    sender: WeightSender,
    pause_mode: str,
    deadline_s: float,
    adapter: AdapterInfo | None = None,
    is_released: bool = True,
) -> PublishReport:
    """Bring the weights of `stream` to every engine as `version`, and let the engines continue once all confirmed.

    `adapter`: the stream holds the tensors of one. `is_released` False: another update of the same version follows, the
    engines stay paused until then.

    Called by each trainer rank that sends, for its engines. `stream` holds collectives in which that rank's peers take
    part, so it is consumed to its end in every case, also when the update fails. Raises PublishError; engines then stay
    paused.
    """
    try:
        return _publish(stream, metadata, version, fleet, sender, pause_mode, deadline_s, adapter, is_released)
    except Exception as error:
        _drain(stream)
        if isinstance(error, PublishError):
            raise
        raise publish_error(
            error,
            f"weight update to version {version} failed",
            "The engines stay paused; they must be restarted before they serve again.",
        ) from error


def publish_error(error: Exception, what: str, then: str) -> PublishError:
    """Return what to raise because of `error`: a PublishLostError where the same may work with the engines that are
    left."""
    kind = PublishLostError if may_pass(error) else PublishError
    return kind(f"{what}: {type(error).__name__}: {str(error).rstrip('.')}. {then}")


def _publish(
    stream: Iterator[tuple[str, torch.Tensor]],
    metadata: Sequence[TensorMeta],
    version: Version,
    fleet: EngineControl,
    sender: WeightSender,
    pause_mode: str,
    deadline_s: float,
    adapter: AdapterInfo | None,
    is_released: bool,
) -> PublishReport:
    started = time.monotonic()

    def mark() -> float:
        now = time.monotonic()
        if now - started > deadline_s:
            advice = "Raise --update-weight-timeout-secs, or look for a stuck engine in RUN_DIR/logs."
            raise WaitTimeoutError(f"the weight update to version {version}", deadline_s, "publish", advice)
        return now

    if not metadata:
        raise PublishError(f"weight update to version {version}: the metadata names no tensor")
    results: list[UpdateResponse] = []
    asked: list[float] = []

    def deliver(update_info: UpdateInfo) -> None:
        failpoint(Point.SEND)
        asked.append(mark())
        results.append(fleet.update(update_info, version=version, pause_mode=pause_mode, adapter=adapter))

    failpoint(Point.PAUSE)
    content = sender.send_update(stream, metadata, deliver)
    failpoint(Point.CONFIRM)
    mark()
    expected = content.hexdigest()
    reports = results[-1].reports if results else ()
    names = [address.name for address in fleet.addresses]
    check_reports(reports, version=version, content_hash=expected, engines=names)
    failpoint(Point.CONFIRMED)
    if is_released:
        fleet.resume()
        serving = {address.name for address in fleet.addresses}  # without those that did not resume
        reports = [report for report in reports if report.engine in serving]
    return PublishReport(
        version=version,
        content_hash=expected,
        engine_reports=tuple(reports),
        num_tensors=content.num_tensors,
        num_bytes=content.num_bytes,
        pause_s=time.monotonic() - asked[0] - results[0].pause_s,
        confirm_s=results[-1].confirm_s,
    )


def _drain(stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Run the rest of the stream's collectives, so that no peer waits for this rank until a timeout."""
    try:
        for _ in stream:
            pass
    except Exception:  # boundary: the first failure is about to be raised and explains more than this one
        logger.exception("the rest of the weight stream could not be drained")
