"""Flags about engines that somebody else started: what contradicts what."""

from __future__ import annotations

from urllib.parse import urlsplit

from vime.config.parse import Config
from vime.types import ConfigError

ADDRS, KEYS = "--rollout-external-engine-addrs", "--rollout-external-engine-keys"


def check_external_addresses(config: Config) -> None:
    """ConfigError for what is no address, is there twice, lacks the keys, or meets a flag that has no effect."""
    cluster, places = config.cluster, config.cluster.rollout_external_engine_addrs
    if not places:
        if cluster.rollout_external_engine_keys is not None:
            raise ConfigError(f"{KEYS} without {ADDRS}: no effect. Give the addresses, or remove it.")
        return
    for place in places:
        if not _is_address(place):
            raise ConfigError(f"{ADDRS} {place}: expected HOST:PORT, as `vime engine` says when it is ready.")
    if len(set(places)) < len(places):
        raise ConfigError(f"{ADDRS} {' '.join(places)}: an address is there twice. Name each engine once.")
    if cluster.rollout_external_engine_keys is None:
        raise ConfigError(f"{ADDRS} needs {KEYS} FILE, which `vime engine --keys FILE` made. Add it.")
    if cluster.num_engines != len(places):
        raise ConfigError(
            f"--rollout-num-engines {cluster.num_engines} with {len(places)} addresses in {ADDRS}, which are the "
            "engines. Leave the number out."
        )
    if config.vllm_flags:
        raise ConfigError(
            f"--vllm-{config.vllm_flags[0].lstrip('-')} with {ADDRS}: the run starts no engine. Give it to `vime "
            "engine`, and leave it out here."
        )
    if config.debug.debug_train_only:
        raise ConfigError(f"{ADDRS} with --debug-train-only: no engine is used. Remove one of the two.")


def _is_address(place: str) -> bool:
    try:
        parts = urlsplit(f"//{place}")
        return bool(parts.hostname and parts.port) and parts.netloc == place and "@" not in place
    except ValueError:
        return False
