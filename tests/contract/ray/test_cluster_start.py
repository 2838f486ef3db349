"""A local Ray that does not start in the time that it grants itself: tried again, bounded, and named."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training import ROOT, TinyTask, train
from vime.config.parse import Config, parse
from vime.ray import cluster
from vime.types import ClusterError

NODE_TIMED_OUT = (
    "The current node timed out during startup. This could happen because some of the raylet failed to startup or the "
    "GCS has become overloaded."
)
PORT_WAIT = "RAY_gcs_server_port_wait_time_s"
"""How long Ray waits for its server's port; 0 fails the start as a busy machine does: the server is there, but late."""


class SlowRay:
    """`ray.init` as a busy machine has it: each attempt takes 31 s and raises what Ray raises."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures, self.num_attempts, self.now = failures, 0, 1000.0

    def init(self, **_: Any) -> None:
        self.num_attempts += 1
        self.now += 31
        if self.failures:
            raise self.failures.pop(0)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def config() -> Config:
    return parse(["--device", "cpu", "--start-timeout-secs", "100"])


def make_slow(monkeypatch: pytest.MonkeyPatch, failures: list[Exception]) -> SlowRay:
    slow = SlowRay(failures)
    monkeypatch.setattr(cluster.ray, "init", slow.init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.time, "monotonic", slow.monotonic)
    monkeypatch.setattr(cluster, "_check_resources", lambda _: None)
    return slow


def test_a_start_that_timed_out_is_tried_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = make_slow(monkeypatch, [Exception(NODE_TIMED_OUT), RuntimeError("Timed out waiting for file port")])
    asked: list[int] = []
    cluster.start_ray(config, on_retry=lambda: asked.append(slow.num_attempts))
    assert slow.num_attempts == 3
    assert asked == [1, 2]


def test_tries_end_at_the_limit_of_the_run_and_name_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = make_slow(monkeypatch, [Exception(NODE_TIMED_OUT)] * 9)
    with pytest.raises(ClusterError, match=r"--start-timeout-secs.*4 attempt.*current node timed out"):
        cluster.start_ray(config)
    assert slow.num_attempts == 4  # the third ends after 93 s, the fourth after 124 of 100


def test_what_is_no_timeout_is_said_at_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = make_slow(monkeypatch, [ValueError("object store memory must be at least 75 MiB")])
    with pytest.raises(ClusterError, match="did not start: ValueError object store memory"):
        cluster.start_ray(config)
    assert slow.num_attempts == 1


REAL = f"""
import os, psutil, sys
from vime.config.parse import parse
from vime.ray.cluster import start_ray
def servers():
    return [child for child in psutil.Process().children() if child.name() == "gcs_server"]
def later():
    assert not servers(), servers()
    del os.environ["{PORT_WAIT}"]
start_ray(parse(["--device", "cpu"]), on_retry=later)
sys.exit(0 if len(servers()) == 1 and "{PORT_WAIT}" not in os.environ else 5)
"""


def test_a_second_start_of_a_real_ray_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    environment = {**os.environ, PORT_WAIT: "0", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", REAL], env=environment, cwd=ROOT, check=True, timeout=120)


def test_a_real_ray_that_never_starts_in_time_ends_the_run_by_name(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PORT_WAIT, "0")
    finished = train([*tiny_task.flags(), "--num-rollout", "1", "--start-timeout-secs", "5"], tmp_path / "run")
    assert finished.code == 3, finished.output
    assert "--start-timeout-secs" in finished.output
    assert "Traceback" not in finished.output
