"""What a run is told about nodes that have another Vime: `python -m tests.helpers.node_packages FILE COPY...`.

The cluster is real raylets of one machine: a head with this process's Vime, and a node for each COPY, a directory that
has a `vime` in it. It is run in a directory without one: Ray's workers look where their driver is. Writes what was said
to FILE.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from vime.config.parse import parse
from vime.ray.nodes import check_nodes, nodes_of_cluster
from vime.types import ClusterError


def main(file: str, *copies: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for number, copy in enumerate(copies):
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": copy}, resources={f"copy-{number}": 1})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    said = "nothing"
    try:
        check_nodes(parse(["--ray-address", "auto", "--device", "cpu", "--debug-rollout-only"]), nodes_of_cluster())
    except ClusterError as error:
        said = str(error)
    Path(file).write_text(said)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
