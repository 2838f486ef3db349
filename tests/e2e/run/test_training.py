"""The whole machine through train.py, as a user starts it: real Ray, vLLM, megatron-core and TransferQueue."""

import signal
import time
from pathlib import Path

import pytest

from tests.helpers.metrics_page import undocumented
from tests.helpers.training import Finished, TinyTask, Training, interrupt, train
from vime.observability.stuck import explain

ROUNDS = 3
# Where the answers are recorded ones, or only the weights are looked at.
SCRIPTED = ("--debug-engine-module", "vime.backends.vllm_utils.scripted_server")
WANDB_KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def recorded(tiny_task: TinyTask, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rollouts of four rounds by a scripted engine: who sampled them is no matter of those who train on them. Also
    shows --debug-rollout-only."""
    directory = tmp_path_factory.mktemp("recorded")
    path = f"{directory}/rollout_{{rollout_id}}.jsonl"
    flags = [*tiny_task.flags(), "--num-rollout", "4", "--debug-rollout-only", "--save-debug-rollout-data", path]
    finished = train([*flags, *SCRIPTED], directory / "run")
    assert finished.code == 0, finished.output
    assert sorted(entry.name for entry in directory.glob("rollout_*")) == [f"rollout_{i}.jsonl" for i in range(4)]
    return path


def replay_function(directory: Path, recorded: str) -> str:
    """A rollout function that answers recorded rounds, so that two live runs train on the same tokens."""
    plugin = directory / "replay.py"
    plugin.write_text(
        "from pathlib import Path\n\n"
        "from vime.rollout.record import load_rollout\n"
        "from vime.types import RolloutFnTrainOutput\n\n\n"
        "def generate_rollout(args, rollout_id, data_source, evaluation=False):\n"
        f"    samples = load_rollout(Path({recorded!r}.format(rollout_id=rollout_id)))\n"
        "    return RolloutFnTrainOutput(samples=samples)\n"
    )
    return f"{plugin}:generate_rollout"


def test_buffer_run_trains_publishes_and_leaves_nothing(tiny_task: TinyTask, tmp_path: Path) -> None:
    flags = [*tiny_task.flags(), "--num-rollout", str(ROUNDS), "--transferqueue-mode", "buffer"]
    flags += ["--eval-prompt-data", "held_out", str(tiny_task.prompts), "--eval-interval", "3", "--use-tensorboard"]
    flags += ["--check-weight-update-equal", "--use-wandb", "--wandb-mode", "offline", "--wandb-key", WANDB_KEY]
    finished = train(flags, tmp_path / "run")
    assert finished.code == 0, finished.output
    metrics = finished.metrics()
    for rollout_id in range(ROUNDS):
        assert metrics[rollout_id]["weights/version"] == rollout_id + 1
        # the engine sampled these tokens with the very weights that train on them
        assert metrics[rollout_id]["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert metrics[rollout_id]["transferqueue/sample_staleness/max"] == 0
        assert metrics[rollout_id]["train/grad_norm"] > 0
        rates = ("perf/train_tokens_per_sec", "perf/train_tflops", "perf/peak_memory")
        rates += ("transferqueue/put_latency", "transferqueue/get_latency")
        assert all(metrics[rollout_id][name] > 0 for name in rates)
        assert metrics[rollout_id]["perf/padding_waste"] == metrics[rollout_id]["perf/dp_imbalance_flops"] == 0
        assert undocumented(metrics[rollout_id]) == []
    written = [path for path in finished.run_dir.rglob("*") if path.is_file()]
    assert any(path.name.endswith(".wandb") for path in written)
    assert [path for path in written if WANDB_KEY.encode() in path.read_bytes()] == []
    assert WANDB_KEY not in finished.output
    hashes = finished.confirmed_hashes()
    assert len(hashes) == ROUNDS + 1  # the initial weights, then one version a round
    assert len(set(hashes)) == ROUNDS + 1
    assert len(finished.events("eval_done")) == 2
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_fsdp_ranks_train_and_publish_what_the_engine_then_samples_with(tiny_task: TinyTask, tmp_path: Path) -> None:
    flags = [*tiny_task.flags(), "--num-rollout", "2", "--train-backend", "fsdp", "--actor-num-gpus-per-node", "2"]
    flags += ["--check-weight-update-equal", "--use-kl-loss", "--kl-loss-coef", "0.01", "--save-interval", "2"]
    finished = train(flags, tmp_path / "run")
    assert finished.code == 0, finished.output
    metrics = finished.metrics()
    for rollout_id in range(2):
        assert metrics[rollout_id]["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert metrics[rollout_id]["train/grad_norm"] > 0
    assert len(set(finished.confirmed_hashes())) == 3  # the initial weights, then one version a round
    assert list((tmp_path / "run" / "checkpoints").glob("iter_*/model/*.distcp"))


@pytest.mark.nightly
def test_off_and_buffer_with_models_of_their_own_ranks_and_trainers_that_sleep_give_bit_equal_weights(
    tiny_task: TinyTask, recorded: str, tmp_path: Path
) -> None:
    """PPO: policy, reference and critic in one process, and in three that sleep while the engine generates. In the
    usual session: the bits of roles that are split and asleep by test_roles.py, of mode buffer by
    test_equivalence_ladder.py, and a critic on a rank of its own through Ray by `whole` below."""
    flags = [*tiny_task.flags(), "--num-rollout", str(ROUNDS), "--max-staleness", str(ROUNDS)]
    flags += ["--rollout-function-path", replay_function(tmp_path, recorded)]
    flags += ["--advantage-estimator", "ppo", "--kl-coef", "0.1", "--save-interval", str(ROUNDS), *SCRIPTED]
    hashes, losses = {}, {}
    for mode, more in {"off": [], "buffer": ["--separate-roles", "reference", "critic", "--offload-train"]}.items():
        finished = train([*flags, "--transferqueue-mode", mode, *more], tmp_path / mode)
        assert finished.code == 0, finished.output
        hashes[mode] = finished.confirmed_hashes()
        losses[mode] = [finished.metrics()[number]["train/value_loss"] for number in range(ROUNDS)]
        assert list(finished.run_dir.glob("checkpoints/iter_*/model/critic/*.distcp"))
        ranks = {path.name.split(".")[0] for path in (finished.run_dir / "events").iterdir()}
        assert ({"reference-0", "critic-0"} <= ranks) == bool(more)
        assert ("perf/offload_time" in finished.metrics()[0]) == ("--offload-train" in more)
    assert len(set(hashes["off"])) == ROUNDS + 1
    assert hashes["off"] == hashes["buffer"]
    assert losses["off"] == losses["buffer"]


def replayed(tiny_task: TinyTask, recorded: str, run_dir: Path, num_rollout: int, *extra: str) -> Finished:
    """Training alone on recorded rounds; exports HF weights with each checkpoint."""
    flags = [*tiny_task.flags(), "--debug-train-only", "--load-debug-rollout-data", recorded]
    flags += ["--num-rollout", str(num_rollout), "--max-staleness", "4", "--save-interval", "2"]
    flags += ["--lr-decay-style", "linear", "--lr-warmup-iters", "1", "--lr-decay-iters", "4"]
    flags += ["--on-train-rollout-diff", "ignore"]  # no model sampled these tokens
    finished = train([*flags, *extra], run_dir)
    assert finished.code == 0, finished.output
    return finished


PPO = ("--advantage-estimator", "ppo")


@pytest.fixture(scope="module")
def whole(tiny_task: TinyTask, recorded: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """PPO over four rounds by one rank, the critic on a rank of its own; exports `whole_<round>` beside its run. Its
    checkpoints are written in the background, and the end of the run waits for the last one."""
    directory = tmp_path_factory.mktemp("whole")
    more = ("--separate-roles", "critic", "--async-save", "--save-hf", f"{directory}/whole_{{rollout_id}}")
    return replayed(tiny_task, recorded, directory / "run", 4, *PPO, *more)


def test_resumed_run_equals_the_run_that_never_stopped(
    tiny_task: TinyTask, recorded: str, whole: Finished, tmp_path: Path
) -> None:
    """Two worlds save, and load, one checkpoint: the one behind round 1 of the run that went on. That a run ends there,
    or is killed, and another goes on: `test_sigterm_to_all_saves_the_last_round_and_resume_goes_on` and
    test_equivalence_ladder.py."""
    checkpoints = whole.run_dir / "checkpoints"
    assert int((checkpoints / "latest_checkpointed_iteration.txt").read_text()) == 3
    more = ("--separate-roles", "critic", "--save-hf", f"{tmp_path}/resumed_{{rollout_id}}")
    load = ("--load", str(checkpoints / "iter_0000001"), "--save", str(tmp_path / "checkpoints"))
    second = replayed(tiny_task, recorded, tmp_path / "second", 4, *PPO, *more, *load)
    assert sorted(second.metrics()) == [2, 3]  # continues at the next rollout id
    for name in ("train/loss", "train/lr", "train/value_loss", "train/critic_lr", "train/critic_grad_norm"):
        assert second.metrics()[3][name] == whole.metrics()[3][name]
    exported = whole.run_dir.parent / "whole_3/model.safetensors"
    assert exported.read_bytes() == (tmp_path / "resumed_3/model.safetensors").read_bytes()


@pytest.mark.nightly
def test_four_trainer_actors_learn_what_one_learns(
    tiny_task: TinyTask, recorded: str, whole: Finished, tmp_path: Path
) -> None:
    """TP2 x DP2, each with its part of policy and critic, against one rank of each, through Ray and its tickets. In the
    usual session: the same of layouts without Ray by test_megatron_layouts.py and test_megatron_ppo.py, and several
    ranks through Ray by `test_prefetch_trains_tokens_one_version_old` (TP2) and test_equivalence_ladder.py (DP2)."""
    layout = ["--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2"]
    four = replayed(tiny_task, recorded, tmp_path / "four", 4, *PPO, *layout)
    for rollout_id in range(4):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/value_loss", "train/critic_grad_norm"):
            expected = whole.metrics()[rollout_id][name]
            assert four.metrics()[rollout_id][name] == pytest.approx(expected, rel=1e-4, abs=1e-6), (rollout_id, name)


def test_prefetch_trains_tokens_one_version_old(tiny_task: TinyTask, tmp_path: Path) -> None:
    """Two tensor-parallel ranks, two engines, weights broadcast over gloo."""
    flags = [*tiny_task.flags(), "--num-rollout", str(ROUNDS), "--transferqueue-mode", "buffer"]
    flags += ["--max-staleness", "1", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
    flags += ["--rollout-num-engines", "2", "--update-weight-transport", "gloo"]
    finished = train(flags, tmp_path / "run", script="train_async.py")
    assert finished.code == 0, finished.output
    assert finished.events("weights_confirmed")[-1]["engines"] == ["engine-0", "engine-1"]
    staleness = [metrics["transferqueue/sample_staleness/max"] for _, metrics in sorted(finished.metrics().items())]
    assert staleness == [0, 1, 1]  # round 0 is sampled by the weights it trains, later ones while training ran
    for rollout_id, metrics in finished.metrics().items():
        # what cannot be compared with the trainer's own is compared through a fresh score by the engines
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert metrics["train/train_rollout_compared_tokens"] > 0
        assert ("rollout/rescored_logprob_abs_diff" in metrics) is (rollout_id > 0)
        assert metrics.get("rollout/rescored_logprob_abs_diff", 0) < 1e-5


STOPS_THE_CORE = '''"""Generate as ever, but from round 2 on stop this run's engine core (SIGSTOP) before asking it."""

import contextlib
import os

import psutil

from tests.helpers.training import MARK
from vime.rollout.generation import generate


async def generate_until_round_2(args, sample, sampling_params):
    for pid in psutil.pids() if sample.rollout_id == 2 else ():
        with contextlib.suppress(psutil.NoSuchProcess):  # of somebody else, and gone meanwhile
            process = psutil.Process(pid)
            if "EngineCore" not in " ".join(process.cmdline()):
                continue
            server = process.parent()  # the core's title may have overwritten its own environment
            if server is not None and server.environ().get(MARK) == os.environ[MARK]:
                process.suspend()
    return await generate(args, sample, sampling_params)
'''


def test_an_engine_that_hangs_is_named_and_what_was_trained_is_saved(tiny_task: TinyTask, tmp_path: Path) -> None:
    """Its core is stopped, not dead: the API server still answers, no token comes. `vime why-stuck` says so before the
    health check has given up, and what ended the run afterwards."""
    (tmp_path / "stop.py").write_text(STOPS_THE_CORE)
    flags = [*tiny_task.flags(), "--num-rollout", "1000", "--engine-health-timeout-secs", "8"]
    flags += ["--max-restarts", "0"]
    flags += ["--custom-generate-function-path", f"{tmp_path / 'stop.py'}:generate_until_round_2"]
    training = Training("train.py", flags, tmp_path / "run")
    training.wait_for_event("round_trained", count=2)
    verdicts = []
    through = "from rollout-manager, which waits"  # what a process waits for is written once a second: not at first
    while training.process.poll() is None and not any(
        through in line and "from engine-0; engine-0" in line for line in verdicts
    ):
        verdicts.append(explain(tmp_path / "run").line)
        time.sleep(0.2)  # the cores are the run's
    finished = training.finish()
    assert "driver waits" in verdicts[-1], verdicts[-3:]
    assert through in verdicts[-1], verdicts[-3:]
    assert "(VLLM::EngineCore" in verdicts[-1], verdicts[-3:]
    over = explain(tmp_path / "run")
    assert over.is_stuck
    assert "the run has ended" in over.line
    assert "engine-0 lives" in over.line
    assert finished.code == 3, finished.output
    checkpoints = tmp_path / "run" / "checkpoints"
    assert "engine-0 lives" in finished.output
    assert f"State saved in {checkpoints}/iter_0000001; continue with --load {checkpoints}" in finished.output


def test_sigterm_to_all_saves_the_last_round_and_resume_goes_on(tiny_task: TinyTask, tmp_path: Path) -> None:
    """As `timeout` and schedulers send it, to the process group. Ray would end at once, and the driver by a handler of
    Ray's; Ctrl-C goes the same way (test_colocated_run.py)."""
    flags = [*tiny_task.flags(), "--transferqueue-mode", "buffer", "--update-weight-transport", "disk"]
    background = ["--save-interval", "1", "--keep-checkpoints", "2", "--async-save"]
    training = Training("train.py", [*flags, *background, "--num-rollout", "1000"], tmp_path / "run")
    training.wait_for_event("round_trained", count=2)
    interrupt(training, signal.SIGTERM)
    finished = training.finish()
    assert finished.code == 130, finished.output
    checkpoints = tmp_path / "run" / "checkpoints"
    saved = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert saved == len(finished.events("round_trained")) - 1
    assert f"--load {checkpoints}" in finished.output
    more = [*flags, *SCRIPTED, "--num-rollout", str(saved + 2), "--load", str(checkpoints)]
    resumed = train(more, tmp_path / "resumed")
    assert resumed.code == 0, resumed.output
    assert sorted(resumed.metrics()) == [saved + 1]
    assert resumed.confirmed_hashes()[0] == finished.confirmed_hashes()[saved + 1]
