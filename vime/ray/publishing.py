"""Which weights a trainer rank brings to the engines: the model, or its base once and then adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vime.config.parse import Config
from vime.types import EngineAddress, Version

if TYPE_CHECKING:
    import torch

    from vime.protocols import AdapterEngine, TrainEngine
    from vime.ray.publisher import Publisher
    from vime.weights.publish import PublishReport


class Publishing:
    """Publishes for one trainer rank: rank 0 sends, the others take part in the gathering."""

    def __init__(self, config: Config, run_dir: Path, rank: int) -> None:
        self._config, self._run_dir, self._rank = config, run_dir, rank
        self._publisher: Publisher | None = None
        self._with_base: set[str] = set()  # engines that have the model for which they get adapters

    def publish(self, actor: TrainEngine, version: Version, engines: list[EngineAddress]) -> PublishReport | None:
        """Collective over the ranks that hold shards. Returns what rank 0 sent."""
        streams = self._streams(actor, engines)
        report = None
        try:
            if self._rank == 0:
                report = self._send(actor, streams, version, self._publisher_to(engines))
        finally:
            for stream in streams.values():
                for _ in stream:  # its collectives are reached by every rank, also when rank 0 failed
                    pass
        self._with_base = {address.url for address in engines}  # not those that are lost now: they come back without
        return report

    def _streams(
        self, actor: TrainEngine, engines: list[EngineAddress]
    ) -> dict[str, Iterator[tuple[str, torch.Tensor]]]:
        """Return what goes to these engines, in this order: the model, or its adapter, and before that the model for
        engines that have not had it yet. The same on every rank."""
        if not self._config.lora.trains_adapter:
            return {"model": actor.export_weights()}
        trained = cast("AdapterEngine", actor)
        adapter = {"adapter": trained.export_adapter()}
        has_base = {address.url for address in engines} <= self._with_base
        return adapter if has_base else {"base": trained.export_base(), **adapter}

    def _send(
        self,
        actor: TrainEngine,
        streams: Mapping[str, Iterator[tuple[str, torch.Tensor]]],
        version: Version,
        publisher: Publisher,
    ) -> PublishReport:
        if "model" in streams:
            return publisher.publish(streams["model"], actor.weight_metadata(), version)
        if "base" in streams:
            publisher.publish_base(streams["base"], actor.weight_metadata(), version)
        metadata = cast("AdapterEngine", actor).adapter_metadata()
        return publisher.publish(streams["adapter"], metadata, version, adapter=self._config.lora.described)

    def _publisher_to(self, engines: list[EngineAddress]) -> Publisher:
        """Return the publisher, a new one when an engine was lost or started again since."""
        from vime.ray.publisher import Publisher  # imports torch, which not every reader of trainers.py needs

        if self._publisher is not None and not self._publisher.reaches(engines):
            closed, self._publisher = self._publisher, None
            closed.close()
        self._publisher = self._publisher or Publisher(self._config, self._run_dir, engines, may_lose=True)
        return self._publisher

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
