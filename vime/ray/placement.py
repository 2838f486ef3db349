"""Which node of a cluster each trainer rank and engine goes to; all of them get a place, or the run does not start.

Ray places one actor at a time, wherever something is free: the ranks of one tensor-parallel group may come to lie on
two nodes, and an engine of eight GPUs waits without an end where eight nodes have one each. Here one placement group is
asked for before the first actor. Its bundles, which Ray never divides, are the ranks of a node
(--actor-num-gpus-per-node of them, once for each of --actor-num-nodes and each world of ranks) and each engine. With
--colocate an engine goes into the bundle of the ranks whose GPUs it shares. Ray gives a GPU to one actor alone, so it
gives them to the ranks, and each engine is told which ones its ranks got.

A local Ray has one node: there nothing is asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from vime.config.colocation import shared_ranks
from vime.config.parse import Config
from vime.ray.actor import Options
from vime.ray.cluster import ENGINE_CPUS, LEDGER_CPUS, MANAGER_CPUS, TRAINER_CPUS, num_trainer_ranks
from vime.ray.nodes import Node, check_nodes, nodes_of_cluster
from vime.types import ClusterError
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)
POLL_S = 1  # Ray takes whole seconds
PLACE_S = 20.0
"""For Ray to reserve what is free. Where something is missing it waits without an end."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What has to be on one node."""

    what: str
    cpus: float
    gpus: float

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    def fits(self, room: Mapping[str, float]) -> bool:
        return all(room.get(name, 0.0) + ROUNDING >= wanted for name, wanted in self.resources.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where actors go: Ray's options for each; none on a local Ray."""

    worlds: Sequence[Sequence[Options]] = ()  # by world of ranks, the policy's first, and by rank
    engines: Sequence[Options] = ()
    home: Options = field(default_factory=Options)
    """Of RolloutManager and ledger, and so of router and gateway: the node whose disk has the run directory."""

    def of_rank(self, world: int, rank: int) -> Options:
        return self.worlds[world][rank] if self.worlds else {}

    def of_engine(self, index: int) -> Options:
        return self.engines[index] if self.engines else {}


ANYWHERE = Places()


@contextlib.contextmanager
def reserved(config: Config, on_poll: Callable[[], None] = lambda: None) -> Iterator[Places]:
    """Reserve what ranks and engines need, until the block ends. Raises ClusterError, which names what is missing and
    what each node has, when there is no room."""
    if config.cluster.ray_address is None:
        yield ANYWHERE
        return
    nodes = nodes_of_cluster()
    check_nodes(config, nodes, on_poll)
    bundles = bundles_of(config)
    refuse_what_no_node_has(bundles, nodes)
    group = placement_group([bundle.resources for bundle in bundles], strategy="PACK")
    try:
        _wait(group, bundles, on_poll)
        home = _home(config, nodes_of_cluster())  # now: with what the group has left
        by_bundle: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        order = {node.id: place for place, node in enumerate(nodes)}
        places = _places(config, group, lambda index: order.get(by_bundle[index], len(order)), home)
        for node in nodes:
            there = [bundle.what for index, bundle in enumerate(bundles) if by_bundle[index] == node.id]
            if there:
                logger.info("node %s (%s): %s", node.address, node.host, ", ".join(there))
        yield places
    finally:
        with contextlib.suppress(Exception):  # Ray has gone, and the group with it
            remove_placement_group(group)


class ExtraPlace:
    """Room for one more engine of a live run: a placement group of its own, also on a local Ray, where an actor that
    does not fit would wait without an end. `kept`: a place that the run has already."""

    def __init__(self, config: Config, kept: Options | None = None) -> None:
        self.kept = kept
        self._bundle, self._ends = engine_bundle(config, "one more engine"), time.monotonic() + PLACE_S
        self._group = None if kept is not None else placement_group([self._bundle.resources], strategy="PACK")

    def find(self) -> Options | None:
        """Return where to start it; None: Ray looks for it still. ClusterError when there is no room."""
        if self._group is None:
            return self.kept
        if placement_group_table(self._group)["state"] == "CREATED":
            return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, 0)}
        if time.monotonic() > self._ends:
            raise ClusterError(f"no node has room for {_described(self._bundle)}: {_table(nodes_of_cluster())}")
        return None

    def give_back(self) -> None:
        """What runs there is ended by Ray."""
        if self._group is not None:
            with contextlib.suppress(Exception):  # Ray has gone, and the group with it
                remove_placement_group(self._group)
        self._group = None


def engine_bundle(config: Config, what: str) -> Bundle:
    gpus = config.cluster.rollout_num_gpus_per_engine if config.cluster.device == "cuda" else 0
    return Bundle(what=what, cpus=ENGINE_CPUS, gpus=gpus)


def bundles_of(config: Config) -> list[Bundle]:
    """Return what has to be together: for each world of ranks the ranks of each node, then each engine that has GPUs of
    its own."""
    cluster, bundles = config.cluster, list[Bundle]()
    on_cuda = cluster.device == "cuda"
    if cluster.colocate:
        bundles += _shared_bundles(config)
    if not config.debug.debug_rollout_only:
        per_node = cluster.actor_num_gpus_per_node or 1
        worlds = _worlds(config)[1:] if cluster.colocate else _worlds(config)
        for world, number in itertools.product(worlds, range(cluster.actor_num_nodes)):
            ranks = f"ranks {number * per_node} to {(number + 1) * per_node - 1}" if per_node > 1 else f"rank {number}"
            bundles.append(
                Bundle(what=f"{world} {ranks}", cpus=TRAINER_CPUS * per_node, gpus=per_node if on_cuda else 0)
            )
    if not config.debug.debug_train_only and not cluster.colocate:
        bundles += [engine_bundle(config, f"engine-{n}") for n in range(cluster.num_started_engines)]
    return bundles


def _shared_bundles(config: Config) -> list[Bundle]:
    """Return for each node the ranks of the policy and the engines on their GPUs, which are reserved once."""
    cluster = config.cluster
    per_node = cluster.actor_num_gpus_per_node or 1
    bundles = []
    for node in range(cluster.actor_num_nodes):
        ranks = range(node * per_node, (node + 1) * per_node)
        engines = [f"engine-{n}" for n in range(cluster.num_engines) if shared_ranks(config, n)[0] in ranks]
        named = f"ranks {ranks[0]} to {ranks[-1]}" if per_node > 1 else f"rank {ranks[0]}"
        bundles.append(
            Bundle(
                what=" and ".join([f"trainer {named}", *engines]),
                cpus=TRAINER_CPUS * per_node + ENGINE_CPUS * len(engines),
                gpus=per_node if cluster.device == "cuda" else 0,
            )
        )
    return bundles


def refuse_what_no_node_has(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> None:
    """ClusterError for the first bundle that no node could take even if nothing else ran there."""
    impossible = [bundle for bundle in bundles if not any(bundle.fits(node.total) for node in nodes)]
    if impossible:
        raise ClusterError(f"no node of the cluster is large enough for {_described(impossible[0])}: {_table(nodes)}")


def _left_over(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> list[Bundle]:
    """Return the bundles for which no room is left when each, the largest first, goes to the first node with room."""
    room = [dict(node.free) for node in nodes]
    left = []
    for bundle in sorted(bundles, key=lambda each: (each.gpus, each.cpus), reverse=True):
        there = next((free for free in room if bundle.fits(free)), None)
        if there is None:
            left.append(bundle)
            continue
        for name, wanted in bundle.resources.items():
            there[name] -= wanted
    return left


def _wait(group: PlacementGroup, bundles: Sequence[Bundle], on_poll: Callable[[], None]) -> None:
    ends = time.monotonic() + PLACE_S
    with waiting("ranks and engines to be placed", "Ray", deadline_s=PLACE_S):
        while time.monotonic() < ends:
            if group.wait(POLL_S):  # `group.ready()` is a task, for which Ray would first start a worker
                return
            on_poll()
    nodes = nodes_of_cluster()
    left = _left_over(bundles, nodes)
    if not left:
        raise ClusterError(
            f"Ray has not placed ranks and engines within {PLACE_S:g} s, although there seems to be room: "
            f"{_table(nodes)}"
        )
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    raise ClusterError(f"no node has room for {_described(left[0])}{more}: {_table(nodes)}")


def _described(bundle: Bundle) -> str:
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in reversed(bundle.resources.items()))
    return f"{bundle.what}, which must be on one node ({wanted})"


def _table(nodes: Sequence[Node]) -> str:
    """One part for each node, then what to do."""
    each = [
        f"{node.address} has "
        + ", ".join(
            f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free"
            for name in ("GPU", "CPU")
            if name == "CPU" or any(other.total.get(name) for other in nodes)
        )
        for node in nodes
    ]
    return (
        "; ".join(each) + ". Stop other jobs, add nodes, or lower --actor-num-gpus-per-node, --actor-num-nodes, "
        "--rollout-num-gpus-per-engine or the number of engines."
    )


def _worlds(config: Config) -> list[str]:
    return ["trainer", *config.cluster.separate_roles]


def _places(config: Config, group: PlacementGroup, order: Callable[[int], int], home: Options) -> Places:
    """`order`: the place of a bundle's node among the nodes. Ranks go through the nodes in this order."""

    def at(bundle: int) -> Options:
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        }

    first, worlds = 0, list[list[Options]]()
    if not config.debug.debug_rollout_only:
        for _ in _worlds(config):
            numbers = range(first, first + config.cluster.actor_num_nodes)
            per_node = num_trainer_ranks(config) // len(numbers)
            worlds.append([at(number) for number in sorted(numbers, key=order) for _ in range(per_node)])
            first += len(numbers)
    num_engines = 0 if config.debug.debug_train_only else config.cluster.num_started_engines
    if config.cluster.colocate:
        shared = [worlds[0][shared_ranks(config, engine)[0]] for engine in range(num_engines)]
        return Places(worlds=worlds, engines=shared, home=home)
    return Places(worlds=worlds, engines=[at(first + index) for index in range(num_engines)], home=home)


def _home(config: Config, nodes: Sequence[Node]) -> Options:
    """The node of --coordinator-node; by default this process's, or where that takes no actors the first that does."""
    asked, wanted = config.cluster.coordinator_node, MANAGER_CPUS + LEDGER_CPUS
    mine = ray.get_runtime_context().get_node_id()
    if asked is not None:
        found = [node for node in nodes if asked in (node.address, node.host)]
        if not found:
            known = ", ".join(f"{node.address} ({node.host})" for node in nodes)
            raise ClusterError(f"--coordinator-node {asked}: the cluster has no such node. Expected one of: {known}.")
    else:
        found = sorted(nodes, key=lambda node: node.id != mine)
    able = [node for node in found if node.free.get("CPU", 0.0) + ROUNDING >= wanted]
    if not able:
        named = f"--coordinator-node {asked}" if asked else "RolloutManager and ledger"
        raise ClusterError(f"{named}: no room for {wanted:g} CPU: {_table(found)}")
    logger.info("RolloutManager, ledger, router and gateway: node %s (%s)", able[0].address, able[0].host)
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(able[0].id, soft=False)}
