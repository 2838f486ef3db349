"""--colocate through train.py: engines and trainers in turns, with the same weights as without, and where each stands.

On a CPU nothing is freed; a scripted engine refuses an update while its weights are asleep, and prompts after it has
discarded them, and lets prompts wait while anything of it is asleep.
"""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.metrics_page import undocumented
from tests.helpers.ray_head import joined_node, live_in, running_head
from tests.helpers.training import Finished, TinyTask, Training, interrupt, train

ROUNDS = 3
SCRIPTED = ("--debug-engine-module", "vime.backends.vllm_utils.scripted_server")
STEPS = ("wait", "engine_sleep", "train", "save", "offload", "engine_wake", "update_weights", "eval")
GENERATED = ["wait"]
TRAINED = ["engine_sleep", "train"]
UPDATED = ["offload", "engine_wake", "update_weights", "offload", "engine_wake"]


def steps(finished: Finished) -> list[str]:
    """What the driver did, in order, without repetition."""
    events = [event for event in finished.events("span_started") if event["process"] == "driver"]
    names = [event["name"] for event in sorted(events, key=lambda event: event["mono"]) if event["name"] in STEPS]
    return [name for name, _ in itertools.groupby(names)]


def sent_by(finished: Finished) -> dict[str, int]:
    """How many updates each process has brought to engines."""
    events = finished.events("span_started")
    return Counter(event["process"] for event in events if event["name"] == "load_weights")


def test_two_ranks_and_two_engines_in_turns_train_the_same_bits_as_apart(tiny_task: TinyTask, tmp_path: Path) -> None:
    flags = [*tiny_task.flags(), *SCRIPTED, "--num-rollout", str(ROUNDS), "--actor-num-gpus-per-node", "2"]
    flags += ["--save-interval", "2", "--eval-prompt-data", "held_out", str(tiny_task.prompts), "--eval-interval", "2"]
    flags += ["--skip-eval-before-train", "--on-train-rollout-diff", "ignore"]
    apart = train([*flags, "--rollout-num-engines", "2"], tmp_path / "apart")
    shared = train([*flags, "--colocate", "--transferqueue-mode", "buffer"], tmp_path / "shared")
    assert (apart.code, shared.code) == (0, 0), apart.output + shared.output
    assert shared.confirmed_hashes() == apart.confirmed_hashes()
    assert len(set(shared.confirmed_hashes())) == ROUNDS + 1
    assert sent_by(apart) == {"trainer-0": ROUNDS + 1}
    assert sent_by(shared) == {"trainer-0": ROUNDS + 1, "trainer-1": ROUNDS + 1}, "each to the engine on its GPU"
    assert [event["engines"] for event in shared.events("weights_confirmed")] == [["engine-0", "engine-1"]] * 4
    for name in ("train/loss", "rollout/reward_mean", "eval/held_out/reward_mean"):
        assert [line.get(name) for line in shared.metrics().values()] == [
            line.get(name) for line in apart.metrics().values()
        ]
    for line in shared.metrics().values():
        assert line["perf/engine_sleep_time"] > 0
        assert line["perf/engine_wake_time"] > 0
        assert undocumented(line) == []
    expected = [*UPDATED, "offload"]  # nothing to free before the first prompts
    for rollout_id in range(ROUNDS):
        is_saved = ["save"] * (rollout_id in (1, 2))
        is_evaluated = ["offload", "eval"] * (rollout_id in (1, 2))
        expected += [*GENERATED, *TRAINED, *is_saved, *UPDATED, *is_evaluated, "offload"]
    assert steps(shared) == [name for name, _ in itertools.groupby(expected[:-1])]


@pytest.mark.nightly
def test_on_two_nodes_the_rank_of_each_node_sends_to_the_engine_there(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes are on this machine: it shows who sends, not that memory of another host is out of reach."""
    home = tmp_path / "home"
    home.mkdir()
    live_in(home, monkeypatch)
    flags = [*tiny_task.flags(), *SCRIPTED, "--num-rollout", "2", "--colocate"]
    here = train([*flags, "--actor-num-gpus-per-node", "2"], tmp_path / "here")
    with running_head(home, with_dashboard=False) as head, joined_node(head, num_cpus=4):
        more = ["--ray-address", head.address, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1"]
        there = train([*flags, *more], tmp_path / "there")
    assert (here.code, there.code) == (0, 0), here.output + there.output
    assert there.confirmed_hashes() == here.confirmed_hashes()
    assert sent_by(there) == {"trainer-0": 3, "trainer-1": 3}
    placed = (tmp_path / "there/logs/driver.log").read_text()
    assert "trainer rank 0 and engine-0" in placed
    assert "trainer rank 1 and engine-1" in placed


@pytest.mark.nightly
def test_rank_1_sends_alone_while_the_engine_of_rank_0_is_lost(tiny_task: TinyTask, tmp_path: Path) -> None:
    flags = [*tiny_task.flags(), *SCRIPTED, "--num-rollout", "12", "--colocate", "--actor-num-gpus-per-node", "2"]
    pace = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "30"}
    training = Training(
        "train.py", [*flags, "--on-train-rollout-diff", "ignore"], tmp_path / "run", variables=pace
    )  # the engine's answers are made up
    training.wait_for_event("weights_confirmed", count=2)
    [engine] = [
        process
        for process, command in training._members()
        if f"-m {SCRIPTED[1]}" in command and "guard.py" not in command and "--seed 42 " in command
    ]
    engine.kill()
    finished = training.finish()
    assert finished.code == 0, finished.output
    assert finished.events("run_restarted") == []
    confirmed = [event["engines"] for event in finished.events("weights_confirmed")]
    assert ["engine-1"] in confirmed
    assert confirmed[-1] == ["engine-0", "engine-1"]
    assert len(confirmed) == 13
    assert sent_by(finished)["trainer-1"] == 13


@pytest.mark.nightly
def test_ctrl_c_while_engines_generate_saves_what_trainers_that_sleep_have_learned(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    flags = [*tiny_task.flags(), *SCRIPTED, "--num-rollout", str(ROUNDS), "--colocate"]
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "100"]
    pace = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "1"}  # so that the signal comes while engines generate
    training = Training("train.py", [*flags, *save], tmp_path / "stopped", variables=pace)
    training.wait_for_event("weights_confirmed", count=2)
    interrupt(training)
    stopped = training.finish()
    assert stopped.code == 130, stopped.output
    assert "interrupted during generation" in stopped.output
    resumed = train([*flags, *save, "--load", str(tmp_path / "checkpoints")], tmp_path / "resumed")
    assert resumed.code == 0, resumed.output
    trained = len(stopped.events("round_trained"))
    assert [event["rollout_id"] for event in resumed.events("round_trained")] == list(range(trained, ROUNDS))
