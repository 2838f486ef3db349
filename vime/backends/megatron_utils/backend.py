"""`MegatronBackend`: this process as a trainer rank. The entry point of the package, called by the Ray actor of that
rank.

megatron modules are imported inside the methods, after `prepare_process` has set up the device: importing this file is
cheap and changes nothing in the process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vime.backends.megatron_utils import cpu_device, initialize
from vime.config.parse import Config
from vime.types import EngineSpec, RankInfo, RankPlace

if TYPE_CHECKING:
    from vime.backends.megatron_utils.engine import MegatronEngine

logger = logging.getLogger(__name__)


class MegatronBackend:
    """`protocols.TrainBackend` on megatron-core: one process of the layout, on NCCL or gloo."""

    place: RankPlace
    replica_group: dist.ProcessGroup  # the TP x PP x CP ranks of this replica
    device: torch.device

    def __init__(self, config: Config, rank: RankInfo) -> None:
        """Collective over all trainer ranks."""
        redirected = initialize.prepare_process(config.cluster.device)
        if redirected:
            logger.info("CPU device layer: %d names redirected: %s", len(redirected), ", ".join(redirected))
        initialize.initialize_distributed(
            rank, cluster=config.cluster, parallel=config.parallel, seed=config.model.seed
        )
        self._config = config
        self.replica_group = initialize.replica_group(config.cluster.distributed_timeout_minutes)
        self.device = torch.device(torch.cuda.current_device())
        self.place = initialize.rank_place(self.replica_group)

    def build(self, spec: EngineSpec) -> MegatronEngine:
        """Collective over all trainer ranks."""
        from vime.backends.megatron_utils.engine import build_engine

        return build_engine(spec, self._config)

    def close(self) -> None:
        """Leave the process groups and restore what the device layer redirected."""
        initialize.shut_down()
        cpu_device.uninstall()
