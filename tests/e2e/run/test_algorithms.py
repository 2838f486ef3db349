"""Algorithms through train.py: imitation without engines, and stale tokens under every correction."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.training import TinyTask, train

ROUNDS = 4
TAUGHT_REWARD = '''"""Reward: share of even tokens; the teacher likes every token alike."""


async def taught(args, sample, **kwargs):
    answer = sample.tokens[-sample.response_length :]
    sample.teacher_log_probs = [-4.0] * sample.response_length
    return sum(token % 2 == 0 for token in answer) / max(1, len(answer))
'''


def test_imitation_lowers_its_loss_without_starting_an_engine(tiny_task: TinyTask, tmp_path: Path) -> None:
    flags = [*tiny_task.flags(), "--num-rollout", "8", "--transferqueue-mode", "buffer", "--debug-train-only"]
    flags += ["--rollout-function-path", "vime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss"]
    flags += ["--n-samples-per-prompt", "1", "--rollout-batch-size", "8", "--calculate-per-token-loss", "--lr", "3e-3"]
    finished = train(flags, tmp_path / "run")
    assert finished.code == 0, finished.output
    losses = [metrics["train/loss"] for _, metrics in sorted(finished.metrics().items())]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    assert finished.events("weights_confirmed") == []


@pytest.mark.parametrize(
    "more",
    [
        [
            *("--advantage-estimator", "ppo", "--kl-coef", "0.05", "--gamma", "0.99", "--lambd", "0.95", "--use-opd"),
            *("--critic-lr", "3e-3", "--save-interval", "4"),
        ],
        pytest.param(
            ["--advantage-estimator", "gspo", "--off-policy-correction", "mis", "--get-mismatch-metrics"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["ppo-distilled", "gspo-mis"],
)
def test_tokens_one_version_old_are_weighed(tiny_task: TinyTask, tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "reward.py").write_text(TAUGHT_REWARD)
    flags = [*tiny_task.flags(), "--num-rollout", str(ROUNDS), "--max-staleness", "1", "--lr", "1e-3", *more]
    flags += ["--custom-rm-path", f"{tmp_path / 'reward.py'}:taught"]
    finished = train(flags, tmp_path / "run", script="train_async.py")
    assert finished.code == 0, finished.output
    metrics = finished.metrics()
    # round 0 is sampled by the weights that train on it; every later one by those before
    assert "train/ess/staleness_1" not in metrics[0]
    assert metrics[0]["train/ess"] == pytest.approx(1, abs=1e-4)
    for rollout_id in range(1, ROUNDS):
        assert metrics[rollout_id]["train/token_share/staleness_1"] == 1
        assert 0 < metrics[rollout_id]["train/ess/staleness_1"] <= 1
        assert metrics[rollout_id]["train/grad_norm"] > 0
    if "ppo" in more:
        assert metrics[0]["train/value_mean"] == 0
        assert metrics[ROUNDS - 1]["train/value_loss"] < metrics[0]["train/value_loss"]
        [checkpoint] = (tmp_path / "run" / "checkpoints").glob("iter_*")
        assert any(path.name == "critic" for path in checkpoint.rglob("*"))
