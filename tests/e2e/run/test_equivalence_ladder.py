"""One answer from every mode, bit for bit: off, another mode that goes on with it, and modes killed and resumed.

Real Ray, vLLM, megatron-core and TransferQueue under --reference-mode. What is compared is the content hash of every
version, which each engine computed over the weights it received. A mode is added by a line in MODES.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import walk
from tests.helpers.training import Finished, TinyTask, Training, train

ROUNDS = 4
MODES = {
    # two engines behind two routers: which of them answers a prompt must not matter
    "buffer": ["--transferqueue-mode", "buffer", "--rollout-num-engines", "2", "--vllm-router-count", "2"],
    "streaming": ["--transferqueue-mode", "streaming"],
    # engines that sleep and discard their weights while two ranks train, and the reverse
    "colocated": ["--colocate", "--rollout-num-engines", "1"],
    # before the kill too; in the usual session four workers go on with what none began
    "two workers": ["--transferqueue-mode", "streaming", "--num-rollout-workers", "2"],
    "four workers": ["--transferqueue-mode", "streaming", "--num-rollout-workers", "4"],
}
NIGHTLY = ("buffer", "colocated", "two workers", "four workers")
GOES_ON_WITH = {
    "buffer": ["--rollout-num-engines", "1", "--vllm-router-count", "1"],
    "streaming": ["--num-rollout-workers", "4"],
}
"""Flags of the life after the kill alone: who generates may change."""
FILTER = '''"""Drop about half of the groups, so that what a round is made of depends on what was sampled."""


def keep(args, samples):
    return sum(sample.reward for sample in samples) >= len(samples) / 2
'''


@pytest.fixture(scope="module")
def flags(tiny_task: TinyTask, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Rounds of 4 groups, 6 asked for at a time; every round is a checkpoint."""
    plugin = tmp_path_factory.mktemp("filter") / "filter.py"
    plugin.write_text(FILTER)
    return [
        *tiny_task.flags(), "--num-rollout", str(ROUNDS), "--save-interval", "1", "--reference-mode",
        "--actor-num-gpus-per-node", "2",
        "--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path", f"{plugin}:keep",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def never_stopped(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The lowest rung: mode off, from the first round to the last."""
    run = tmp_path_factory.mktemp("off") / "run"
    finished = train(flags, run, variables=walk.environment(trace_of(run)))
    assert finished.code == 0, finished.output
    return finished


def trace_of(run_dir: Path) -> Path:
    """Where the processes of a run write down which functions they enter."""
    return run_dir.with_name("entered")


def walk_faults(finished: Finished, mode: str, rollout_id: int) -> list[str]:
    """Where the page of a mode and what the run entered differ."""
    page = walk.read_page(walk.ROOT / "docs" / f"walk-{mode}.md")
    return walk.faults(page, walk.entered(trace_of(finished.run_dir), finished.run_dir, rollout_id=rollout_id))


def hashes(finished: Finished) -> dict[int, str]:
    """Version -> content hash."""
    return {event["version"]: event["content_hash"] for event in finished.events("weights_confirmed")}


def test_the_weights_move_each_round_and_groups_are_dropped_on_the_way(never_stopped: Finished) -> None:
    """Without either, equal hashes below would say little."""
    assert sorted(hashes(never_stopped)) == list(range(ROUNDS + 1))
    assert len(set(hashes(never_stopped).values())) == ROUNDS + 1
    metrics = never_stopped.metrics()
    assert sum(metrics[number]["rollout/dropped_groups"] for number in range(ROUNDS)) > 0


def test_the_walk_of_mode_off_is_the_way_of_a_real_round(never_stopped: Finished) -> None:
    assert walk_faults(never_stopped, "off", 2) == []


def test_a_page_with_a_step_too_many_or_a_file_too_few_is_found_out(never_stopped: Finished) -> None:
    page = walk.read_page(walk.ROOT / "docs" / "walk-off.md")
    trace = walk.entered(trace_of(never_stopped.run_dir), never_stopped.run_dir, rollout_id=2)
    swapped = replace(page, steps=(*page.steps[1:], page.steps[0]))  # what is first comes last
    assert any("entered only before" in fault for fault in walk.faults(swapped, trace))
    unknown = replace(page, steps=(*page.steps, walk.Step(99, "ray/driver.py", "no_such_function")))
    assert any("never entered" in fault for fault in walk.faults(unknown, trace))
    short = replace(page, steps=tuple(step for step in page.steps if step.file != "batching/plan.py"))
    assert walk.faults(short, trace) == ["batching/plan.py was entered and is not on the page"]


@pytest.mark.parametrize("mode", ["buffer", pytest.param("off", marks=pytest.mark.nightly)])
def test_what_mode_off_did_in_two_rounds_is_gone_on_with(
    never_stopped: Finished, flags: list[str], tmp_path: Path, mode: str
) -> None:
    """In mode buffer with two engines behind two routers: of the usual session, its rounds and its resumption. That a
    killed run goes on: streaming below; in mode buffer, by night."""
    second = never_stopped.run_dir / "checkpoints" / "iter_0000001"
    resumed = train([*flags, *MODES.get(mode, []), "--load", str(second)], tmp_path / "run")
    assert resumed.code == 0, resumed.output
    assert hashes(resumed) == {version: hashes(never_stopped)[version] for version in range(2, ROUNDS + 1)}
    assert resumed.metrics()[3]["train/loss"] == never_stopped.metrics()[3]["train/loss"]


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.nightly] * (mode in NIGHTLY)) for mode in MODES]
)
def test_another_mode_killed_in_the_middle_and_resumed(
    never_stopped: Finished, flags: list[str], tmp_path: Path, mode: str
) -> None:
    flags = [*flags, *MODES[mode], "--save", str(tmp_path / "checkpoints")]
    training = Training("train.py", flags, tmp_path / "killed")
    training.wait_for_event("weights_confirmed", count=2)  # round 0 is trained and saved; round 1 begins
    os.kill(training.process.pid, signal.SIGKILL)
    killed = training.finish()
    assert killed.code == -signal.SIGKILL
    resumed = train(
        [*flags, *GOES_ON_WITH.get(mode, []), "--load", str(tmp_path / "checkpoints")],
        tmp_path / "resumed",
        variables=walk.environment(trace_of(tmp_path / "resumed")) if mode == "streaming" else None,
    )
    assert resumed.code == 0, resumed.output
    expected = hashes(never_stopped)
    assert {version: expected[version] for version in hashes(killed)} == hashes(killed)  # another mode
    assert min(hashes(resumed)) >= 1  # it did not begin anew
    assert max(hashes(resumed)) == ROUNDS
    assert {version: expected[version] for version in hashes(resumed)} == hashes(resumed)  # and after the kill
    if mode == "streaming":
        assert walk_faults(resumed, "streaming", ROUNDS - 1) == []
