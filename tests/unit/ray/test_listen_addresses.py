"""Where the parts of a run listen: loopback without a cluster, one named interface with one."""

from __future__ import annotations

import os

import pytest

from vime.config.parse import parse
from vime.config.readers import check_given
from vime.ray.cluster import keep_collectives_on_interface, listen_host
from vime.types import ConfigError
from vime.utils.network import loopback_interface

ON_A_CLUSTER = ["--device", "cpu", "--ray-address", "10.0.0.1:6379"]


def collectives(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> tuple[str | None, str | None]:
    """The interfaces of gloo and NCCL, where the user's environment says eth7."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "eth7")
    keep_collectives_on_interface(parse(flags))
    return os.environ.get(names[0]), os.environ.get(names[1])


def test_without_a_cluster_everything_listens_on_loopback_whatever_the_environment_says(monkeypatch):
    loopback = loopback_interface()
    assert listen_host(parse(["--device", "cpu"])) == "127.0.0.1"
    assert collectives(monkeypatch, ["--device", "cpu"]) == (loopback, loopback)


def test_on_a_cluster_the_named_interface_counts_and_otherwise_the_environment(monkeypatch):
    named = [*ON_A_CLUSTER, "--network-interface", loopback_interface()]
    assert listen_host(parse(named)) == "127.0.0.1"
    assert collectives(monkeypatch, named) == (loopback_interface(), loopback_interface())
    assert collectives(monkeypatch, ON_A_CLUSTER) == ("eth7", "eth7")


def test_an_interface_that_a_node_does_not_have_is_refused_with_those_that_it_has():
    config = parse([*ON_A_CLUSTER, "--network-interface", "nowhere0"])
    with pytest.raises(ConfigError, match=r"--network-interface nowhere0: .*\(127\.0\.0\.1\).*every node"):
        listen_host(config)


def test_an_interface_without_a_cluster_is_refused():
    config = parse(["--device", "cpu", "--hf-checkpoint", "m", "--network-interface", "eth1"])
    with pytest.raises(ConfigError, match=r"--network-interface.*--ray-address"):
        check_given(config, config)
