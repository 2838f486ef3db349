"""`vime engine --listen HOST:PORT --keys FILE FLAGS`: one engine for runs of --rollout-external-engine-addrs.

The command line and environment of vLLM are those that a run with the same FLAGS would start an engine with.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.external import ADDRS_FLAG, KEYS_FLAG
from vime.backends.vllm_utils.launch import engine_command, engine_environment, validate_vllm_flags
from vime.backends.vllm_utils.process import ServerProcess, server_environment
from vime.cli.commands import Commands
from vime.config.checks import resolve
from vime.config.deadlines import start_deadline_s
from vime.config.hf_config import read_model_shape
from vime.config.parse import Config, collect
from vime.config.paths import absolute_paths
from vime.config.problems import Problems
from vime.types import ConfigError, VimeError
from vime.utils.network import LOOPBACK, loopback_interface, port_is_free

COMMAND = "engine"
CHECK_S = 1.0


class StoppedError(VimeError):
    """Somebody ended it while it started."""


def add_parsers(commands: Commands) -> None:
    """List it in the help of `vime`. `run_engine` gets its command line unparsed: most of it are flags of train.py."""
    text = "one engine on this machine, for runs of --rollout-external-engine-addrs; flags of train.py follow"
    commands.add_parser(COMMAND, help=text, add_help=False)


def run_engine(words: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 0, 2 for refused flags, 3 when the engine ended by itself."""
    parser = argparse.ArgumentParser(
        prog="vime engine",
        allow_abbrev=False,
        description="Start one engine that runs use and none of them stops.",
        epilog="All other flags are those of train.py (vime train --help); those about the engine have an effect.",
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where runs reach it, on this machine")
    parser.add_argument("--keys", required=True, type=Path, metavar="FILE", help="its keys; made when missing")
    parser.add_argument("--log", type=Path, metavar="FILE", help="vLLM's log (default: vime-engine-PORT.log)")
    own, flags = parser.parse_known_args(words)
    try:
        host, port = address_of(own.listen)
        config = read_flags(flags)
        keys = keys_in(own.keys)
        log = own.log or Path(f"vime-engine-{port}.log")
        return serve(config, host, port, keys, log.absolute(), f"{KEYS_FLAG} {own.keys.absolute()}")
    except VimeError as error:
        sys.stderr.write(f"vime engine: {error}\n")
        return error.exit_code


def address_of(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--listen {listen}: expected HOST:PORT, for example 10.0.0.5:8100.")
    try:
        is_free = port_is_free(host, int(port))
    except OSError as error:
        raise ConfigError(f"--listen {listen}: {error}. Expected an address of this machine.") from error
    if not is_free:
        raise ConfigError(f"--listen {listen}: cannot be listened on. Expected a free port of this machine.")
    return host, int(port)


def read_flags(flags: Sequence[str]) -> Config:
    """Return the configuration with its derived defaults. Data and what trains need not be here."""
    problems = Problems()
    given, _ = collect(flags, problems, program="vime engine")
    problems.raise_all()
    config = resolve(absolute_paths(given))
    read_model_shape(config.model.hf_checkpoint)
    validate_vllm_flags(config)
    return config


def keys_in(path: Path) -> EngineKeys:
    """Return the keys of the file, which is made when it is missing: engines of one run share a file."""
    try:
        keys = EngineKeys.make()
        keys.write(path)
    except FileExistsError:
        return EngineKeys.read(path, flag="--keys")
    except OSError as error:
        raise ConfigError(f"--keys {path}: cannot be made: {error}. Expected a path that can be written.") from error
    return keys


def serve(config: Config, host: str, port: int, keys: EngineKeys, log: Path, keys_flag: str) -> int:
    ended = threading.Event()

    def end(*_: object) -> None:
        """Also while it starts: whoever is asked twice ends at once."""
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()
        if not is_ready.is_set():
            raise StoppedError("stopped before it was ready.")

    is_ready = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    environment = {**engine_environment(config, os.environ), **keys.environment(), "VLLM_HOST_IP": host}
    if host == LOOPBACK:
        environment |= {"GLOO_SOCKET_IFNAME": loopback_interface(), "NCCL_SOCKET_IFNAME": loopback_interface()}
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    engine = ServerProcess(
        f"engine at {host}:{port}",
        # a seed of its own for each port: engines with one seed would sample alike
        engine_command(config, index=port, host=host, port=port),
        env=server_environment(environment),
        log_path=log,
        ready_url=f"{url}/health",
    )
    try:
        engine.start()
        say(f"starting, log {log}")
        engine.wait_ready(start_deadline_s(config))
        is_ready.set()
        say(f"ready: {ADDRS_FLAG} {url.removeprefix('http://')} {keys_flag}")
        while not ended.wait(CHECK_S):
            engine.check()
    except VimeError:
        if not ended.is_set():
            raise
    finally:
        engine.stop()
    return os.EX_OK


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
