"""Real vLLM on a GPU: its weights after updates, what it says of exports, and whole runs of train.py with it.

One GPU is enough: a run's cluster then counts it twice, and trainer and engine share it. With two, weights come by
NCCL; with four, trainer and engine are tensor-parallel too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_models
from tests.helpers.dist_launch import launch
from tests.helpers.engine_updates import Pusher, difference, prompt_difference, sample
from tests.helpers.engines import engine_config, started
from tests.helpers.families import EXPORTS
from tests.helpers.gpu_runs import ROUNDS, gpu_run
from tests.helpers.megatron_models import make_rows
from tests.helpers.ray_head import environment, running_head
from tests.helpers.training import TinyTask, train
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.launch import DEFAULT_ENV, DEFAULT_ENV_GPU_FP32

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXACT = 1e-3  # largest difference of a log-probability, fp32 on both sides, sums in another order
COARSE = 0.1  # bf16; weights that did not arrive are off by nats
HALF = {"deepseek": "bfloat16"}  # no kernel of vLLM computes latent attention in fp32 on a GPU
WAYS = {"graphs": (), "eager": ("--enforce-eager",)}
"""With torch.compile and CUDA graphs, as vLLM starts by itself, and without."""


@pytest.fixture(scope="module", params=WAYS)
def gpu_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = tiny_models.make_qwen3(tmp_path_factory.mktemp("model"))
    config = engine_config(model, 512, device="cuda", bf16=False, vllm_kv_cache_memory_bytes=1 << 28)
    config = dataclasses.replace(config, vllm_flags=[*WAYS[request.param], "--gpu-memory-utilization", "0.1"])
    yield from started(config, tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("transport", ["shm", "gloo", "disk"])
def test_after_an_update_an_engine_on_the_gpu_computes_with_the_new_weights(
    transport: str, gpu_engine: EngineProcess, tmp_path: Path
) -> None:
    pusher = Pusher(gpu_engine.address, transport, tmp_path)
    try:
        for seed in (1, 2):
            model = tiny_models.load(tiny_models.make_qwen3(tmp_path / str(seed), seed=seed))
            pusher.push(model)
            of_prompt = prompt_difference(pusher.fleet, model)
            choice = sample(gpu_engine.url, [3, 5, 7, 11], 24)
            of_completion = difference(choice, model, [3, 5, 7, 11])
            print(f"{transport} {seed}: prompt {of_prompt:.2e}, completion {of_completion:.2e}")  # noqa: T201
            assert max(of_prompt, of_completion) < EXACT
    finally:
        pusher.close()


def test_an_engine_on_the_gpu_says_of_every_export_what_the_trainer_says(tmp_path: Path) -> None:
    models = {name: make(tmp_path / "models" / name) for name, make in EXPORTS.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        [trainer] = launch(
            "tests.helpers.megatron_worker:trained_exports",
            world_size=1,
            directory=tmp_path / "launch",
            arguments={"models": models, "directory": tmp_path},
            deadline_s=240,
        )
    rows = make_rows()
    (tmp_path / "tokens.json").write_text(json.dumps([row.tokens.tolist() for row in rows]))
    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(models, pool.map(lambda name: _asked(name, tmp_path), models), strict=True))
    wrong = {}
    for name, answer in answers.items():
        if isinstance(answer, str):  # this vLLM cannot compute it on the GPU
            wrong[name] = answer
            continue
        worst = max(
            abs(theirs - ours)
            for row, logp_R, said in zip(rows, trainer[name], answer, strict=True)
            for ours, theirs in zip(logp_R.tolist(), said[-row.response_length :], strict=True)
        )
        print(f"{name}: {worst:.2e}")  # noqa: T201
        if worst >= (COARSE if name in HALF else EXACT):
            wrong[name] = f"differs by {worst:.2e}"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


def _asked(name: str, directory: Path) -> list[list[float]] | str:
    """Log-probabilities of each row of tokens by vLLM, in a process of its own; why there are none."""
    (directory / f"{name}.json").write_text(json.dumps([str(directory / name)]))
    files = [directory / f"{name}.json", directory / "tokens.json", directory / f"{name}-answers.json"]
    log = directory / f"{name}.log"
    with log.open("w") as output:
        asked = subprocess.run(
            [sys.executable, "-m", "tests.helpers.vllm_log_probs", *map(str, files), HALF.get(name, "float32")],
            cwd=ROOT,
            env={**os.environ, **DEFAULT_ENV, **DEFAULT_ENV_GPU_FP32},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=200,
            check=False,
        )
    if asked.returncode != 0:
        return log.read_text()[-2500:]
    [answer] = json.loads(files[2].read_text())
    return answer


SIZES = [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"))]
"""GPUs of the trainer, and as many of its engine: tensor parallelism of both."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_a_run_on_the_gpu_trains_what_its_engine_samples(
    kind: str, precision: str, size: int, tiny_task: TinyTask, tmp_path: Path
) -> None:
    task = dataclasses.replace(tiny_task, model=EXPORTS[kind](tmp_path / "model"))
    is_shared = torch.cuda.device_count() < 2
    flags = gpu_run(task, precision, size, is_shared=is_shared)
    home = tmp_path / "home"
    home.mkdir()
    variables = {"CUDA_VISIBLE_DEVICES": "0,0"} if is_shared else {}
    with running_head(home, with_dashboard=False, flags=("--num-gpus", str(2 * size)), **variables) as head:
        flags += ["--ray-address", head.address]
        finished = train(flags, tmp_path / "run", variables=environment(home), deadline_s=240)
    assert finished.code == 0, finished.output[-6000:]
    lines = finished.metrics()
    differences = [lines[number]["train/train_rollout_logprob_abs_diff"] for number in range(ROUNDS)]
    print(f"{kind} {precision} TP{size}: mean difference of log-probabilities {differences}")  # noqa: T201
    assert max(differences) < (COARSE if precision == "bf16" else EXACT)
    assert len(set(finished.confirmed_hashes())) == ROUNDS + 1
