"""Real runs on the scripted engine: the same weights in every mode, and after a kill in the middle of a step."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.training import TinyTask, train
from vime.cli.chaos import parse_case
from vime.cli.chaos_run import ChaosRun, Plan

ROUNDS = 3


def scripted(tiny_task: TinyTask, mode: str) -> list[str]:
    engine = ["--debug-engine-module", "vime.backends.vllm_utils.scripted_server"]
    return [*tiny_task.flags(), *engine, "--num-rollout", str(ROUNDS), "--transferqueue-mode", mode]


def test_a_run_killed_in_a_step_has_the_weights_of_the_run_that_was_not(tiny_task: TinyTask, tmp_path: Path) -> None:
    """Undisturbed in mode off; killed in streaming when a trainer has gradients of round 1 and old weights."""
    undisturbed = train(scripted(tiny_task, "off"), tmp_path / "off")
    assert undisturbed.code == 0, undisturbed.output
    expected = dict(enumerate(undisturbed.confirmed_hashes()))
    assert len(set(expected.values())) == ROUNDS + 1
    plan = Plan(out=tmp_path, script="train.py", flags=tuple(scripted(tiny_task, "streaming")), deadline_s=200)
    run = ChaosRun(plan, "killed", expected=expected)
    outcome = run.complete([parse_case("trainer@trainer.optimizer:2")])
    assert outcome.is_good, (outcome, run.log.read_text())
    assert (outcome.codes, outcome.num_restarts) == ([0], 1)  # it started its parts again itself
    assert outcome.audit == "kept"
    assert run.hashes == expected
