"""Sections about the cluster: processes, devices, parallel layout, model and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import PathKind, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Cluster: how many processes, on which device."""

    train_backend: str = flag(
        "megatron",
        "what trains: megatron (every parallel layout, known model families), or fsdp (any Hugging Face causal "
        "language model, cut over all trainer ranks)",
        choices=("megatron", "fsdp"),
    )
    actor_num_nodes: int = flag(1, "nodes for training", minimum=1)
    actor_num_gpus_per_node: int | None = flag(
        None,
        "trainer ranks per node, one per GPU; on the CPU the number of trainer processes (8 on cuda, 1 on cpu)",
        minimum=1,
    )
    rollout_num_gpus: int | None = flag(
        None, "GPUs for generation in all; on the CPU use --rollout-num-engines", minimum=1
    )
    rollout_num_gpus_per_engine: int = flag(
        1,
        "GPUs of one engine: its tensor-parallel size, times --vllm-pipeline-parallel-size; more than a node has: "
        "it is on several, with equal parts of it on each",
        minimum=1,
    )
    rollout_num_engines: int | None = flag(
        None,
        "vLLM engines; empty: --rollout-num-gpus / --rollout-num-gpus-per-engine, or 1 on the CPU; with --colocate as "
        "many as the trainers' GPUs hold; 0, with --transferqueue-mode external: every group comes from jobs outside",
        minimum=0,
    )
    rollout_external_engine_addrs: tuple[str, ...] = flag(
        (),
        "HOST:PORT of each engine that somebody else started with `vime engine`, and goes on after the run: they take "
        "the place of engines of the run; checked before anything starts",
        nargs="+",
    )
    rollout_external_engine_keys: str | None = flag(
        None, "file of the keys of these engines, which `vime engine` made", path=PathKind.FILE
    )
    device: str = flag("auto", "device of trainer and engines", choices=("auto", "cuda", "cpu"))
    gpu_memory_gib: float = flag(
        80.0,
        "memory of one GPU, GiB: with --device cuda a run whose trainer ranks hold more than that between two steps is "
        "refused before anything starts, and `vime plan` compares the peak with it",
        minimum=0.1,
    )
    distributed_backend: str | None = flag(
        None, "torch.distributed backend; empty: nccl on cuda, gloo on cpu", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(
        10.0, "deadline of one collective of the trainer ranks, minutes", minimum=0.1
    )
    train_timeout_secs: float = flag(
        14400.0,
        "deadline of a whole training round, save or load, seconds; a trainer rank that dies ends it at once",
        minimum=1,
    )
    ray_address: str | None = flag(None, "Ray cluster to join (`auto` or host:port); empty: start a local one")
    network_interface: str | None = flag(
        None,
        "with --ray-address, the network interface on which engines and trainer ranks of every node listen, for "
        "example eth1; empty: the one that Ray uses",
    )
    separate_roles: tuple[str, ...] = flag(
        (),
        "models of the trainer that get ranks (processes, GPUs) of their own, as many as the policy and in its layout; "
        "empty: all share the policy's ranks",
        nargs="+",
        choices=("reference", "critic", "teacher"),
    )
    offload_train: bool = flag(
        False,
        "trainer ranks move weights, gradients and optimizer state to host memory while engines generate and evaluate; "
        "on the CPU the same is done but frees nothing",
    )
    colocate: bool = flag(
        False,
        "engines and the policy's trainer ranks take turns on the same GPUs: engines sleep while trainers work and the "
        "reverse (then --offload-train is on; modes off and buffer under train.py); on the CPU the same is done but "
        "frees nothing",
    )
    max_restarts: int = flag(
        3,
        "how often in a row, without a round trained in between, a run restarts its parts from the newest checkpoint "
        "when one of them died or hung; 0: such a run ends",
        minimum=0,
    )
    coordinator_node: str | None = flag(
        None,
        "with --ray-address: node (its address or host name in Ray) of RolloutManager, ledger, router and gateway, "
        "which own the run directory's files; empty: the node of this process, or the first that has CPUs",
    )
    start_timeout_secs: float = flag(
        300.0,
        "deadline for every part to start (Ray placement, queue, engines, trainer ranks), seconds; one more for each "
        "100 MB of the checkpoint where it is read",
        minimum=5,
    )

    @property
    def num_engines(self) -> int:
        """vLLM engines of the run; 0 when only jobs outside generate."""
        if self.rollout_num_engines is None:
            return len(self.rollout_external_engine_addrs) or 1
        return self.rollout_num_engines

    @property
    def num_started_engines(self) -> int:
        """Those that the run itself starts."""
        return 0 if self.rollout_external_engine_addrs else self.num_engines


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Parallel layout of the trainer (megatron-core)."""

    tensor_model_parallel_size: int = flag(1, "tensor-parallel ranks (TP)", minimum=1)
    pipeline_model_parallel_size: int = flag(1, "pipeline-parallel stages (PP)", minimum=1)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "model chunks of one stage (interleaved pipeline; needs PP > 1)", minimum=2
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers of one chunk: another way to give --virtual-pipeline-model-parallel-size", minimum=1
    )
    context_parallel_size: int = flag(1, "ranks that share each sequence (CP)", minimum=1)
    expert_model_parallel_size: int = flag(1, "ranks over which the experts of a MoE layer are spread (EP)", minimum=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "tensor-parallel ranks inside an expert; empty: --tensor-model-parallel-size", minimum=1
    )
    sequence_parallel: bool = flag(False, "split activations along the sequence inside the TP group (needs TP > 1)")
    use_distributed_optimizer: bool | None = flag(
        None,
        "shard optimizer state over the data-parallel ranks; empty: on with --device cuda and --train-backend megatron",
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = flag(
        False,
        "gather updated parameters during the next forward pass (needs --use-distributed-optimizer and "
        "--overlap-grad-reduce)",
    )
    recompute_granularity: str | None = flag(
        None, "recompute activations in the backward pass", choices=("full", "selective")
    )
    recompute_method: str | None = flag(None, "with --recompute-granularity full", choices=("uniform", "block"))
    recompute_num_layers: int | None = flag(
        None, "layers per recompute unit, with --recompute-granularity full", minimum=1
    )
    bf16: bool | None = flag(
        None,
        "parameters and activations in bfloat16, main weights and gradients in fp32; empty: on with --device cuda",
    )
    moe_grouped_gemm: bool | None = flag(
        None,
        "compute all experts of a rank in one product instead of one after the other; empty: with --bf16 on a GPU",
    )
    transformer_impl: str = flag(
        "local", "layer implementation; transformer_engine needs a GPU", choices=("local", "transformer_engine")
    )

    @property
    def ranks_per_replica(self) -> int:
        """Return the number of ranks that work on the same rows: TP x PP x CP. The data-parallel size is the world
        divided by this. Experts are spread over these ranks and, when there are not enough, over several replicas."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """Return the multiple to which each sequence is padded: with context parallelism a rank computes two chunks of
        it."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """Return the multiple to which a micro-batch is padded: sequence parallelism also cuts it over the TP ranks."""
        return self.sequence_multiple * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """An interleaved pipeline takes micro-batches in groups of one per stage."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model and checkpoints."""

    hf_checkpoint: str = flag(
        "",
        "Hugging Face directory with config.json, safetensors and tokenizer, or its name on the hub (required)",
        path=PathKind.FILE,
    )
    ref_load: str | None = flag(
        None, "HF directory of the reference model for KL; empty: --hf-checkpoint", path=PathKind.FILE
    )
    load: str | None = flag(
        None,
        "checkpoint directory to resume from, or one checkpoint in it; without one there the run starts fresh when "
        "--save is the same directory, and is refused otherwise",
        path=PathKind.FILE,
    )
    save: str | None = flag(
        None, "checkpoint directory; empty: RUN_DIR/checkpoints when --save-interval is set", path=PathKind.FILE
    )
    save_interval: int | None = flag(
        None, "rounds between checkpoints; the last round is always saved when set", minimum=1
    )
    async_save: bool = flag(
        False,
        "copy the state to host memory and write the checkpoint while training continues; it is visible when every "
        "rank has written. Needs memory for one more copy of model and optimizer",
    )
    keep_checkpoints: int | None = flag(
        None,
        "checkpoints to keep in the --save directory: the newest ones, and always the one this run was loaded from; "
        "empty: all. Exports of --save-hf stay",
        minimum=1,
    )
    save_hf: str | None = flag(
        None, "also export HF weights with each checkpoint, for example out/hf_{rollout_id}", path=PathKind.FILE
    )
    no_save_optim: bool = flag(
        False, "leave optimizer, scheduler and RNG state out of checkpoints", cli="--no-save-optim"
    )
    seed: int = flag(1234, "seed of the trainer's random states", minimum=0, maximum=2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and schedule."""

    lr: float = flag(1e-6, "peak learning rate", minimum=0)
    min_lr: float = flag(0.0, "final learning rate of a decaying schedule", minimum=0)
    lr_decay_style: str = flag("constant", "shape after warm-up", choices=("constant", "linear", "cosine"))
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up from 0", minimum=0)
    lr_decay_iters: int | None = flag(
        None, "optimizer steps over which the rate decays; empty: the whole run", minimum=1
    )
    weight_decay: float = flag(0.01, "decoupled weight decay", minimum=0)
    adam_beta1: float = flag(0.9, "decay of the first moment", cli="--adam-beta1", minimum=0, maximum=1)
    adam_beta2: float = flag(0.95, "decay of the second moment", cli="--adam-beta2", minimum=0, maximum=1)
    adam_eps: float = flag(1e-8, "denominator term of Adam", minimum=0)
    clip_grad: float = flag(1.0, "clip the global gradient norm to this; 0: no clipping", minimum=0)
    optimizer_cpu_offload: bool = flag(
        False,
        "main weights (of a model in bf16) and moments lie in host memory, page-locked; each step brings them to the "
        "device in pieces and computes there: the same numbers with less memory of the GPU",
    )
    optimizer_offload_fraction: float = flag(
        1.0,
        "share of the parameters whose state lies there, with --optimizer-cpu-offload",
        minimum=0.01,
        maximum=1,
    )
    exp_avg_dtype: str = flag(
        "fp32", "in what Adam's first moment is kept between steps; it is computed in fp32", choices=("fp32", "bf16")
    )
    exp_avg_sq_dtype: str = flag("fp32", "the same for the second moment", choices=("fp32", "bf16"))
