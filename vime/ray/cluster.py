"""Ray itself: start a local one or join a cluster, and say at once when it is too small.

Ray queues an actor that asks for more than is free, and that wait has no end. So the demand is added up before the
first actor is made and compared with what the cluster has (https://github.com/verl-project/verl/issues/7656).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import parameter, ray_constants, services
from ray._private import utils as ray_utils
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled, and left out of its types
from ray._raylet import Config as RayletConfig  # type: ignore[attr-defined]  # the same

from vime.backends.vllm_utils.guard import session_members, weigh_session
from vime.config.parse import Config
from vime.config.queue_checks import BUFFER, EXTERNAL
from vime.ray.template import BaseProcess, raise_open_files
from vime.types import ClusterError, ConfigError, describe
from vime.utils import die_with_parent
from vime.utils.heap import KEEP_FREED_MEMORY
from vime.utils.network import LOOPBACK, address_of_interface, loopback_interface
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

# Shares of one CPU that Ray reserves for each process. They decide placement; they do not limit the process.
TRAINER_CPUS = 0.5
ENGINE_CPUS = 0.5
MANAGER_CPUS = 0.2
WORKER_CPUS = 0.1
QUEUE_CPUS = 0.1
LEDGER_CPUS = 0.1
LOCAL_OBJECT_STORE_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 10.0
ROOM_POLL_S = 1.0
ALIVE_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
START_ONE = "Start a cluster with `ray start --head`, or leave the flag out for a local one."
WORKER_CONNECT_S = "2"
"""Ray's own value is five times as long. A worker that was being started when its driver was killed ends after this
time."""
GENERATION_NICENESS = 3
"""Half of the weight of a process of niceness 0 (Linux: 1.25 times less for each step). More would leave generation
next to nothing beside other work: 15 is 3 % of a core."""
LOWEST_PRIORITY = 19  # of Linux
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""For torch: nothing is compiled without a GPU, and what only decorates with `torch.compile` would import the compiler,
1.6 CPU s a process."""
STOCK_WORKER = str(Path(ray.__file__).parent / "_private" / "workers" / ray_constants.SETUP_WORKER_FILENAME)
SOCKET_TOO_LONG = "AF_UNIX path length"  # of Ray's OSError
END_S = 10.0
START_S = 180.0
"""Ray bounds its own start, by several time-outs one after the other; a start that takes longer is logged."""

_base_process = BaseProcess()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of Ray."""

    cpus: float
    gpus: float


def has_worker_processes(config: Config) -> bool:
    """Whether rollout workers are processes of their own; else the RolloutManager is the only one."""
    return config.queue.num_rollout_workers > 1 or config.queue.transferqueue_mode == EXTERNAL


def num_worker_processes(config: Config) -> int:
    """Rollout workers, and the gateway of mode external, which is one more."""
    is_external = config.queue.transferqueue_mode == EXTERNAL
    return (config.queue.num_rollout_workers if config.cluster.num_engines else 0) + is_external


def demand_of(config: Config) -> Demand:
    """Add up CPU shares and GPUs of all actors of this run."""
    cpus, gpus = MANAGER_CPUS, 0.0
    on_cuda = config.cluster.device == "cuda"
    if not config.debug.debug_rollout_only:
        ranks = num_trainer_ranks(config)
        ranks *= 1 + len(config.cluster.separate_roles)
        cpus += TRAINER_CPUS * ranks
        gpus += ranks if on_cuda else 0
    if not config.debug.debug_train_only:
        engines = config.cluster.num_started_engines
        cpus += ENGINE_CPUS * engines
        own_gpus = on_cuda and not config.cluster.colocate  # else those of the trainers
        gpus += engines * config.cluster.rollout_num_gpus_per_engine if own_gpus else 0
    if config.queue.has_ledger or config.queue.transferqueue_mode == BUFFER:
        cpus += QUEUE_CPUS * (1 + config.queue.num_data_storage_units)
    if config.queue.has_ledger:
        cpus += LEDGER_CPUS
        # one more: a worker that takes a dead one's place may be placed before Ray has seen that it is dead
        cpus += WORKER_CPUS * (num_worker_processes(config) + 1) if has_worker_processes(config) else 0
    return Demand(cpus=cpus, gpus=gpus)


def limit_threads(config: Config) -> None:
    """One thread for this process, said before it imports torch: processes share the machine's cores. The user's
    OMP_NUM_THREADS counts, except under --reference-mode, where a sum must not depend on how many add it up."""
    if config.debug.reference_mode:
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def yield_to_trainers(config: Config, *, session: int | None = None) -> None:
    """Lower the priority of this process and of all that it starts, or of the processes of a session, a little: to
    GENERATION_NICENESS above what this process was started with, so this also works in a run that was itself started
    with `nice`.

    Without a GPU, engines, rewards and trainers share few cores: a trainer is one computing thread, generation is many
    short-running threads that would displace it. So on a core that both want, generation gets half of a trainer's
    weight, and whatever the trainer leaves (decisions 0014 and 0016; what a guard starts is lowered as one:
    guard.py)."""
    if config.cluster.device != "cpu":
        return
    for pid in [os.getpid()] if session is None else session_members(session):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # has just ended
            # Linux keeps a niceness for each thread; new ones inherit their maker's
            for thread in psutil.Process(pid).threads():
                mine = os.getpriority(os.PRIO_PROCESS, thread.id)
                os.setpriority(os.PRIO_PROCESS, thread.id, max(mine, yielding_niceness()))
    if session is not None:
        weigh_session(session)


@functools.cache
def yielding_niceness() -> int:
    """Return the niceness for generation that this process owns. Cached, because this process may be lowered later."""
    return min(LOWEST_PRIORITY, os.getpriority(os.PRIO_PROCESS, os.getpid()) + GENERATION_NICENESS)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a start waits for what the cluster lacks. Not at all when a run begins: then it is most likely a
    mistake, which the user should see at once. A restart waits: a node that died may come back, and a part that was
    ended a moment ago still has what Ray gave it."""

    seconds: float = 0.0
    tell: Callable[[str], None] = logger.warning

    def wait(self, lacks: Callable[[], str], on_poll: Callable[[], None]) -> None:
        """Return when `lacks` says nothing. ClusterError, with what it says, when the time is over."""
        said = lacks()
        if not said:
            return
        if self.seconds:
            self.tell(f"{said} Waiting {self.seconds:.0f} s at most (--start-timeout-secs) until it is there.")
        ends = time.monotonic() + self.seconds
        with waiting("room for this run in the cluster", "Ray", deadline_s=self.seconds):
            while time.monotonic() < ends:
                on_poll()
                time.sleep(ROOM_POLL_S)
                said = lacks()
                if not said:
                    return
        raise ClusterError(said)


NO_PATIENCE = Patience()


def start_ray(config: Config, on_retry: Callable[[], None] = lambda: None, *, patience: Patience = NO_PATIENCE) -> None:
    """Join `--ray-address`, or start a local Ray with as many logical CPUs as this run needs. Raises ClusterError.

    `on_retry` runs before a start that failed by a time-out is tried again, while `patience` lasts too, and may raise
    to end the tries.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Ray announces on every start that its ports ask for a token: intended, so the user need not see it.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    demand = demand_of(config)
    if config.cluster.ray_address is None:
        _start_local_ray(config, max(os.cpu_count() or 1, int(demand.cpus + 1)), on_retry)
    else:
        _join_ray(config)
    patience.wait(lambda: _lacks(demand), on_retry)


def _start_local_ray(config: Config, num_cpus: int, on_retry: Callable[[], None]) -> None:
    """Start a local Ray. On a busy machine Ray gives up its own start after 30 s; then try again until
    --start-timeout-secs."""
    os.environ.setdefault("RAY_gcs_rpc_server_connect_timeout_s", WORKER_CONNECT_S)
    if config.cluster.device == "cpu":
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # they would have another environment
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: see yield_to_trainers
        for name, value in {**KEEP_FREED_MEMORY, **NO_COMPILER}.items():
            os.environ.setdefault(name, value)
    _keep_ray_to_itself()
    raise_open_files()  # as Ray's init does, but before the base of its workers begins
    worker_program = None
    if config.cluster.device == "cpu":
        worker_program = _base_process.worker_program(STOCK_WORKER)
        _base_process.begin(with_queue=config.queue.transferqueue_mode != "off")
    limit_s = config.cluster.start_timeout_secs
    ends = time.monotonic() + limit_s
    for attempt in itertools.count(1):
        others = set(psutil.Process().children(recursive=True))
        try:
            with waiting("a local Ray to start", deadline_s=START_S), own_sigterm(), servers_alone(worker_program):
                ray.init(
                    address="local",  # never the cluster that some `ray start` left a note about
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                    logging_level=logging.WARNING,
                )
        except Exception as error:  # boundary: Ray raises a bare Exception, a RuntimeError and others for a time-out
            logger.info("attempt %d to start a local Ray failed", attempt, exc_info=True)  # the traceback: to the file
            _end_what_was_started(others)
            if not _is_timeout(error):
                advice = ray_logs()
                if SOCKET_TOO_LONG in str(error):
                    advice = (
                        "Set RAY_TMPDIR to a short path (RAY_TMPDIR=/tmp): it goes before TMPDIR for Ray's sockets."
                    )
                raise ClusterError(f"a local Ray did not start: {describe(error)}. {advice}") from error
            if time.monotonic() >= ends:
                raise ClusterError(
                    f"a local Ray did not start within {limit_s:g} s (--start-timeout-secs), {attempt} attempt(s); "
                    f"the last ended with {describe(error)}. Is the machine busy with other work? Raise the limit, or "
                    f"wait until there is less. {ray_logs()}"
                ) from error
            logger.warning("a local Ray did not start in the time that it gives itself: trying again")
            on_retry()
        else:
            break
    if ray.util.get_node_ip_address() != LOOPBACK:
        raise ClusterError(
            f"the local Ray listens on {ray.util.get_node_ip_address()}, expected {LOOPBACK}: other machines could "
            "reach it. Install the release of Ray that setup.py names."
        )


def ray_logs() -> str:
    """Return the sentence that says where they are, which TMPDIR and RAY_TMPDIR decide."""
    return f"Ray's own logs are in {get_default_ray_temp_dir()}/session_latest/logs."


def _keep_ray_to_itself() -> None:
    """Have a local Ray listen on loopback only, and take commands only from who knows a token of this run.

    Ray has no option for the first: it turns a loopback address that it is given into the host's own, except where it
    supports no clusters, which this variable says. Its Python part has read the variable at import; all that it starts
    reads it anew. The token is Ray's, here fresh instead of the one that all local Rays of a user share in a file of
    the user's home, where each `ray start` would find it and ask for it too.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextlib.contextmanager
def servers_alone(worker_program: str | None) -> Iterator[None]:
    """Have `ray.init` in the block start what runs actors, and nothing that only shows or scales a cluster.

    Ray's option for the dashboard leaves out its pages, not its process. Left out are that one, the autoscaler, the
    reader of logs (which serves `log_to_driver`) and most of the agent's modules: 4 of Ray's 6 CPU seconds and half of
    the time that its start takes. They are asked for in three places of Ray's Python part, by module.

    What is started gets a process group of its own: a SIGTERM to that of the driver, as `timeout` and schedulers send
    it, asks for a save, which needs Ray.

    The two agents that are left end with the raylet, their parent. By themselves they would tell the cluster server of
    its death first: after a kill of the driver, which ends both servers, they would try that for a minute.
    """
    python_command = cast("Callable[..., list[str]]", services._build_python_executable_command_memory_profileable)  # noqa: SLF001

    def of_an_agent(*arguments: object, **options: object) -> list[str]:
        return [sys.executable, "-I", "-S", die_with_parent.__file__, "0", *python_command(*arguments, **options)]

    less = {"no_monitor": True, "include_log_monitor": False, "setup_worker_path": worker_program}
    own_group = functools.partial(cast("Callable[..., object]", services.ConsolePopen), process_group=0)
    replaced: list[tuple[ModuleType, str, Callable[..., object]]] = [
        (parameter, "RayParams", functools.partial(cast("Callable[..., object]", parameter.RayParams), **less)),
        (services, "start_api_server", lambda *_, **__: (None, None)),  # its result for a dashboard that did not start
        (ray_utils, "get_dashboard_dependency_error", lambda: "not wanted"),  # as where no dashboard is installed
        (services, "_build_python_executable_command_memory_profileable", of_an_agent),
        (services, "ConsolePopen", own_group),
    ]
    with _replaced(replaced):
        yield


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """Have SIGTERM do what it did before `ray.init` in the block. Ray has two handlers of its own: one in Python that
    ends this process at once, and one in its core that writes a stack and aborts the process 3 s later. That one is
    replaced by setting Python's anew."""
    handler = signal.getsignal(signal.SIGTERM)
    with _replaced([(ray_utils, "set_sigterm_handler", lambda _handler: None)]):
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _replaced(replaced: list[tuple[ModuleType, str, Callable[..., object]]]) -> Iterator[None]:
    stock = [getattr(module, name) for module, name, _ in replaced]
    for module, name, stand_in in replaced:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for (module, name, _), original in zip(replaced, stock, strict=True):
            setattr(module, name, original)


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, (TimeoutError, ConnectionError)) or "timed out" in str(error).lower()


def _end_what_was_started(others: set[psutil.Process]) -> None:
    """End the processes of a failed start. Ray forgets them: they would live as long as this process."""
    ray.shutdown()
    left = [child for child in psutil.Process().children(recursive=True) if child not in others]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=END_S)


def _join_ray(config: Config) -> None:
    """Join the cluster of `--ray-address`, with a token where it asks for one."""
    asked = config.cluster.ray_address
    assert asked is not None, "else a local Ray is started"
    try:
        address = services.canonicalize_bootstrap_address_or_die(asked)
    except (ConnectionError, ValueError) as error:
        raise ClusterError(f"--ray-address {asked}: {error} {START_ONE}") from error
    _agree_on_token(asked if asked == address else f"{asked} ({address})", address)
    try:
        with waiting("the Ray cluster to answer", f"ray://{address}", deadline_s=START_S), own_sigterm():
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # boundary: Ray raises different errors for other versions, lost nodes and slow replies
        logger.info("--ray-address %s cannot be joined", asked, exc_info=True)
        raise ClusterError(f"--ray-address {asked}: cannot be joined: {describe(error)}. {START_ONE}") from error
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "--ray-address %s: this cluster takes commands from everyone who reaches its ports. Start its nodes with "
            "RAY_AUTH_MODE=token and a shared token (docs/security.md).",
            asked,
        )


def _agree_on_token(named: str, address: str) -> None:
    """Find out with one call whether the cluster wants a token, and which one it accepts. Ray itself would try for 20 s
    without a token, and after a wrong one say that nothing responds. The cluster's choice then holds for this process
    and all that it starts, whatever RAY_AUTH_MODE says."""
    if os.environ.get("RAY_USE_TLS") not in (None, "", "0"):
        return  # the call would have to know Ray's certificates
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    wants_token = not _is_answered(named, address, {})
    if wants_token:
        help_text = (
            "Set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file, to what `ray get-auth-token` says on the head node "
            "(a job that was submitted has it from its cluster)."
        )
        try:
            header = loader.get_token_for_http_header(ignore_auth_mode=True)
        except ray.exceptions.AuthenticationError as error:  # RAY_AUTH_TOKEN_PATH names a file that is not there
            raise ClusterError(
                f"--ray-address {named}: the cluster asks for a token, and the one named here cannot be read: "
                f"{error.message}. {help_text}"
            ) from error
        if not header:
            raise ClusterError(
                f"--ray-address {named}: the cluster asks for a token, and none is here: neither RAY_AUTH_TOKEN nor "
                f"RAY_AUTH_TOKEN_PATH is set, and there is no ~/.ray/auth_token. {help_text}"
            )
        if not _is_answered(named, address, header):
            raise ClusterError(
                f"--ray-address {named}: the cluster asks for another token than the one of {_token_source()}. "
                f"{help_text}"
            )
    os.environ["RAY_AUTH_MODE"] = "token" if wants_token else "disabled"
    RayletConfig.initialize("")  # Ray remembers the mode from its import on


def _is_answered(named: str, address: str, header: dict[str, str]) -> bool:
    """False when the cluster refuses the call because of its token."""
    import grpc  # only who joins a cluster needs it

    with (
        waiting("the Ray cluster to answer", f"ray://{address}", deadline_s=CONNECT_TIMEOUT_S),
        grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        call = channel.unary_unary(ALIVE_CALL, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=CONNECT_TIMEOUT_S, metadata=list(header.items()))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            raise ClusterError(
                f"--ray-address {named}: no Ray cluster responds there within {CONNECT_TIMEOUT_S:g} s: "
                f"{error.details()}. {START_ONE}"
            ) from error
    return True


def _token_source() -> str:
    """Where Ray takes its token from: the first of these."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"


def stop_ray() -> None:
    """Leave the cluster; a local one is shut down."""
    ray.shutdown()


def _lacks(demand: Demand) -> str:
    """Return which resource is not free in sum; empty when all are."""
    free = ray.available_resources()
    for name, wanted in (("CPU", demand.cpus), ("GPU", demand.gpus)):
        if wanted > free.get(name, 0.0) + 1e-6:
            return (
                f"this run needs {wanted:g} Ray {name} but only {free.get(name, 0.0):g} of "
                f"{ray.cluster_resources().get(name, 0.0):g} are free. Stop other jobs, add nodes, or lower "
                "--actor-num-gpus-per-node / --rollout-num-engines."
            )
    logger.info("Ray has %s free; this run asks for %g CPU and %g GPU", free, demand.cpus, demand.gpus)
    return ""
