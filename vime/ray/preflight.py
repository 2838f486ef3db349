"""Refusals that need more than the command line, still before any process starts."""

from __future__ import annotations

from vime.backends.fsdp_utils.hf_config import read_config
from vime.backends.megatron_utils.architecture import read_architecture
from vime.backends.vllm_utils.launch import validate_vllm_flags
from vime.backends.vllm_utils.router import validate_router_flags
from vime.config.parse import Config
from vime.handoff.columns import check_requested
from vime.rollout.plugins import check_plugins
from vime.types import ConfigError
from vime.utils.network import port_is_free


def preflight(config: Config, *, is_async: bool) -> None:
    """The rhythm's own demand on staleness, ports, columns, plug-ins, the model's architecture, vLLM flags."""
    if is_async:
        _check_prefetch(config)
    port = config.engine.vllm_router_port
    if port is not None and not port_is_free("127.0.0.1", port):
        raise ConfigError(f"--vllm-router-port {port} is in use on this machine. Choose another or leave it out.")
    check_requested(config.queue.transfer_queue_extra_data_fields)
    check_plugins(config.flat)
    if not config.debug.debug_rollout_only:
        read_model = read_architecture if config.cluster.train_backend == "megatron" else read_config
        read_model(config.model.hf_checkpoint)
    validate_router_flags(config)
    validate_vllm_flags(config)


def _check_prefetch(config: Config) -> None:
    """Round r + 1 starts on what the engines serve before round r trains, so with an update every I rounds its tokens
    are up to I versions old when it trains: one more than under train.py."""
    if config.cluster.offload_train:
        raise ConfigError(
            "--offload-train under train_async.py has no effect: the next round is generated while this one trains. "
            "Use train.py, or remove the flag."
        )
    staleness, interval = config.queue.transferqueue_max_staleness, config.weights.update_weights_interval
    if staleness < interval:
        raise ConfigError(
            "train_async.py generates the next round while this one trains, so with --update-weights-interval "
            f"{interval} its tokens are up to {interval} version(s) old, but --transferqueue-max-staleness is "
            f"{staleness}. Set it to {interval}, or use train.py."
        )
