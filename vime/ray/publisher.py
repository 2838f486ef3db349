"""Where weights leave the trainer: rank 0's sender and its control of the engines, built once and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vime.backends.vllm_utils.control import FleetControl
from vime.config.parse import Config
from vime.config.update_deadline import update_deadline_s
from vime.types import EngineAddress, Version
from vime.weights.plan import TensorMeta
from vime.weights.publish import PublishReport, publish
from vime.weights.transports import make_sender

if TYPE_CHECKING:
    import torch


class Publisher:
    """Sends one version after another over one connection to all engines."""

    def __init__(self, config: Config, run_dir: Path, engines: Sequence[EngineAddress]) -> None:
        weights, self._deadline_s = config.weights, update_deadline_s(config)
        self._config = weights
        self._fleet = FleetControl(engines, timeout_s=self._deadline_s)
        directory = Path(weights.update_weight_disk_dir) if weights.update_weight_disk_dir else run_dir / "weights"
        self._sender = make_sender(
            weights.update_weight_transport,
            bucket_bytes=weights.update_weight_buffer_size,
            directory=directory,
            timeout_s=self._deadline_s,
        )
        self._sender.connect(self._fleet)

    def publish(
        self, stream: Iterator[tuple[str, torch.Tensor]], metadata: Sequence[TensorMeta], version: Version
    ) -> PublishReport:
        return publish(
            stream,
            metadata,
            version=version,
            fleet=self._fleet,
            sender=self._sender,
            pause_mode=self._config.pause_mode or "wait",
            deadline_s=self._deadline_s,
        )

    def close(self) -> None:
        self._sender.close()
        self._fleet.close()
