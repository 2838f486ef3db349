"""A local Ray that does not start in the time that it grants itself: tried again, bounded, and named."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.helpers.training import ROOT, TinyTask, Training, train
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
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=slow.monotonic, sleep=time.sleep))
    monkeypatch.setattr(cluster, "_lacks", lambda _: "")
    # The session may have a Ray of its own, with another address, which this process must go on to reach.
    monkeypatch.setattr(cluster, "_keep_ray_to_itself", lambda: None)
    monkeypatch.setattr(
        cluster, "_base_process", SimpleNamespace(worker_program=lambda _: None, begin=lambda **_: None)
    )
    monkeypatch.setattr(cluster.ray.util, "get_node_ip_address", lambda: cluster.LOOPBACK)
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


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_the_logs_of_ray_are_named_where_the_environment_puts_them(
    config: Config, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, "/scratch/me")
    make_slow(monkeypatch, [ValueError("no")])
    with pytest.raises(ClusterError, match="logs are in /scratch/me/ray/session_latest/logs"):
        cluster.start_ray(config)


def test_a_temporary_directory_too_long_for_a_socket_is_refused_with_what_to_set(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / ("a" * 90)  # and 107 bytes are all of a socket's path
    far.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(far))
    with pytest.raises(OSError, match="AF_UNIX") as told:
        cluster.ray_utils.validate_socket_filepath(f"{far}/ray/session_1/sockets/plasma_store")
    make_slow(monkeypatch, [told.value])
    with pytest.raises(ClusterError, match="Set RAY_TMPDIR to a short path"):
        cluster.start_ray(config)


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


SIGNALLED = """
import os, ray, resource, signal, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))  # of a login
from vime.config.parse import parse
from vime.ray.cluster import start_ray, stop_ray
from vime.ray.interrupts import Interrupts
with Interrupts() as interrupts:
    for _ in range(2):  # a restart of the run has a Ray of its own
        interrupts.is_asked = False
        start_ray(parse(["--device", "cpu"]))
        os.killpg(0, signal.SIGTERM)
        time.sleep(5)  # Ray's core would abort this process after 3 s
        assert interrupts.is_asked
        limit = ray.remote(num_cpus=0)(lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        assert ray.get(limit.remote(), timeout=30) > 1024, "Ray lives, and a worker may open as many files as Ray's own"
        stop_ray()
"""


def test_sigterm_to_the_process_group_of_a_driver_is_a_request_whatever_ray_does_with_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "*** SIGTERM received" not in ended.stderr


def test_a_real_ray_that_never_starts_in_time_ends_the_run_by_name(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PORT_WAIT, "0")
    finished = train([*tiny_task.flags(), "--num-rollout", "1", "--start-timeout-secs", "5"], tmp_path / "run")
    assert finished.code == 3, finished.output
    assert "--start-timeout-secs" in finished.output, finished.output  # seen to fail once, in silence
    assert "Traceback" not in finished.output


WATCH = """
import os, psutil, ray, sys, threading, time
from vime.config.parse import parse
from vime.ray.cluster import start_ray, stop_ray
from vime.ray.servers import watched_ray
start_ray(parse(["--device", "cpu"]))
words = [word for child in psutil.Process().children(recursive=True) for word in child.cmdline()]
print("scripts", [word for word in words if ".py" in word])
said = []
def on_lost(what):
    said.append(what)
    if sys.argv[1] != "none":
        print("lost", what, flush=True)
        os._exit(3)
def kill():
    [child] = [child for child in psutil.Process().children() if child.name() == sys.argv[1]]
    child.kill()
with watched_ray(on_lost):
    if sys.argv[1] != "none":
        threading.Timer(0.5, kill).start()
        while True:
            ray.put(bytes(200_000))  # one of these calls is under way when the server dies
stop_ray()
print("stopped", said)
"""


@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_the_death_of_a_server_of_ray_is_named_before_it_takes_a_busy_driver_along(server: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WATCH, server], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 3, ended.stderr
    assert f"lost {server} (pid " in ended.stdout


def test_a_ray_that_is_stopped_did_not_die_and_had_neither_dashboard_nor_autoscaler_nor_reader_of_logs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WATCH, "none"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert "stopped []" in ended.stdout, ended.stderr
    [scripts] = [line for line in ended.stdout.splitlines() if line.startswith("scripts")]
    assert "runtime_env/agent/main.py" in scripts  # what a script of Ray's looks like
    assert [name for name in ("dashboard.py", "monitor.py") if name in scripts] == []


SCRIPTED = ["--debug-engine-module", "vime.backends.vllm_utils.scripted_server", "--save-interval", "1"]


def kill_server(training: Training, name: str) -> list[psutil.Process]:
    """Kill a server of the run's Ray; answers all processes that the driver had started, also through others."""
    members = psutil.Process(training.process.pid).children(recursive=True)
    [server] = [member for member in members if member.name() == name]
    server.kill()
    return members


def test_a_run_whose_ray_died_starts_again_in_a_fresh_one_and_leaves_nothing_of_the_old(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    flags = [*tiny_task.flags(), *SCRIPTED, "--num-rollout", "40", "--transferqueue-mode", "streaming"]
    training = Training("train.py", [*flags, "--max-restarts", "1"], tmp_path / "run")
    training.wait_for_event("checkpoint_saved")
    old = kill_server(training, "raylet")
    training.wait_for_event("run_restarted")
    assert not [process for process in old if process.is_running()]
    num_saved = len(training.so_far().events("checkpoint_saved"))
    # The raylet may have died when later rounds were trained and not saved. These do not count twice, so more than one
    # round must be saved before another restart is allowed.
    training.wait_for_event("checkpoint_saved", count=num_saved + 4)
    kill_server(training, "gcs_server")
    finished = training.finish()
    assert finished.code == 0, finished.output
    restarts = [(event["error"].split(" (")[0], event["load"]) for event in finished.events("run_restarted")]
    assert restarts == [(f"Ray's {name}", str(tmp_path / "run/checkpoints")) for name in ("raylet", "gcs_server")]
    assert sorted(finished.metrics()) == list(range(40))
    assert "every promise kept" in finished.output


@pytest.mark.parametrize("server", ["raylet", pytest.param("gcs_server", marks=pytest.mark.nightly)])
def test_a_run_that_may_not_start_again_ends_by_name_when_its_ray_dies(
    tiny_task: TinyTask, tmp_path: Path, server: str
) -> None:
    """That the death of either server is seen and named, in the usual session too: the two tests before it."""
    flags = [*tiny_task.flags(), *SCRIPTED, "--num-rollout", "500", "--max-restarts", "0"]
    training = Training("train.py", flags, tmp_path / "run")
    training.wait_for_event("checkpoint_saved")
    kill_server(training, server)
    told = training.finish()
    assert told.code == 3, told.output
    assert f"Ray's {server} (pid " in told.output
    assert f"continue with --load {tmp_path / 'run' / 'checkpoints'}" in told.output
    assert [event["error"] for event in told.events("run_failed")]
