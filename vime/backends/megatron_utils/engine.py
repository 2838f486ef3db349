"""`MegatronEngine`: one model on this rank, cut as the layout says, with what it needs to learn when it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime.backends.megatron_utils import checkpoint
from vime.backends.megatron_utils.architecture import as_critic, read_architecture
from vime.backends.megatron_utils.hf_weights import HFWeights
from vime.backends.megatron_utils.initialize import checkpoint_group
from vime.backends.megatron_utils.lora import Adapter, add_adapter
from vime.backends.megatron_utils.model import build_chunks, transformer_config, with_precision
from vime.backends.megatron_utils.optimizer import PolicyOptimizer
from vime.backends.megatron_utils.step import Sampling, forward_backward, forward_values, pack_rows
from vime.backends.offload import Offload
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.protocols import PackLoss, PendingSave
from vime.types import EngineSpec, Role, SamplingRule, VimeError
from vime.weights.plan import TensorMeta


class MegatronEngine:
    """`protocols.TrainEngine` on megatron-core. A frozen role has neither optimizer nor gradient buffers: it costs one
    copy of the parameters. (Swapping its weights in and out of the policy's module would cost two copies on every step
    and, under the distributed optimizer, a collective.)"""

    def __init__(
        self,
        spec: EngineSpec,
        config: Config,
        *,
        core: list[GPTModel],
        chunks: Sequence[MegatronModule],
        hf: HFWeights,
        optimizer: PolicyOptimizer | None,
        sampling: Sampling | None,
        adapter: Adapter | None,
    ) -> None:
        """`core`: bare chunks, which checkpoint and export look at. `chunks`: the same, wrapped for training."""
        self._role, self._config, self._parallel = spec.role, config, config.parallel
        self._core, self._chunks, self._hf, self._optimizer = core, chunks, hf, optimizer
        self._metadata = hf.metadata()
        self._offload = Offload()
        self._checkpoint_group: dist.ProcessGroup | None = None  # made by the first save
        self._sampling, self._adapter = sampling, adapter

    @property
    def takes_part_in_export(self) -> bool:
        """The experts of one layer may lie on ranks of several replicas."""
        is_first_replica = parallel_state.get_data_parallel_rank() == 0
        return is_first_replica or self._parallel.expert_model_parallel_size > 1

    @property
    def learning_rate(self) -> float:
        return self._learning.learning_rate

    @property
    def _learning(self) -> PolicyOptimizer:
        if self._optimizer is None:
            raise VimeError(f"the engine of role {self._role} is frozen: it has nothing to learn, save or load with.")
        self._require_awake(with_optimizer=True)
        return self._optimizer

    def _require_awake(self, *, with_optimizer: bool = False) -> None:
        if self._offload.is_asleep:
            raise VimeError(f"the engine of role {self._role} sleeps: its weights are not on the device. Wake it up.")
        if with_optimizer and self._offload.is_resting:
            raise VimeError(f"the engine of role {self._role} rests: it sleeps but for its weights. Wake it up.")

    def forward(self, batches: Sequence[Sequence[TrainRow]], rule: SamplingRule | None = None) -> list[list[Tensor]]:
        """See `TrainEngine.forward`. Collective over the model-parallel group, with experts over all trainer ranks."""
        self._require_awake()
        missing = -len(batches) % self._parallel.micro_batch_multiple
        packs = [pack_rows(batch, self._parallel) for batch in [*batches, *[[]] * missing]]
        packed = forward_values(self._chunks, packs, self._sampling, rule)
        if not packed:
            return []
        values = [
            [value_T[positions].cpu() for positions in batch.row_slices]
            for batch, value_T in zip(packs, packed, strict=True)
        ]
        return values[: len(batches)]

    def accumulate(
        self,
        batches: Sequence[Sequence[TrainRow]],
        columns: Sequence[Mapping[str, Sequence[Tensor]]],
        loss: PackLoss,
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> list[Tensor]:
        if is_first:
            self._learning.zero_grad()
        packs = [pack_rows(batch, self._parallel, extra=extra) for batch, extra in zip(batches, columns, strict=True)]
        with contextlib.nullcontext() if is_last else self._learning.unfinished():
            return forward_backward(self._chunks, packs, self._sampling, loss)

    def apply_gradients(self, scale: float = 1.0) -> float:
        return self._learning.step(scale)

    def finish_round(self) -> None:
        self._learning.finish_round()

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        optimizer = self._learning
        if self._checkpoint_group is None:
            self._checkpoint_group = checkpoint_group(self._config.cluster.distributed_timeout_minutes)
        return checkpoint.save(
            directory,
            self._core,
            optimizer,
            adapter=self._adapter,
            with_optimizer=not self._config.model.no_save_optim,
            group=self._checkpoint_group,
            in_background=in_background,
        )

    def load(self, directory: Path) -> None:
        checkpoint.load(directory, self._core, self._learning, adapter=self._adapter)

    def sleep(self) -> None:
        """Free device memory; does nothing when already asleep."""
        if self._offload.is_asleep:
            return
        learning, scratch = self._learned()
        self._offload.sleep([*self._weights(), *learning], scratch)

    def rest(self) -> None:
        """Free what an export does not need; does nothing when already done, or asleep."""
        if not (self._offload.is_asleep or self._offload.is_resting):
            self._offload.rest(*self._learned(), but=self._weights())

    def _weights(self) -> list[Tensor]:
        return [parameter for chunk in self._core for parameter in chunk.parameters()]

    def _learned(self) -> tuple[list[Tensor], list[Tensor]]:
        return ([], []) if self._optimizer is None else self._optimizer.tensors()

    def wake_up(self) -> None:
        self._offload.wake_up()

    def weight_metadata(self) -> list[TensorMeta]:
        return list(self._metadata)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model, an adapter merged into it. Collective over the model-parallel group, with expert parallelism
        over all trainer ranks."""
        base = self.export_base()
        return base if self._adapter is None else self._adapter.merged(base)

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model without its adapter. Collective like `export_weights`."""
        self._require_awake()
        return self._hf.export()

    def adapter_metadata(self) -> list[TensorMeta]:
        """Return what `export_adapter` will yield, in its order; [] without an adapter. Local."""
        return [] if self._adapter is None else self._adapter.metadata()

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter by PEFT's names, whole and in fp32. Collective over the model-parallel group."""
        self._require_awake()
        return iter(()) if self._adapter is None else self._adapter.export()

    def base_only(self) -> AbstractContextManager[None]:
        """Inside, `forward` is that of the base model, bit for bit. Local."""
        return contextlib.nullcontext() if self._adapter is None else self._adapter.off()


def build_engine(spec: EngineSpec, config: Config) -> MegatronEngine:
    """Read the HF checkpoint into this layout. Collective over all trainer ranks."""
    parallel = config.parallel
    architecture = read_architecture(spec.checkpoint, flag=spec.flag)
    if spec.has_value_head:
        architecture = as_critic(architecture)
    model_config = transformer_config(architecture, parallel)
    # only the policy generated with these experts; other models have their own router
    replays_routing = config.algo.use_rollout_routing_replay and spec.role is Role.ACTOR
    core = build_chunks(architecture, model_config, parallel, replays_routing=replays_routing)
    hf = HFWeights(core, architecture)
    hf.load(spec.checkpoint, flag=spec.flag)
    adapter = add_adapter(core, model_config, architecture, spec, config)
    if adapter is not None:
        adapter.begin(config.model.seed)
    wrapped = with_precision(core, model_config)
    optimizer = None
    if spec.is_trainable:
        optimizer = PolicyOptimizer(
            wrapped,
            model_config,
            optimizer=replace(config.optimizer, lr=spec.lr, lr_warmup_iters=spec.lr_warmup_iters),
            parallel=parallel,
            total_steps=spec.total_steps,
        )
    else:
        for chunk in core:
            chunk.requires_grad_(False)
    sampling = Sampling(vocab_size=architecture.vocab_size, temperature=config.rollout.rollout_temperature)
    return MegatronEngine(
        spec,
        config,
        core=core,
        chunks=wrapped if optimizer is None else optimizer.chunks,
        hf=hf,
        optimizer=optimizer,
        sampling=None if spec.has_value_head else sampling,
        adapter=adapter,
    )
