"""Sections about learning and about carrying: algorithm, batches, queue, weights."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """Algorithm."""

    advantage_estimator: str = flag("grpo", "how rewards become advantages", choices=("grpo",))
    eps_clip: float = flag(0.2, "lower clip of the probability ratio: 1 - this", minimum=0)
    eps_clip_high: float | None = flag(None, "upper clip: 1 + this; empty: the same as --eps-clip", minimum=0)
    use_kl_loss: bool = flag(False, "add a KL term towards the reference model to the loss")
    kl_loss_coef: float = flag(0.0, "weight of the KL term", minimum=0)
    kl_loss_type: str = flag("low_var_kl", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl"))
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", minimum=0)
    calculate_per_token_loss: bool = flag(
        False, "divide by the trainable tokens of the step instead of averaging per sample first"
    )
    disable_grpo_std_normalization: bool = flag(False, "GRPO without dividing by the group's standard deviation")


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
        None, "tokens of one micro-batch on one context-parallel rank, with --use-dynamic-batch-size", minimum=1
    )
    balance_data: bool = flag(False, "spread samples over data-parallel ranks by length")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Queue: how rollouts reach the trainer (TransferQueue)."""

    enable_vime_transfer_queue: bool = flag(False, "carry rollouts by TransferQueue; alone it means mode buffer")
    transferqueue_mode: str | None = flag(
        None,
        "off: Ray object refs; buffer: a TransferQueue partition per round (empty: off; buffer with the flag above)",
        choices=("off", "buffer"),
    )
    transferqueue_partition: str = flag("train", "namespace of training partitions")
    transferqueue_storage_backend: str = flag("simple", "TransferQueue storage", choices=("simple",))
    num_data_storage_units: int = flag(1, "TransferQueue storage actors", minimum=1)
    transferqueue_max_staleness: int = flag(
        0, "versions a token may be behind the weights that train on it", aliases=("--max-staleness",), minimum=0
    )
    transferqueue_timeout_secs: float = flag(
        300.0, "deadline of one queue operation and of back-pressure, seconds", minimum=1
    )
    transfer_queue_extra_data_fields: tuple[str, ...] = flag(
        (), "optional columns to carry besides the required ones", nargs="+"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """Weights: how they travel to the engines."""

    update_weights_interval: int = flag(1, "rounds between weight updates", minimum=1)
    update_weight_transport: str = flag(
        "auto", "auto: shm on one CPU host, nccl on GPUs", choices=("auto", "nccl", "gloo", "shm", "disk")
    )
    update_weight_buffer_size: int = flag(512 << 20, "bytes of one transfer bucket", minimum=1 << 10)
    update_weight_disk_dir: str | None = flag(None, "directory of transport disk; empty: RUN_DIR/weights")
    update_weight_timeout_secs: float = flag(300.0, "deadline of one weight update, seconds", minimum=1)
    pause_mode: str | None = flag(
        None,
        "what running requests do during an update; empty: wait (keep when max staleness > 0)",
        choices=("keep", "wait", "abort"),
    )
    check_weight_update_equal: bool = flag(
        False, "after each update compare the engine's log-probabilities of a probe text with the trainer's"
    )
