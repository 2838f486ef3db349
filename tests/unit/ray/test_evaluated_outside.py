"""What becomes of an evaluation by jobs when a sample of it has failed, or its reward has."""

import pytest

from tests.helpers.rollout_setup import make_args, write_jsonl, write_model_directory
from vime.gateway.messages import SAMPLE_FAILED
from vime.ray.rollout_manager import RolloutManager
from vime.ray.workers import RemoteWorkers
from vime.rollout.evaluate import eval_data_sets, eval_groups
from vime.types import RewardError, SampleStatus


class Jobs(RemoteWorkers):
    """Jobs that have played all prompts but one, of which they say `error`."""

    def __init__(self, args, error) -> None:
        self._args, self._error = args, error

    def evaluate(self, rollout_id):
        [(one, prompts)] = eval_data_sets(self._args)
        groups = eval_groups(one, prompts, rollout_id)
        for group in groups:
            for sample in group:
                sample.tokens, sample.response_length, sample.reward = [*sample.tokens, 5], 1, 1.0
                sample.status = SampleStatus.COMPLETED
        return {(one.name, number): group for number, group in enumerate(groups)} | {(one.name, 1): self._error}


def evaluated(tmp_path, error):
    model = write_model_directory(tmp_path / "model")
    data = write_jsonl(tmp_path / "held.jsonl", [{"input": "a", "label": "a"}] * 4)
    flags = ("--hf-checkpoint", model, "--eval-prompt-data", "held", data, "--label-key", "label")
    args = make_args(*flags, "--on-reward-error", "drop")

    class Coordinator:
        workers = Jobs(args, error)

    manager = RolloutManager.__new__(RolloutManager)
    manager._config, manager._coordinator = args.config, Coordinator()
    return manager._evaluated_outside(0).metrics


def test_a_prompt_whose_sample_failed_is_left_out_and_counted_as_in_the_run_itself(tmp_path, caplog):
    metrics = evaluated(tmp_path, f"{SAMPLE_FAILED}its container died")
    assert metrics["eval/held/failed"] == 1
    assert metrics["eval/held/reward_mean"] == 1.0
    assert "eval/held/reward_errors" not in metrics
    assert "evaluation held: prompt 1 is left out, a sample has failed: its container died" in caplog.text


def test_a_reward_that_failed_counts_against_its_share(tmp_path):
    with pytest.raises(RewardError, match=r"the reward failed for 1 of 4 prompts.*no rubric"):
        evaluated(tmp_path, "no rubric")
