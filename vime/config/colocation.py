"""`--colocate`: trainer ranks and engines that take turns on the same GPUs. Who shares with whom, and what is refused.

The GPUs are those of the policy's ranks. Engine after engine takes the next `--rollout-num-gpus-per-engine` ranks of a
node, so an engine is on one node, and no two share a rank.
"""

from __future__ import annotations

from vime.config.parse import Config
from vime.types import ConfigError

MODES = ("off", "buffer")


def resolve_colocation(config: Config) -> dict[str, object]:
    """Return what follows from --colocate: trainers that sleep, and by default an engine for each of its GPUs."""
    cluster = config.cluster
    if not cluster.colocate:
        return {}
    changes: dict[str, object] = {"offload_train": True}
    if cluster.rollout_num_engines is None:
        size = cluster.rollout_num_gpus_per_engine
        asked = cluster.rollout_num_gpus // size if cluster.rollout_num_gpus else room_for_engines(config)
        changes["rollout_num_engines"] = max(1, asked)
    return changes


def room_for_engines(config: Config) -> int:
    """Return how many engines the GPUs of the policy's ranks hold."""
    return config.cluster.actor_num_nodes * engines_of_node(config)


def engines_of_node(config: Config) -> int:
    return (config.cluster.actor_num_gpus_per_node or 1) // config.cluster.rollout_num_gpus_per_engine


def shared_ranks(config: Config, engine: int) -> range:
    """Return the ranks of the policy whose GPUs this engine has too."""
    per_node, size = config.cluster.actor_num_gpus_per_node or 1, config.cluster.rollout_num_gpus_per_engine
    node, slot = divmod(engine, engines_of_node(config))
    first = node * per_node + slot * size
    return range(first, first + size)


def sleep_level(config: Config) -> int:
    """Return vLLM's level for engines that make room for a round of training.

    2 discards the weights: the round ends with an update that sends every tensor, so a copy on the host would be moved
    for nothing. 1 keeps it, where engines may have to go on with what they had: after a round without an update, and
    where an update brings an adapter alone.
    """
    sends_all = config.weights.update_weights_interval == 1 and not config.lora.trains_adapter
    return 2 if sends_all else 1


def transport_in_turns(config: Config) -> str:
    """Return how weights travel: NCCL takes no two processes on one GPU, but an engine can open what a rank that shares
    its GPU holds there."""
    return "shm" if config.cluster.device == "cpu" else "ipc"


def check_colocation(config: Config) -> None:
    cluster, debug, transport = config.cluster, config.debug, config.weights.update_weight_transport
    if transport == "ipc" and not (cluster.colocate and cluster.device == "cuda"):
        raise ConfigError(
            "--update-weight-transport ipc: an engine opens the memory of a trainer rank on its GPU. Expected "
            "--colocate on GPUs. Leave it out, or use shm."
        )
    if not cluster.colocate:
        return
    for flag, is_given in (
        ("--debug-rollout-only", debug.debug_rollout_only),
        ("--debug-train-only", debug.debug_train_only),
        ("--rollout-num-engines 0", cluster.num_engines == 0),
    ):
        if is_given:
            raise ConfigError(
                f"--colocate with {flag} has no effect: trainers and engines take turns, and this run has only one of "
                "them. Remove one of the two flags."
            )
    if cluster.rollout_external_engine_addrs:
        raise ConfigError(
            "--colocate with --rollout-external-engine-addrs: those engines have GPUs of their own, so there is no GPU "
            "to share. Remove one of the two flags."
        )
    mode = config.queue.transferqueue_mode
    if mode not in MODES:
        raise ConfigError(
            f"--colocate with --transferqueue-mode {mode}: there engines generate while trainers train, and both would "
            f"need the same GPUs. Expected mode {' or '.join(MODES)}. Change it, or give engines GPUs of their own: "
            "--rollout-num-gpus N without --colocate."
        )
    per_node, size = cluster.actor_num_gpus_per_node or 1, cluster.rollout_num_gpus_per_engine
    if size > per_node:
        raise ConfigError(
            f"--colocate with --rollout-num-gpus-per-engine {size}: a node has {per_node} trainer ranks "
            "(--actor-num-gpus-per-node), and an engine is on one node: over several it needs GPUs of its own. "
            "Expected at most as many. Lower it, or leave --colocate out."
        )
    room = room_for_engines(config)
    if cluster.num_engines > room:
        raise ConfigError(
            f"--colocate: {cluster.num_engines} engine(s) of {size} GPU(s) are asked for, but the GPUs of "
            f"{cluster.actor_num_nodes} x {per_node} trainer ranks hold {room}. Leave --rollout-num-engines and "
            "--rollout-num-gpus out, or lower them."
        )
    if transport == "nccl":
        raise ConfigError(
            "--colocate with --update-weight-transport nccl: NCCL takes no two processes on one GPU. Leave it out, or "
            "use shm, gloo or disk."
        )
