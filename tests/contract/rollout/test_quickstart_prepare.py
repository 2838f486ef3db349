"""What the quick start begins with and how it ends: data, the model that is shipped, the verdict at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.rollout_setup import EXAMPLES, example_module, make_args
from vime.rollout.data_source import RolloutDataSource

MODEL = EXAMPLES / "quickstart" / "model"


def run_example(name: str, *arguments: object, expected_code: int = 0) -> str:
    """Output of an example script, run as a user runs it."""
    command = [sys.executable, str(EXAMPLES / "quickstart" / name), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, timeout=120, text=True, check=False)
    assert ran.returncode == expected_code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The script run twice: directory, time of the first file, output of the second run."""
    home = tmp_path_factory.mktemp("prepared")
    arguments = ("--data-dir", home, "--num-train", "40", "--num-eval", "8")
    run_example("prepare.py", *arguments)
    stamp = (home / "train.jsonl").stat().st_mtime_ns
    return home, stamp, run_example("prepare.py", *arguments)


def test_a_second_preparation_does_nothing(prepared: tuple[Path, int, str]) -> None:
    home, stamp, output = prepared
    assert output.count("is up to date") == 1
    assert (home / "train.jsonl").stat().st_mtime_ns == stamp


def test_prepared_data_load_as_prompts_and_evaluation_prompts_are_held_out(prepared: tuple[Path, int, str]) -> None:
    home, _, _ = prepared
    args = make_args("--hf-checkpoint", MODEL, "--prompt-data", home / "train.jsonl", "--label-key", "label")
    source = RolloutDataSource(args)
    assert len(source) == 40
    sample = source.get_samples(1)[0][0]
    assert sample.tokens[0] == 1
    assert len(sample.tokens) == len(sample.prompt) + 1
    train, held_out = (
        {json.loads(line)["input"] for line in (home / f"{name}.jsonl").open()} for name in ("train", "eval")
    )
    assert (len(train), len(held_out), train & held_out) == (40, 8, set())


def test_the_shipped_model_is_the_one_of_the_script_and_mostly_guesses() -> None:
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    warm_start = example_module("quickstart/warm_start.py")
    model = Qwen3ForCausalLM.from_pretrained(MODEL)
    shapes, made = (
        {name: tuple(tensor.shape) for name, tensor in each.state_dict().items()}
        for each in (model, warm_start.build_model(0))
    )
    assert shapes == made
    assert AutoTokenizer.from_pretrained(MODEL).get_vocab() == warm_start.build_tokenizer().get_vocab()
    assert warm_start.refusal(warm_start.measure(model, num_problems=512)) is None


def test_a_warm_start_that_misses_the_window_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the README's first command met on another processor: a model that thinks in 2 % of its answers."""
    warm_start = example_module("quickstart/warm_start.py")
    guesses = warm_start.Measured(accuracy=0.14, think_share=0.02, accuracy_when_thinking=0.9)
    monkeypatch.setattr(warm_start, "measure", lambda model: guesses)
    recipe = warm_start.WarmStart(steps=2, more_steps=1, most_measurements=2)
    with pytest.raises(SystemExit, match="nothing is written: it thinks in 2% of its completions, expected 25% to 35%"):
        warm_start.make_model(tmp_path / "model", recipe, seed=0)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("last", "expected_code", "said"),
    [(0.85, 0, "It learned: reward 0.30 in the first 3 rounds, 0.85 in the last 10"), (0.32, 1, "did NOT learn")],
)
def test_the_quick_start_says_whether_it_learned(tmp_path: Path, last: float, expected_code: int, said: str) -> None:
    """The means of 3 and of 10 equal rewards are that reward."""
    metrics: list[dict[str, float]] = [{"eval/held_out/reward_mean": 0.5}]
    metrics += [{"rollout/reward_mean": reward} for reward in [0.3] * 20 + [last] * 10]
    lines = [json.dumps({"step": 0, "metrics": each}) for each in metrics]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert said in run_example("check.py", tmp_path, expected_code=expected_code)


def test_a_run_that_ended_early_has_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "metrics": {"rollout/reward_mean": 0.9}}))
    assert "has 1 rounds, expected 30" in run_example("check.py", tmp_path, expected_code=1)
