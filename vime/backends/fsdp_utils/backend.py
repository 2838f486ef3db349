"""`FsdpBackend`: this process as a trainer rank. The entry point of the package, called by the Ray actor of that rank.

transformers and the model code are imported when the first engine is built: importing this file is cheap.
"""

from __future__ import annotations

import datetime
import random
from typing import TYPE_CHECKING

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vime.config.parse import Config
from vime.types import ConfigError, EngineSpec, RankInfo, RankPlace
from vime.weights.rendezvous import meet_trainer_ranks

if TYPE_CHECKING:
    from vime.backends.fsdp_utils.engine import FsdpEngine


class FsdpBackend:
    """`protocols.TrainBackend` on FSDP2: every rank is a replica that trains on rows of its own, and all ranks together
    hold one copy of the parameters."""

    place: RankPlace
    replica_group: dist.ProcessGroup  # this rank alone
    device: torch.device

    def __init__(self, config: Config, rank: RankInfo) -> None:
        """Collective over all trainer ranks."""
        on_cuda = config.cluster.device == "cuda"
        if on_cuda and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no CUDA device in the trainer process. Use --device cpu.")
        self._config = config
        self.device = torch.device("cuda", rank.local_rank) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(self.device)
        meet_trainer_ranks(rank, config.cluster)
        self._mesh = init_device_mesh(self.device.type, (rank.world_size,), mesh_dim_names=("shard",))
        timeout = datetime.timedelta(minutes=config.cluster.distributed_timeout_minutes)
        self.replica_group, _ = dist.new_subgroups(1, timeout=timeout)
        self.place = RankPlace(
            rank=rank.rank,
            world_size=rank.world_size,
            dp_rank=rank.rank,
            dp_size=rank.world_size,
            source_rank=rank.rank,
            holds_tokens=True,
            speaks=True,
        )
        random.seed(config.model.seed)
        numpy.random.seed(config.model.seed % 2**32)
        torch.manual_seed(config.model.seed)

    def build(self, spec: EngineSpec) -> FsdpEngine:
        """Collective over all trainer ranks."""
        from vime.backends.fsdp_utils.engine import build_engine

        return build_engine(spec, self._config, mesh=self._mesh, device=self.device)

    def close(self) -> None:
        """Leave the process groups. Not a collective: a rank may leave after a peer died."""
        if dist.is_initialized():
            dist.destroy_process_group()
