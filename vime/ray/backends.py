"""The one place where a run's training engine is chosen. Imports nothing heavy until a trainer rank asks."""

from __future__ import annotations

from vime.config.parse import Config
from vime.protocols import TrainBackend
from vime.types import RankInfo


def make_backend(config: Config, rank: RankInfo) -> TrainBackend:
    """Join the trainer ranks. Collective over all of them."""
    if config.cluster.train_backend == "fsdp":
        from vime.backends.fsdp_utils.backend import FsdpBackend

        return FsdpBackend(config, rank)
    from vime.backends.megatron_utils.backend import MegatronBackend

    return MegatronBackend(config, rank)
