"""The life of a vllm-router: one address for all engines. Data only.

It drops query strings and sends a control call to one engine of its choice: control goes to each engine (control.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from vime.backends.vllm_utils.flag_values import FlagShape, check_values, flag_names, refuse_owned, shape_of
from vime.backends.vllm_utils.process import POLL_S, ServerProcess, server_environment
from vime.config.deadlines import request_deadline_s
from vime.config.parse import Config
from vime.types import ConfigError, EngineAddress, EngineLostError
from vime.utils.http import HttpFailure
from vime.utils.network import LOOPBACK, free_port, port_is_free
from vime.utils.waits import waiting

OWNED_FLAGS = {  # what the run itself decides, and the flag of Vime that decides it (empty: none does)
    "--host": "",
    "--port": "--vllm-router-port",
    "--worker-urls": "",
    "--policy": "--vllm-router-policy",
    **dict.fromkeys(("--mini-lb", "--enable-igw", "--api-key", "--wasm-middleware"), ""),
    **dict.fromkeys(("--service-discovery", "--vllm-discovery-address", "--intra-node-data-parallel-size"), ""),
    **dict.fromkeys(("--vllm-pd-disaggregation", "--prefill", "--decode"), ""),
}
ADD_ROUTE, REMOVE_ROUTE = "/add_worker", "/remove_worker"
CHANGE_S, PORT_FREE_S = 10.0, 15.0  # Ray kills an actor that is stopped after 5 s
SHARES = ("--cache-threshold", "--retry-jitter-factor")
AT_LEAST_ONE = (
    *("--worker-startup-timeout-secs", "--worker-startup-check-interval", "--request-timeout-secs"),
    *("--health-failure-threshold", "--health-success-threshold", "--health-check-timeout-secs"),
    *("--health-check-interval-secs", "--cb-failure-threshold", "--cb-success-threshold", "--max-payload-size"),
    *("--max-concurrent-requests", "--retry-backoff-multiplier", "--rate-limit-tokens-per-second"),
)
METRICS_PORT = "--prometheus-port"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
PORTS = (METRICS_PORT, "--service-discovery-port")

# The router's own defaults look at a worker every 30 s at start and every 60 s later, and two routers on a host collide
# on the metrics port. The health time-out is long because an engine may share its core with the trainer.
DEFAULT_FLAGS = {
    "--worker-startup-check-interval": "1",
    "--health-check-interval-secs": "2",
    "--health-failure-threshold": "3",
    "--health-check-timeout-secs": "10",
    "--health-success-threshold": "1",
    "--retry-max-retries": "3",
}


class RouterLostError(EngineLostError):
    """The router ended, hangs or cannot be reached."""


class RouterProcess(ServerProcess):
    """Router in front of `engines`, all of which must be ready."""

    def __init__(
        self,
        config: Config,
        engines: Sequence[EngineAddress],
        *,
        run_dir: Path,
        name: str = "router",
        port: int | None = None,
        host: str = LOOPBACK,
    ) -> None:
        """`port`: where it listens; None: at --vllm-router-port, or a free one."""
        self.host = host
        self.port = port or config.engine.vllm_router_port or free_port(host)
        super().__init__(
            name,
            router_command(config, engines, host=host, port=self.port),
            env=_without_proxy(server_environment({})),
            log_path=run_dir / "logs" / f"vllm-{name}.log",
            ready_url=f"http://{host}:{self.port}/readiness",
        )

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wait_for_port(self, deadline_s: float) -> None:
        """Return when nothing else listens at its address: the router before it, whose actor hung, may take seconds to
        end, and would respond in its place. EngineLostError at the deadline."""
        ends = time.monotonic() + deadline_s
        with waiting(f"the port of {self.name} to be free", deadline_s=deadline_s):
            while not port_is_free(self.host, self.port):
                if time.monotonic() > ends:
                    raise EngineLostError(
                        f"{self.name}: after {deadline_s:g} s another program still listens at {self.host}:"
                        f"{self.port}. End it, or choose another --vllm-router-port."
                    )
                time.sleep(POLL_S)

    def take_in(self, engine_url: str) -> None:
        """Send requests to this engine too, from now on. The router asks the engine first whether it is well."""
        self._change(ADD_ROUTE, engine_url)

    def leave_out(self, engine_url: str) -> None:
        """Send no further request to this engine. Requests that it has are waited for until it responds or ends."""
        self._change(REMOVE_ROUTE, engine_url)

    def _change(self, route: str, engine_url: str) -> None:
        where = f"{self.url}{route}?{urlencode({'url': engine_url})}"
        try:
            with waiting(f"the server of {self.name} to change its engines", deadline_s=CHANGE_S):
                response = self._http.call("POST", where, deadline_s=CHANGE_S)
        except HttpFailure as error:
            raise RouterLostError(f"{self.name}: POST {where}: {error}") from error
        if response.status != 200:
            raise EngineLostError(f"{self.name}: POST {where}: {response.described()}, expected status 200")

    def check_health(self, deadline_s: float) -> None:
        """EngineError when it has ended or hangs."""
        self.probe(f"{self.url}/liveness", deadline_s)


def _without_proxy(environment: dict[str, str]) -> dict[str, str]:
    """Leave out what names a proxy: prompts and keys are for the engines alone, and it may not reach them."""
    return {name: value for name, value in environment.items() if name.lower() not in PROXIES}


def router_command(config: Config, engines: Sequence[EngineAddress], *, host: str, port: int) -> list[str]:
    """Command line of the router; a user flag replaces the default of the same name."""
    validate_router_flags(config)
    given = flag_names(config.router_flags)
    longest_s = request_deadline_s(config)
    defaults = {
        **DEFAULT_FLAGS,
        METRICS_PORT: str(free_port(host)),
        "--request-timeout-secs": str(max(1, int(longest_s))),
    }
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", host, "--port", str(port)]
    command += ["--policy", config.engine.vllm_router_policy or "round_robin"]
    for name, value in defaults.items():
        if name not in given:
            command += [name, value]
    return [*command, *config.router_flags, "--worker-urls", *(engine.url for engine in engines)]


def validate_router_flags(config: Config) -> None:
    """ConfigError for a --router-* flag that the run owns, that the installed router does not have, or whose value is
    impossible; before any process starts."""
    refuse_owned(config.router_flags, OWNED_FLAGS, prefix="--router-", whose="the router's")
    count = config.engine.vllm_router_count
    if count > 1 and METRICS_PORT in flag_names(config.router_flags):
        raise ConfigError(
            f"--router-prometheus-port with --vllm-router-count {count}: all routers would use this one port, expected "
            "one for each. Leave it out, and each takes a free one, or use one router."
        )
    if config.router_flags:
        check_values(config.router_flags, _installed_flags(), prefix="--router-", whose="vllm-router")


def _installed_flags() -> dict[str, FlagShape]:
    """Its parser knows no bounds, and its core would fail with an overflow, or wait for ever: they are given here."""
    try:
        from vllm_router.router_args import RouterArgs
    except ImportError as error:
        raise ConfigError(f"--router-*: vllm-router cannot be imported: {error}. Run scripts/install.sh.") from error
    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return {
        name: shape_of(action, _bounds(name) if action.type in (int, float) else None)
        for action in parser._actions  # noqa: SLF001 - argparse has no public list of its flags
        for name in action.option_strings
    }


def _bounds(name: str) -> dict[str, float]:
    if name in PORTS:
        return {"ge": 1, "le": 65535}
    if name in SHARES:
        return {"ge": 0, "le": 1}
    return {"ge": 1 if name in AT_LEAST_ONE else 0}
