"""The life of one vLLM server."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.launch import Part, engine_command, engine_environment
from vime.backends.vllm_utils.process import ServerProcess, server_environment
from vime.backends.vllm_utils.routes import REQUESTS_ROUTE, WEIGHTS_ROUTE, HeldWeights, OpenRequests
from vime.config.parse import Config
from vime.types import EngineAddress, EngineError
from vime.utils.network import LOOPBACK, free_port


class EngineProcess(ServerProcess):
    """Engine number `index`, with its log in `run_dir`/logs. `host` is where it listens and how it is reached; `keys`
    are those of the run, new ones for an engine by itself. `num_nodes`: on which it is; the others hold a
    `FollowerProcess` each, made of `part`, without which it does not get ready."""

    def __init__(
        self,
        config: Config,
        *,
        index: int,
        run_dir: Path,
        host: str = LOOPBACK,
        keys: EngineKeys | None = None,
        num_nodes: int = 1,
    ) -> None:
        port = free_port(host)
        self._of, self._meeting = num_nodes, (host, free_port(host) if num_nodes > 1 else 0)
        self.keys = keys or EngineKeys.make()
        self.address = EngineAddress(
            name=f"engine-{index}",
            url=f"http://{host}:{port}",
            key=self.keys.control,
            num_workers=config.cluster.rollout_num_gpus_per_engine if num_nodes > 1 else None,
            start=uuid.uuid4().hex,  # its port may be one that an engine before it had
        )
        super().__init__(
            self.address.name,
            engine_command(config, index=index, host=host, port=port, part=self.part(0) if num_nodes > 1 else None),
            env=_environment(config, self.keys, host),
            log_path=run_dir / "logs" / f"vllm-{index}.log",
            ready_url=f"{self.address.url}/health",
        )

    def part(self, number: int) -> Part:
        """Return what tells a further node how to join."""
        address, port = self._meeting
        return Part(number=number, of=self._of, address=address, port=port)

    def check_health(self, deadline_s: float, *, is_updating: bool) -> str | None:
        """Return the version that it puts on its tokens. EngineError when it has ended or hangs.

        The API server responds to /health by itself; what is held is known to the process with the model, which is not
        asked while an update may hold it (the update has a deadline): the version is None then."""
        if is_updating:
            self.probe(f"{self.url}/health", deadline_s, self.address.headers)
            return None
        said = self.probe(self.url + WEIGHTS_ROUTE, deadline_s, self.address.headers)
        try:
            return msgspec.json.decode(said, type=HeldWeights)["weight_version"]
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name} {WEIGHTS_ROUTE}: the response cannot be read: {error}") from error

    def num_requests(self, deadline_s: float) -> int:
        """Return how many requests for completions are in progress. EngineError as in `check_health`."""
        said = self.probe(self.url + REQUESTS_ROUTE, deadline_s, self.address.headers)
        try:
            return msgspec.json.decode(said, type=OpenRequests)["in_progress"]
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name} {REQUESTS_ROUTE}: the response cannot be read: {error}") from error

    @property
    def url(self) -> str:
        return self.address.url


class FollowerProcess(ServerProcess):
    """The workers of engine number `index` on a further node: no server, and no health of its own. What hangs here
    hangs the engine, whose server asks every worker."""

    def __init__(
        self, config: Config, *, index: int, part: Part, run_dir: Path, keys: EngineKeys, host: str = LOOPBACK
    ) -> None:
        super().__init__(
            f"engine-{index}, part {part.number + 1} of {part.of}",
            engine_command(config, index=index, host=host, port=0, part=part),
            env=_environment(config, keys, host),
            log_path=run_dir / "logs" / f"vllm-{index}-part-{part.number}.log",
            ready_url="",  # nobody waits for it but the engine's server
        )


def _environment(config: Config, keys: EngineKeys, host: str) -> dict[str, str]:
    return server_environment({**engine_environment(config, os.environ), **keys.environment(), "VLLM_HOST_IP": host})
