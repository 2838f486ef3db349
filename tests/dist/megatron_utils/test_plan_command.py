"""`vime plan`, and the same check before a run: models that nobody has here, on GPUs that are not there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.helpers.dist_launch import ROOT, launch
from tests.helpers.dry_run_cases import write_large
from tests.helpers.families import EXPORTS, RUNS
from tests.helpers.recorded_run import record_run
from vime.cli.main import main
from vime.config.checks import resolve
from vime.config.parse import Config, parse
from vime.ray.inputs import Refusals
from vime.ray.preflight import check_memory, preflight

GIB = 2**30
TP8_PP4_EP8 = {
    "actor_num_nodes": 8,
    "tensor_model_parallel_size": 8,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 4,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large(tmp_path_factory.mktemp("large"))


def on_gpus(model: Path, **flags: Any) -> Config:
    return resolve(Config().replace(device="cuda", hf_checkpoint=str(model), actor_num_gpus_per_node=8, **flags))


def plan(*flags: str, is_of_its_own: bool = False) -> subprocess.CompletedProcess[str]:
    """What `vime plan` says, in a process of its own or in this one, which has its imports already. The dry run is a
    child in both cases."""
    words = [sys.executable, "-m", "vime", "plan", *flags]
    if is_of_its_own:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(["plan", *flags])
    return subprocess.CompletedProcess(words, code, out.getvalue(), error.getvalue())


def script_flags(script: str, directory: Path, models: Path) -> list[str]:
    """The flags that a launch script hands to its program; `ray` is replaced by a script that writes them down."""
    (directory / "ray").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {directory}/submitted\n")
    (directory / "ray").chmod(0o755)
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MODEL_DIR": str(models), "OUT_DIR": str(directory)}
    subprocess.run([ROOT / "scripts" / script], env=environment, capture_output=True, timeout=60, check=True)
    submitted = (directory / "submitted").read_text().splitlines()
    return submitted[submitted.index("train_async.py" if "async" in script else "train.py") + 1 :]


@pytest.fixture(scope="module")
def downloaded(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of the launch scripts, by the names that they have there."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("Qwen3-4B", "Qwen3-30B-A3B"):
        (directory / name).symlink_to(large / name.lower())
    return directory


@pytest.mark.parametrize("script", ["run-qwen3-4B.sh", "run-qwen3-4B-async-streaming.sh", "run-qwen3-30B-A3B.sh"])
def test_a_shipped_launch_needs_nothing_that_the_installation_leaves_out(
    script: str, tmp_path: Path, downloaded: Path
) -> None:
    config = parse(script_flags(script, tmp_path, downloaded))
    preflight(config, is_async="async" in script)
    assert config.parallel.transformer_impl == "local"
    assert not config.tracking.use_wandb


@pytest.mark.nightly
def test_30_billion_parameters_fit_two_nodes_that_train_and_generate_in_turns(tmp_path: Path, downloaded: Path) -> None:
    flags = script_flags("run-qwen3-30B-A3B.sh", tmp_path, downloaded)
    fits = plan("--json", *flags, is_of_its_own=True)
    assert fits.returncode == 0, fits.stderr
    record = json.loads(fits.stdout)
    [rank] = record["parts"][0]["ranks"]
    # of 30.5322 B parameters, 128 experts a layer over 8 ranks and all else over 2: 2 bytes, 4 of gradients, and 12 of
    # the optimizer over the 2 ranks with the same experts, the 8 with the same of all else
    experts = 48 * 128 * 3 * 2048 * 768
    other = 30_532_122_624 - experts
    static = experts / 8 * (6 + 12 / 2) + other / 2 * (6 + 12 / 8)
    assert (record["fits"], rank["count"]) == (True, 16)
    assert rank["static"] == pytest.approx(static, rel=2e-3)


ONE_NODE = shlex.split(
    "--device cuda --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --colocate --rollout-num-gpus-per-engine 2 "
    "--use-kl-loss --kl-loss-coef 0.001 --rollout-max-prompt-len 2048 --rollout-max-response-len 16384 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 18432 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
"""Of docs/gpu-launch.md."""


def test_30_billion_parameters_fit_one_node_with_the_optimizer_in_host_memory(downloaded: Path) -> None:
    """With a reference and sequences of 18432 tokens; without the flag they do not, and it is named."""
    model = ("--hf-checkpoint", str(downloaded / "Qwen3-30B-A3B"))
    fits = plan(*model, *ONE_NODE, "--optimizer-cpu-offload")
    assert fits.returncode == 0, fits.stderr
    _, header, row, *_ = rows = fits.stdout.splitlines()
    assert max(map(len, rows[:4])) <= 80
    assert " ".join(header.split()) == "models stage ranks params weights gradients optimizer passes peak host"
    weights, gradients, optimizer, passes, peak, host = map(float, row.split()[-6:])
    # experts over 8 ranks, all else over 2: 2 bytes for the policy and for the reference, 4 of gradients; of the
    # optimizer 12 on the host, for all but the experts over the 4 ranks with the same
    experts = 48 * 128 * 3 * 2048 * 768
    other = 30_532_122_624 - experts
    assert (weights, gradients) == pytest.approx((4 * (experts / 8 + other / 2) / GIB,) * 2, rel=2e-3)
    assert host == pytest.approx(12 * (experts / 8 + other / 2 / 4) / GIB, rel=2e-3)
    assert optimizer == 0
    assert peak == pytest.approx(weights + gradients + passes, abs=0.02)
    assert peak + host + 4 > 80, "with what lies in host memory now, and the reserve"
    assert " GB by ipc (1 GB/s assumed)" in fits.stdout
    assert f"Host memory, page-locked, of the 8 ranks of a node: {8 * host:.0f}" in fits.stdout.replace(".4 GiB", "")
    refused = plan("--no-passes", "--gpu-memory-gib", "79", *model, *ONE_NODE)
    assert refused.returncode == 2, refused.stderr
    assert f"--optimizer-cpu-offload: {host:.1f} GiB of main weights and moments go to host memory" in refused.stdout


def test_distinct_shards_sum_to_the_model(large: Path, models: Path, work: Path) -> None:
    """The model's own number is that of transformers."""
    cases = {
        "tp8-pp4-ep8": on_gpus(large / "qwen3-30b-a3b", **TP8_PP4_EP8),
        "cp2": on_gpus(models / "qwen3", context_parallel_size=2),
        "vpp2": on_gpus(models / "qwen3", pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    }
    [found] = launch(
        "tests.helpers.dry_run_cases:shards",
        world_size=1,
        directory=work / "shards",
        arguments={"cases": cases},
        deadline_s=200,
    )
    assert set(found) == set(cases)
    for name, (held, expected) in found.items():
        print(name, held, expected)  # noqa: T201  the figure belongs in the log
        assert held == expected


@pytest.mark.nightly
def test_all_64_ranks_of_tp8_pp4_ep8_are_as_their_stage_and_sum_to_the_model(large: Path, work: Path) -> None:
    [found] = launch(
        "tests.helpers.dry_run_cases:shards",
        world_size=1,
        directory=work / "all-shards",
        arguments={"cases": {"all": on_gpus(large / "qwen3-30b-a3b", **TP8_PP4_EP8)}, "all_ranks": True},
        deadline_s=600,
    )
    held, expected = found["all"]
    assert held == expected


def test_the_shipped_launch_fits_80_gib_and_is_told_what_to_change_for_24(tmp_path: Path, downloaded: Path) -> None:
    flags = script_flags("run-qwen3-4B.sh", tmp_path, downloaded)
    fits = plan("--json", *flags)
    assert fits.returncode == 0, fits.stderr
    record = json.loads(fits.stdout)
    [part] = record["parts"]
    [rank] = part["ranks"]
    assert (record["fits"], record["limit_gib"], part["roles"], rank["count"]) == (True, 80, ["actor", "reference"], 4)
    # 4.0224 B parameters, half a rank: 2 bytes, with the reference twice, 4 of gradients, 12 of the optimizer / 2
    assert rank["static"] / GIB == pytest.approx(2.0113e9 * (2 * 2 + 4 + 6) / GIB, rel=1e-3)
    assert 0 < rank["activations"] < 8 * GIB
    flags += ["--transformer-impl", "transformer_engine"]
    refused = plan("--gpu-memory-gib", "24", "--trainer-tflops", "100", "--engine-tokens-per-sec", "5000", *flags)
    assert refused.returncode == 2, refused.stderr
    for said in (
        "Does not fit: peak",
        "--tensor-model-parallel-size 4",
        "--separate-roles reference",
        "2.7 % more in the one case measured",
        "counted with local layers",
        "4 engine(s) of 1 GPU(s)",
    ):
        assert said in refused.stdout


def test_a_run_whose_ranks_cannot_hold_the_model_is_refused_before_it_starts(large: Path) -> None:
    """30.5 B parameters on 8 GPUs with a sharded optimizer: 71.5 GiB each."""
    refusals = Refusals()
    config = on_gpus(large / "qwen3-30b-a3b", expert_model_parallel_size=8, gpu_memory_gib=71.0)
    refusals.attempt(check_memory, config)
    refusals.attempt(check_memory, config.replace(gpu_memory_gib=72.0))
    with pytest.raises(Exception, match=r"holds 71\.5 GiB of weights, .* at most --gpu-memory-gib 71\. .*vime plan"):
        refusals.raise_all()


def test_a_machine_whose_memory_cannot_hold_the_optimizer_is_refused_before_it_starts(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30.5 B parameters, of whose main weights and moments 341 GiB go to host memory."""
    refusals, memory = Refusals(), SimpleNamespace(total=330 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    config = on_gpus(large / "qwen3-30b-a3b", expert_model_parallel_size=8, optimizer_cpu_offload=True)
    refusals.attempt(check_memory, config.replace(ray_address="here:6379"))  # nodes that nobody has asked
    refusals.attempt(check_memory, config.replace(optimizer_offload_fraction=0.9))
    refusals.raise_all()
    refusals.attempt(check_memory, config)
    with pytest.raises(Exception, match=r"lock 341\.\d GiB of this machine's memory .* and it has 330\.0\. Lower"):
        refusals.raise_all()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "deepseek" else pytest.mark.nightly) for kind in EXPORTS]
)
def test_each_family_is_planned_for_gpus(kind: str, tmp_path: Path) -> None:
    """Attention of each kind has a kernel on the meta device, in forward and backward."""
    layout = ("--device", "cuda", "--actor-num-gpus-per-node", "2", *RUNS.get(kind, ()))
    done = plan("--hf-checkpoint", str(EXPORTS[kind](tmp_path)), "--rollout-max-response-len", "32", *layout)
    assert done.returncode == 0, done.stderr
    assert "Fits: peak 0.0" in done.stdout


def test_context_parallel_attention_on_gpus_grows_with_the_tokens_and_not_with_their_square(models: Path) -> None:
    layout = ("--device", "cuda", "--actor-num-gpus-per-node", "2", "--context-parallel-size", "2", "--json")
    of_length = {}
    for length in (8192, 16384):
        lengths = ("--rollout-max-prompt-len", "1", "--rollout-max-response-len", str(length - 1))
        done = plan("--hf-checkpoint", str(models / "qwen3"), "--micro-batch-size", "1", *layout, *lengths)
        assert done.returncode == 0, done.stderr
        [part] = json.loads(done.stdout)["parts"]
        of_length[length] = max(rank["activations"] for rank in part["ranks"])
    assert of_length[16384] <= 2.01 * of_length[8192]


def test_recorded_runs_say_how_fast_it_would_be_and_how_stale(models: Path, tmp_path: Path) -> None:
    flags = ("--hf-checkpoint", str(models / "qwen3"), "--device", "cpu", "--no-passes", "--rollout-batch-size", "8")
    flags += ("--transferqueue-mode", "streaming", "--max-staleness", "1", "--rollout-num-engines", "2")
    run = record_run(tmp_path / "run")
    said = plan(*flags, "--like", str(run), "--async", "--json")
    assert said.returncode == 0, said.stderr
    played = json.loads(said.stdout)["forecasts"]
    assert list(played) == ["1", "2", "4"]
    assert [one["staleness"] for one in played.values()] == [1, 1, 1]
    assert all(one["tokens_per_sec"] > 0 for one in played.values())
    assert f"--like {run}: trained m, not {models / 'qwen3'}." in json.loads(said.stdout)["notes"]
    text = plan(*flags, "--like", str(run), "--async").stdout
    assert "Forecast, from what the runs of --like recorded:\n  1 engine instead: " in text
    assert "  2 engines: " in text
    assert "assumed" not in text  # beside what was measured
    nothing = plan(*flags, "--like", str(tmp_path))
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "config.json: cannot be read" in nothing.stderr


def test_fsdp_counts_a_share_of_every_tensor_and_says_what_it_leaves_out(models: Path) -> None:
    done = plan("--json", "--hf-checkpoint", str(models / "qwen3"), "--train-backend", "fsdp", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    [rank] = record["parts"][0]["ranks"]
    held = rank["models"]["actor"]
    assert rank["count"] == 8
    assert held["gradients"] == held["parameters"] == 4 * held["num_parameters"] == held["optimizer"] / 2
    assert "activations, and the whole layers that a pass gathers, are not counted" in " ".join(record["notes"])


def test_the_command_of_an_engine_on_gpus_is_one_that_vllm_parses(tmp_path: Path, downloaded: Path) -> None:
    """As a run starts it: with GPUs of its own, and in turns with the trainers."""
    own = resolve(parse(script_flags("run-qwen3-4B.sh", tmp_path, downloaded)))
    own = own.replace(rollout_num_gpus_per_engine=4, use_rollout_routing_replay=True)
    shared = resolve(parse(script_flags("run-qwen3-30B-A3B.sh", tmp_path, downloaded)))
    program = (
        "import json, sys\n"
        "from vime.backends.vllm_utils.launch import awaiting_update, engine_command\n"
        "from vime.config.parse import Config\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "for given in json.load(sys.stdin):\n"
        "    config = awaiting_update(Config.from_dict(given))\n"
        "    command = engine_command(config, index=1, host='127.0.0.1', port=8000)\n"
        "    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])\n"
        "    print('\\n' + json.dumps([parsed.tensor_parallel_size, parsed.dtype, parsed.gpu_memory_utilization,\n"
        "        parsed.enable_return_routed_experts, parsed.max_model_len, parsed.logprobs_mode,\n"
        "        parsed.enable_sleep_mode, parsed.load_format]))\n"
    )
    words = [sys.executable, "-c", program]
    given = json.dumps([own.to_dict(), shared.to_dict()])
    done = subprocess.run(words, cwd=ROOT, input=given, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found[0] == [4, "bfloat16", 0.85, True, 16384, "processed_logprobs", False, "dummy"]
    assert found[1][:4] == [2, "bfloat16", 0.8, True]
    assert found[1][5:] == ["processed_logprobs", True, "dummy"]
