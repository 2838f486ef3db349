"""Sections about learning and about transport: algorithm, batches, queue, weights."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import PathKind, flag

PLAIN_CLIP = 0.2
"""Of PPO (Schulman et al. 2017), for a ratio of single tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """Algorithm. Formulas and papers: docs/algorithms.md."""

    loss_type: str = flag(
        "policy_loss",
        "policy_loss: by the advantages; sft_loss: cross entropy of the completions; custom_loss: --custom-loss-path",
        choices=("policy_loss", "sft_loss", "custom_loss"),
    )
    custom_loss_path: str | None = flag(
        None, "function (args, logp_T, entropy_T, columns) that returns the loss of every token", path=PathKind.PLUGIN
    )
    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages",
        choices=("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    )
    disable_grpo_std_normalization: bool = flag(
        False, "grpo, gspo and cispo without dividing by the group's standard deviation"
    )
    normalize_advantages: bool | None = flag(
        None, "whiten advantages over the step's trainable tokens; empty: on for reinforce_plus_plus[_baseline], ppo"
    )
    gamma: float = flag(1.0, "discount a token of returns, reinforce_plus_plus and ppo", minimum=0, maximum=1)
    lambd: float = flag(
        1.0, "lambda of ppo's GAE: 1 trusts the rewards to come, 0 the critic's next value", minimum=0, maximum=1
    )
    num_ppo_epochs: int = flag(
        1,
        "times that the optimizer steps of a round are taken, in the same order; old log-probabilities, advantages and "
        "values stay those of the round's beginning",
        minimum=1,
    )
    eps_clip: float | None = flag(
        None,
        "lower clip of the probability ratio: 1 - this; empty: 0.2, but 3e-4 for gspo, whose ratio of a whole "
        "completion never moves by 0.2 (Zheng et al. 2025, section 5.1), and 1, no lower bound, for cispo (MiniMax-M1 "
        "2025)",
        minimum=0,
    )
    eps_clip_high: float | None = flag(
        None,
        "upper clip: 1 + this; empty: the same as --eps-clip, but without that 4e-4 for gspo and 0.2 for cispo",
        minimum=0,
    )
    eps_clip_c: float | None = flag(
        None, "dual clip, above 1: a negative advantage costs at most this times itself; empty: no bound", minimum=1
    )
    kl_coef: float = flag(
        0.0,
        "weight of the KL penalty logp - ref in token rewards, reinforce_plus_plus[_baseline], ppo",
        minimum=0,
    )
    use_kl_loss: bool = flag(False, "add a KL term towards the reference model to the loss")
    kl_loss_coef: float = flag(0.0, "weight of the KL term", minimum=0)
    kl_loss_type: str = flag(
        "low_var_kl",
        "KL estimator of the loss term; k1 needs --use-unbiased-kl, k2 refuses it. In token rewards (--kl-coef) it is "
        "always k1: the others give almost no gradient there",
        choices=("k1", "k2", "k3", "low_var_kl"),
    )
    use_unbiased_kl: bool = flag(
        False, "multiply the KL term of the loss by the probability ratio and the weight of --off-policy-correction"
    )
    use_opd: bool = flag(
        False,
        "on-policy distillation: pull tokens towards a teacher: that of --opd-teacher-load, or the column "
        "teacher_log_probs that a plug-in fills",
    )
    opd_teacher_load: str | None = flag(
        None,
        "HF directory of the teacher of --use-opd, of the policy's vocabulary; the trainer runs it",
        path=PathKind.FILE,
    )
    opd_kl_coef: float = flag(1.0, "weight of that pull in the advantage of a token", minimum=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", minimum=0)
    calculate_per_token_loss: bool = flag(
        False, "divide by the trainable tokens of the step instead of averaging per sample first"
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "a model with experts: in training each token goes to the experts that generation sent it to; engines on the "
        "CPU cannot report them, there a plug-in sets sample.rollout_routed_experts",
    )
    off_policy_correction: str | None = flag(
        None,
        "weight of a token by trainer / engine probability; empty: decoupled when max staleness > 0, else none",
        choices=("none", "tis", "mis", "icepop", "decoupled"),
    )
    tis_clip: float | None = flag(
        None,
        "upper bound of that weight; empty: 2 (tis, mis), 5 for icepop (Ling team 2025) and decoupled (AReaL), 1.001 "
        "for --mis-level geometric: a mean over the completion, which stays near 1 (verl: 1.0002 to 1.001)",
        minimum=1,
    )
    tis_clip_low: float | None = flag(
        None,
        "lower bound of that weight, at most 1; empty: 0, but 0.5 for icepop (Ling team 2025) and 1 / --tis-clip for "
        "--mis-level geometric",
        minimum=0,
        maximum=1,
    )
    mis_level: str = flag("sequence", "what mis weighs", choices=("token", "sequence", "geometric"))
    mis_mode: str = flag("mask", "what mis does out of bounds: cut the weight, or drop", choices=("truncate", "mask"))
    use_rollout_logprobs: bool = flag(False, "the engine's log-probabilities as the old policy of the ratio")
    use_opsm: bool = flag(False, "leave out completions of negative advantage that drifted from the engine's policy")
    opsm_delta: float = flag(
        0.01,
        "drift allowed by --use-opsm, nats a token, mean of the completion. Not slime's 1e-4: the drift is from the "
        "engine's own log-probabilities, and rounding in bf16 alone moves a mean over 500 tokens by 1e-3",
        minimum=0,
    )
    get_mismatch_metrics: bool = flag(False, "report train/mismatch_*: how trainer and engine probabilities differ")

    @property
    def clip_range(self) -> tuple[float, float]:
        """Return --eps-clip and --eps-clip-high, or where they are empty the values of the paper or the field (decision
        0020)."""
        plain = PLAIN_CLIP, PLAIN_CLIP
        low, high = {"gspo": (3e-4, 4e-4), "cispo": (1.0, PLAIN_CLIP)}.get(self.advantage_estimator, plain)
        if self.eps_clip is not None:
            low, high = self.eps_clip, PLAIN_CLIP if self.advantage_estimator == "cispo" else self.eps_clip
        return low, high if self.eps_clip_high is None else self.eps_clip_high

    @property
    def weight_range(self) -> tuple[float, float]:
        """Return --tis-clip-low and --tis-clip, or where they are empty the values of the paper or the field (decision
        0020)."""
        is_geometric = self.off_policy_correction == "mis" and self.mis_level == "geometric"
        high = self.tis_clip
        if high is None:
            high = (
                1.001 if is_geometric else {"icepop": 5.0, "decoupled": 5.0}.get(self.off_policy_correction or "", 2.0)
            )
        if self.tis_clip_low is not None:
            return self.tis_clip_low, high
        return (1 / high if is_geometric else 0.5 if self.off_policy_correction == "icepop" else 0.0), high


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """Critic, of --advantage-estimator ppo. It has the policy's layout, schedule and optimizer flags but for these."""

    critic_load: str | None = flag(
        None,
        "HF directory of the critic's initial weights, with a value head (score.weight) or without; empty: "
        "--hf-checkpoint",
        path=PathKind.FILE,
    )
    critic_lr: float | None = flag(None, "peak learning rate of the critic; empty: --lr", minimum=0)
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up of the critic from 0", minimum=0)
    num_critic_only_steps: int = flag(
        0,
        "rounds at the beginning in which only the critic learns: the policy generates but its weights and the "
        "schedule of its learning rate do not move",
        minimum=0,
    )
    value_clip: float = flag(
        0.2,
        "how far from its prediction at the start of the round a value may move in the critic's loss; inf: no bound",
        minimum=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Batches: optimizer steps and micro-batches."""

    global_batch_size: int | None = flag(
        None,
        "samples of one optimizer step; empty: rollout-batch-size * n-samples-per-prompt / num-steps-per-rollout",
        minimum=1,
    )
    num_steps_per_rollout: int | None = flag(None, "optimizer steps per round; empty: derived (1)", minimum=1)
    micro_batch_size: int = flag(8, "samples of one micro-batch, when not dynamic", minimum=1)
    use_dynamic_batch_size: bool = flag(False, "cut micro-batches by tokens instead of samples")
    max_tokens_per_gpu: int | None = flag(
        None,
        "tokens of one micro-batch on one context-parallel rank, with --use-dynamic-batch-size; a longer sample is a "
        "micro-batch of its own and may need more memory",
        minimum=1,
    )
    balance_data: bool = flag(False, "spread samples over data-parallel ranks so that none has much more work")
    balance_data_by: str = flag(
        "length", "work of a sample for --balance-data: its tokens, or its FLOPs", choices=("length", "flops")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Queue: how rollouts reach the trainer (TransferQueue)."""

    enable_vime_transfer_queue: bool = flag(False, "carry rollouts by TransferQueue; alone it means mode buffer")
    transferqueue_mode: str | None = flag(
        None,
        "off: Ray object refs; buffer: a TransferQueue partition per round; streaming: groups as they finish, each "
        "trained exactly once; external: the same, and rollout jobs outside of the run bring groups too, by HTTP "
        "(empty: off; buffer with the flag above)",
        choices=("off", "buffer", "streaming", "external"),
    )
    transferqueue_address: str = flag(
        "127.0.0.1:0",
        "external: HOST:PORT where the gateway listens for rollout jobs; port 0: a free one, which RUN/gateway.json "
        "names; another host than loopback lets other machines in",
    )
    transferqueue_tls_cert: str | None = flag(
        None,
        "external: certificate chain of the gateway in PEM, for TLS; with --transferqueue-tls-key",
        path=PathKind.FILE,
    )
    transferqueue_tls_key: str | None = flag(
        None, "external: private key of that certificate in PEM", path=PathKind.FILE
    )
    transferqueue_storage_backend: str = flag(
        "simple",
        "where TransferQueue keeps rows: simple: in the memory of its storage actors; the others are refused, with the "
        "reason",
        choices=("simple", "ray", "mooncake", "yuanrong"),
    )
    num_rollout_workers: int = flag(
        1,
        "streaming: processes that generate, score, filter and store groups; 1: the RolloutManager does it itself",
        minimum=1,
    )
    transferqueue_partition: str = flag("train", "namespace of training partitions")
    num_data_storage_units: int = flag(1, "TransferQueue storage actors", minimum=1)
    transferqueue_max_staleness: int = flag(
        0, "versions a token may be behind the weights that train on it", aliases=("--max-staleness",), minimum=0
    )
    stale_policy: str = flag(
        "drop",
        "streaming: a group that is too old when its round begins, or that --mixed-version-policy rejects, is dropped, "
        "or its prompt is generated again",
        choices=("drop", "retry"),
    )
    transferqueue_round_order: str | None = flag(
        None,
        "streaming: a round takes index: the lowest open group numbers, and waits for the slowest of them, so "
        "that no group gets too old; commit: what is ready first, and what misses its rounds is treated by "
        "--stale-policy (empty: index; commit with a staleness above 0 and one of the --transferqueue-max-* bounds)",
        choices=("index", "commit"),
    )
    mixed_version_policy: str | None = flag(
        None,
        "a completion sampled by several versions: correct: its tokens are trained, under --off-policy-correction; "
        "mask: only those of its newest version are; reject: its group is not trained, see --stale-policy (empty: "
        "correct)",
        choices=("correct", "mask", "reject"),
    )
    transferqueue_durable: bool = flag(
        True, "streaming: keep finished groups on disk until a checkpoint contains them, for a restart"
    )
    transferqueue_fsync: str = flag(
        "commit",
        "streaming: when groups are forced to disk: commit: each before it counts; never: a power cut may lose some",
        choices=("never", "commit", "always"),
    )
    transferqueue_lease_timeout_secs: float = flag(
        600.0,
        "streaming: prompts and rounds whose holder is silent for this long go to others, seconds",
        minimum=1,
    )
    train_early_groups: int = flag(
        0,
        "streaming: trainers begin the optimizer step of a round with this many finished groups at a time, "
        "while the others are generated; 0: when all are finished",
        minimum=0,
    )
    transferqueue_max_groups: int | None = flag(
        None, "streaming: finished groups that may wait to be trained; empty: as many as staleness allows", minimum=1
    )
    transferqueue_max_tokens: int | None = flag(
        None, "streaming: tokens of finished groups that may wait to be trained; empty: no bound", minimum=1
    )
    transferqueue_max_bytes: int | None = flag(
        None, "streaming: bytes of finished groups that may wait to be trained; empty: no bound", minimum=1
    )
    transferqueue_timeout_secs: float = flag(
        300.0, "deadline of one queue operation and of back-pressure, seconds", minimum=1
    )
    transfer_queue_extra_data_fields: tuple[str, ...] = flag(
        (), "optional columns to carry besides the required ones", nargs="+"
    )

    @property
    def has_ledger(self) -> bool:
        """Whether groups reach the trainer one by one, each through the ledger: modes streaming and external."""
        return self.transferqueue_mode in ("streaming", "external")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """Weights: how they travel to the engines."""

    update_weights_interval: int = flag(1, "rounds between weight updates", minimum=1)
    update_weight_transport: str = flag(
        "auto",
        "auto: shm on one CPU host, nccl on GPUs, gloo on several CPU nodes; with --colocate ipc on GPUs (an engine "
        "opens the memory of the trainer rank on its GPU) and shm on CPUs",
        choices=("auto", "nccl", "gloo", "shm", "ipc", "disk"),
    )
    update_weight_buffer_size: int | None = flag(
        None,
        "bytes of one transfer bucket, which either side holds; empty: 512 MiB, and 64 MiB by transport shm",
        minimum=1 << 10,
    )
    update_weight_disk_dir: str | None = flag(
        None,
        "directory of transport disk; empty: RUN_DIR/weights. The newest update_NUMBER in it is a model directory that "
        "anybody can load, with config and tokenizer (not with --lora-rank)",
        path=PathKind.FILE,
    )
    update_weight_timeout_secs: float = flag(
        300.0,
        "deadline of one weight update, seconds; one more for each GB of the model in fp32. Over shm and disk an "
        "engine that has not taken a bucket after half of it, when another has, is left out",
        minimum=1,
    )
    pause_mode: str | None = flag(
        None,
        "what running requests do during an update; empty: wait (keep when max staleness > 0)",
        choices=("keep", "wait", "abort"),
    )
    check_weight_update_equal: bool = flag(
        False, "after each update compare the engine's log-probabilities of a probe text with the trainer's"
    )
