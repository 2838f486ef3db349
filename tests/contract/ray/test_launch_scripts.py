"""The files of examples/launch do what they say, as far as that goes without Slurm, Kubernetes, Ray and GPUs.

Their real text is run with stand-ins of the commands around it, up to where train.py looks for its cluster.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray.scripts.scripts import start as ray_start

from tests.helpers.training import ROOT, TinyTask
from vime.utils.network import free_port

NODES = ("127.0.0.1", "127.0.0.2")
NOTE = """note() { local words; printf -v words '\\t%s' "$@"; echo "${0##*/}$words" >> "$NOTES"; }\n"""  # in one write
SRUN = """#!/bin/bash
note "cpus=${SRUN_CPUS_PER_TASK-}" "$@"
nodes=1
while [[ $1 == --* ]]; do
  case $1 in
    --overlap) shift ;;
    --nodes) nodes=$2; shift 2 ;;
    --ntasks | --nodelist | --exclude) shift 2 ;;
    *) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
  esac
done
((nodes <= SLURM_JOB_NUM_NODES)) || { echo "srun: More processors requested than permitted" >&2; exit 1; }
exec "$@"
"""
SCONTROL = """#!/bin/bash
note "$@"
for node in {nodes}; do echo "$node"; /bin/sleep 0.3; done  # a long list is more than one write
"""
RAY_THAT_BLOCKS = """#!/bin/bash
note "pid=$$" "$@"
exec tail -f /dev/null
"""
RAY_THAT_JOINS = '''"""As many nodes are there as `ray start` was called for."""
import os, pathlib
def init(address, log_to_driver):
    assert address.rpartition(":")[0] == "127.0.0.1", address
def nodes():
    lines = pathlib.Path(os.environ["NOTES"]).read_text().splitlines()
    return [{"Alive": True} for line in lines if line.startswith("ray\\t")]
'''


def tool(path: Path, text: str) -> None:
    """Write a command that first notes how it was called."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, _, rest = text.partition("\n")
    path.write_text(f"{first}\n{NOTE}{rest}")
    path.chmod(0o755)


def noted(notes: Path, name: str) -> list[list[str]]:
    lines = [line.split("\t") for line in notes.read_text().splitlines()]
    return [words for first, *words in lines if first == name]


def check_ray_start(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the options of `ray start` by name; the test fails where Ray does not have one."""
    assert words[0] == "start"
    return ray_start.make_context("start", list(words[1:])).params


SAVES = """import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
os.kill(os.getppid(), signal.SIGTERM)  # Slurm, of the batch shell alone
ends = time.monotonic() + 30
while time.monotonic() < (asked[0] + 1 if asked else ends):
    time.sleep(0.05)
print("saved, asked", len(asked), "time(s)")
sys.exit(130)
"""


def submit(home: Path, num_nodes: int, train: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a job of Slurm that was submitted in `home`, a checkout. `train`: in place of train.py."""
    bin_of_checkout, tools = home / ".venv/bin", home / "tools"
    tool(bin_of_checkout / "ray", RAY_THAT_BLOCKS)
    # the program in the script meets a `ray` that says who is there; train.py is the real one
    program = f'[[ $1 == - ]] && export PYTHONPATH={home / "fakes"}\nexec {sys.executable} "$@"\n'
    tool(bin_of_checkout / "python", f'#!/bin/bash\nnote "$@"\n{program}')
    tool(tools / "srun", SRUN)
    tool(tools / "scontrol", SCONTROL.format(nodes=" ".join(NODES[:num_nodes])))
    tool(tools / "sleep", '#!/bin/bash\nnote "$@"\n')
    (home / "fakes").mkdir()
    (home / "fakes/ray.py").write_text(RAY_THAT_JOINS)
    if train:
        (home / "train.py").write_text(train)
    else:
        (home / "train.py").symlink_to(ROOT / "train.py")
    (home / "prompts.jsonl").write_text('{"input": "1 + 1 =", "label": "2"}\n')
    flags = [
        "--hf-checkpoint",
        "/nowhere/a model",
        "--prompt-data",
        "prompts.jsonl",
        "--rm-type",
        "math",
        "--label-key",
        "label",
    ]
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": str(num_nodes)}
    path = f"{tools}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", ROOT / "examples/launch/slurm.sh", *flags, "--num-rollout", "1"],
        cwd="/",
        env={**os.environ, **slurm, "SLURM_SUBMIT_DIR": str(home), "NOTES": str(home / "notes"), "PATH": path, **more},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_script_for_slurm_starts_ray_on_each_node_and_train_py_with_its_flags(
    num_nodes: int, tmp_path: Path
) -> None:
    """train.py is started with the flags as they were given, and refuses the model that is not there."""
    done = submit(tmp_path, num_nodes, SLURM_CPUS_PER_TASK="64", SLURM_GPUS_ON_NODE="4")
    assert done.returncode == 2, "the exit code of train.py: " + done.stdout + done.stderr
    assert "refused: --hf-checkpoint /nowhere/a model: no config.json there" in done.stderr, "and nothing else"
    notes = tmp_path / "notes"
    assert noted(notes, "scontrol") == [["show", "hostnames", "node[1-2]"]]
    # 20000 + 4711: two jobs of a cluster have ports of their own
    starts = {words[0]: check_ray_start(words[1:]) for words in noted(notes, "ray")}
    told = {each["head"]: (each["address"], each["port"]) for each in starts.values()}
    head, worker = (None, 24711), ("127.0.0.1:24711", None)
    assert told == ({True: head} if num_nodes == 1 else {True: head, False: worker})
    assert {each["num_gpus"] for each in starts.values()} == {4}
    assert all(each["block"] for each in starts.values())
    steps = noted(notes, "srun")
    assert len(steps) == num_nodes + 2, "Ray's head, its workers, the wait for all nodes, train.py"
    assert {step[0] for step in steps} == {"cpus=64"}, "Slurm gives a step one CPU unless it is told"
    [python] = [words for words in noted(notes, "python") if words[0] == "train.py"]
    assert python[1:5] == ["--device", "cuda", "--ray-address", "127.0.0.1:24711"]
    left = [psutil.Process(int(pid.removeprefix("pid="))) for pid in starts if is_there(pid)]
    assert psutil.wait_procs(left, timeout=20)[1] == [], "Ray ends with the script"


def is_there(pid: str) -> bool:
    return psutil.pid_exists(int(pid.removeprefix("pid=")))


def test_without_cpus_per_task_the_script_for_slurm_says_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    done = submit(tmp_path, 1)
    assert done.returncode == 2, done.stdout + done.stderr
    assert {step[0] for step in noted(tmp_path / "notes", "srun")} == {"cpus="}


def test_slurm_s_signal_before_the_time_limit_lets_the_run_save(tmp_path: Path) -> None:
    done = submit(tmp_path, 1, SAVES)
    assert (done.returncode, done.stdout) == (130, "saved, asked 1 time(s)\n"), done.stderr


FIELDS = {
    "RayJob": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"shutdownAfterJobFinishes", "submissionMode", "entrypoint", "rayClusterSpec"},
    "rayClusterSpec": {"headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "pod": {"containers", "volumes"},
    "container": {"name", "image", "env", "resources", "volumeMounts"},
}
"""What the manifest may use of ray.io/v1 and v1, so that a misspelt field is found: an API server drops it."""


def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "examples/launch/kuberay.yaml").read_text())


def groups(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The head and each group of workers."""
    cluster = job["spec"]["rayClusterSpec"]
    return {"head": cluster["headGroupSpec"], **{each["groupName"]: each for each in cluster["workerGroupSpecs"]}}


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    [container] = group["template"]["spec"]["containers"]
    return container


def test_the_manifest_has_only_fields_of_a_ray_job_and_their_types() -> None:
    job = manifest()
    cluster = job["spec"]["rayClusterSpec"]
    found = {"RayJob": {*job}, "spec": {*job["spec"]}, "rayClusterSpec": {*cluster}}
    found["headGroupSpec"] = {*cluster["headGroupSpec"]}
    found["workerGroupSpecs"] = {name for each in cluster["workerGroupSpecs"] for name in each}
    for group in groups(job).values():
        found["pod"] = {*group["template"]["spec"]} | found.get("pod", set())
        container = container_of(group)
        found["container"] = {*container} | found.get("container", set())
        volumes = {each["name"] for each in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        texts = [*group["rayStartParams"].values(), *(each["value"] for each in container["env"])]
        assert all(isinstance(each, str) for each in texts), "the API server takes no numbers there"
    assert {level: names - FIELDS[level] for level, names in found.items()} == {level: set() for level in found}


class Image:
    """Stands for what the manifest says of its image and volume: this repository in /vime with its .venv, and /shared.
    Commands of the manifest are run with the paths of these stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root, self.notes = root, root / "notes"
        (root / "shared").mkdir()
        (root / "vime").mkdir()
        (root / "vime/train.py").symlink_to(ROOT / "train.py")
        tool(root / "vime/.venv/bin/python", f'#!/bin/bash\nnote "$@"\nexec {sys.executable} "$@"\n')
        tool(root / "vime/.venv/bin/ray", '#!/bin/bash\nnote "$RAY_worker_niceness" "$@"\n')

    def run(self, container: dict[str, Any], *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """In an environment as an image of a plain Linux has it, with that of the container."""
        plain = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self.root)}
        environment = {**plain, **{each["name"]: self.placed(each["value"]) for each in container["env"]}}
        return subprocess.run(
            [*map(self.placed, command)],
            env={**environment, "NOTES": str(self.notes), "PYTHONPATH": str(ROOT), **more},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def placed(self, text: str) -> str:
        return text.replace("/vime/", f"{self.root}/vime/").replace("/shared/", f"{self.root}/shared/")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_ray_is_started_in_each_pod_by_the_command_that_kuberay_makes_of_it(image: Image) -> None:
    """KubeRay starts `ray` by name, with what `rayStartParams` says and some of its own."""
    for name, group in groups(manifest()).items():
        params = group["rayStartParams"]
        own = {
            "metrics-export-port": "8080",
            "memory": "1000000000",
            "block": "true",
            "dashboard-agent-listen-port": "52365",
        }
        own |= {"dashboard-host": "0.0.0.0"} if name == "head" else {"address": "vime-head-svc:6379"}
        flags = [f"--{key}={value}" if value != "true" else f"--{key}" for key, value in {**own, **params}.items()]
        start = shlex.join(["ray", "start", *(["--head"] if name == "head" else []), *flags])
        done = image.run(container_of(group), "/bin/bash", "-c", "--", f"ulimit -n 1024; {start} ")
        assert done.returncode == 0, done.stderr
        niceness, *words = noted(image.notes, "ray")[-1]
        assert niceness == "0"
        assert check_ray_start(words)["num_gpus"] == int(
            container_of(group)["resources"]["limits"].get("nvidia.com/gpu", 0)
        )
    assert len(noted(image.notes, "ray")) == 2


def test_the_entry_point_of_the_job_gets_as_far_as_its_cluster(image: Image, tiny_task: TinyTask) -> None:
    """Nothing is refused where model and prompts are at the paths of the manifest. Ray tells a job the address of its
    cluster: here of none."""
    job, model = manifest(), image.root / "shared/model"
    shutil.copytree(tiny_task.model, model)
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 4096}))
    (image.root / "shared/train.jsonl").write_text('{"input": "1 + 1 =", "label": "2"}\n')
    head, port = container_of(groups(job)["head"]), free_port()
    address = f"127.0.0.1:{port}"  # for Ray another word for the host's own
    done = image.run(head, "/bin/sh", "-c", job["spec"]["entrypoint"], RAY_ADDRESS=address, OMP_NUM_THREADS="1")
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.search(rf"--ray-address auto \([\d.]+:{port}\): no Ray cluster responds there", done.stderr), done.stderr
    assert (image.root / "shared/runs/first/config.json").is_file()
