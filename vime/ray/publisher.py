"""Where weights leave the trainer: rank 0's sender and its control of the engines, built once and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vime.backends.vllm_utils.control import FleetControl
from vime.config.deadlines import update_deadline_s
from vime.config.lora import AdapterInfo
from vime.config.parse import Config
from vime.types import EngineAddress, Version
from vime.weights.plan import TensorMeta
from vime.weights.publish import PublishReport, publish
from vime.weights.transports import EACH_BY_ITSELF, make_sender

if TYPE_CHECKING:
    import torch


class Publisher:
    """Sends one version after another over one connection to all engines.

    `may_lose`: an engine that is lost in an update is left out, and the others get the update; it is for the caller to
    see whose reports are missing. Not over a broadcast, in which all wait for each."""

    def __init__(
        self, config: Config, run_dir: Path, engines: Sequence[EngineAddress], *, may_lose: bool = False
    ) -> None:
        weights, self._deadline_s = config.weights, update_deadline_s(config)
        self._config = weights
        self._is_released_by_driver = config.cluster.colocate  # when the engines' cache has its memory again
        may_lose = may_lose and weights.update_weight_transport in EACH_BY_ITSELF
        self._fleet = FleetControl(engines, timeout_s=self._deadline_s, may_lose=may_lose)
        directory = Path(weights.update_weight_disk_dir) if weights.update_weight_disk_dir else run_dir / "weights"
        self._sender = make_sender(
            weights.update_weight_transport,
            bucket_bytes=weights.update_weight_buffer_size,
            directory=directory,
            timeout_s=self._deadline_s,
        )
        self._sender.connect(self._fleet)

    def reaches(self, engines: Sequence[EngineAddress]) -> bool:
        """Whether these are the engines that it sends to."""
        return tuple(self._fleet.addresses) == tuple(engines)

    def publish(
        self,
        stream: Iterator[tuple[str, torch.Tensor]],
        metadata: Sequence[TensorMeta],
        version: Version,
        *,
        adapter: AdapterInfo | None = None,
    ) -> PublishReport:
        """`adapter`: the tensors are those of one, whose model these engines have by `publish_base`."""
        return self._publish(stream, metadata, version, adapter=adapter)

    def publish_base(
        self, stream: Iterator[tuple[str, torch.Tensor]], metadata: Sequence[TensorMeta], version: Version
    ) -> PublishReport:
        """The model that adapters are for. The engines stay paused until the adapter of this version is there."""
        return self._publish(stream, metadata, version, is_released=False)

    def _publish(
        self,
        stream: Iterator[tuple[str, torch.Tensor]],
        metadata: Sequence[TensorMeta],
        version: Version,
        *,
        adapter: AdapterInfo | None = None,
        is_released: bool = True,
    ) -> PublishReport:
        return publish(
            stream,
            metadata,
            version=version,
            fleet=self._fleet,
            sender=self._sender,
            pause_mode=self._config.pause_mode or "wait",
            deadline_s=self._deadline_s,
            adapter=adapter,
            is_released=is_released and not self._is_released_by_driver,
        )

    def close(self) -> None:
        self._sender.close()
        self._fleet.close()
