"""Real runs on the scripted engine: the same weights in every mode, and after kills. The whole matrix of phases takes
an hour (`scripts/chaos.sh`); here are a kill that ends nothing, and one that ends the life of every part."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.training import TinyTask, train
from vime.cli.chaos import parse_case
from vime.cli.chaos_run import ChaosRun, Plan

ROUNDS = 6


def scripted(tiny_task: TinyTask, mode: str) -> list[str]:
    engine = ["--debug-engine-module", "vime.backends.vllm_utils.scripted_server"]
    return [*tiny_task.flags(), *engine, "--num-rollout", str(ROUNDS), "--transferqueue-mode", mode]


def test_a_run_that_was_killed_twice_has_the_weights_of_the_run_that_was_not(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    """Undisturbed in mode off; in streaming the ledger is killed with a commit that nobody has heard of, then a trainer
    with gradients and old weights."""
    undisturbed = train(scripted(tiny_task, "off"), tmp_path / "off")
    assert undisturbed.code == 0, undisturbed.output
    expected = dict(enumerate(undisturbed.confirmed_hashes()))
    assert len(set(expected.values())) == ROUNDS + 1
    plan = Plan(out=tmp_path, script="train.py", flags=tuple(scripted(tiny_task, "streaming")), deadline_s=200)
    run = ChaosRun(plan, "killed", expected=expected)
    outcome = run.complete([parse_case("ledger@ledger.commit:2"), parse_case("trainer@trainer.optimizer:1")])
    assert outcome.is_good, (outcome, run.log.read_text())
    assert [(strike.hit, strike.then.split(":")[0]) for strike in outcome.strikes] == [
        ("ledger", "went on"),  # Ray starts it again on its file, and the answer that was lost is asked for again
        ("trainer", "restarted itself"),
    ]
    assert outcome.codes == [0]
    assert outcome.audit == "kept"
    assert run.hashes == expected
