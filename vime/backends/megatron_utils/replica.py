"""The model of this rank with everything that belongs to it: HF view, optimizer, reference. Built in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime.backends.megatron_utils.architecture import read_architecture
from vime.backends.megatron_utils.columns import needs_reference
from vime.backends.megatron_utils.context_parallel import sequence_multiple
from vime.backends.megatron_utils.hf_weights import HFWeights
from vime.backends.megatron_utils.model import build_chunks, transformer_config, with_precision
from vime.backends.megatron_utils.optimizer import PolicyOptimizer
from vime.backends.megatron_utils.step import Sampling, forward_log_probs, pack_rows
from vime.config.parse import Config
from vime.types import ConfigError, TrainRow
from vime.weights.hashing import ContentHash
from vime.weights.plan import TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """This rank's part of one model replica (TP x PP x CP ranks), ready to train.

    `reference` is a second, frozen set of weights without optimizer or gradient buffers, only when a KL term asks for
    it (`needs_reference`). It costs one more copy of the parameters; swapping weights in and out of one module would
    cost two copies on every step and, under the distributed optimizer, a collective.
    """

    core: list[GPTModel]  # bare chunks: checkpoint and export look at these
    chunks: Sequence[MegatronModule]  # the same, wrapped for training
    hf: HFWeights
    metadata: list[TensorMeta]
    optimizer: PolicyOptimizer
    reference: Sequence[MegatronModule] | None
    sampling: Sampling
    pad_multiple: int  # tokens of a pack: sequence parallel cuts it over the tensor-parallel ranks
    batch_multiple: int  # micro-batches of a pass: an interleaved pipeline takes them in groups

    def log_probs(self, chunks: Sequence[MegatronModule], batches: Sequence[Sequence[TrainRow]]) -> list[list[Tensor]]:
        """log p of the response tokens, [R] fp32 on the CPU, per row of each batch; [] off the last pipeline stage.

        `chunks` is `self.chunks` or `self.reference`. Collective over the model-parallel group.
        """
        missing = -len(batches) % self.batch_multiple
        packs = [pack_rows(batch, multiple=self.pad_multiple) for batch in [*batches, *[[]] * missing]]
        answers = forward_log_probs(chunks, packs, self.sampling)
        if not answers:
            return []
        logps = [
            [logp_T[positions].cpu() for positions in batch.row_slices]
            for batch, logp_T in zip(packs, answers, strict=True)
        ]
        return logps[: len(batches)]

    def weights_hash(self) -> str:
        """The content hash that an engine reports for these weights. Collective like the export; the same on every
        rank, and in every layout with the same expert-parallel size (it covers the order, see `HFWeights`)."""
        content = ContentHash()
        for meta, (_, tensor) in zip(self.metadata, self.hf.export(), strict=True):
            content.add(meta, tensor)
        return content.hexdigest()


def build_replica(config: Config, *, total_steps: int) -> Replica:
    """Read the HF checkpoint into this layout. Collective over all trainer ranks."""
    parallel = config.parallel
    architecture = read_architecture(config.model.hf_checkpoint)
    model_config = transformer_config(architecture, parallel)
    core = build_chunks(architecture, model_config, parallel)
    hf = HFWeights(core, architecture)
    hf.load(config.model.hf_checkpoint)
    optimizer = PolicyOptimizer(
        with_precision(core, model_config),
        model_config,
        optimizer=config.optimizer,
        parallel=parallel,
        total_steps=total_steps,
    )
    return Replica(
        core=core,
        chunks=optimizer.chunks,
        hf=hf,
        metadata=hf.metadata(),
        optimizer=optimizer,
        reference=_build_reference(config, architecture.vocab_size) if needs_reference(config.algo) else None,
        sampling=Sampling(vocab_size=architecture.vocab_size, temperature=config.rollout.rollout_temperature),
        pad_multiple=sequence_multiple() * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1),
        batch_multiple=parallel.micro_batch_multiple,
    )


def _build_reference(config: Config, vocab_size: int) -> Sequence[MegatronModule]:
    """Frozen weights of --ref-load, or of --hf-checkpoint."""
    flag = "--ref-load" if config.model.ref_load else "--hf-checkpoint"
    directory = config.model.ref_load or config.model.hf_checkpoint
    architecture = read_architecture(directory, flag=flag)
    if architecture.vocab_size != vocab_size:
        raise ConfigError(
            f"{flag} {directory}: the reference model has {architecture.vocab_size} tokens, the policy {vocab_size}; "
            "expected the same vocabulary. Choose a reference of the same family."
        )
    model_config = transformer_config(architecture, config.parallel)
    chunks = build_chunks(architecture, model_config, config.parallel)
    HFWeights(chunks, architecture).load(directory, flag=flag)
    for chunk in chunks:
        chunk.requires_grad_(False)
    return with_precision(chunks, model_config)
