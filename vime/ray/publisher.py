"""Where weights leave the trainer.

`Publishing` is a trainer rank's part: which weights go to the engines, the model, or its base once and then adapters.
`Publisher` is a sender and its control of the engines that it sends to, built once and kept.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vime.backends.vllm_utils.control import FleetControl
from vime.config.colocation import shared_ranks
from vime.config.deadlines import update_deadline_s
from vime.config.lora import AdapterInfo
from vime.config.parse import Config
from vime.types import EngineAddress, PublishError, PublishLostError, Version
from vime.weights.publish import PublishReport, Sent, publish, publish_error

if TYPE_CHECKING:
    import torch

    from vime.protocols import AdapterEngine, TrainEngine
    from vime.weights.plan import TensorMeta

logger = logging.getLogger(__name__)

BY_MEMORY = ("shm", "ipc")
"""Transports whose two ends are on one node, or on one GPU."""


class Publishing:
    """Publishes for one trainer rank: rank 0 sends, or with --colocate a rank on each engine's GPUs; the others take
    part in the gathering."""

    def __init__(self, config: Config, run_dir: Path, rank: int) -> None:
        self._config, self._run_dir, self._rank = config, run_dir, rank
        self.needs_every_rank = has_many_senders(config)
        self._publisher: Publisher | None = None
        self._with_base: set[EngineAddress] = set()  # that have the model for which they get adapters

    def publish(self, actor: TrainEngine, version: Version, engines: list[EngineAddress]) -> Sent:
        """Collective over the ranks that hold shards. Returns what this rank sent; None: to no engine. One of several
        senders returns the error when each of its engines was lost, because those of the others are not."""
        streams = self._streams(actor, engines)
        report: Sent = None
        mine = senders(self._config, engines).get(self._rank)
        try:
            if mine:
                report = self._send(actor, streams, version, self._publisher_to(mine))
        except PublishLostError as error:
            if not self.needs_every_rank:
                raise
            logger.warning(
                "version %d: %s was lost in the update: %s", version, [each.name for each in mine or ()], error
            )
            report = error
        finally:
            for stream in streams.values():
                for _ in stream:  # its collectives are reached by every rank, also when a sender failed
                    pass
        self._with_base = set(engines)  # not those that are lost now: they come back without
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
        has_base = set(engines) <= self._with_base
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
            publisher.publish(streams["base"], actor.weight_metadata(), version, is_released=False)
        metadata = cast("AdapterEngine", actor).adapter_metadata()
        return publisher.publish(streams["adapter"], metadata, version, adapter=self._config.lora.described)

    def _publisher_to(self, engines: Sequence[EngineAddress]) -> Publisher:
        """Return the publisher, a new one when an engine was lost or started again since."""
        if self._publisher is not None and not self._publisher.reaches(engines):
            closed, self._publisher = self._publisher, None
            closed.close()
        self._publisher = self._publisher or Publisher(self._config, self._run_dir, engines, may_lose=True)
        return self._publisher

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def has_many_senders(config: Config) -> bool:
    """Return whether several trainer ranks may send weights, so that each rank has to have them whole."""
    return config.cluster.colocate and config.weights.update_weight_transport in BY_MEMORY


def senders(config: Config, engines: Sequence[EngineAddress]) -> Mapping[int, Sequence[EngineAddress]]:
    """Return which trainer rank sends weights to which of these engines.

    With --colocate and a transport through memory the first of the ranks that share an engine's GPUs; else rank 0 to
    all of them.
    """
    if not has_many_senders(config):
        return {0: engines}
    by_rank = defaultdict[int, list[EngineAddress]](list)
    for address in engines:
        by_rank[shared_ranks(config, int(address.name.removeprefix("engine-")))[0]].append(address)
    return by_rank


class Publisher:
    """Sends one version after another over one connection to all engines.

    `may_lose`: an engine that is lost in an update is left out, and the others get the update; it is for the caller to
    see whose reports are missing. Not over a broadcast, in which all wait for each."""

    def __init__(
        self, config: Config, run_dir: Path, engines: Sequence[EngineAddress], *, may_lose: bool = False
    ) -> None:
        from vime.weights.transports import EACH_BY_ITSELF, make_sender  # imports torch; not every importer needs it

        weights, self._deadline_s = config.weights, update_deadline_s(config)
        self._config = weights
        self._is_released_by_driver = config.cluster.colocate  # when the engines' cache has its memory again
        may_lose = may_lose and weights.update_weight_transport in EACH_BY_ITSELF
        # One that hangs takes half of the update's time, which leaves the other half to those that do not.
        lose_after_s = self._deadline_s / 2 if may_lose else None
        self._fleet = FleetControl(engines, timeout_s=self._deadline_s, lose_after_s=lose_after_s)
        directory = Path(weights.update_weight_disk_dir) if weights.update_weight_disk_dir else run_dir / "weights"
        self._sender = make_sender(
            weights.update_weight_transport,
            bucket_bytes=weights.update_weight_buffer_size,
            directory=directory,
            timeout_s=self._deadline_s,
            source=None if config.lora.trains_adapter else Path(config.model.hf_checkpoint).expanduser(),
        )
        try:
            self._sender.connect(self._fleet)
        except Exception as error:
            self.close()
            if isinstance(error, PublishError):
                raise
            what = "the engines could not be connected for weight updates"
            raise publish_error(error, what, "They have the weights that they had.") from error

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
        is_released: bool = True,
    ) -> PublishReport:
        """`adapter`: the tensors are those of one, whose model these engines have. That model was published with
        `is_released` False: the engines stay paused until the adapter of this version is there."""
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
