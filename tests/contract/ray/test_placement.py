"""Where the ranks and engines of a run go on clusters of 2, 3 and 8 nodes with 8 GPUs each; real Ray, made-up GPUs."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from ray.util.placement_group import PlacementGroup

from tests.helpers.training import ROOT
from vime.config.parse import parse
from vime.ray import placement
from vime.ray.nodes import Node, check_nodes
from vime.ray.placement import Bundle, _left_over, planned
from vime.types import ClusterError, ConfigError
from vime.utils.device import see_only, visible_device


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("placement") / "found.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    subprocess.run(
        [sys.executable, "-m", "tests.helpers.placement_cases", output],
        cwd=ROOT,
        env={**environment, "RAY_AUTH_MODE": "disabled"},
        check=True,
        timeout=300,
    )
    return json.loads(output.read_text())


def nodes_in_order(world):
    """The nodes of a world's ranks, one for each change of node."""
    return [node for node, _ in itertools.groupby(world)]


def test_eight_ranks_are_on_one_node_each_with_a_gpu_of_it_and_the_engines_on_the_other(found):
    case = found["2 nodes: 8 ranks, 4 engines"]
    [world] = case["worlds"]
    assert len({node for node, _ in world}) == 1
    # which of them is Ray's choice: actors that start at the same time get them in any order
    assert sorted(gpus for _, gpus in world) == [[str(number)] for number in range(8)]
    engines = case["engines"]
    assert {node for node, _ in engines} == {"gpu-0", "gpu-1"} - {world[0][0]}
    assert sorted(gpus for _, gpus in engines) == [["0"], ["1"], ["2"], ["3"]]
    assert case["home"] == ["head", []], "the driver's node, which has no GPU"


def test_an_engine_over_several_nodes_leaves_one_that_has_died_when_another_has_room(found):
    """What it had on the node that is left is given back first: it is needed for the new place."""
    case = found["4 engines of 16, a node dies and another comes"]
    [moved] = [index for index, nodes in enumerate(case["before"]) if "gpu-3" in nodes]
    assert case["found"] == [True] * 4
    assert case["without"] == [index != moved for index in range(4)]
    assert case["ended"] == case["to start"] == [f"engine-{moved}"]
    [kept] = set(case["before"][moved]) - {"gpu-3"}
    expected = [*case["before"]]
    expected[moved] = sorted([kept, "gpu-8"])
    assert case["after"] == expected


def test_an_engine_as_large_as_a_node_gets_one(found):
    case = found["2 nodes: 8 ranks, an engine of 8"]
    assert set(case["worlds"][0]) | set(case["engines"]) == {"gpu-0", "gpu-1"}
    assert len(set(case["worlds"][0])) == 1


def test_ranks_go_to_the_node_that_is_free_and_engines_to_what_is_left(found):
    case = found["half of gpu-0 taken: 8 ranks, 2 engines of 2"]
    assert case == {"worlds": [["gpu-1"] * 8], "engines": ["gpu-0"] * 2}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "one GPU of each taken: 8 ranks",
            "no node has room for trainer ranks 0 to 7, which must be on one node (8 GPU",
        ),
        ("half-full nodes: an engine of 8", "no node has room for engine-0, which must be on one node (8 GPU"),
        (
            "an engine of 16 beside 4 ranks",
            "no node has room for trainer ranks 0 to 3, which must be on one node (4 GPU",
        ),
        (
            "one GPU of gpu-0 taken, an engine of 16",
            "no node has room for part 1 of 2 of engine-0, which must be on a node of its own (8 GPU and 0.5 CPU)",
        ),
        (
            "an engine of 64",
            "no node of the cluster is large enough for an engine of 64 GPU (--rollout-num-gpus-per-engine), and no ",
        ),
        ("a second run beside one that has all", "no node has room for trainer ranks 0 to 7"),
    ],
)
def test_what_no_node_has_room_for_is_named_with_what_each_node_has(found, name, said):
    refused = found[name]["refused"]
    assert refused.startswith(said), refused
    assert refused.count(" of 8 GPU free") == 2, "each node that has GPUs"
    assert refused.endswith("or the number of engines.")


ALL_OF_A_NODE = [str(number) for number in range(8)]


def test_an_engine_larger_than_a_node_gets_equal_parts_of_as_few_nodes_as_can_be(found):
    """8 GPUs of each node: 16 are two times 8, 12 two times 6, 24 three times 8."""
    of_16, of_24 = found["an engine of 16"]["engines"], found["3 nodes: an engine of 24"]["engines"]
    assert sorted(of_16) == [["gpu-0", ALL_OF_A_NODE], ["gpu-1", ALL_OF_A_NODE]]
    assert sorted(of_24) == [["gpu-0", ALL_OF_A_NODE], ["gpu-1", ALL_OF_A_NODE], ["gpu-2", ALL_OF_A_NODE]]
    of_12 = found["two GPUs of gpu-0 taken: an engine of 12"]["engines"]
    assert sorted((node, len(gpus)) for node, gpus in of_12) == [("gpu-0", 6), ("gpu-1", 6)]


def test_parts_of_engines_go_where_nothing_else_is(found):
    [two, other] = found["4 nodes: 2 engines of 16"]["engines"]
    assert sorted([*two, *other]) == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    [engine] = found["4 nodes, the second taken: an engine of 16"]["engines"]
    assert len(set(engine) - {"gpu-1"}) == 2
    beside = found["3 nodes: 8 ranks, an engine of 16"]
    assert {*beside["worlds"][0], *beside["engines"][0]} == {"gpu-0", "gpu-1", "gpu-2"}
    fitted = found["3 nodes, one GPU of the second taken: an engine of 16, 6 ranks"]
    assert (set(fitted["worlds"][0]), set(fitted["engines"][0])) == ({"gpu-1"}, {"gpu-0", "gpu-2"})
    half = found["4 of 8 nodes half full: 2 x 8 ranks, an engine of 16"]
    assert {*half["worlds"][0], *half["engines"][0]} == {f"gpu-{number}" for number in range(4, 8)}


def test_weights_through_the_memory_of_one_host_are_refused_for_an_engine_on_two(found):
    assert found["an engine of 16 by shm"]["refused"].startswith("--update-weight-transport shm: each engine is on 2 ")


def test_an_engine_that_is_added_gets_as_many_nodes_as_the_others(found):
    assert sorted(found["one more engine of 16"]) == ["gpu-0", "gpu-1"]
    said = found["one more engine of 16 without room"]
    assert said.startswith("no node has room for part 1 of 2 of one more engine, which must be on a node of its own")


def test_what_a_run_had_is_free_after_it(found):
    assert [set(world) for world in found["and after it"]["worlds"]] in ([{"gpu-0"}], [{"gpu-1"}])


def test_two_runs_in_one_cluster_have_gpus_of_their_own_and_one_ends_without_the_other(found):
    """Of 16 GPUs the first has 4 + 2, the second 4 + 3 x 2: all of them."""
    case = found["two runs side by side"]
    [world], engines = case["second"]["worlds"], case["second"]["engines"]
    taken = [(node, gpu) for node, gpus in [*case["first"], *world, *engines] for gpu in gpus]
    assert sorted(taken) == [(f"gpu-{node}", str(gpu)) for node in range(2) for gpu in range(8)]
    assert case["first, later"] == case["first"], "when what the second had was free again"


def test_roles_with_ranks_of_their_own_are_whole_on_a_node_too(found):
    case = found["policy and reference apart"]
    assert [len(world) for world in case["worlds"]] == [4, 4]
    assert all(len(set(world)) == 1 for world in case["worlds"])
    assert len(case["engines"]) == 4


def test_ranks_go_from_node_to_node_and_never_back(found):
    three = found["3 nodes: 2 x 8 ranks, 8 engines"]
    assert len(nodes_in_order(three["worlds"][0])) == len(set(three["worlds"][0])) == 2
    assert set(three["engines"]) == {"gpu-0", "gpu-1", "gpu-2"} - set(three["worlds"][0])
    eight = found["8 nodes: 4 x 8 ranks, 4 engines of 8"]
    assert len(nodes_in_order(eight["worlds"][0])) == len(set(eight["worlds"][0])) == 4
    assert len({*eight["worlds"][0], *eight["engines"]}) == 8
    half = found["4 of 8 nodes half full: 4 x 8 ranks, 8 engines of 2"]
    assert set(half["worlds"][0]) == {f"gpu-{number}" for number in range(4, 8)}, "the ones that are empty"
    assert set(half["engines"]) <= {f"gpu-{number}" for number in range(4)}


def test_engines_that_share_are_on_the_node_of_their_ranks_and_see_exactly_their_gpus(found):
    """Eight GPUs are all that is free: each was asked for once."""
    case = found["shared: 2 x 4 ranks, 4 engines of 2"]
    [world] = case["worlds"]
    assert len({(node, *gpus) for node, gpus in world}) == 8
    assert [node for node, _ in world[:4]] == ["gpu-0"] * 4 or [node for node, _ in world[:4]] == ["gpu-1"] * 4
    pairs = [(world[first], world[first + 1]) for first in (0, 2, 4, 6)]
    assert case["engines"] == [[node, [*mine, *its]] for (node, mine), (_, its) in pairs]
    assert case["left"] == 0


def test_a_critic_has_gpus_of_its_own_beside_ranks_and_engines_that_share(found):
    case = found["shared, and a critic apart"]
    [policy], [critic] = case["worlds"], case["others"]
    gpus = [gpu for _, [gpu] in policy]
    assert [seen for _, seen in case["engines"]] == [gpus[:2], gpus[2:]]
    assert {node for node, _ in [*policy, *critic]} == {policy[0][0]}, "one node has room for both"
    assert sorted(int(gpu) for _, [gpu] in [*policy, *critic]) == list(range(8))


def test_what_is_missing_for_ranks_and_engines_that_share_is_named_with_both(found):
    refused = found["one GPU of gpu-0 taken, shared: 2 x 8 ranks"]["refused"]
    assert refused.startswith("no node has room for trainer ranks "), refused
    assert "and engine-" in refused
    assert ", which must be on one node (8 GPU and 8 CPU)" in refused


def test_an_unknown_coordinator_is_refused_with_the_nodes_there_are(found):
    refused = found["a coordinator by name"]["refused"]
    assert refused.startswith("--coordinator-node nowhere: the cluster has no such node. Expected one of: ")


def test_a_node_without_the_environment_or_the_files_is_named(found):
    assert "torch: got 2" in found["nodes"]["a package"]
    assert ", expected 1.0 as in this process" in found["nodes"]["a package"]
    assert "--hf-checkpoint /nowhere/model is not there" in found["nodes"]["a file"]


def test_ranks_go_through_the_nodes_in_order_also_where_a_node_has_two_bundles():
    config = parse(["--device", "cuda", "--actor-num-nodes", "4", "--actor-num-gpus-per-node", "2"])
    node_of_bundle = {0: 1, 1: 0, 2: 1, 3: 0, 4: 0}
    places = placement._places(config, partial(placement._at, PlacementGroup.empty()), node_of_bundle.__getitem__, {})
    [world] = places.worlds
    taken = [place["scheduling_strategy"].placement_group_bundle_index for place in world]
    assert taken == [1, 1, 3, 3, 0, 0, 2, 2]
    assert [[numbered(place) for place in engine] for engine in places.engines] == [[4]]


def numbered(place):
    return place["scheduling_strategy"].placement_group_bundle_index


def test_the_workers_of_an_engine_go_through_its_nodes_in_order():
    """So that its first stage, or the first ranks of a group, are beside the next: bundle 0 is of ranks."""
    config = parse(["--device", "cuda", "--actor-num-gpus-per-node", "1", *("--rollout-num-engines", "2")])
    node_of_bundle = {0: 9, 1: 3, 2: 1, 3: 2, 4: 5, 5: 4, 6: 0}
    places = placement._places(
        config, partial(placement._at, PlacementGroup.empty()), node_of_bundle.__getitem__, {}, 3
    )
    assert [[numbered(place) for place in engine] for engine in places.engines] == [[2, 3, 1], [6, 5, 4]]


MINE, OTHER = "a" * 56, "b" * 56  # Ray's ids are that long


@pytest.mark.parametrize(("free", "chosen"), [(2.0, MINE), (0.0, OTHER)])
def test_the_files_stand_on_the_drivers_node_or_where_that_takes_no_actors_on_the_first_that_does(
    free, chosen, monkeypatch
):
    mine = Node(id=MINE, address="10.0.0.2", host="head", total={}, free={"CPU": free})
    other = Node(id=OTHER, address="10.0.0.1", host="gpu-0", total={}, free={"CPU": 4.0})
    monkeypatch.setattr(placement.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: MINE))
    config = parse(["--device", "cuda", "--ray-address", "auto"])
    assert placement._home(config, [other, mine])["scheduling_strategy"].node_id == chosen
    for name in ("gpu-0", "10.0.0.1"):
        asked = config.replace(coordinator_node=name)
        assert placement._home(asked, [other, mine])["scheduling_strategy"].node_id == OTHER
    with pytest.raises(ClusterError, match=r"RolloutManager and ledger: no room for 0.3 CPU: 10.0.0.2 has 0 of 0 CPU"):
        placement._home(config, [dataclasses.replace(mine, free={})])


def test_a_device_that_was_not_named_is_not_taken_for_the_head_s_on_a_cluster_with_gpus():
    node = Node(id=OTHER, address="10.0.0.1", host="gpu-0", total={"GPU": 8.0}, free={})
    config = dataclasses.replace(parse(["--ray-address", "auto", "--device", "cpu"]), derived=(("device", "cpu"),))
    with pytest.raises(ClusterError, match=r"--device auto means cpu here, .* the cluster has 8. Say --device cuda"):
        check_nodes(config, [node])


def test_what_is_left_over_is_counted_on_what_each_node_has_free():
    def node(name, gpus):
        return Node(id=name, address=name, host=name, total={"GPU": 8.0, "CPU": 9.0}, free={"GPU": gpus, "CPU": 9.0})

    wanted = [Bundle(what=f"b{gpus}", cpus=0.5, gpus=gpus) for gpus in (2, 6, 4)]
    assert _left_over(wanted, [node("a", 8.0), node("b", 4.0)]) == []
    assert [each.what for each in _left_over(wanted, [node("a", 6.0), node("b", 3.0)])] == ["b4"]


def test_the_parts_of_an_engine_are_on_nodes_that_are_least_apart():
    def nodes(*gpus):
        return [
            Node(id=str(n), address=str(n), host="", total={"GPU": 8.0}, free={"GPU": free, "CPU": 9.0})
            for n, free in enumerate(gpus)
        ]

    def chosen(bundles, *gpus):
        return {index: node.id for index, node in planned(bundles, nodes(*gpus)).items()}

    engine = [Bundle(what=f"part {n}", cpus=0.5, gpus=4, apart="engine-0") for n in (1, 2)]
    assert chosen(engine, 8, 0, 4, 4) == {0: "2", 1: "3"}, "side by side, not the first two"
    assert chosen(engine, 4, 0, 0, 4, 0, 4) == {0: "3", 1: "5"}, "two apart, not three"
    assert chosen(engine, 4, 4, 0, 4) == {0: "0", 1: "1"}, "and not the last two"
    assert chosen(engine, 8, 0) == {}, "two parts of 4 would fit on one node of 8"
    rank = Bundle(what="rank", cpus=0.5, gpus=5)
    assert chosen([*engine, rank], 8, 4, 4) == {2: "0", 0: "1", 1: "2"}, "the largest first"


@pytest.mark.parametrize(
    ("size", "have", "parts"),
    [(8, [8, 8], 1), (16, [8, 8], 2), (12, [8, 8], 2), (16, [8, 4, 4, 4], 4), (9, [8, 8, 8], 3), (8, [0, 4, 4], 2)],
)
def test_on_how_many_nodes_an_engine_is_follows_from_what_nodes_have_and_not_from_what_is_free(size, have, parts):
    """16 on 8, 4, 4, 4: only one node has half of it, and all have a quarter."""
    config = parse(["--device", "cuda", "--rollout-num-gpus-per-engine", str(size), "--rollout-num-engines", "1"])
    nodes = [Node(id=str(n), address="", host="", total={"GPU": float(gpus)}, free={}) for n, gpus in enumerate(have)]
    assert placement.nodes_of_engine(config, nodes) == parts
    assert placement.nodes_of_engine(config.replace(device="cpu"), nodes) == 1
    assert placement.nodes_of_engine(config.replace(debug_train_only=True), nodes) == 1


def test_one_more_engine_for_which_no_nodes_are_left_is_refused_when_it_is_looked_for(monkeypatch):
    """And not before: a run would end with what is raised then."""
    node = Node(id=OTHER, address="10.0.0.1", host="", total={"GPU": 8.0, "CPU": 4.0}, free={})
    monkeypatch.setattr(placement, "nodes_of_cluster", lambda: [node])
    flags = ["--device", "cuda", "--rollout-num-gpus-per-engine", "16", "--rollout-num-engines", "1"]
    extra = placement.ExtraPlace(parse(flags))
    with pytest.raises(ClusterError, match=r"no node of the cluster is large enough for an engine of 16 GPU"):
        extra.find()
    extra.give_back()


@pytest.mark.parametrize(("transport", "is_refused"), [("shm", True), ("ipc", True), ("nccl", False), ("disk", False)])
def test_only_transports_over_the_network_or_files_reach_an_engine_on_several_nodes(transport, is_refused):
    config = parse(["--device", "cuda", "--update-weight-transport", transport])
    placement.refuse_other_hosts(config, 1)
    if is_refused:
        with pytest.raises(ConfigError, match=f"--update-weight-transport {transport}: each engine is on 2 nodes"):
            placement.refuse_other_hosts(config, 2)
    else:
        placement.refuse_other_hosts(config, 2)


def test_the_number_of_a_device_is_that_of_what_the_process_sees():
    assert visible_device(["5"], {"CUDA_VISIBLE_DEVICES": "5"}) == 0, "Ray hides the others"
    assert visible_device([5], {}) == 5, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    assert visible_device(["6"], {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == 2, "the same on a part of a node"
    environment = {}
    see_only(["2", "3"], environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    see_only([], environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
