"""Where Ray puts the ranks and engines of a run, on clusters whose GPUs are only numbers: `python -m
tests.helpers.placement_cases FILE`. Writes a JSON object to the file (Ray itself writes to standard output when a node
dies): the name of a case -> what was found.

The clusters are real raylets of one machine; the actors are started with a run's own options, and say which node and
which GPUs Ray gave them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from vime.config.colocation import shared_ranks
from vime.config.parse import Config, parse
from vime.ray import nodes as nodes_module
from vime.ray import placement
from vime.ray.actor import Options
from vime.ray.managed_engine import ManagedEngine, find_nodes
from vime.ray.placement import leave_place
from vime.types import ClusterError, ConfigError
from vime.utils.device import see_only

GPUS = 8  # of each node
ROLLOUT_ONLY = ("--debug-rollout-only",)
FLAGS = ("--ray-address", "auto", "--device", "cuda")


@ray.remote
class Probe:
    def found(self) -> tuple[str, list[str]]:
        return ray.get_runtime_context().get_node_id(), [str(each) for each in ray.get_gpu_ids()]

    def found_with(self, shared_gpus: list[str]) -> tuple[str, list[str]]:
        """What a child of an engine that shares GPUs sees, where Ray gave this process none."""
        see_only(shared_gpus)
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"].split(",")


def started(gpus: int, place: Options) -> ray.actor.ActorHandle:
    return Probe.options(num_cpus=0.5, num_gpus=gpus, **place).remote()


class World:
    """A cluster that grows: a head without GPUs, and nodes of GPUS each, named gpu-0, gpu-1, ..."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0})
        self.num_nodes, self.nodes = 0, []
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    def grow(self, num_nodes: int) -> None:
        for number in range(self.num_nodes, num_nodes):
            more = {f"gpu-{number}": 1000}
            self.nodes.append(self.cluster.add_node(num_cpus=32, num_gpus=GPUS, resources=more))
        self.num_nodes = num_nodes
        self.cluster.wait_for_nodes()

    def names(self) -> dict[str, str]:
        return {
            node["NodeID"]: next((name for name in node["Resources"] if name.startswith("gpu-")), "head")
            for node in ray.nodes()
        }

    @contextlib.contextmanager
    def taken(self, **gpus: int) -> Iterator[None]:
        """Somebody else's job has so many GPUs: gpu_0=4."""
        groups = [placement_group([{"GPU": n, name.replace("_", "-"): 1}]) for name, n in gpus.items()]
        assert all(group.wait(60) for group in groups)
        until(lambda: free_gpus() == GPUS * self.num_nodes - sum(gpus.values()))
        try:
            yield
        finally:
            for group in groups:
                remove_placement_group(group)
            until(lambda: free_gpus() == GPUS * self.num_nodes)

    def run(self, *flags: str, starts: bool = False) -> dict[str, object]:
        """Reserve what a run with these flags would: the node of each rank and engine, by what Ray lists. `starts`: an
        actor for each, which says its node and its GPUs. What they had is free again when this returns: Ray would pack
        the next case around it."""
        config, before = parse([*FLAGS, *flags]), free_gpus()
        try:
            return self._run(config, starts=starts)
        finally:
            until(lambda: free_gpus() >= before)

    def _run(self, config: Config, *, starts: bool) -> dict[str, object]:
        try:
            with placement.reserved(config) as places:
                if not starts:
                    engines = [self.listed(engine) for engine in places.engines]
                    return {
                        "worlds": [self.listed(world) for world in places.worlds],
                        "engines": [nodes[0] if len(nodes) == 1 else nodes for nodes in engines],
                    }
                ranks = [[started(1, place) for place in world] for world in places.worlds]
                if config.cluster.colocate:
                    found = self.shared(config, ranks[0], [started(0, place) for [place] in places.engines])
                    return {**found, "others": [self.where(world) for world in ranks[1:]]}
                parts = [place for engine in places.engines for place in engine]
                size = config.cluster.rollout_num_gpus_per_engine * len(places.engines) // max(1, len(parts))
                engines = [started(size, place) for place in parts]
                home = Probe.options(num_cpus=0.2, **places.home).remote()
                return {
                    "worlds": [self.where(world) for world in ranks],
                    "engines": self.where(engines),
                    "home": self.where([home])[0],
                }
        except (ClusterError, ConfigError) as error:
            return {"refused": str(error)}

    def run_beside(self, first: Sequence[str], second: Sequence[str]) -> dict[str, object]:
        """The GPUs of the actors of two runs, the second of which begins and ends while the first goes on."""
        until(lambda: free_gpus() == GPUS * self.num_nodes)  # what an earlier case had
        with placement.reserved(parse([*FLAGS, *first])) as places:
            actors = [started(1, place) for place in itertools.chain(*places.worlds, *places.engines)]
            mine, theirs = self.where(actors), self.run(*second, starts=True)
            until(lambda: free_gpus() == GPUS * self.num_nodes - len(actors))
            return {"first": mine, "second": theirs, "first, later": self.where(actors)}

    def one_more(self, *flags: str) -> list[str] | str:
        """The nodes of an engine that is added to a live run with these flags; why there are none."""
        extra = placement.ExtraPlace(parse([*FLAGS, *flags]))
        try:
            while (found := extra.find()) is None:
                time.sleep(0.1)
            return self.listed(found)
        except ClusterError as error:
            return str(error)
        finally:
            extra.give_back()

    def shared(
        self, config: Config, ranks: list[ray.actor.ActorHandle], engines: list[ray.actor.ActorHandle]
    ) -> dict[str, object]:
        """As a run tells engines which GPUs their ranks got."""
        placed, names = self.where(ranks), self.names()
        asked = [
            engine.found_with.remote([gpu for rank in shared_ranks(config, index) for gpu in placed[rank][1]])
            for index, engine in enumerate(engines)
        ]
        seen = [(names[node], gpus) for node, gpus in ray.get(asked, timeout=120)]
        return {"worlds": [placed], "engines": seen, "left": ray.available_resources().get("GPU", 0)}

    def listed(self, places: Sequence[Options]) -> list[str]:
        names = self.names()
        strategies = [place["scheduling_strategy"] for place in places]
        tables = [placement_group_table(each.placement_group)["bundles_to_node_id"] for each in strategies]
        return [names[table[each.placement_group_bundle_index]] for table, each in zip(tables, strategies, strict=True)]

    def node_dies(self, number: int, *flags: str) -> dict[str, object]:
        """What becomes of the engines of a run, all nodes of which are taken, when this node dies and another comes."""
        config, ended = parse([*FLAGS, *flags]), list[str]()

        def looked() -> list[bool]:
            return [find_nodes(config, engine) for engine in engines]

        def listed() -> list[list[str]]:
            return [sorted(self.listed(engine.place)) for engine in engines]

        with placement.reserved(config) as places:
            engines = [ManagedEngine(index, place=place) for index, place in enumerate(places.engines)]
            for engine in engines:
                engine.actor = cast("Any", SimpleNamespace(kill=partial(ended.append, engine.name)))
            said: dict[str, object] = {"before": listed(), "found": looked()}
            self.cluster.remove_node(self.nodes[number], allow_graceful=False)
            until(lambda: not all(looked()))
            time.sleep(2 * placement.POLL_S)
            said |= {"without": looked(), "ended": ended}
            self.grow(self.num_nodes + 1)
            until(lambda: all(looked()))
            said |= {"after": listed(), "to start": [engine.name for engine in engines if engine.actor is None]}
            for engine in engines:
                leave_place(engine.place)
        until(lambda: ray.available_resources().get("GPU", 0.0) == GPUS * (self.num_nodes - 1))
        return said

    def where(self, actors: list[ray.actor.ActorHandle]) -> list[tuple[str, list[str]]]:
        names = self.names()
        found = ray.get([actor.found.remote() for actor in actors], timeout=120)
        return [(names[node], gpus) for node, gpus in found]


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0.0))


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends, "Ray does not come so far"
        time.sleep(0.2)


def trainers(nodes: int, per_node: int) -> list[str]:
    return ["--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(per_node)]


def engines(count: int, gpus: int = 1) -> list[str]:
    return ["--rollout-num-engines", str(count), "--rollout-num-gpus-per-engine", str(gpus)]


def main() -> None:
    placement.PLACE_S = 4.0
    real_check, placement.check_nodes = nodes_module.check_nodes, lambda *_: None
    world, found = World(), {}
    world.grow(2)
    found["2 nodes: 8 ranks, 4 engines"] = world.run(*trainers(1, 8), *engines(4), starts=True)
    found["2 nodes: 8 ranks, an engine of 8"] = world.run(*trainers(1, 8), *engines(1, 8))
    with world.taken(gpu_0=4):
        found["half of gpu-0 taken: 8 ranks, 2 engines of 2"] = world.run(*trainers(1, 8), *engines(2, 2))
    with world.taken(gpu_0=1, gpu_1=1):
        found["one GPU of each taken: 8 ranks"] = world.run(*trainers(1, 8), *engines(1))
    found["an engine of 16"] = world.run(*ROLLOUT_ONLY, *engines(1, 16), starts=True)
    found["an engine of 16 beside 4 ranks"] = world.run(*trainers(1, 4), *engines(1, 16))
    found["an engine of 64"] = world.run(*trainers(1, 4), *engines(1, 64))
    with world.taken(gpu_0=2):
        found["two GPUs of gpu-0 taken: an engine of 12"] = world.run(*ROLLOUT_ONLY, *engines(1, 12), starts=True)
    with world.taken(gpu_0=1):
        found["one GPU of gpu-0 taken, an engine of 16"] = world.run(*ROLLOUT_ONLY, *engines(1, 16))
    with world.taken(gpu_0=4, gpu_1=4):
        found["half-full nodes: an engine of 8"] = world.run(*ROLLOUT_ONLY, *engines(1, 8))
    found["an engine of 16 by shm"] = world.run(*ROLLOUT_ONLY, *engines(1, 16), "--update-weight-transport", "shm")
    found["one more engine of 16"] = world.one_more(*engines(1, 16))
    with world.taken(gpu_1=1):
        found["one more engine of 16 without room"] = world.one_more(*engines(1, 16))
    found["policy and reference apart"] = world.run(
        *trainers(1, 4), *engines(4, 2), "--separate-roles", "reference", "--kl-loss-coef", "0.1", "--use-kl-loss"
    )
    found["a coordinator by name"] = world.run(*trainers(1, 4), *engines(1), "--coordinator-node", "nowhere")
    with world.taken(gpu_0=4, gpu_1=4):
        found["shared: 2 x 4 ranks, 4 engines of 2"] = world.run(
            *trainers(2, 4), *engines(4, 2), "--colocate", starts=True
        )
    found["shared, and a critic apart"] = world.run(
        *trainers(1, 4), *engines(2, 2), "--colocate", "--separate-roles", "critic", "--advantage-estimator", "ppo",
        starts=True,
    )  # fmt: skip
    with world.taken(gpu_0=1):
        found["one GPU of gpu-0 taken, shared: 2 x 8 ranks"] = world.run(*trainers(2, 8), *engines(16), "--colocate")
    first = parse([*FLAGS, *trainers(1, 8), *engines(8)])
    with placement.reserved(first):
        found["a second run beside one that has all"] = world.run(*trainers(1, 8), *engines(1))
    found["two runs side by side"] = world.run_beside([*trainers(1, 4), *engines(2)], [*trainers(1, 4), *engines(3, 2)])
    found["and after it"] = world.run(*trainers(1, 8), *engines(1))
    world.grow(3)
    found["3 nodes: 2 x 8 ranks, 8 engines"] = world.run(*trainers(2, 8), *engines(8))
    found["3 nodes: 8 ranks, an engine of 16"] = world.run(*trainers(1, 8), *engines(1, 16))
    with world.taken(gpu_1=1):
        found["3 nodes, one GPU of the second taken: an engine of 16, 6 ranks"] = world.run(
            *trainers(1, 6), *engines(1, 16)
        )
    found["3 nodes: an engine of 24"] = world.run(*ROLLOUT_ONLY, *engines(1, 24), starts=True)
    world.grow(4)
    found["4 nodes: 2 engines of 16"] = world.run(*ROLLOUT_ONLY, *engines(2, 16))
    with world.taken(gpu_1=8):
        found["4 nodes, the second taken: an engine of 16"] = world.run(*ROLLOUT_ONLY, *engines(1, 16))
    world.grow(8)
    found["8 nodes: 4 x 8 ranks, 4 engines of 8"] = world.run(*trainers(4, 8), *engines(4, 8))
    with world.taken(**{f"gpu_{number}": 4 for number in range(4)}):
        found["4 of 8 nodes half full: 4 x 8 ranks, 8 engines of 2"] = world.run(*trainers(4, 8), *engines(8, 2))
        found["4 of 8 nodes half full: 2 x 8 ranks, an engine of 16"] = world.run(*trainers(2, 8), *engines(1, 16))
    found["4 engines of 16, a node dies and another comes"] = world.node_dies(3, *ROLLOUT_ONLY, *engines(4, 16))
    found["nodes"] = look_at_nodes(real_check)
    Path(sys.argv[1]).write_text(json.dumps(found))
    ray.shutdown()
    world.cluster.shutdown()


def look_at_nodes(check_nodes) -> dict[str, str]:
    """What a run is told about a node that lacks a file, or a package: here of the head, which asks itself."""
    config = parse([*FLAGS, "--hf-checkpoint", os.getcwd()])
    [head] = [node for node in nodes_module.nodes_of_cluster() if not node.total.get("GPU")]
    check_nodes(config, [head])
    said = {}
    other = {**nodes_module.package_versions(), "torch": "1.0"}
    for name, replacement in {
        "a package": {"package_versions": lambda: other},
        "a file": {"existing_paths": lambda _: [("--hf-checkpoint", "/nowhere/model")]},
    }.items():
        stock = {key: getattr(nodes_module, key) for key in replacement}
        vars(nodes_module).update(replacement)
        try:
            check_nodes(config, [head])
        except ClusterError as error:
            said[name] = str(error)
        finally:
            vars(nodes_module).update(stock)
    return said


if __name__ == "__main__":
    main()
