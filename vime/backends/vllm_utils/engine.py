"""The life of one vLLM server."""

from __future__ import annotations

import os
from pathlib import Path

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.launch import engine_command, engine_environment
from vime.backends.vllm_utils.process import ServerProcess, server_environment
from vime.config.parse import Config
from vime.types import EngineAddress
from vime.utils.network import LOOPBACK, free_port


class EngineProcess(ServerProcess):
    """Engine number `index`, with its log in `run_dir`/logs. `host` is where it listens and how it is reached; `keys`
    are those of the run, new ones for an engine by itself."""

    def __init__(
        self, config: Config, *, index: int, run_dir: Path, host: str = LOOPBACK, keys: EngineKeys | None = None
    ) -> None:
        port = free_port(host)
        self.keys = keys or EngineKeys.make()
        self.address = EngineAddress(name=f"engine-{index}", url=f"http://{host}:{port}", key=self.keys.control)
        super().__init__(
            self.address.name,
            engine_command(config, index=index, host=host, port=port),
            env=server_environment(
                {**engine_environment(config, os.environ), **self.keys.environment(), "VLLM_HOST_IP": host}
            ),
            log_path=run_dir / "logs" / f"vllm-{index}.log",
            ready_url=f"{self.address.url}/health",
        )

    def check_health(self, deadline_s: float, *, is_updating: bool) -> None:
        """EngineError when it has ended or hangs. The API server responds to /health by itself; /is_paused goes to the
        process with the model and back, which is not asked while an update may hold it (the update has a deadline)."""
        self.probe(self.url + ("/health" if is_updating else "/is_paused"), deadline_s, self.address.headers)

    @property
    def url(self) -> str:
        return self.address.url
