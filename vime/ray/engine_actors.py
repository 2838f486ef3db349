"""The Ray actors of a vLLM server and of a router: each owns one child."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import ray

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.external import ExternalEngine
from vime.backends.vllm_utils.router import PORT_FREE_S, RouterProcess
from vime.config.parse import Config
from vime.observability.logs import setup_logging
from vime.ray.actor import Options
from vime.ray.cluster import keep_collectives_on_interface, listen_host, yield_to_trainers
from vime.ray.followers import Followers
from vime.types import EngineAddress, EngineError, EngineLostError
from vime.utils.device import see_only
from vime.utils.network import free_port

ASKED_S = 30.0


class ServerActor(Protocol):
    """What the driver asks an engine and a router alike."""

    def check(self, deadline_s: float, is_updating: bool) -> str | None: ...
    def stop(self) -> None: ...


class EngineActor:
    """Owns one `vllm serve` child, which dies with this actor, and the actors of the engine's further nodes."""

    _is_stopped = False

    def __init__(
        self,
        config: Config,
        index: int,
        run_dir: str,
        keys: EngineKeys,
        shared_gpus: Sequence[str] = (),
        further: Sequence[Options] = (),
    ) -> None:
        """`shared_gpus`: with --colocate, what Ray gave to the ranks; it gave none to this process. `further`: where
        the rest of the engine is."""
        self._config = config
        keep_collectives_on_interface(config)
        setup_logging(Path(run_dir), f"engine-{index}")
        see_only(shared_gpus or ray.get_gpu_ids())
        self._process = EngineProcess(
            config,
            index=index,
            run_dir=Path(run_dir),
            host=listen_host(config),
            keys=keys,
            num_nodes=1 + len(further),
        )
        self._followers = Followers(config, index, run_dir, keys, further)

    def start(self, deadline_s: float) -> EngineAddress:
        self._followers.start(self._process)
        self._process.start()
        self._process.wait_ready(deadline_s, on_poll=self._followers.check)
        # Not earlier: the whole run waits for the engines' start, which takes longest.
        yield_to_trainers(self._config)
        yield_to_trainers(self._config, session=self._process.pid)
        return self._process.address

    def check(self, deadline_s: float, is_updating: bool) -> str | None:
        """Return the version that it puts on its tokens. EngineLostError with the last log lines when the child, or one
        on a further node, has ended, or hangs for `deadline_s`. None when it is stopped meanwhile: whoever stops it
        reads no answer, and Ray shows an error that nobody reads."""
        try:
            self._followers.check()
            return self._process.check_health(deadline_s, is_updating=is_updating)
        except EngineError as error:
            if self._is_stopped:
                return None
            if isinstance(error, EngineLostError):
                self._followers.check()  # the server hangs when a part is gone, which says more
            raise

    def num_requests(self) -> int | None:
        """Return how many requests for completions it works on; None if it does not say, as one does that is being
        stopped. Whoever stops it may have no use for the answer, and Ray shows an error that nobody reads."""
        return _said_by(self._process)

    def stop(self) -> None:
        self._is_stopped = True
        stopping = self._followers.begin_stop()
        self._process.stop()
        self._followers.end_stop(stopping)


class ExternalEngineActor(EngineActor):
    """Holds an engine that somebody else started, with the contract of `EngineActor`: a start waits until it responds
    and is what the run needs; a stop leaves it running, paused and free for the next run."""

    def __init__(self, config: Config, index: int, run_dir: str, keys: EngineKeys, place: str, owner: str) -> None:
        setup_logging(Path(run_dir), f"engine-{index}")
        self._external = ExternalEngine(config, index=index, place=place, keys=keys, owner=owner)

    def start(self, deadline_s: float) -> EngineAddress:
        self._external.wait_ready(deadline_s)
        return self._external.address

    def check(self, deadline_s: float, is_updating: bool) -> str | None:
        return self._external.check_health(deadline_s, is_updating=is_updating)

    def num_requests(self) -> int | None:
        return _said_by(self._external)

    def stop(self) -> None:
        self._external.stop()


def _said_by(engine: EngineProcess | ExternalEngine) -> int | None:
    try:
        return engine.num_requests(ASKED_S)
    except EngineError:
        return None  # what is wrong with it, the health check says


class RouterActor:
    """Owns a router child: one address for N engines, data only. It listens on loopback, beside the RolloutManager,
    which alone talks to it: the router has no way to know its callers."""

    def __init__(self, config: Config, run_dir: str, name: str) -> None:
        yield_to_trainers(config)
        setup_logging(Path(run_dir), name)
        self._config, self._run_dir, self._name = config, Path(run_dir), name
        self._process: RouterProcess | None = None

    def free_ports(self, count: int) -> int:
        """Return the first of so many free ports in a row, on the node of all routers."""
        return free_port(in_a_row=count)

    def start(self, engines: list[EngineAddress], deadline_s: float, port: int | None) -> tuple[str, int]:
        self._process = RouterProcess(self._config, engines, run_dir=self._run_dir, name=self._name, port=port)
        self._process.wait_for_port(PORT_FREE_S)
        self._process.start()
        self._process.wait_ready(deadline_s)
        return self._process.host, self._process.port

    def take_in(self, engine_url: str) -> None:
        """Send requests to this engine too."""
        self._started.take_in(engine_url)

    def leave_out(self, engine_url: str) -> None:
        """Send no more requests to this engine."""
        self._started.leave_out(engine_url)

    def check(self, deadline_s: float, is_updating: bool) -> str | None:  # noqa: ARG002 - asked like an engine
        if self._process is not None:
            self._process.check_health(deadline_s)
        return None

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    @property
    def _started(self) -> RouterProcess:
        assert self._process is not None, "the run is up"
        return self._process
