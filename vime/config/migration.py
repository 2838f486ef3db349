"""What becomes of flags of slime, megatron-core and SGLang that Vime does not have. Data only; translate.py reads it.

Names and meanings are facts of those projects (slime/utils/arguments.py and slime's launch scripts of August 2026,
megatron-core 0.1x). A flag that is in no table is refused as unknown, without a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

Number = int | float


@dataclass(frozen=True, slots=True)
class FromModel:
    """The model's config.json gives the value. `keys`: where, the first that is there; a dot goes into an object.

    `means`: the entries that a switch stands for; empty: the value behind the flag is compared with the entry.
    """

    keys: tuple[str, ...]
    means: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Always:
    """The flag is always on here. `values`: accepted values (empty: anything, () after a switch too)."""

    why: str
    values: tuple[str | Number, ...] = ()


@dataclass(frozen=True, slots=True)
class Renamed:
    """`to` are the flags that mean the same here, `{}` standing for the value or `{}...` for several.

    `note`: where the meaning differs."""

    to: tuple[str, ...]
    note: str = ""

    @property
    def num_values(self) -> int | None:
        """Return how many values follow the flag; None: one or more."""
        return None if "{}..." in self.to else int("{}" in self.to)


@dataclass(frozen=True, slots=True)
class Missing:
    """Not available here. `instead`: what to do."""

    instead: str


FROM_MODEL: dict[str, FromModel] = {
    "--num-layers": FromModel(("num_hidden_layers",)),
    "--hidden-size": FromModel(("hidden_size",)),
    "--ffn-hidden-size": FromModel(("intermediate_size",)),
    "--num-attention-heads": FromModel(("num_attention_heads",)),
    "--num-query-groups": FromModel(("num_key_value_heads", "num_attention_heads")),
    "--group-query-attention": FromModel(()),
    "--kv-channels": FromModel(("head_dim",)),
    "--vocab-size": FromModel(("vocab_size",)),
    "--max-position-embeddings": FromModel(("max_position_embeddings",)),
    "--seq-length": FromModel(()),
    "--norm-epsilon": FromModel(("rms_norm_eps", "layer_norm_eps")),
    "--rotary-base": FromModel(("rope_theta", "rope_parameters.rope_theta")),
    "--rotary-percent": FromModel(("partial_rotary_factor", "rope_parameters.partial_rotary_factor")),
    "--rotary-scaling-factor": FromModel(("rope_scaling.factor", "rope_parameters.factor")),
    "--use-rope-scaling": FromModel(("rope_scaling.rope_type", "rope_parameters.rope_type"), ("llama3",)),
    "--swiglu": FromModel(("hidden_act",), ("silu", "swish")),
    "--untie-embeddings-and-output-weights": FromModel(("tie_word_embeddings",), (False,)),
    "--add-qkv-bias": FromModel(("attention_bias",), (True,)),
    "--qk-layernorm": FromModel(()),
    "--spec": FromModel(()),
    "--rotary-interleaved": FromModel(()),
    "--post-self-attn-layernorm": FromModel(()),
    "--post-mlp-layernorm": FromModel(()),
    "--no-position-embedding": FromModel(()),
    "--apply-layernorm-1p": FromModel(()),
    "--attention-output-gate": FromModel(()),
    "--use-gated-attention": FromModel(()),
    "--num-experts": FromModel(("num_experts", "num_local_experts", "n_routed_experts")),
    "--moe-ffn-hidden-size": FromModel(("moe_intermediate_size",)),
    "--moe-router-topk": FromModel(("num_experts_per_tok",)),
    "--moe-layer-freq": FromModel(()),
    "--moe-router-score-function": FromModel(("scoring_func",)),
    "--moe-router-topk-scaling-factor": FromModel(("routed_scaling_factor",)),
    "--moe-router-num-groups": FromModel(("n_group",)),
    "--moe-router-group-topk": FromModel(("topk_group",)),
    "--moe-router-pre-softmax": FromModel(("norm_topk_prob",), (False,)),
    "--moe-router-enable-expert-bias": FromModel(()),
    "--moe-shared-expert-intermediate-size": FromModel(("shared_expert_intermediate_size",)),
    "--moe-shared-expert-gate": FromModel(()),
    "--multi-latent-attention": FromModel(()),
    "--q-lora-rank": FromModel(("q_lora_rank",)),
    "--kv-lora-rank": FromModel(("kv_lora_rank",)),
    "--qk-head-dim": FromModel(("qk_nope_head_dim",)),
    "--qk-pos-emb-head-dim": FromModel(("qk_rope_head_dim",)),
    "--v-head-dim": FromModel(("v_head_dim",)),
    "--mscale": FromModel(("rope_scaling.mscale",)),
    "--mscale-all-dim": FromModel(("rope_scaling.mscale_all_dim",)),
}
"""Read from the model; a value that contradicts it is refused. Without `keys` there
is no single entry to compare with: the layers are those of `model_type`."""

_FP32 = "reductions, gradients and softmax are in fp32"
_LAYERS = "layers are those of the model's config.json"
_KERNELS = "the trainer takes the kernels that it has; they change no result"
_POLLS = "nothing polls: waiting processes are notified"
_ALL_RANKS = "the run continues or ends as a whole"

ALWAYS: dict[str, Always] = {
    "--attention-softmax-in-fp32": Always(_FP32),
    "--accumulate-allreduce-grads-in-fp32": Always(_FP32),
    "--no-check-for-nan-in-loss-and-grad": Always("a step with a gradient that is not finite is left out and reported"),
    "--moe-router-dtype": Always(_FP32, ("fp32",)),
    "--attention-dropout": Always("there is no dropout", (0.0,)),
    "--hidden-dropout": Always("there is no dropout", (0.0,)),
    "--optimizer": Always("the optimizer is Adam with decoupled weight decay", ("adam",)),
    "--normalization": Always(_LAYERS, ("RMSNorm",)),
    "--position-embedding-type": Always(_LAYERS, ("rope",)),
    "--use-rotary-position-embeddings": Always(_LAYERS),
    "--disable-bias-linear": Always(_LAYERS),
    "--make-vocab-size-divisible-by": Always("the vocabulary is padded for the ranks and cut again"),
    "--padded-vocab-size": Always("the vocabulary is padded for the ranks and cut again"),
    "--attention-backend": Always(_KERNELS, ("flash", "auto", "fused")),
    "--no-rope-fusion": Always(_KERNELS),
    "--no-masked-softmax-fusion": Always(_KERNELS),
    "--no-gradient-accumulation-fusion": Always(_KERNELS),
    "--moe-permute-fusion": Always(_KERNELS),
    "--moe-token-dispatcher-type": Always(_KERNELS, ("alltoall", "allgather", "flex")),
    "--moe-enable-deepep": Always(_KERNELS),
    "--moe-token-drop-policy": Always("no token is dropped", ("probs", "position")),
    "--moe-aux-loss-coeff": Always("there is no load-balancing loss", (0.0,)),
    "--moe-router-load-balancing-type": Always("there is no load-balancing loss"),
    "--moe-router-bias-update-rate": Always("the router's biases do not move by themselves", (0.0,)),
    "--disable-compute-advantages-and-returns": Always("--loss-type sft_loss computes no advantages"),
    "--use-fault-tolerance": Always("a part that dies is started again (--max-restarts)"),
    "--rollout-health-check-first-wait": Always("an engine is watched from its first response on"),
    "--ci-test": Always(_ALL_RANKS),
    "--no-offload-rollout": Always("nothing is offloaded unless it is asked for"),
    "--rollout-skip-special-tokens": Always("the text of a completion has no special tokens; its tokens keep them"),
    "--log-passrate": Always("pass@k of an evaluation follows from its samples"),
    "--log-multi-turn": Always("every metric is per completion"),
    "--data-pad-size-multiplier": Always("packs are padded to what the layout needs"),
    "--log-probs-chunk-size": Always("log-probabilities are computed in chunks that fit"),
    "--loss-mask-type": Always("masks follow the tokenizer's own chat template"),
    "--disable-wandb-random-suffix": Always("names get no random suffix"),
    "--use-distributed-post": Always("requests to engines need no processes of their own"),
    "--allgather-cp": Always("keys and values of a context-parallel group are gathered"),
    "--cp-comm-type": Always(
        "keys and values of a context-parallel group are gathered, nothing goes all to all (Ulysses)",
        ("p2p", "all_gather"),
    ),
    "--overlap-cpu-optimizer-d2h-h2d": Always("copies of an optimizer in host memory overlap with its step"),
    "--use-torch-optimizer-for-cpu-offload": Always("steps of an optimizer in host memory are torch's AdamW"),
    "--use-precision-aware-optimizer": Always("moments are kept as --exp-avg-dtype and --exp-avg-sq-dtype say"),
    "--main-grads-dtype": Always(_FP32, ("fp32",)),
    "--main-params-dtype": Always("main weights are in fp32", ("fp32",)),
    "--transferqueue-prefetch-groups": Always("ranks read their rows by key; no payload is read ahead of them"),
    "--transferqueue-ack-on-train-data": Always("a round's rows leave the queue when it is trained"),
    "--no-transferqueue-ack-on-train-data": Always("a round's rows leave the queue when it is trained"),
    "--polling-mode": Always(_POLLS),
    "--transfer-queue-staleness-poll-interval": Always(_POLLS),
    "--enable-experimental": Always("nothing is hidden behind this switch"),
}

RENAMED: dict[str, Renamed] = {
    "--use-tis": Renamed(("--off-policy-correction", "tis")),
    "--balance-by-flops": Renamed(("--balance-data", "--balance-data-by", "flops")),
    "--rollout-health-check-interval": Renamed(("--engine-health-interval-secs", "{}")),
    "--rollout-health-check-timeout": Renamed(("--engine-health-timeout-secs", "{}")),
    "--ci-train-rollout-logprob-abs-diff-threshold": Renamed(("--train-rollout-diff-threshold", "{}")),
    "--log-probs-max-tokens-per-gpu": Renamed(
        (), "passes without a gradient take micro-batches of --max-tokens-per-gpu; here it is left out"
    ),
}
"""Read as the flags on the right, with one line that says so."""

TO_ENVIRONMENT = {"--wandb-team": "WANDB_ENTITY", "--wandb-host": "WANDB_BASE_URL"}
"""Read as settings of wandb, which are environment variables and not part of the configuration."""
SECRETS = {"--wandb-key": "WANDB_API_KEY"}
"""The same for what must not be seen: `ray/relaunch.py` takes it off the command line of the process too."""

ENGINE: dict[str, Renamed | Always | Missing] = {
    "mem-fraction-static": Renamed(
        ("--vllm-gpu-memory-utilization", "{}"),
        "vLLM's number is the share of the whole device that it may use, weights, cache and activations together",
    ),
    "server-concurrency": Renamed(("--vllm-server-concurrency", "{}"), "here it is per engine"),
    "context-length": Renamed(("--rollout-max-context-len", "{}")),
    "max-running-requests": Renamed(("--vllm-max-num-seqs", "{}")),
    "chunked-prefill-size": Renamed(("--vllm-max-num-batched-tokens", "{}")),
    "cuda-graph-bs": Renamed(("--vllm-cudagraph-capture-sizes", "{}...")),
    "cuda-graph-max-bs": Renamed(("--vllm-max-cudagraph-capture-size", "{}")),
    "disable-cuda-graph": Renamed(("--vllm-enforce-eager",)),
    "disable-radix-cache": Renamed(("--vllm-no-enable-prefix-caching",)),
    "page-size": Renamed(("--vllm-block-size", "{}")),
    "kv-cache-dtype": Renamed(("--vllm-kv-cache-dtype", "{}")),
    "quantization": Renamed(("--vllm-quantization", "{}")),
    "tool-call-parser": Renamed(("--vllm-tool-call-parser", "{}")),
    "reasoning-parser": Renamed(("--vllm-reasoning-parser", "{}")),
    "log-level": Renamed(("--vllm-uvicorn-log-level", "{}")),
    "router-ip": Renamed(("--vllm-router-ip", "{}")),
    "router-port": Renamed(("--vllm-router-port", "{}")),
    "router-policy": Renamed(("--vllm-router-policy", "{}")),
    "attention-backend": Always("vLLM chooses its attention kernel by device"),
    "disable-overlap-schedule": Always("vLLM schedules as it finds best"),
    "watchdog-timeout": Always("engines are watched by --engine-health-timeout-secs"),
    "trust-remote-code": Always("engines load models that transformers knows"),
    "enable-deterministic-inference": Missing(
        "Remove it; set VLLM_BATCH_INVARIANT=1 in the environment for batch-invariant kernels on a GPU, or use "
        "--reference-mode on the CPU."
    ),
    "ep-size": Missing("Remove it; --vllm-enable-expert-parallel spreads an engine's experts over its GPUs."),
    "expert-parallel-size": Missing(
        "Remove it; --vllm-enable-expert-parallel spreads an engine's experts over its GPUs."
    ),
    "dp-size": Missing("Remove it; raise --rollout-num-gpus for more engines."),
    "enable-dp-attention": Missing("Remove it; raise --rollout-num-gpus for more engines."),
    "enable-dp-lm-head": Missing("Remove it; raise --rollout-num-gpus for more engines."),
    "moe-dense-tp-size": Missing("Remove it; an engine's layers share --rollout-num-gpus-per-engine."),
    "moe-a2a-backend": Missing("Remove it; vLLM's name is --vllm-all2all-backend."),
    "deepep-mode": Missing("Remove it; vLLM's name is --vllm-all2all-backend."),
    "speculative-algorithm": Missing("Remove it, and the other --sglang-speculative-*."),
    "config": Missing("Remove it: all engines of a run are alike; give vLLM's flags as --vllm-<flag>."),
}
"""Flags of SGLang without their prefix, also when they were rewritten to --vllm-<flag>."""
OF_VLLM_TOO = frozenset(
    {
        *("attention-backend", "config", "kv-cache-dtype", "log-level", "quantization", "reasoning-parser"),
        *("tool-call-parser", "trust-remote-code"),
    }
)
"""Of these, the names that vLLM 0.32 has as well: behind --vllm- they are vLLM's."""

_PINNED = "Remove it: host memory of --optimizer-cpu-offload is page-locked, or copies would not overlap."
_CONTEXT = "Say --context-parallel-size SIZE: as many ranks share each sequence, whatever the number of heads."
_FORMULA = "Remove it; --custom-loss-path takes a loss of your own (docs/customization.md)."
_LOGS = "Remove it; RUN_DIR/metrics.jsonl and `vime report` have what a run measured."

MISSING: dict[str, Missing] = {
    "--wandb-dir": Missing("Remove it: wandb's files are in RUN_DIR/wandb."),
    "--custom-loss-function-path": Missing(
        "Say --loss-type custom_loss --custom-loss-path with a function (args, logp_T, entropy_T, columns)."
    ),
    "--offload": Missing(
        "Remove it: --colocate lets trainers and engines sleep in turn, --offload-train trainers alone."
    ),
    "--offload-rollout": Missing("Remove it: engines sleep with --colocate, and else keep their GPUs."),
    "--no-pin-cpu-grads": Missing(_PINNED),
    "--no-pin-cpu-params": Missing(_PINNED),
    "--use-stateless-adam": Missing(
        "Remove it; --optimizer-cpu-offload keeps both moments in host memory, --exp-avg-dtype bf16 in half the bytes."
    ),
    "--ring-attn-size": Missing(_CONTEXT),
    "--ring_attn_size": Missing(_CONTEXT),
    "--sequence-parallel-size": Missing(_CONTEXT),
    "--sequence_parallel_size": Missing(_CONTEXT),
    "--decoder-first-pipeline-num-layers": Missing("Remove it; stages are cut into equal parts."),
    "--decoder-last-pipeline-num-layers": Missing("Remove it; stages are cut into equal parts."),
    "--lr-warmup-fraction": Missing("Say --lr-warmup-iters STEPS: that share of the run's optimizer steps."),
    "--deterministic-mode": Missing("Remove it; --reference-mode promises equal bits, on the CPU."),
    "--fp8-format": Missing("Remove it: trainers compute in bf16 or fp32."),
    "--fp8-recipe": Missing("Remove it: trainers compute in bf16 or fp32."),
    "--custom-config-path": Missing("Remove it; say its entries as flags."),
    "--custom-tis-function-path": Missing(
        "Remove it; --off-policy-correction tis, mis, icepop or decoupled, --mis-level, --mis-mode, --tis-clip and "
        "--tis-clip-low cover the published ones."
    ),
    "--custom-advantage-function-path": Missing("Say --custom-reward-post-process-path, or --custom-loss-path."),
    "--custom-pg-loss-reducer-function-path": Missing(_FORMULA),
    "--custom-model-provider-path": Missing("Remove it; --train-backend fsdp takes any causal model of transformers."),
    "--custom-convert-samples-to-train-data-path": Missing("Say --custom-reward-post-process-path."),
    "--custom-megatron-init-path": Missing("Remove it."),
    "--custom-megatron-before-log-prob-hook-path": Missing("Remove it."),
    "--custom-megatron-before-train-step-hook-path": Missing("Remove it."),
    "--custom-rollout-log-function-path": Missing(_LOGS),
    "--custom-eval-rollout-log-function-path": Missing(_LOGS),
    "--rollout-all-samples-process-path": Missing("Say --rollout-sample-filter-path, which sees every kept group."),
    "--rollout-data-postprocess-path": Missing("Say --custom-reward-post-process-path."),
    "--rollout-sample-hook-path": Missing("Say --custom-generate-function-path."),
    "--eval-function-path": Missing("Say --rollout-function-path: it is called with evaluation=True."),
    "--disable-rewards-normalization": Missing(
        "Say --custom-reward-post-process-path with a function that returns rewards."
    ),
    "--disable-rollout-global-dataset": Missing("Say --data-source-path with a class of your own."),
    "--use-routing-replay": Missing("Say --use-rollout-routing-replay."),
    "--opd-type": Missing("Remove it; --use-opd with --opd-teacher-load runs the teacher in the trainer."),
    "--mtp-num-layers": Missing("Remove it: heads for several tokens are not trained."),
    "--enable-mtp-training": Missing("Remove it: heads for several tokens are not trained."),
    "--mtp-loss-scaling-factor": Missing("Remove it: heads for several tokens are not trained."),
    "--freeze-params-name-list": Missing("Remove it: every parameter is trained."),
    "--only-train-params-name-list": Missing("Remove it: every parameter is trained."),
    "--use-rollout-entropy": Missing("Remove it: train/entropy is always there."),
    "--ref-update-interval": Missing("Remove it: the reference stays as it was loaded."),
    "--keep-old-actor": Missing("Remove it: old log-probabilities are computed before a round's first step."),
    "--ref-ckpt-step": Missing("Remove it; --ref-load names a Hugging Face directory."),
    "--update-weight-mode": Missing("Remove it: every update sends all weights, and checks their hash."),
    "--start-rollout-id": Missing("Remove it: a checkpoint knows its round."),
    "--reset-optimizer-states": Missing("Begin anew from an export (--save-hf) as --hf-checkpoint."),
    "--dump-details": Missing("Say --save-debug-rollout-data PATH_{rollout_id}.jsonl."),
    "--save-debug-train-data": Missing("Say --save-debug-rollout-data PATH_{rollout_id}.jsonl."),
    "--memory-recorder": Missing("Remove it."),
    "--record-memory-history": Missing("Remove it."),
    "--profile-target": Missing("Remove it; RUN_DIR/events and its trace show where time goes."),
    "--tb-project-name": Missing("Remove it: TensorBoard files are in RUN_DIR/tensorboard."),
    "--tb-experiment-name": Missing("Remove it: TensorBoard files are in RUN_DIR/tensorboard."),
    "--train-env-vars": Missing("Set the variables in the environment of train.py."),
    "--http-proxy": Missing("Set HTTP_PROXY in the environment; engines are asked without a proxy."),
    "--megatron-config-path": Missing("Remove it; say its entries as flags."),
    "--model-name": Missing("Remove it: config.json says which model it is."),
    "--rollout-task-type": Missing("Remove it."),
    "--eval-input-key": Missing("Say input_key of the set in a file for --eval-config."),
    "--eval-label-key": Missing("Say label_key of the set in a file for --eval-config."),
    "--eval-tool-key": Missing("Say tool_key of the set in a file for --eval-config."),
    "--eval-reward-key": Missing("Say reward_key of the set in a file for --eval-config."),
    "--eval-max-prompt-len": Missing("Remove it; --rollout-max-prompt-len holds for evaluation too."),
    "--eval-max-context-len": Missing("Remove it; --rollout-max-context-len holds for evaluation too."),
    "--eval-min-new-tokens": Missing("Remove it."),
    "--num-gpus-per-node": Missing("Remove it: Ray says what a node has."),
}

FULLY_ASYNC = (
    "groups that are trained as they finish are --transferqueue-mode streaming --max-staleness 1 under train_async.py. "
    "Say those and leave this flag out."
)
VALUES: dict[str, dict[str, str | Missing]] = {
    "--rollout-function-path": {
        "slime.rollout.sglang_rollout.generate_rollout": "vime.rollout.vllm_rollout.generate_rollout",
        "slime.rollout.sft_rollout.generate_rollout": "vime.rollout.sft_rollout.generate_rollout",
        "slime.rollout.fully_async_rollout.generate_rollout_fully_async": Missing(FULLY_ASYNC),
    },
    "--data-source-path": {
        "slime.rollout.data_source.RolloutDataSourceWithBuffer": (
            "vime.rollout.data_source.RolloutDataSourceWithBuffer"
        ),
        "slime.rollout.data_source.RolloutDataSource": "vime.rollout.data_source.RolloutDataSource",
    },
    "--dynamic-sampling-filter-path": {
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": (
            "vime.rollout.filter_hub.check_reward_nonzero_std"
        ),
    },
    "--rm-type": {
        "boxed_deepscaler": Missing("deepscaler looks for the box itself. Say --rm-type deepscaler."),
        "boxed_dapo": Missing(
            "dapo looks for a line `Answer:`, which no box holds. Say --rm-type boxed_math or boxed_exact_match."
        ),
        "boxed_remote_rm": Missing("the service gets the whole completion. Say --rm-type remote_rm."),
    },
    "--rollout-backend": {"sglang": Missing("Only vllm generates. Remove the flag.")},
    **{
        flag: {dtype: Missing("moments are kept in fp32 or bf16, which need no scale. Say bf16.") for dtype in narrow}
        for flag, narrow in {"--exp-avg-dtype": ("fp16", "fp8"), "--exp-avg-sq-dtype": ("fp16", "fp8")}.items()
    },
}
"""Values of flags that both have, and their names here."""

ULYSSES = (
    "Ulysses sequence parallelism is not here: it moves heads between ranks, so it is bound by the number of key-value "
    f"heads. {_CONTEXT}"
)
"""Of every flag and setting with that name; trainers spell it in many ways."""

DIFFERENT: dict[str, tuple[str, str]] = {
    "--n-samples-per-prompt": ("", "8 when it is not given; slime's is 1"),
    "--micro-batch-size": ("", "8 when it is not given; slime's is 1"),
    "--lr-decay-style": ("", "constant when it is not given; megatron's is linear"),
    "--adam-beta2": ("", "0.95 when it is not given; megatron's is 0.999"),
    "--kl-loss-type": ("--use-kl-loss", "low_var_kl when it is not given; slime's is k1, whose expected gradient is 0"),
    "--opsm-delta": ("--use-opsm", "0.01 when it is not given; slime's is 1e-4"),
}
"""Flags of both whose defaults differ: (the flag that makes it matter, the note for a user who comes with flags of
slime or megatron)."""
SAME_NAME: dict[tuple[str, str], str] = {
    ("--rm-type", "math"): "math-verify judges the last expression, boxed or not; slime's wants a box.",
    ("--rm-type", "dapo"): "equal text after one spelling, as in DAPO; no expression is evaluated.",
    ("--rm-type", "gpqa"): "the letter that the completion names last by `answer`, `option`, `choice`, a box or `(B)`.",
}
"""Values of both whose meaning differs."""
