"""The files of examples/launch, and the list of what has never run, are true as far as this machine can say."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import yaml

from vime.config.parse import parse

ROOT = Path(__file__).resolve().parents[3]


def test_the_kubernetes_job_is_a_ray_job_whose_flags_are_ours_and_whose_gpus_suffice() -> None:
    job = yaml.safe_load((ROOT / "examples/launch/kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    python, script, *flags = shlex.split(job["spec"]["entrypoint"])
    assert (python, script) == ("/vime/.venv/bin/python", "/vime/train.py")
    config = parse(flags)
    assert config.cluster.ray_address == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    [workers] = cluster["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    per_node = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert str(per_node) == workers["rayStartParams"]["num-gpus"]
    wanted = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node + config.cluster.rollout_num_gpus
    assert wanted == workers["replicas"] * per_node


def test_the_slurm_script_is_bash() -> None:
    checked = subprocess.run(["bash", "-n", "examples/launch/slurm.sh"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def gpu_tests(source: str) -> set[str]:
    """Return the names of the tests that carry the mark `gpu`: by their module, by themselves, or in some of their
    cases."""

    def is_marked(*nodes: ast.AST) -> bool:
        return any("pytest.mark.gpu" in ast.unparse(node) for node in nodes)

    statements = ast.parse(source).body
    of_module = [
        each for each in statements if isinstance(each, ast.Assign) and "pytestmark" in map(ast.unparse, each.targets)
    ]
    return {
        each.name
        for each in statements
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and each.name.startswith("test_")
        and is_marked(*of_module, *each.decorator_list)
    }


def test_a_gpu_mark_is_found_wherever_it_stands() -> None:
    assert gpu_tests("pytestmark = [\n    pytest.mark.gpu,\n]\ndef test_a(): ...\nasync def test_b(): ...") == {
        "test_a",
        "test_b",
    }
    case = '@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.gpu)])\ndef test_b(x): ...\n'
    assert gpu_tests(f"@pytest.mark.gpu\ndef test_a(): ...\n{case}def test_c(): 'pytest.mark.gpu'") == {
        "test_a",
        "test_b",
    }


def test_the_page_of_what_never_ran_lists_every_gpu_test() -> None:
    found = set()
    for file in ROOT.glob("tests/**/test_*.py"):
        source = file.read_text()
        if "mark.gpu" in source:
            found |= {f"{file.relative_to(ROOT)}::{test}" for test in gpu_tests(source)}
    page = (ROOT / "docs/never-run.md").read_text()
    listed = set(re.findall(r"^\| `(tests/[\w/]+\.py::test_\w+)` \|", page, re.MULTILINE))
    assert listed == found
    assert len(found) > 3


def test_the_page_of_what_never_ran_has_what_the_page_of_gpus_says_of_other_packages_and_models() -> None:
    page = (ROOT / "docs/never-run.md").read_text()
    gpus = (ROOT / "docs/gpu-launch.md").read_text()
    [build] = re.findall(r"`(pip install [^`]*transformer-engine[^`]*)`", gpus)
    assert f"`{build}`" in page
    assert "A judge or a reward model can live on these GPUs too (never run)" in gpus
    assert "a judge or a reward model that shares GPUs" in page
