"""A cluster that somebody else started: joined with its token or without one, by train.py and by a submitted job.

Each head has a home, ports and a temporary directory of its own, and ends with the test module.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.ray_head import RAY, Head, environment, live_in, running_head
from tests.helpers.training import ROOT, TinyTask, Training, interrupt
from vime.observability.metrics import read_metrics

TOKEN = "a" * 64
SCRIPTED = [
    *("--debug-engine-module", "vime.backends.vllm_utils.scripted_server", "--num-rollout", "2"),
    *("--transferqueue-mode", "streaming"),
]
START = "from vime.config.parse import parse; from vime.ray.cluster import start_ray; import sys, ray; "
START += "start_ray(parse(['--device', 'cpu', *sys.argv[1:]])); print('nodes', len(ray.nodes()))"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A cluster as `ray start --head` makes it where an earlier Ray left a token in the user's home."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(TOKEN)
    with running_head(home, with_dashboard=True) as running:
        yield running


def start(*flags: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, *flags],
        env=environment(home, **more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_local_run_leaves_nothing_in_the_users_home(tmp_path: Path) -> None:
    local = start(home=tmp_path)
    assert "nodes 1" in local.stdout, local.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_without_a_token_is_joined_also_where_a_token_lies_about(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    (other / ".ray").mkdir(parents=True)
    (other / ".ray" / "auth_token").write_text(TOKEN)
    with running_head(home, with_dashboard=False) as open_head:
        for user in (home, other):
            joined = start("--ray-address", open_head.address, home=user)
            assert "nodes 1" in joined.stdout, joined.stderr
        joined = start("--ray-address", "auto", home=other, RAY_ADDRESS=open_head.address, RAY_AUTH_MODE="token")
        assert "nodes 1" in joined.stdout, joined.stderr


def test_a_run_joins_a_cluster_with_the_token_of_the_users_home(
    head: Head, tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM: what a local run says to its processes by Ray's environment, this one says nobody."""
    live_in(head.home, monkeypatch)
    flags = [*tiny_task.flags(), *SCRIPTED[2:], "--ray-address", head.address]
    finished = Training("train.py", flags, tmp_path / "run").finish()
    assert finished.code == 0, finished.output
    assert "every promise kept" in finished.output
    assert sorted(finished.metrics()) == [0, 1]
    assert "trainer rank 0, engine-0" in (tmp_path / "run/logs/driver.log").read_text(), "places were reserved"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_runs_in_one_cluster_do_not_meet(
    head: Head, tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins and ends while the first trains: actors' names, ports, placements, queue and ledger of the two
    are apart, and the end of one takes nothing from the other."""
    live_in(head.home, monkeypatch)
    flags = [*tiny_task.flags(), *SCRIPTED[:2], *SCRIPTED[4:], "--ray-address", head.address]
    first = Training("train.py", [*flags, "--num-rollout", "5000"], tmp_path / "first")
    try:
        first.wait_for_event("round_trained")
        second = Training("train.py", [*flags, "--num-rollout", "3"], tmp_path / "second").finish()
        assert second.code == 0, second.output
        assert "every promise kept" in second.output
        assert sorted(second.metrics()) == [0, 1, 2]
        so_far = len(first.so_far().events("round_trained"))
        first.wait_for_event("round_trained", count=so_far + 2)
        interrupt(first, signal.SIGTERM)  # as a scheduler does; Ray's library would end the process at once
        ended = first.finish()
    finally:
        first.kill()
    assert ended.code == 130, ended.output
    for run in (ended, second):
        kinds = {kind for kind in ("engine_lost", "router_lost", "queue_lost", "run_restarted") if run.events(kind)}
        assert not kinds, run.output


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "the cluster asks for a token, and none is here"),
        ({"RAY_AUTH_MODE": "token"}, "the cluster asks for a token, and none is here"),
        ({"RAY_AUTH_TOKEN": "b" * 64}, "another token than the one of RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, "cannot be read"),
    ],
)
def test_a_token_that_is_missing_or_wrong_is_named_at_once(
    head: Head, tmp_path: Path, more: dict[str, str], says: str
) -> None:
    refused = start("--ray-address", head.address, home=tmp_path, **more)
    last = refused.stderr.strip().splitlines()[-1]
    assert "ClusterError" in last, refused.stderr
    assert head.address in last
    assert says in last
    # Ray's own tries, each of which warns, would have come first
    assert "Failed to" not in refused.stderr
    assert "_private/" not in refused.stderr


def test_a_run_whose_cluster_died_ends_by_name_and_says_where_to_go_on(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is for its owner to start again."""
    home = tmp_path / "home"
    home.mkdir()
    live_in(home, monkeypatch)
    with running_head(home, with_dashboard=False) as doomed:
        flags = [*tiny_task.flags(), *SCRIPTED[:2], "--num-rollout", "500", "--save-interval", "1"]
        training = Training("train.py", [*flags, "--ray-address", doomed.address], tmp_path / "run")
        training.wait_for_event("checkpoint_saved")
        doomed.server("raylet").kill()
        ended = training.finish()
    assert ended.code == 3, ended.output
    assert re.search(r"Ray's raylet \([\d.]+:\d+\) died", ended.output), ended.output
    assert f"continue with --load {tmp_path / 'run' / 'checkpoints'}" in ended.output
    assert ended.events("run_restarted") == []


BUSY = """
import os, psutil, ray, sys, threading, time
from vime.ray.servers import watched_ray
ray.init(address=sys.argv[1], log_to_driver=False)
def on_lost(what):
    time.sleep(2)  # the thread that watches may be late: the calls of Ray must wait for it
    print("lost", what, flush=True)
    os._exit(3)
with watched_ray(on_lost):
    threading.Timer(0.5, psutil.Process(int(sys.argv[2])).kill).start()
    while True:
        ray.put(bytes(200_000))  # one of these calls is under way when the server dies
"""


def test_the_death_of_a_joined_raylet_is_named_before_it_takes_a_busy_driver_along(tmp_path: Path) -> None:
    with running_head(tmp_path, with_dashboard=False) as doomed:
        ended = subprocess.run(
            [sys.executable, "-c", BUSY, doomed.address, str(doomed.server("raylet").pid)],
            env=environment(tmp_path),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (ended.returncode, "lost raylet (" in ended.stdout) == (3, True), ended.stdout + ended.stderr


def test_a_submitted_job_runs_on_its_cluster(head: Head, tiny_task: TinyTask, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    entry = [sys.executable, str(ROOT / "train.py"), "--run-dir", str(run_dir), *tiny_task.flags(), *SCRIPTED]
    submitted = subprocess.run(
        [*RAY, "job", "submit", "--address", head.dashboard, "--", *entry, "--ray-address", "auto"],
        env=environment(head.home, RAY_AUTH_MODE="token"),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "every promise kept" in submitted.stdout
    assert sorted(read_metrics(run_dir)) == [0, 1]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_for_slurm_starts_ray_and_a_run_in_its_allocation(
    nodes: int, tiny_task: TinyTask, tmp_path: Path
) -> None:
    """Stand-ins of `srun` and `scontrol` run everything here; Ray and the run are real. Each of two nodes is a Ray node
    with one CPU, and the run needs both: weights and payloads go from one to the other."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
    small = "--num-cpus 1 --object-store-memory 200000000"
    (tools / "srun").write_text(
        "#!/bin/bash\nwhile [[ $1 == --* ]]; do case $1 in --overlap) shift ;; *) shift 2 ;; esac; done\n"
        f'if ((SLURM_JOB_NUM_NODES > 1)) && [[ $2 == start ]]; then exec "$@" {small}; fi\nexec "$@"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    slurm = {"SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": str(os.getpid() + nodes), "SLURM_JOB_NUM_NODES": str(nodes)}
    flags = [*tiny_task.flags(), *SCRIPTED, "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    flags += ["--actor-num-nodes", str(nodes), "--update-weight-transport", "gloo"]
    done = subprocess.run(
        ["bash", "examples/launch/slurm.sh", *flags],
        cwd=ROOT,
        env=environment(home, **slurm, SLURM_GPUS_ON_NODE="0", PATH=f"{tools}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every promise kept" in done.stdout
    assert len(read_metrics(tmp_path / "run")) == 2
    told = (tmp_path / "run/logs/driver.log").read_text()
    placed = [line.split(", ") for line in re.findall(r"placement: node .* \(.*\): (.*)", told)]
    assert len(placed) == nodes
    assert sorted(part for parts in placed for part in parts) == [
        "engine-0",
        *(f"trainer rank {n}" for n in range(nodes)),
    ]
