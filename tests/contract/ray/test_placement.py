"""Where the ranks and engines of a run go on clusters of 2, 3 and 8 nodes with 8 GPUs each; real Ray, made-up GPUs."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray.util.placement_group import PlacementGroup

from tests.helpers.training import ROOT
from vime.config.parse import parse
from vime.ray import placement
from vime.ray.nodes import Node, check_nodes
from vime.ray.placement import Bundle, _left_over
from vime.types import ClusterError
from vime.utils.device import see_only, visible_device


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("placement") / "found.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    with output.open("w") as file:
        subprocess.run(
            [sys.executable, "-m", "tests.helpers.placement_cases"],
            cwd=ROOT,
            env={**environment, "RAY_AUTH_MODE": "disabled"},
            stdout=file,
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
        ("an engine of 16", "no node of the cluster is large enough for engine-0, which must be on one node (16 GPU"),
        ("a second run beside one that has all", "no node has room for trainer ranks 0 to 7"),
    ],
)
def test_what_no_node_has_room_for_is_named_with_what_each_node_has(found, name, said):
    refused = found[name]["refused"]
    assert refused.startswith(said), refused
    assert refused.count(" of 8 GPU free") == 2, "each node that has GPUs"
    assert refused.endswith("or the number of engines.")


def test_what_a_run_had_is_free_after_it(found):
    assert [set(world) for world in found["and after it"]["worlds"]] in ([{"gpu-0"}], [{"gpu-1"}])


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


def test_what_is_missing_for_ranks_and_engines_that_share_is_named_with_both(found):
    refused = found["one GPU of gpu-0 taken, shared: 2 x 8 ranks"]["refused"]
    assert refused.startswith("no node has room for trainer ranks "), refused
    assert "and engine-" in refused
    assert ", which must be on one node (8 GPU and 8 CPU)" in refused


def test_an_unknown_coordinator_is_refused_with_the_nodes_there_are(found):
    refused = found["a coordinator by name"]["refused"]
    assert refused.startswith("--coordinator-node nowhere: the cluster has no such node. Expected one of: ")


def test_a_node_without_the_environment_or_the_files_is_named(found):
    assert "torch " in found["nodes"]["a package"]
    assert "(this process has 1.0)" in found["nodes"]["a package"]
    assert "--hf-checkpoint /nowhere/model is not there" in found["nodes"]["a file"]


def test_ranks_go_through_the_nodes_in_order_also_where_a_node_has_two_bundles():
    config = parse(["--device", "cuda", "--actor-num-nodes", "4", "--actor-num-gpus-per-node", "2"])
    node_of_bundle = {0: 1, 1: 0, 2: 1, 3: 0}
    places = placement._places(config, PlacementGroup.empty(), node_of_bundle.__getitem__, {})
    [world] = places.worlds
    taken = [place["scheduling_strategy"].placement_group_bundle_index for place in world]
    assert taken == [1, 1, 3, 3, 0, 0, 2, 2]
    assert [place["scheduling_strategy"].placement_group_bundle_index for place in places.engines] == [4]


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


def test_the_number_of_a_device_is_that_of_what_the_process_sees():
    assert visible_device(["5"], {"CUDA_VISIBLE_DEVICES": "5"}) == 0, "Ray hides the others"
    assert visible_device([5], {}) == 5, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    assert visible_device(["6"], {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == 2, "the same on a part of a node"
    environment = {}
    see_only(["2", "3"], environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    see_only([], environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
