"""Architecture + parallel layout -> megatron-core GPTModel chunks of this rank (several in an interleaved pipeline)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vime.backends.megatron_utils.architecture import Architecture, check_implementation
from vime.backends.megatron_utils.fused import rotation
from vime.backends.megatron_utils.latent_attention import LatentAttention
from vime.backends.megatron_utils.layer_spec import block_spec
from vime.backends.megatron_utils.value_head import ValueHead
from vime.config.cluster import ParallelConfig
from vime.config.layout import check_model_layout

LOGIT_ENTRIES = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Of a chunk of logits, by type of device: 128 MiB, and 2 GiB, in fp32. Fewer are not cut, and cost nothing more."""


def transformer_config(architecture: Architecture, parallel: ParallelConfig) -> TransformerConfig:
    """megatron's configuration of this model in this layout."""
    check_model_layout(parallel, architecture)
    check_implementation(architecture, parallel.transformer_impl, "the model")
    on_cuda = torch.cuda.is_available()
    is_interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    dtype = torch.bfloat16 if parallel.bf16 else torch.float32
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=partial(F.gelu, approximate="tanh") if architecture.is_gelu else F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.has_qkv_bias,
        layernorm_zero_centered_gamma=architecture.norms_add_one,
        qk_layernorm=architecture.has_qk_norm,
        softmax_scale=architecture.attention_scale,
        window_size=(architecture.window - 1, 0) if architecture.window else None,
        window_attn_skip_freq=[int(number in architecture.window_layers) for number in range(architecture.num_layers)],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Weights come from HF files, so initialisation does nothing. `perform_initialization=False` would also skip
        # marking the tensor-parallel shards, and those would drop out of the gradient norm.
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        # With two stages a chunk's next and last neighbour are one rank, and batched messages between the two would be
        # swapped.
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bool(parallel.bf16),
        variable_seq_lengths=True,  # packs differ in length
        moe_token_dispatcher_type="alltoall",  # megatron asks for it with variable lengths, for dense models too
        **_expert_settings(architecture, parallel),
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        gradient_accumulation_fusion=False,  # of the output layer: needs Apex. Others: `PolicyOptimizer`
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # megatron rotates for Transformer Engine's layers. Unfused it would read the lengths of a pack on the host, for
        # queries and for keys, in each layer. Layers `local` rotate in `PackedAttention`.
        apply_rope_fusion=parallel.transformer_impl == "transformer_engine",
        bias_activation_fusion=on_cuda and not architecture.is_gelu,
        bias_dropout_fusion=on_cuda,
    )


def _expert_settings(architecture: Architecture, parallel: ParallelConfig) -> dict[str, object]:
    """No balancing loss: the loss of the run is the algorithm's. Routing weights in fp32, as HF computes them."""
    if not architecture.num_experts:
        return {}
    return {
        "num_moe_experts": architecture.num_experts,
        "moe_ffn_hidden_size": architecture.moe_intermediate_size,
        "moe_router_topk": architecture.num_experts_per_token,
        "moe_router_pre_softmax": not architecture.normalizes_chosen,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        **_router_settings(architecture),
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def _router_settings(architecture: Architecture) -> dict[str, object]:
    """The bias of experts stays what it is: a rule outside of the loss would move it."""
    router = architecture.router
    if router is None:
        return {}
    groups: dict[str, object] = {}
    if router.num_groups > 1:
        groups = {"moe_router_num_groups": router.num_groups, "moe_router_group_topk": router.groups_per_token}
    return {
        **groups,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": router.scale,
        "moe_shared_expert_intermediate_size": router.shared_size,
        "moe_layer_freq": [int(number >= router.num_dense_layers) for number in range(architecture.num_layers)],
    }


def _keep(weight: Tensor) -> Tensor:
    return weight


def padded_vocab_size(architecture: Architecture, parallel: ParallelConfig) -> int:
    """Rows of the embedding over all tensor-parallel ranks; the extra rows are zero and masked in the logits."""
    size = parallel.tensor_model_parallel_size
    return -(-architecture.vocab_size // size) * size


def build_chunks(
    architecture: Architecture, config: TransformerConfig, parallel: ParallelConfig, *, replays_routing: bool = False
) -> list[GPTModel]:
    """Uninitialised fp32 or bf16 model of this pipeline stage, in the order its chunks run. Load weights before use.

    Local construction, except that a tied model with several stages makes its two copies equal (collective over the
    embedding group).
    """
    rope: dict[str, object] = {"rotary_base": architecture.rope_theta}
    if architecture.rope_llama3_factor is not None:
        rope.update(rope_scaling=True, rope_scaling_factor=architecture.rope_llama3_factor)
    if architecture.rope_linear_factor is not None:
        rope["seq_len_interpolation_factor"] = architecture.rope_linear_factor
    latent, router = architecture.latent, architecture.router
    spec = partial(
        block_spec,
        config,
        parallel.transformer_impl,
        replays_routing=replays_routing,
        has_sandwich_norms=architecture.has_sandwich_norms,
        has_sinks=architecture.has_sinks,
        attention=None if latent is None else ModuleSpec(module=LatentAttention, params={"latent": latent}),
        num_dense_layers=router.num_dense_layers if router else 0,
        groups_experts=bool(parallel.moe_grouped_gemm),
    )
    count = parallel.virtual_pipeline_model_parallel_size
    chunks = []
    for number in [None] if count is None else range(count):
        model = CompletionModel(
            config,
            spec(chunk=number),
            padded_vocab_size(architecture, parallel),
            architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=architecture.is_tied,
            vp_stage=number,
            rotates_in_attention=parallel.transformer_impl == "local",
            embedding_scale=architecture.embedding_scale,
            window_rope_theta=architecture.window_rope_theta,
            rope_scale=architecture.rope_scale,
            **rope,
        )
        if architecture.has_value_head and model.post_process:
            model.output_layer = ValueHead(config)
        if architecture.rope_yarn is not None:
            model.rotary_pos_emb.inv_freq = _yarn_frequencies(model.rotary_pos_emb.inv_freq, architecture)
        chunks.append(model.to(torch.cuda.current_device()))
    return chunks


def _yarn_frequencies(plain_D: Tensor, architecture: Architecture) -> Tensor:
    yarn = architecture.rope_yarn
    assert yarn is not None
    share_D = plain_D.new_tensor(yarn.shares(architecture.rope_theta, architecture.head_dim))
    return plain_D / yarn.factor * share_D + plain_D * (1 - share_D)


class CompletionModel(GPTModel):
    """A GPTModel whose logits are those that predict response tokens (`answer_U` of the pack): prompts have none, which
    saves their share of the largest product and of the largest tensor of a step."""

    def __init__(
        self,
        config: TransformerConfig,
        *arguments: object,
        rotates_in_attention: bool,
        embedding_scale: float | None = None,
        window_rope_theta: float | None = None,
        rope_scale: float = 1.0,
        **options: object,
    ) -> None:
        """`rotates_in_attention`: the layers' `PackedAttention` applies rotary positions, not megatron.
        `window_rope_theta`: of the layers with a window, if they have another than the rest."""
        super().__init__(config, *arguments, **options)
        self._rotates_in_attention = rotates_in_attention
        self._embedding_scale: float | None = None
        if embedding_scale is not None:  # rounded to the type of the embedding, as transformers does
            self._embedding_scale = torch.tensor(embedding_scale, dtype=config.params_dtype, device="cpu").item()
        self._window_rope, self._rope_scale = None, rope_scale
        if window_rope_theta is not None:
            self._window_rope = RotaryEmbedding(
                config.kv_channels, rotary_percent=1.0, rotary_base=window_rope_theta, cp_group=self.pg_collection.cp
            )
        self._gathers = self.post_process and config.sequence_parallel
        if self._gathers:
            # gathered before the choice, here, not after it by the output layer, which sums gradients instead
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    def _preprocess(
        self, *arguments: object, position_ids: Tensor, packed_seq_params: PackedSeqParams, **options: object
    ) -> tuple[object, ...]:
        """megatron's own, before the decoder; `position_ids` [1, L] of this rank's tokens."""
        hidden_states, angles_S11D, *others = super()._preprocess(
            *arguments, position_ids=position_ids, packed_seq_params=packed_seq_params, **options
        )
        if self._embedding_scale is not None and self.pre_process:
            hidden_states = hidden_states * self._embedding_scale
        if not self._rotates_in_attention:
            return (hidden_states, angles_S11D, *others)

        def turned(angles: Tensor) -> tuple[Tensor, Tensor]:
            return rotation(angles.flatten(1)[position_ids[0]], self.config.params_dtype, self._rope_scale)

        packed_seq_params.rotation = packed_seq_params.window_rotation = turned(angles_S11D)
        if self._window_rope is not None:
            packed_seq_params.window_rotation = turned(self._window_rope(len(angles_S11D), packed_seq=True))
        return (hidden_states, None, *others)

    def _postprocess(
        self, hidden_states: Tensor, *arguments: object, packed_seq_params: PackedSeqParams, **options: object
    ) -> Tensor:
        """megatron's own, behind the decoder; `hidden_states` [L, 1, H], or [L / TP, 1, H] under sequence parallelism.
        Collective over the tensor-parallel group then. With `read_logits` of the pack its result for the logits [A, V],
        instead of them: the first value, and all of them as the pack's `values` (megatron's schedule takes no tuple).
        """
        answer_U = getattr(packed_seq_params, "answer_U", None)
        if self.post_process and answer_U is not None:
            if self._gathers:
                hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
            hidden_states = hidden_states.index_select(0, answer_U)

        def logits(hidden_A1H: Tensor) -> Tensor:
            return super(CompletionModel, self)._postprocess(  # type: ignore[no-any-return]
                hidden_A1H, *arguments, packed_seq_params=packed_seq_params, **options
            )

        read = getattr(packed_seq_params, "read_logits", None)
        if not self.post_process or read is None:
            return logits(hidden_states)
        width = self.vocab_size // self.config.tensor_model_parallel_size
        values = _read_in_chunks(hidden_states, lambda chunk, rows: read(logits(chunk).squeeze(0), rows), width)
        packed_seq_params.values = values
        return values[0]


def _read_in_chunks(
    hidden_A1H: Tensor, read: Callable[[Tensor, slice], tuple[Tensor, ...]], width: int
) -> tuple[Tensor, ...]:
    """What `read` says of all rows, [A] each, while the logits of at most two chunks of them are held: backward
    computes those of each chunk but the last anew."""
    size = max(1, LOGIT_ENTRIES[hidden_A1H.device.type] // width)
    parts = []
    for start in range(0, len(hidden_A1H), size):
        rows = slice(start, start + size)
        is_last = start + size >= len(hidden_A1H)
        if is_last or not torch.is_grad_enabled():
            parts.append(read(hidden_A1H[rows], rows))
        else:
            parts.append(checkpoint(read, hidden_A1H[rows], rows, use_reentrant=False, preserve_rng_state=False))
    return parts[0] if len(parts) == 1 else tuple(torch.cat(values) for values in zip(*parts, strict=True))


def with_precision(chunks: list[GPTModel], config: TransformerConfig) -> list[MegatronModule]:
    """Under --bf16 wrap each chunk so that inputs go in as bfloat16 and logits come out as fp32. The bias of experts
    stays in fp32, as in the files: megatron would round it first."""
    if not config.bf16:
        return list(chunks)
    biases = {
        module: module.expert_bias
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(getattr(module, "expert_bias", None), Tensor)
    }
    wrapped: list[MegatronModule] = [Float16Module(config, chunk) for chunk in chunks]
    for module, bias in biases.items():
        module.expert_bias = bias
    return wrapped
