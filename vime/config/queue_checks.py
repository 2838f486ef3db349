"""Defaults and refusals of the modes `streaming` and `external`, before any process starts."""

from __future__ import annotations

from vime.config.parse import Config
from vime.config.run import DebugConfig
from vime.config.training import QueueConfig
from vime.types import ConfigError

BUFFER, STREAMING, EXTERNAL = "buffer", "streaming", "external"
ROUNDS = "vime.rollout.vllm_rollout.generate_rollout"
REFUSED_STORES = {
    "ray": "its rows end with the process that put them, and a second run in the cluster overwrites them "
    "(docs/decisions/0052-storage-of-transfer-queue.md)",
    "mooncake": "it needs a Mooncake server and its package, with which no test of Vime has run",
    "yuanrong": "it needs openYuanrong's data system, with which no test of Vime has run",
}


def default_round_order(queue: QueueConfig) -> str:
    """Choose the order of the prompts, unless the group that a round waits for could itself wait for capacity."""
    return "commit" if queue.transferqueue_max_staleness > 0 and _bounds(queue) else "index"


def _bounds(queue: QueueConfig) -> list[str]:
    """Return the given bounds of what may wait to be trained, as flags."""
    given = {
        "--transferqueue-max-groups": queue.transferqueue_max_groups,
        "--transferqueue-max-tokens": queue.transferqueue_max_tokens,
        "--transferqueue-max-bytes": queue.transferqueue_max_bytes,
    }
    return [f"{flag} {most}" for flag, most in given.items() if most is not None]


def check_queue(config: Config) -> None:
    """Refuse flags that contradict the mode, and bounds under which a run would wait for ever."""
    rollout, queue, mode = config.rollout, config.queue, config.queue.transferqueue_mode
    if queue.has_ledger and rollout.rollout_function_path != ROUNDS:
        raise ConfigError(
            f"--rollout-function-path {rollout.rollout_function_path} with mode {mode}: groups are generated one by "
            "one there. Remove the flag; --custom-generate-function-path, rewards and filters work group by group."
        )
    store = queue.transferqueue_storage_backend
    if store in REFUSED_STORES:
        raise ConfigError(
            f"--transferqueue-storage-backend {store}: {REFUSED_STORES[store]}. Expected simple. Leave the flag out."
        )
    _check_partial(config)
    _check_external(config)
    if not queue.has_ledger:
        return
    _check_debug(config.debug)
    if queue.train_early_groups:
        _check_early(config)
    _check_order(queue)
    wanted = rollout.rollout_batch_size
    if queue.transferqueue_max_groups is not None and queue.transferqueue_max_groups < wanted:
        raise ConfigError(
            f"--transferqueue-max-groups {queue.transferqueue_max_groups} is below --rollout-batch-size {wanted}: no "
            "round would ever be whole. Raise it, or leave it out."
        )


def _check_external(config: Config) -> None:
    """Refuse a gateway that nobody could reach, and flags that need engines in a run without any."""
    queue, has_engines = config.queue, config.cluster.rollout_num_engines != 0
    if queue.transferqueue_mode != EXTERNAL:
        if not has_engines:
            raise ConfigError(
                f"--rollout-num-engines 0 with --transferqueue-mode {queue.transferqueue_mode}: nothing would "
                f"generate. Give at least 1, or use --transferqueue-mode {EXTERNAL} and rollout jobs of your own."
            )
        return
    host, _, port = queue.transferqueue_address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or "/" in host:
        raise ConfigError(
            f"--transferqueue-address {queue.transferqueue_address}: expected HOST:PORT, where the gateway of this run "
            "listens for rollout jobs (port 0: a free one). A TransferQueue of somebody else cannot be joined: its "
            "protocol executes what it is sent."
        )
    if (queue.transferqueue_tls_cert is None) != (queue.transferqueue_tls_key is None):
        raise ConfigError("--transferqueue-tls-cert and --transferqueue-tls-key: give both for TLS, or none.")
    if config.debug.debug_train_only:
        raise ConfigError(
            "--debug-train-only with --transferqueue-mode external: groups would come from jobs that confirm weights. "
            "Use --rollout-num-engines 0 for a run without engines."
        )
    if has_engines:
        return
    needs_engines = {
        "--check-weight-update-equal": config.weights.check_weight_update_equal,
        "--partial-rollout": config.rollout.partial_rollout,
        f"--num-rollout-workers {queue.num_rollout_workers}": queue.num_rollout_workers > 1,
    }
    for flag, is_given in needs_engines.items():
        if is_given:
            raise ConfigError(f"{flag} with --rollout-num-engines 0: it needs engines of this run. Remove one.")


def _check_partial(config: Config) -> None:
    """Refuse --partial-rollout and --mixed-version-policy where they contradict, or nothing could ever be trained."""
    rollout, queue = config.rollout, config.queue
    policy, mask = queue.mixed_version_policy, "--mask-offpolicy-in-partial-rollout"
    if rollout.mask_offpolicy_in_partial_rollout and policy != "mask":
        raise ConfigError(f"{mask} with --mixed-version-policy {policy}: it means mask. Keep one of the two.")
    if not rollout.partial_rollout:
        return
    if policy == "reject":
        raise ConfigError(
            "--partial-rollout with --mixed-version-policy reject: a completion that newer weights continue would be "
            "refused when it is finished. Use correct or mask, or leave --partial-rollout out."
        )
    if queue.has_ledger and not queue.transferqueue_durable:
        raise ConfigError(
            "--partial-rollout with --no-transferqueue-durable: the tokens of an aborted completion are kept in the "
            "spool. Keep one of the two."
        )
    if not queue.has_ledger and policy == "correct" and queue.transferqueue_max_staleness == 0:
        raise ConfigError(
            "--partial-rollout with --transferqueue-max-staleness 0: the next round may not train tokens of this one's "
            f"weights, so every completion would begin anew. Add {mask}, which keeps them as context, or raise the "
            "bound to 1."
        )


def _check_order(queue: QueueConfig) -> None:
    """Refuse values of --transferqueue-round-order that mean nothing, or with which a round could wait for ever."""
    order, staleness = queue.transferqueue_round_order, queue.transferqueue_max_staleness
    if order == "commit" and staleness == 0:
        raise ConfigError(
            "--transferqueue-round-order commit with --transferqueue-max-staleness 0: every group in flight belongs to "
            "the round, so none can be first. Leave it out, or raise the bound."
        )
    if order == "index" and staleness > 0 and _bounds(queue):
        raise ConfigError(
            f"--transferqueue-round-order index with {', '.join(_bounds(queue))}: the group that a round waits for "
            "could wait for capacity that groups behind it hold. Use commit, or leave the bound out."
        )


def _check_debug(debug: DebugConfig) -> None:
    if debug.debug_rollout_only:
        raise ConfigError(
            f"--debug-rollout-only with --transferqueue-mode {STREAMING} or {EXTERNAL}: rounds that are not trained "
            "would never free their slots. Use mode off."
        )


def _check_early(config: Config) -> None:
    """Refuse what --train-early-groups cannot do: it begins a step before all of its rows are known, so nothing may
    need all of them or change meanwhile."""
    early, steps = config.queue.train_early_groups, config.batch.num_steps_per_rollout or 1
    reasons = {
        f"--num-steps-per-rollout {steps}": (steps > 1, "the first step would change the weights before the others"),
        f"--num-ppo-epochs {config.algo.num_ppo_epochs}": (
            config.algo.num_ppo_epochs > 1,
            "a further pass needs the rows of all groups again",
        ),
        "--normalize-advantages": (config.algo.normalize_advantages, "it needs every token of the step"),
        "--advantage-estimator ppo": (config.algo.advantage_estimator == "ppo", "its critic learns from whole rounds"),
        "--rollout-sample-filter-path": (
            config.rollout.rollout_sample_filter_path is not None,
            "it looks at whole rounds",
        ),
        "--custom-reward-post-process-path": (
            config.reward.custom_reward_post_process_path is not None,
            "it looks at whole rounds",
        ),
        "--separate-roles": (bool(config.cluster.separate_roles), "their columns travel round by round"),
        "--offload-train": (config.cluster.offload_train, "the trainers sleep while engines generate"),
        "--overlap-grad-reduce": (config.parallel.overlap_grad_reduce, "it sums gradients over ranks in every pass"),
        "--reference-mode": (config.debug.reference_mode, "which groups are together depends on who is faster"),
    }
    for flag, (is_given, why) in reasons.items():
        if is_given:
            raise ConfigError(f"--train-early-groups {early} with {flag}: {why}. Leave one of the two out.")
    if early >= config.rollout.rollout_batch_size:
        raise ConfigError(
            f"--train-early-groups {early}: a round has {config.rollout.rollout_batch_size} groups "
            "(--rollout-batch-size), so nothing would begin before it is whole. Lower it."
        )
