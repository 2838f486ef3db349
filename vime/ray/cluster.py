"""Ray itself: start a local one or join a cluster, and say at once when it is too small.

Ray queues an actor that asks for more than is free and waits for ever. So the demand is added up before the first
actor is made and compared with what the cluster has (https://github.com/verl-project/verl/issues/7656).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from dataclasses import dataclass

import psutil
import ray
from ray._private import ray_constants
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vime.config.parse import Config
from vime.config.paths import path_flags
from vime.config.queue_checks import STREAMING
from vime.ray.waits import wait_for
from vime.types import ClusterError, ConfigError
from vime.utils.network import LOOPBACK, address_of_interface, loopback_interface
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

# Shares of one CPU that Ray books for each process. They order placement, they do not limit the process.
TRAINER_CPUS = 0.5
ENGINE_CPUS = 0.5
MANAGER_CPUS = 0.2
QUEUE_CPUS = 0.1
LEDGER_CPUS = 0.1
LOCAL_OBJECT_STORE_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 10.0
WORKER_CONNECT_S = "2"
"""Ray tries five times so long: a worker that was just being started when its driver was killed ends after so much."""
GENERATION_NICENESS = 15
KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
}
"""For glibc: a step gets the memory of the step before, instead of fresh pages that the kernel clears one by one. One
arena: each thread has its own otherwise, with an upper size, and Ray trains in one thread of several."""
START_S = 180.0
"""Ray bounds its own start, by several time-outs one after the other; a start that takes longer is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of Ray."""

    cpus: float
    gpus: float


def demand_of(config: Config) -> Demand:
    """CPU shares and GPUs of all actors of this run."""
    cpus, gpus = MANAGER_CPUS, 0.0
    on_cuda = config.cluster.device == "cuda"
    if not config.debug.debug_rollout_only:
        ranks = num_trainer_ranks(config)
        ranks *= 1 + len(config.cluster.separate_roles)
        cpus += TRAINER_CPUS * ranks
        gpus += ranks if on_cuda else 0
    if not config.debug.debug_train_only:
        engines = config.cluster.rollout_num_engines or 1
        cpus += ENGINE_CPUS * engines
        gpus += engines * config.cluster.rollout_num_gpus_per_engine if on_cuda else 0
    if config.queue.transferqueue_mode in ("buffer", STREAMING):
        cpus += QUEUE_CPUS * (1 + config.queue.num_data_storage_units)
    if config.queue.transferqueue_mode == STREAMING:
        cpus += LEDGER_CPUS
    return Demand(cpus=cpus, gpus=gpus)


def limit_threads(config: Config) -> None:
    """One thread for this process, said before it imports torch: processes share the machine's cores. The user's
    OMP_NUM_THREADS counts, except under --reference-mode, where a sum must not depend on how many add it up."""
    if config.debug.reference_mode:
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def yield_to_trainers(config: Config) -> None:
    """Lower the priority of this process and of all that it starts. Without a GPU, engines, rewards and trainers share
    few cores: a trainer is one thread that computes, generation is many that come and go and would push it aside. What
    the trainer leaves, generation has. (Figures: docs/log.md. What a guard starts is lowered as one: guard.py.)"""
    if config.cluster.device != "cpu":
        return
    for thread in psutil.Process().threads():  # Linux keeps a niceness for each thread; new ones inherit their maker's
        with contextlib.suppress(ProcessLookupError):  # has just ended
            mine = os.getpriority(os.PRIO_PROCESS, thread.id)
            os.setpriority(os.PRIO_PROCESS, thread.id, max(mine, GENERATION_NICENESS))


def listen_host(config: Config) -> str:
    """Loopback on one machine. On a cluster the address of --network-interface, or the one of this node in Ray."""
    if config.cluster.ray_address is None:
        return LOOPBACK
    if config.cluster.network_interface is None:
        return str(ray.util.get_node_ip_address())
    try:
        return address_of_interface(config.cluster.network_interface)
    except ValueError as error:
        raise ConfigError(
            f"--network-interface {config.cluster.network_interface}: {error} Name one that every node of the cluster "
            "has."
        ) from error


def keep_collectives_on_interface(config: Config) -> None:
    """Have gloo and NCCL listen on `listen_host` in this process and all that it starts; said before torch is asked for
    a process group. On a cluster without --network-interface they choose, or the environment says."""
    if config.cluster.ray_address is None:
        name: str | None = loopback_interface()
    else:
        name = config.cluster.network_interface
    if name is not None:
        os.environ |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def num_trainer_ranks(config: Config) -> int:
    return config.cluster.actor_num_nodes * (config.cluster.actor_num_gpus_per_node or 1)


def data_parallel_size(config: Config) -> int:
    return num_trainer_ranks(config) // config.parallel.ranks_per_replica


def start_ray(config: Config) -> None:
    """Join `--ray-address`, or start a local Ray with as many logical CPUs as this run needs."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Ray announces on every start that its ports ask for a token, which is as it should be and nothing to act on.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    demand = demand_of(config)
    if config.cluster.ray_address is None:
        logical = max(os.cpu_count() or 1, int(demand.cpus + 1))
        _keep_ray_to_itself()
        os.environ.setdefault("RAY_gcs_rpc_server_connect_timeout_s", WORKER_CONNECT_S)
        if config.cluster.device == "cpu":
            os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: see yield_to_trainers
            for name, value in KEEP_FREED_MEMORY.items():
                os.environ.setdefault(name, value)
        with waiting("a local Ray to start", deadline_s=START_S):
            ray.init(
                address="local",  # never the cluster that some `ray start` left a note about
                num_cpus=logical,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                logging_level=logging.WARNING,
            )
        if ray.util.get_node_ip_address() != LOOPBACK:
            raise ClusterError(
                f"the local Ray listens on {ray.util.get_node_ip_address()}, expected {LOOPBACK}: other machines could "
                "reach it. Install the release of Ray that setup.py names."
            )
    else:
        _check_reachable(config.cluster.ray_address)
        named = ", ".join(f"{name} {value}" for name, value in path_flags(config).items())
        logger.info("--ray-address: every node must see these files under the same paths: %s", named)
        try:
            with waiting("the Ray cluster to answer", f"ray://{config.cluster.ray_address}", deadline_s=START_S):
                ray.init(address=config.cluster.ray_address, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ClusterError(
                f"--ray-address {config.cluster.ray_address}: no Ray cluster answers there: {error}. Start one with "
                "`ray start --head`, or leave the flag out for a local one."
            ) from error
        _check_interface(config)
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            logger.warning(
                "--ray-address %s: this cluster takes commands from everyone who reaches its ports. Start its nodes "
                "and this run with RAY_AUTH_MODE=token and a shared token (docs/security.md).",
                config.cluster.ray_address,
            )
    _check_resources(demand)


def _keep_ray_to_itself() -> None:
    """Have a local Ray listen on loopback only, and take commands only from who knows a token of this run.

    Ray has no option for the first: it turns a loopback address that it is given into the host's own, except where it
    supports no clusters, which this variable says. Its Python part has read the variable at import; all that it starts
    reads it anew. The token is Ray's, here fresh instead of the one that all local Rays of a user share in a file.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _check_reachable(address: str) -> None:
    """Ray itself tries an address that nobody answers for minutes, with warnings that name no flag."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return  # `auto`: Ray looks the address up
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"--ray-address {address}: nothing answers there within {CONNECT_TIMEOUT_S:g} s: {error}. Start a cluster "
            "with `ray start --head`, or leave the flag out for a local one."
        ) from error


def _check_interface(config: Config) -> None:
    """--network-interface: every node of the cluster has it, said before anything listens."""
    if config.cluster.network_interface is None:
        return
    look = ray.remote(num_cpus=0)(listen_host)
    looks = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            config
        ): node
        for node in ray.nodes()
        if node["Alive"]
    }
    found = wait_for(
        list(looks), name="every node to look at its network interfaces", owner="Ray", deadline_s=START_S, parties=()
    )
    hosts = [node["NodeManagerHostname"] for node in looks.values()]
    logger.info("--network-interface: %s", ", ".join(f"{a} {b}" for a, b in zip(hosts, found, strict=True)))


def stop_ray() -> None:
    """Leave the cluster; a local one is shut down."""
    ray.shutdown()


def _check_resources(demand: Demand) -> None:
    free = ray.available_resources()
    for name, wanted in (("CPU", demand.cpus), ("GPU", demand.gpus)):
        if wanted > free.get(name, 0.0) + 1e-6:
            raise ClusterError(
                f"this run needs {wanted:g} Ray {name} but only {free.get(name, 0.0):g} of "
                f"{ray.cluster_resources().get(name, 0.0):g} are free. Stop other jobs, add nodes, or lower "
                "--actor-num-gpus-per-node / --rollout-num-engines."
            )
    logger.info("Ray has %s free; this run asks for %g CPU and %g GPU", free, demand.cpus, demand.gpus)
