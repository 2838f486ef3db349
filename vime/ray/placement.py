"""Which node of a cluster each trainer rank and engine goes to; all of them get a place, or the run does not start.

Ray places one actor at a time, wherever something is free: the ranks of one tensor-parallel group may come to lie on
two nodes, and an engine of eight GPUs waits without an end where eight nodes have one each. Here one placement group is
asked for before the first actor. Its bundles, which Ray never divides, are the ranks of a node
(--actor-num-gpus-per-node of them, once for each of --actor-num-nodes and each world of ranks) and each engine. An
engine that no node is large enough for is divided over as few nodes as have equal parts of it; which ones, is chosen
here, because Ray would put two parts on one node, or far apart, and each bundle says its node. Such an engine has a
group of its own, so that it can leave a node that has died (`managed_engine.find_nodes`). With --colocate an engine
goes into the bundle of the ranks whose GPUs it shares. Ray gives a GPU to one actor alone, so it gives them to the
ranks, and each engine is told which ones its ranks got.

A local Ray has one node: there nothing is asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from vime.config.colocation import shared_ranks
from vime.config.parse import Config
from vime.ray.actor import Options
from vime.ray.cluster import (
    ENGINE_CPUS,
    LEDGER_CPUS,
    MANAGER_CPUS,
    NO_PATIENCE,
    TRAINER_CPUS,
    Patience,
    num_trainer_ranks,
)
from vime.ray.nodes import Node, check_nodes, nodes_of_cluster
from vime.types import ClusterError, ConfigError
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)
POLL_S = 1  # Ray takes whole seconds
PLACE_S = 20.0
"""For Ray to reserve what is free. Where something is missing it waits without an end."""
ROUNDING = 1e-6
NODE_LABEL = "ray.io/node-id"
ON_ONE_HOST = ("shm", "ipc")
"""Transports whose bytes only processes of the sender's host can read."""

EnginePlace = Sequence[Options]
"""Ray's options on each node of an engine, the first that of its server; none on a local Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What has to be on one node."""

    what: str
    cpus: float
    gpus: float
    apart: str = ""
    """The engine that this is a part of: each of its parts is on a node of its own."""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    def fits(self, room: Mapping[str, float]) -> bool:
        return all(room.get(name, 0.0) + ROUNDING >= wanted for name, wanted in self.resources.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where actors go: Ray's options for each; none on a local Ray."""

    worlds: Sequence[Sequence[Options]] = ()  # by world of ranks, the policy's first, and by rank
    engines: Sequence[EnginePlace] = ()
    home: Options = field(default_factory=Options)
    """Of RolloutManager and ledger, and so of router and gateway: the node whose disk has the run directory."""

    def of_rank(self, world: int, rank: int) -> Options:
        return self.worlds[world][rank] if self.worlds else {}

    def of_engine(self, index: int) -> EnginePlace:
        return self.engines[index] if self.engines else ()


ANYWHERE = Places()


@contextlib.contextmanager
def reserved(
    config: Config, on_poll: Callable[[], None] = lambda: None, *, patience: Patience = NO_PATIENCE
) -> Iterator[Places]:
    """Reserve what ranks and engines need, until the block ends. Raises ClusterError, which names what is missing and
    what each node has, when there is no room before `patience` ends."""
    if config.cluster.ray_address is None:
        yield ANYWHERE
        return
    if patience.seconds:
        patience.wait(lambda: _lacks(config), on_poll)
    nodes = nodes_of_cluster()
    check_nodes(config, nodes, on_poll)
    per_engine = nodes_of_engine(config, nodes)
    refuse_other_hosts(config, per_engine)
    bundles = bundles_of(config, per_engine)
    refuse_what_no_node_has(bundles, nodes)
    pins = _pinned(bundles, on_poll) if per_engine > 1 else None
    groups = _groups(bundles, pins)
    try:
        for group, numbers in groups:
            _wait(group, [bundles[number] for number in numbers], on_poll)
        home = _home(config, nodes_of_cluster())  # now: with what the groups have left
        at, by_bundle = dict[int, Options](), dict[int, str]()
        for group, numbers in groups:
            nodes_of_group = placement_group_table(group)["bundles_to_node_id"]
            for place, number in enumerate(numbers):
                at[number], by_bundle[number] = _at(group, place), nodes_of_group[place]
        order = {node.id: place for place, node in enumerate(nodes)}
        places = _places(config, at.__getitem__, lambda n: order.get(by_bundle[n], len(order)), home, per_engine)
        for node in nodes:
            there = [bundle.what for index, bundle in enumerate(bundles) if by_bundle[index] == node.id]
            if there:
                logger.info("node %s (%s): %s", node.address, node.host, ", ".join(there))
        yield places
    finally:
        for group, _ in groups:
            _remove(group)


def _groups(
    bundles: Sequence[Bundle], pins: Sequence[dict[str, str]] | None
) -> list[tuple[PlacementGroup, Sequence[int]]]:
    """Return the placement groups, which are asked for, each with the numbers of its bundles: one for each engine that
    is divided, and one for all the others."""
    units: dict[str, list[int]] = {}
    for index, bundle in enumerate(bundles):
        units.setdefault(bundle.apart, []).append(index)
    return [
        (
            placement_group(
                [bundles[index].resources for index in numbers],
                strategy="PACK",
                bundle_label_selector=None if pins is None else [pins[index] for index in numbers],
            ),
            numbers,
        )
        for numbers in units.values()
    ]


def _remove(group: PlacementGroup) -> None:
    """What runs there is ended by Ray."""
    with contextlib.suppress(Exception):  # Ray has gone, and the group with it
        remove_placement_group(group)


def has_nodes(place: EnginePlace) -> bool:
    """Return whether there is a node for each part of an engine. Ray gives what was on a dead one another node as soon
    as one has room, unless the bundle names its node, and starts the actor there; until then it says nothing."""
    for options in place:
        at = options.get("scheduling_strategy")
        if isinstance(at, PlacementGroupSchedulingStrategy):
            nodes: dict[int, str] = placement_group_table(at.placement_group)["bundles_to_node_id"]
            if not nodes[at.placement_group_bundle_index]:
                return False
    return True


def leave_place(place: EnginePlace) -> None:
    """Give back what is reserved for one engine alone: its parts on the nodes that are left."""
    for group in {id(found): found for found in _groups_of(place)}.values():
        _remove(group)


def _groups_of(place: EnginePlace) -> list[PlacementGroup]:
    found = [options.get("scheduling_strategy") for options in place]
    return [each.placement_group for each in found if isinstance(each, PlacementGroupSchedulingStrategy)]


class ExtraPlace:
    """Room for one more engine of a live run: a placement group of its own, also on a local Ray, where an actor that
    does not fit would wait without an end. `kept`: a place that the run has already. `waits`: without an end."""

    def __init__(self, config: Config, kept: EnginePlace | None = None, *, waits: bool = False) -> None:
        self.kept, self._ends = kept, math.inf if waits else time.monotonic() + PLACE_S
        self._group: PlacementGroup | None = None
        self._bundles, self._refused = list[Bundle](), ""
        if kept is not None:
            return
        try:
            self._bundles = engine_bundles(config, "one more engine", nodes_of_engine(config, nodes_of_cluster()))
        except ClusterError as error:  # the node that was large enough has gone
            self._refused = str(error)
            return
        strategy = "STRICT_SPREAD" if len(self._bundles) > 1 else "PACK"
        self._group = placement_group([bundle.resources for bundle in self._bundles], strategy=strategy)

    def find(self) -> EnginePlace | None:
        """Return where to start it; None: Ray looks for it still. ClusterError when there is no room."""
        if self._refused:
            raise ClusterError(self._refused)
        if self._group is None:
            return self.kept
        if placement_group_table(self._group)["state"] == "CREATED":
            return [_at(self._group, number) for number in range(len(self._bundles))]
        if time.monotonic() > self._ends:
            raise ClusterError(f"no node has room for {_described(self._bundles[0])}: {_table(nodes_of_cluster())}")
        return None

    def give_back(self) -> None:
        """What runs there is ended by Ray."""
        if self._group is not None:
            _remove(self._group)
        self._group = None


def engine_bundles(config: Config, what: str, num_nodes: int) -> list[Bundle]:
    """Return one for each node of an engine."""
    gpus = config.cluster.rollout_num_gpus_per_engine if config.cluster.device == "cuda" else 0
    if num_nodes == 1:
        return [Bundle(what=what, cpus=ENGINE_CPUS, gpus=gpus)]
    return [
        Bundle(what=f"part {part + 1} of {num_nodes} of {what}", cpus=ENGINE_CPUS, gpus=gpus // num_nodes, apart=what)
        for part in range(num_nodes)
    ]


def nodes_of_engine(config: Config, nodes: Sequence[Node]) -> int:
    """Return on how many nodes each engine is: one where any is large enough, else as few as have equal parts of it.
    By what nodes have, not by what is free: a busy cluster does not divide an engine in silence."""
    cluster, size = config.cluster, config.cluster.rollout_num_gpus_per_engine
    has_own_gpus = cluster.device == "cuda" and not cluster.colocate and not config.debug.debug_train_only
    if not has_own_gpus or not cluster.num_started_engines:
        return 1
    have = [node.total.get("GPU", 0.0) + ROUNDING for node in nodes]
    for count in range(1, size + 1):
        if size % count == 0 and sum(each >= size // count for each in have) >= count:
            return count
    raise ClusterError(
        f"no node of the cluster is large enough for an engine of {size} GPU (--rollout-num-gpus-per-engine), and no "
        f"set of nodes has equal parts of it: {_table(nodes)}"
    )


def refuse_other_hosts(config: Config, num_nodes: int) -> None:
    """ConfigError for weights that could not reach the parts of an engine."""
    transport = config.weights.update_weight_transport
    if num_nodes > 1 and transport in ON_ONE_HOST:
        raise ConfigError(
            f"--update-weight-transport {transport}: each engine is on {num_nodes} nodes, because "
            f"--rollout-num-gpus-per-engine {config.cluster.rollout_num_gpus_per_engine} is more than a node has, and "
            "the memory that its workers would read is on one. Leave it out, or use nccl, gloo or disk."
        )


def bundles_of(config: Config, nodes_per_engine: int = 1) -> list[Bundle]:
    """Return what has to be together: for each world of ranks the ranks of each node, then each engine that has GPUs of
    its own, or its part of each of its nodes."""
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
        for number in range(cluster.num_started_engines):
            bundles += engine_bundles(config, f"engine-{number}", nodes_per_engine)
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


def planned(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> dict[int, Node]:
    """Return the node of each bundle for which there is room when each, the largest first, goes to the first node that
    has it, and the parts of an engine to the first nodes beside each other that have it."""
    room, found = [dict(node.free) for node in nodes], dict[int, Node]()
    units: dict[int | str, list[int]] = {}
    for index, bundle in enumerate(bundles):
        units.setdefault(bundle.apart or index, []).append(index)
    for unit in sorted(units.values(), key=lambda unit: (bundles[unit[0]].gpus, bundles[unit[0]].cpus), reverse=True):
        bundle = bundles[unit[0]]  # its parts are alike
        there = _side_by_side([number for number, free in enumerate(room) if bundle.fits(free)], len(unit))
        for index, number in zip(unit, there, strict=bool(there)):
            found[index] = nodes[number]
            for name, wanted in bundle.resources.items():
                room[number][name] -= wanted
    return found


def _side_by_side(numbers: Sequence[int], count: int) -> Sequence[int]:
    """Return so many of these numbers: the first that follow each other, else those that are least apart; none where
    there are too few."""
    windows = [numbers[first : first + count] for first in range(len(numbers) - count + 1)]
    return min(windows, key=lambda window: window[-1] - window[0], default=())


def _left_over(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> list[Bundle]:
    """Return the bundles for which `planned` finds no room, the largest first."""
    found = planned(bundles, nodes)
    left = [bundle for index, bundle in enumerate(bundles) if index not in found]
    return sorted(left, key=lambda each: (each.gpus, each.cpus), reverse=True)


def _pinned(bundles: Sequence[Bundle], on_poll: Callable[[], None]) -> list[dict[str, str]]:
    """Return what tells Ray the node of each bundle. ClusterError when there is no room within PLACE_S."""
    ends = time.monotonic() + PLACE_S
    with waiting("room for engines on several nodes", "Ray", deadline_s=PLACE_S):
        while True:
            nodes = nodes_of_cluster()
            found = planned(bundles, nodes)
            if len(found) == len(bundles):
                return [{NODE_LABEL: found[index].id} for index in range(len(bundles))]
            if time.monotonic() > ends:
                raise ClusterError(_no_room(_left_over(bundles, nodes), nodes))
            on_poll()
            time.sleep(POLL_S)


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
    raise ClusterError(_no_room(left, nodes))


def _lacks(config: Config) -> str:
    """Return what no node has room for now; empty when all has a place."""
    nodes = nodes_of_cluster()
    try:
        left = _left_over(bundles_of(config, nodes_of_engine(config, nodes)), nodes)
    except ClusterError as error:  # the nodes that are left are too small for an engine
        return str(error)
    return _no_room(left, nodes) if left else ""


def _no_room(left: Sequence[Bundle], nodes: Sequence[Node]) -> str:
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return f"no node has room for {_described(left[0])}{more}: {_table(nodes)}"


def _described(bundle: Bundle) -> str:
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in reversed(bundle.resources.items()))
    where = "a node of its own" if bundle.apart else "one node"
    return f"{bundle.what}, which must be on {where} ({wanted})"


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


def _at(group: PlacementGroup, bundle: int) -> Options:
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)}


def _places(
    config: Config,
    at: Callable[[int], Options],
    order: Callable[[int], int],
    home: Options,
    nodes_per_engine: int = 1,
) -> Places:
    """`at`: Ray's options for a bundle. `order`: the place of its node among the nodes. Ranks go through the nodes in
    this order, and so do the workers of an engine."""
    first, worlds = 0, list[list[Options]]()
    if not config.debug.debug_rollout_only:
        for _ in _worlds(config):
            numbers = range(first, first + config.cluster.actor_num_nodes)
            per_node = num_trainer_ranks(config) // len(numbers)
            worlds.append([at(number) for number in sorted(numbers, key=order) for _ in range(per_node)])
            first += len(numbers)
    num_engines = 0 if config.debug.debug_train_only else config.cluster.num_started_engines
    if config.cluster.colocate:
        shared = [[worlds[0][shared_ranks(config, engine)[0]]] for engine in range(num_engines)]
        return Places(worlds=worlds, engines=shared, home=home)
    engines = []
    for begin in range(first, first + num_engines * nodes_per_engine, nodes_per_engine):
        engines.append([at(part) for part in sorted(range(begin, begin + nodes_per_engine), key=order)])
    return Places(worlds=worlds, engines=engines, home=home)


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
