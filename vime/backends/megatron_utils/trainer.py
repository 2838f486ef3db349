"""`MegatronTrainer`: one trainer rank, the door of this room. Its caller is the Ray actor of that rank.

megatron modules are imported inside the constructor, after `prepare_process` has set up the device: importing this file
is cheap and changes nothing in the process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vime.backends.megatron_utils import cpu_device, initialize
from vime.backends.megatron_utils.initialize import RankInfo
from vime.config.parse import Config
from vime.seams import LOSS_PARAMETERS, load_plugin
from vime.types import CheckpointError, RoundPlan, TrainRow
from vime.weights.plan import TensorMeta

if TYPE_CHECKING:
    from vime.backends.megatron_utils.policy_loss import CustomLoss
    from vime.backends.megatron_utils.replica import Replica

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """One rank. A method marked collective must be called by every rank of the named group, in the same order."""

    rank: int  # global
    dp_rank: int  # data-parallel index: which replica this rank belongs to
    dp_size: int
    is_source: bool  # first tensor and context rank of the first pipeline stage: it fetches the rows of its replica
    source_rank: int  # global rank of this replica's source
    model_parallel_group: dist.ProcessGroup  # the TP x PP x CP ranks of this replica
    takes_part_in_export: bool  # whether `export_weights` needs this rank
    device: torch.device

    def __init__(self, config: Config, rank: RankInfo, *, total_steps: int) -> None:
        """Collective over all trainer ranks. `total_steps`: optimizer steps of the whole run, for the schedule."""
        redirected = initialize.prepare_process(config.cluster.device)
        if redirected:
            logger.info("CPU device layer: %d names redirected: %s", len(redirected), ", ".join(redirected))
        initialize.initialize_distributed(
            rank, cluster=config.cluster, parallel=config.parallel, seed=config.model.seed
        )
        from megatron.core import parallel_state

        from vime.backends.megatron_utils.replica import build_replica

        self._config = config
        self.rank = rank.rank
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.model_parallel_group = initialize.replica_group(config.cluster.distributed_timeout_minutes)
        # the experts of one layer may lie on ranks of several replicas
        self.takes_part_in_export = self.dp_rank == 0 or config.parallel.expert_model_parallel_size > 1
        self.source_rank = dist.get_process_group_ranks(self.model_parallel_group)[0]
        self.is_source = self.rank == self.source_rank
        self.device = torch.device(torch.cuda.current_device())
        self._custom_loss = _load_custom_loss(config)
        self._replica: Replica = build_replica(config, total_steps=total_steps)

    def train_round(self, plan: RoundPlan, rows: Mapping[int, TrainRow]) -> dict[str, float]:
        """Every optimizer step of the plan; metrics are the same on every rank. Collective over all trainer ranks.

        `rows` by row number: at least those the plan gives to this data-parallel index.
        """
        from vime.backends.megatron_utils.round import train_round

        metrics = train_round(
            self._replica,
            plan,
            rows,
            algo=self._config.algo,
            dp_rank=self.dp_rank,
            custom_loss=self._custom_loss,
        )
        self._replica.optimizer.finish_round()
        return metrics

    def log_probs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """log p of each row's response tokens, [R] fp32 on the CPU, at the sampling temperature, valid on every rank.

        Collective over the model-parallel group; its ranks pass the same rows. With expert parallelism over all trainer
        ranks, and all pass the same rows, because they compute each other's experts.
        """
        from vime.backends.megatron_utils.round import row_log_probs

        return row_log_probs(self._replica, rows, batch=self._config.batch)

    def weight_metadata(self) -> list[TensorMeta]:
        """What `export_weights` will yield, in its order. Local."""
        return list(self._replica.metadata)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """HF tensors of the present weights. Collective over the model-parallel group, with expert parallelism over all
        trainer ranks (`takes_part_in_export` says whether to call it): every rank exhausts it."""
        return self._replica.hf.export()

    def save(self, directory: Path) -> None:
        """Model, optimizer, schedule and random states into a new DIRECTORY. Collective over all trainer ranks."""
        from vime.backends.megatron_utils import checkpoint

        replica = self._replica
        checkpoint.save(directory, replica.core, replica.optimizer, with_optimizer=not self._config.model.no_save_optim)

    def load(self, directory: Path) -> None:
        """Inverse of `save`, also from another parallel layout. Collective over all trainer ranks."""
        from vime.backends.megatron_utils import checkpoint

        checkpoint.load(directory, self._replica.core, self._replica.optimizer)

    def save_hf(self, directory: Path) -> None:
        """A Hugging Face directory of the present weights. Collective over all trainer ranks; rank 0 writes.

        A failure of rank 0 reaches every rank as CheckpointError.
        """
        from vime.backends.megatron_utils.save_hf import write_hf

        failure: list[str | None] = [None]
        if self.takes_part_in_export:
            stream = self.export_weights()
            if self.rank == 0:
                try:
                    write_hf(
                        directory,
                        stream,
                        self.weight_metadata(),
                        source=Path(self._config.model.hf_checkpoint).expanduser(),
                    )
                except CheckpointError as error:
                    failure = [str(error)]
            for _ in stream:
                pass
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise CheckpointError(failure[0])

    def weights_hash(self) -> str:
        """blake2b of the exported weights, the same on all ranks. Collective like `export_weights`, over every replica
        that asks."""
        return self._replica.weights_hash()

    def close(self) -> None:
        """Leave the process groups and give back what the device layer redirected."""
        initialize.shut_down()
        cpu_device.uninstall()


def _load_custom_loss(config: Config) -> CustomLoss | None:
    """--custom-loss-path, bound to the configuration; its signature is checked again in this process."""
    path = config.algo.custom_loss_path
    return None if path is None else partial(load_plugin(path, "--custom-loss-path", LOSS_PARAMETERS), config.flat)
