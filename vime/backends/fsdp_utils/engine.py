"""`FsdpEngine`: one model cut over all trainer ranks, with what it needs to learn when it does."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from vime.algo.sampling import log_probs_under
from vime.backends.fsdp_utils import checkpoint, lora
from vime.backends.fsdp_utils.hf_config import read_config
from vime.backends.fsdp_utils.hf_weights import HFWeights, adapter_tensors
from vime.backends.fsdp_utils.model import (
    ValueModel,
    answer_positions,
    attention_for,
    bare_model,
    fill,
    model_inputs,
    read_weights,
    shard,
)
from vime.backends.fsdp_utils.optimizer import ShardOptimizer
from vime.backends.fsdp_utils.probe import check_family, check_packing
from vime.backends.fsdp_utils.vision import VisionInputs, has_images
from vime.backends.logprobs import logprobs_and_entropy
from vime.backends.offload import Offload
from vime.batching.pack import PackedBatch, pack
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.protocols import PackLoss, PendingSave
from vime.types import ConfigError, EngineSpec, Role, SamplingRule, VimeError
from vime.utils.manifest import Entry
from vime.weights.plan import TensorMeta

logger = logging.getLogger(__name__)


class Written:
    """`PendingSave` of a checkpoint that is complete."""

    def __init__(self) -> None:
        self.hashes: dict[Path, Entry] = {}

    def wait(self, deadline_s: float) -> None: ...


class FsdpEngine:
    """`protocols.TrainEngine` on FSDP2. Every rank is a replica with rows of its own, and a part of every parameter: so
    all ranks run the same number of forward and backward passes, whether a micro-batch of theirs is empty or not.

    Gradients are reduced after each micro-batch: keeping them whole until the last would cost the memory that cutting
    saves.
    """

    takes_part_in_export = True  # parts of every tensor lie on every rank

    def __init__(
        self,
        spec: EngineSpec,
        config: Config,
        *,
        model: nn.Module,
        hf: HFWeights,
        implementation: str,
        device: torch.device,
        vision: VisionInputs | None = None,
    ) -> None:
        self._vision = vision  # None: no row has images
        self._spec, self._config = spec, config
        self._model, self._hf = model, hf
        self._implementation, self._device = implementation, device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._has_adapter = bool(adapter_tensors(model))
        self._identity: dict[str, str] | None = None  # of the adapter
        self._offload = Offload()
        self._optimizer = None
        if spec.is_trainable:
            parameters = {
                name: part
                for name, part in model.named_parameters()
                if isinstance(part, DTensor) and part.requires_grad
            }
            settings = replace(config.optimizer, lr=spec.lr, lr_warmup_iters=spec.lr_warmup_iters)
            self._optimizer = ShardOptimizer(parameters, settings, total_steps=spec.total_steps)

    @property
    def learning_rate(self) -> float:
        return self._learning.learning_rate

    @property
    def _learning(self) -> ShardOptimizer:
        if self._optimizer is None:
            raise VimeError(
                f"the engine of role {self._spec.role} is frozen: it has nothing to learn, save or load with."
            )
        self._require_awake(with_optimizer=True)
        return self._optimizer

    def _require_awake(self, *, with_optimizer: bool = False) -> None:
        role = self._spec.role
        if self._offload.is_asleep:
            raise VimeError(f"the engine of role {role} sleeps: its weights are not on the device. Wake it up.")
        if with_optimizer and self._offload.is_resting:
            raise VimeError(f"the engine of role {role} rests: it sleeps but for its weights. Wake it up.")

    @torch.no_grad()
    def forward(self, batches: Sequence[Sequence[TrainRow]], rule: SamplingRule | None = None) -> list[list[Tensor]]:
        """See `TrainEngine.forward`. Collective over all trainer ranks, which pass equally many micro-batches."""
        self._require_awake()
        values = []
        for rows in batches:
            batch = pack(rows, device=self._device)
            value_T, _ = self._token_values(rows, batch, rule)
            values.append([value_T[positions].cpu() for positions in batch.row_slices])
        return values

    def accumulate(
        self,
        batches: Sequence[Sequence[TrainRow]],
        columns: Sequence[Mapping[str, Sequence[Tensor]]],
        loss: PackLoss,
        *,
        is_first: bool = True,
        is_last: bool = True,  # noqa: ARG002  gradients are summed over ranks after each micro-batch
    ) -> list[Tensor]:
        """See `TrainEngine.accumulate`. Collective over all trainer ranks.

        Scale: the loss is a share of the step's loss and gradients are summed over micro-batches and ranks (`shard`),
        so nothing divides again.
        """
        if is_first:
            self._learning.zero_grad()
        statistics = []
        for rows, extra in zip(batches, columns, strict=True):
            batch = pack(rows, device=self._device, extra=extra)
            value_T, entropy_T = self._token_values(rows, batch)
            share, statistics_S = loss(value_T, entropy_T, batch)
            share.backward()
            statistics.append(statistics_S.detach())
        return statistics

    def _token_values(
        self, rows: Sequence[TrainRow], batch: PackedBatch, rule: SamplingRule | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (log p of response tokens [T], entropies [T]), 0 elsewhere; or with a value head (predicted returns
        [T], zeros). fp32. Prompts have no logits: that saves their share of the largest tensor of a step."""
        inputs = model_inputs(batch, self._implementation)
        if self._vision is not None:
            inputs |= self._vision.of(rows, self._device, batch.num_tokens)
        if self._spec.has_value_head:
            value_T = self._model(**inputs)[0, :, 0].float()
            return value_T, torch.zeros_like(value_T)
        answer_A = answer_positions(batch)
        if self._keeps_logits:
            logits_AV = self._model(**inputs, logits_to_keep=answer_A).logits.squeeze(0)
        else:
            logits_AV = self._model(**inputs).logits.squeeze(0).index_select(0, answer_A)
        label_A = batch.labels_T[answer_A]
        if rule is None:
            values = logprobs_and_entropy(logits_AV, label_A, temperature=self._config.rollout.rollout_temperature)
        else:
            values = log_probs_under(logits_AV, label_A, rule), torch.zeros(len(label_A), device=self._device)
        # one by one: without an entropy term in the loss no gradient of the entropy is asked for
        logp_T, entropy_T = (value_A.new_zeros(batch.num_tokens).index_copy(0, answer_A, value_A) for value_A in values)
        return logp_T, entropy_T

    def apply_gradients(self, scale: float = 1.0) -> float:
        return self._learning.step(scale)

    def finish_round(self) -> None:
        """Do nothing: parameters are gathered anew for each pass."""
        _ = self._learning

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:  # noqa: ARG002  always at once
        with_optimizer = not self._config.model.no_save_optim
        checkpoint.save(
            directory, self._model, self._learning, with_optimizer=with_optimizer, adapter=self._adapter_identity()
        )
        return Written()

    def load(self, directory: Path) -> None:
        checkpoint.load(directory, self._model, self._learning, adapter=self._adapter_identity())

    def _adapter_identity(self) -> dict[str, str] | None:
        """Return what a checkpoint of the adapter belongs to; None without one. Collective over all ranks. The base's
        files are read the first time only."""
        if self._has_adapter and self._identity is None:
            found = [lora.identity(self._config.lora, self._spec.checkpoint) if dist.get_rank() == 0 else {}]
            dist.broadcast_object_list(found, src=0)
            [self._identity] = found
        return self._identity

    @contextlib.contextmanager
    def base_only(self) -> Iterator[None]:
        """Inside, `forward` is that of the base model, bit for bit."""
        lora.switch(self._model, is_on=False)
        try:
            yield
        finally:
            lora.switch(self._model, is_on=True)

    def sleep(self) -> None:
        if self._offload.is_asleep:
            return
        self._offload.sleep([*self._weights(), *self._learned()])

    def rest(self) -> None:
        if not (self._offload.is_asleep or self._offload.is_resting):
            self._offload.rest(self._learned(), but=self._weights())

    def _weights(self) -> list[Tensor]:
        return [part.to_local() for part in self._model.parameters() if isinstance(part, DTensor)]

    def _learned(self) -> list[Tensor]:
        if self._optimizer is None:
            return []
        self._optimizer.zero_grad()
        return self._optimizer.tensors()

    def wake_up(self) -> None:
        self._offload.wake_up()

    def weight_metadata(self) -> list[TensorMeta]:
        return self._hf.metadata()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model, an adapter merged into it. Collective over all trainer ranks."""
        self._require_awake()
        return self._hf.export(scale=self._config.lora.lora_scale if self._has_adapter else 0.0)

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model without its adapter. Collective over all trainer ranks."""
        self._require_awake()
        return self._hf.export()

    def adapter_metadata(self) -> list[TensorMeta]:
        """Return what `export_adapter` will yield, in its order; [] without an adapter. Local."""
        return lora.adapter_metadata(adapter_tensors(self._model))

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter by PEFT's names, whole and in fp32. Collective over all trainer ranks."""
        self._require_awake()
        return lora.export_adapter(adapter_tensors(self._model))


def build_engine(spec: EngineSpec, config: Config, *, mesh: DeviceMesh, device: torch.device) -> FsdpEngine:
    """Read the HF directory and cut it over `mesh`. Collective over all trainer ranks; an error that rank 0 finds in
    the weights is raised on all."""
    parallel = config.parallel
    settings = read_config(spec.checkpoint, flag=spec.flag)
    implementation = attention_for(device, parallel)
    check_family(
        settings, flag=spec.flag, checkpoint=spec.checkpoint, implementation=implementation, device=str(device)
    )
    family = bare_model(spec, settings, implementation=implementation)
    model: nn.Module = ValueModel(family) if spec.has_value_head else family
    twin = bare_model(spec, settings, implementation=implementation)
    hf = HFWeights(twin, model, torch.bfloat16 if parallel.bf16 else torch.float32)
    if parallel.recompute_granularity is not None:
        family.gradient_checkpointing_enable({"use_reentrant": False})
    model.eval()
    model.requires_grad_(spec.is_trainable)
    adapter: dict[str, Tensor] = {}
    if config.lora.trains_adapter and spec.role is Role.ACTOR:
        lora.add_adapter(model, config.lora, spec)
        adapter = lora.initial_adapter(model, config.model.seed)
    weights = _read_on_rank_0(spec, settings)
    fill(shard(model, mesh, parallel), None if weights is None else {**weights, **adapter}, mesh, device)
    check_packing(spec, family, model, implementation=implementation, device=device)
    shows_images = has_images(settings) and config.data.multimodal_keys is not None
    vision = VisionInputs(family) if shows_images else None
    return FsdpEngine(spec, config, model=model, hf=hf, implementation=implementation, device=device, vision=vision)


def _read_on_rank_0(spec: EngineSpec, settings: PretrainedConfig) -> dict[str, Tensor] | None:
    """Return the weights on rank 0, None on the others; errors in them are raised on all. Collective."""
    weights: dict[str, Tensor] | None = None
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            weights = read_weights(spec, settings)
        except ConfigError as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ConfigError(failure[0])
    return weights
