"""Gradients to new weights: DDP wrap, megatron's Adam, clipping, learning-rate schedule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import (
    Float16OptimizerWithFloat16Params,
    MegatronOptimizer,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime.backends.live_bytes import storages
from vime.backends.megatron_utils.host_adam import DTYPES, HostAdam
from vime.backends.offload import Offload
from vime.config.cluster import OptimizerConfig, ParallelConfig
from vime.config.schedule import decay_steps


class PolicyOptimizer:
    """Owns the data-parallel wrap of the chunks, the optimizer state and the schedule."""

    def __init__(
        self,
        chunks: Sequence[MegatronModule],
        model_config: TransformerConfig,
        *,
        optimizer: OptimizerConfig,
        parallel: ParallelConfig,
        total_steps: int,
    ) -> None:
        """Collective over all trainer ranks (parameter groups are compared). Weights must be loaded already: under
        --bf16 the fp32 main weights are copied from them here. `total_steps`: optimizer steps of the whole run."""
        self._settings, self._model_config = optimizer, model_config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=bool(parallel.use_distributed_optimizer),
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
        )
        self.chunks = [
            DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for module in (module for chunk in chunks for module in chunk.modules()):
            if hasattr(module, "fuse_wgrad_accumulation"):  # Transformer Engine's: adds to `main_grad`
                module.fuse_wgrad_accumulation = True
        if not parallel.overlap_grad_reduce:  # else megatron asks to see each gradient when it is ready
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.is_summed_in_place = parameter.requires_grad  # of cpu_linear.py, without a GPU
        model_config.finalize_model_grads_func = finalize_model_grads
        if parallel.overlap_grad_reduce:  # only the last micro-batch of a step starts the reduction
            switches = [chunk.no_sync for chunk in self.chunks]
            model_config.no_sync_func = switches if len(switches) > 1 else switches[0]
        self._gathers_late = parallel.overlap_param_gather
        with self._without_gradients():
            self.megatron: MegatronOptimizer = self._make_optimizer(optimizer, parallel)
            self._host = self._take_to_host()
        self._fuse()
        self.scheduler = self._make_scheduler(total_steps)

    def _make_optimizer(self, optimizer: OptimizerConfig, parallel: ParallelConfig) -> MegatronOptimizer:
        return get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                min_lr=self._min_lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.adam_beta1,
                adam_beta2=optimizer.adam_beta2,
                adam_eps=optimizer.adam_eps,
                clip_grad=optimizer.clip_grad,
                bf16=bool(parallel.bf16),
                params_dtype=self._model_config.params_dtype,
                use_distributed_optimizer=bool(parallel.use_distributed_optimizer),
                overlap_param_gather=parallel.overlap_param_gather,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """With --optimizer-cpu-offload nothing lies in the gradients' memory while megatron makes main weights on the
        device: they are in host memory before it is taken again."""
        away = Offload()
        if self._settings.optimizer_cpu_offload:
            away.sleep((), [buffer.grad_data for buffer in self._buffers])
        try:
            yield
        finally:
            away.wake_up()

    def _take_to_host(self) -> list[HostAdam]:
        """Put our Adam in the place of megatron's where flags ask for what that does not do."""
        settings, found = self._settings, list[HostAdam]()
        moments = {"exp_avg": DTYPES[settings.exp_avg_dtype], "exp_avg_sq": DTYPES[settings.exp_avg_sq_dtype]}
        if not settings.optimizer_cpu_offload and set(moments.values()) == {torch.float32}:
            return found
        for part in self.parts:
            if part.optimizer is None:  # no parameter of this kind on this rank
                continue
            part.optimizer = HostAdam(
                part.optimizer.param_groups,
                weights=_followers(part),
                share_on_host=settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0,
                moments=moments,
                counts_in_groups=distrib_optimizer.HAVE_APEX_OR_TE,
            )
            part._copy_main_params_to_model_params = lambda: None  # noqa: SLF001  a step of ours does it
            found.append(part.optimizer)
        return found

    def _fuse(self) -> None:
        """One pass over weights and moments a step where megatron found neither Apex nor Transformer Engine and took
        torch's AdamW, which would make a dozen."""
        for part in self.parts:
            if part.optimizer is None or isinstance(part.optimizer, HostAdam):
                continue
            for group in part.optimizer.param_groups:
                if "fused" in group:  # torch's
                    group["fused"] = True

    @property
    def _min_lr(self) -> float:
        """A constant schedule has no final rate; megatron still wants one that is not above --lr."""
        return 0.0 if self._settings.lr_decay_style == "constant" else self._settings.min_lr

    def _make_scheduler(self, total_steps: int) -> OptimizerParamScheduler:
        """Linear warm-up from 0, then constant, linear or cosine. The flags of this command win over a checkpoint's."""
        settings = self._settings
        steps = decay_steps(settings, total_steps)
        if settings.lr_decay_style == "constant":
            steps = max(steps, settings.lr_warmup_iters + 1)  # has no meaning here, but megatron checks it
        return OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=self._min_lr,
            lr_warmup_steps=settings.lr_warmup_iters,
            lr_decay_steps=steps,
            lr_decay_style=settings.lr_decay_style,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses. Empty groups (a stage without such parameters) carry it too."""
        return float(self.megatron.param_groups[0]["lr"])

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken since the run began, checkpoints included."""
        return int(self.scheduler.num_steps)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[None]:
        """Backward passes in here leave the gradients of each rank where they are: they are summed over ranks once,
        after the last early batch of the step."""
        kept = self._model_config.finalize_model_grads_func
        self._model_config.finalize_model_grads_func = None
        try:
            yield
        finally:
            self._model_config.finalize_model_grads_func = kept

    def step(self, scale: float = 1.0) -> float:
        """Multiply by `scale`, clip and apply the reduced gradients, advance the schedule. Returns the global gradient
        norm before clipping.

        Collective over all ranks. A norm that is not finite is returned without changing the weights: the same number
        reaches every rank, so the caller can raise everywhere.
        """
        optimizer = self.megatron
        if scale != 1.0:
            for chunk in self.chunks:
                chunk.scale_gradients(scale)
        with contextlib.ExitStack() as stack:
            for part in self._host:
                stack.enter_context(part.on_device())
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            if not math.isfinite(norm):
                return norm
            if 0 < self._settings.clip_grad < norm + 1e-6:
                parameters = [parameter for part in self.parts for parameter in part.get_parameters()]
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                if gradients:  # in place: megatron, without Apex, makes a scaled copy of each first
                    torch._foreach_mul_(gradients, self._settings.clip_grad / (norm + 1e-6))
            optimizer.step_with_ready_grads()
        self.scheduler.step(1)
        return norm

    def finish_round(self) -> None:
        """Make the parameters those of the last step on every rank. Collective over all trainer ranks.

        Under --overlap-param-gather the next forward pass would gather them; code that reads them sooner (export, hash,
        checkpoint) would find this rank's own shard new and the others old.
        """
        if self._gathers_late:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    @property
    def parts(self) -> list[MegatronOptimizer]:
        """megatron chains one optimizer per kind of parameter; a dense model has one."""
        return self.megatron.chained_optimizers if hasattr(self.megatron, "chained_optimizers") else [self.megatron]

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What `sleep` moves: (main parameters and moments, which must be kept; gradient buffers, which each step
        zeroes first). What is in host memory already is in neither."""
        inner = [part.optimizer for part in self.parts if part.optimizer is not None]
        kept = [tensor for part in inner for group in part.param_groups for tensor in group["params"]]
        kept += [value for part in inner for state in part.state.values() for value in state.values()]
        buffers = self._buffers
        kept += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        here = [value for value in kept if isinstance(value, Tensor)]
        on_host = storages(self.host_tensors())
        if on_host:
            here = [value for value in here if not on_host.keys() & storages([value]).keys()]
        return here, [buffer.grad_data for buffer in buffers]

    def host_tensors(self) -> list[Tensor]:
        """Return what --optimizer-cpu-offload keeps in host memory; [] without it."""
        return [tensor for part in self._host for tensor in part.host_tensors()]

    @property
    def step_bytes(self) -> int:
        """Device memory that a step takes and gives back, beside what torch's own Adam takes. Parts step one by one."""
        return max((part.step_bytes for part in self._host), default=0)

    @property
    def _buffers(self) -> list[_ParamAndGradBuffer]:
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def adopt_flags(self) -> None:
        """After a checkpoint was loaded: the settings of this command win over those that its groups carry."""
        self._fuse()
        for group in self.megatron.param_groups:
            group["max_lr"], group["min_lr"] = self._settings.lr, self._min_lr
            group["betas"], group["eps"] = (
                (self._settings.adam_beta1, self._settings.adam_beta2),
                self._settings.adam_eps,
            )
        self.scheduler.step(0)


def _followers(part: MegatronOptimizer) -> dict[Tensor, Tensor]:
    """Return by main weight the weights of the model in 16 bits, or this rank's part of them; none in fp32."""
    if isinstance(part, distrib_optimizer.DistributedOptimizer):
        followers, mains = part.shard_float16_groups, part.shard_fp32_from_float16_groups
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        followers, mains = part.float16_groups, part.fp32_from_float16_groups
    else:
        return {}
    pairs = [pair for group in zip(mains, followers, strict=True) for pair in zip(*group, strict=True)]
    return {main: follower.detach() for main, follower in pairs}
