"""Checks of the flags of agents, and what they derive (docs/agents.md)."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

from vime.config.deadlines import generate_deadline_s
from vime.config.eval_sets import eval_sets
from vime.config.parse import Config
from vime.config.queue_checks import EXTERNAL
from vime.types import ConfigError

GENERATE = "vime.agents.generate.generate"
"""What --custom-generate-function-path is in a run with an agent."""


def resolve_agents(config: Config, num_engines: int) -> dict[str, str | None]:
    """Return --custom-generate-function-path as it is, or the one that runs agents; and --vllm-router-policy."""
    given, policy = config.rollout.custom_generate_function_path, config.engine.vllm_router_policy
    is_sticky = config.agents.has_agent and num_engines > 1
    return {
        "custom_generate_function_path": GENERATE if config.agents.has_agent and given is None else given,
        "vllm_router_policy": policy or ("consistent_hash" if is_sticky else "round_robin"),
    }


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer's files have one. True where they cannot be read, which is reported elsewhere."""
    try:
        settings = json.loads((directory.expanduser() / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return True
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    return bool(settings.get("chat_template")) or any((directory.expanduser() / name).exists() for name in files)


def host_and_port(address: str) -> tuple[str, int]:
    """Return what --agent-listen says. A free port would be another one after each restart."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"--agent-listen {address}: expected HOST:PORT with a port of 1 to 65535, which stays the same when the "
            "run starts again: for example 127.0.0.1:8660."
        )
    return host, int(port)


def _check_listen(config: Config, address: str) -> None:
    """Refuse an address that is none, and several servers at one address."""
    host_and_port(address)
    num_workers = config.queue.num_rollout_workers
    if num_workers > 1:
        raise ConfigError(
            f"--agent-listen {address} with --num-rollout-workers {num_workers}: each worker has a server of its own, "
            "and an address has one. Expected 1 worker. Remove one of the two."
        )
    if config.queue.transferqueue_mode != EXTERNAL:
        return
    if not config.cluster.num_engines:
        raise ConfigError(
            f"--agent-listen {address} with --rollout-num-engines 0: the run has no engine that could answer agents. "
            "Give the flag to the job (`vime produce`)."
        )
    if eval_sets(config):
        raise ConfigError(
            f"--agent-listen {address} with --transferqueue-mode {EXTERNAL} and evaluation sets: training and "
            "evaluation generate in two processes there, and an address has one. Evaluate in another run, or use mode "
            "streaming."
        )


def check_agents(config: Config) -> None:
    agents, rollout = config.agents, config.rollout
    if not agents.has_agent:
        return
    ways = ("agent_command", "agent_function", "environment", "agent_listen")
    given = [name for name in ways if getattr(agents, name)]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags}: a sample has one agent. Keep one of them.")
    if rollout.custom_generate_function_path != GENERATE:
        raise ConfigError(
            f"--custom-generate-function-path {rollout.custom_generate_function_path} with an agent: both would answer "
            "the prompts. Remove one of them."
        )
    if agents.agent_command:
        try:
            words = shlex.split(agents.agent_command)
        except ValueError as error:
            raise ConfigError(
                f"--agent-command {agents.agent_command!r}: cannot be split into words: {error}. Expected a program "
                "and its arguments, quoted as for a shell. Close the quotation."
            ) from error
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"--agent-command {agents.agent_command!r}: no program {words[:1]} is found. Give its path."
            )
    if agents.agent_listen:
        _check_listen(config, agents.agent_listen)
    deadline_s = generate_deadline_s(config)
    if agents.agent_timeout_secs >= deadline_s:
        raise ConfigError(
            f"--agent-timeout-secs {agents.agent_timeout_secs:g} is not below --generate-timeout-secs "
            f"{deadline_s:g}, which ends the run. Raise that one."
        )
    if not has_chat_template(Path(config.model.hf_checkpoint)):
        raise ConfigError(
            f"--hf-checkpoint {config.model.hf_checkpoint}: its tokenizer has no chat template, and agents send "
            "messages. Put chat_template.jinja beside the model."
        )
    for flag_given, why in (
        (config.debug.reference_mode and "--reference-mode", "the order of an agent's requests is its own"),
        (config.algo.use_rollout_routing_replay and "--use-rollout-routing-replay", "sessions record no experts"),
        (
            config.algo.use_opd and not config.algo.opd_teacher_load and "--use-opd",
            "nobody gives teacher_log_probs; add --opd-teacher-load",
        ),
    ):
        if flag_given:
            raise ConfigError(f"{flag_given} with an agent: {why}. Remove one of the two.")
