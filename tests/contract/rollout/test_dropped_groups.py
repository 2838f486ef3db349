"""A reward that fails ends the run or costs its group, by choice; a run that keeps nothing ends."""

import sqlite3
from contextlib import closing

import pytest

from tests.helpers.rollout_setup import make_args, write_jsonl
from tests.helpers.scripted_engine import Reply, ScriptedEngine
from tests.helpers.streaming import Streaming, groups_of
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import EngineError, PluginError, RewardError

EOS = 2
LETTERS = "abcdefghij"
FAILS_FOR_A = """
def rm(args, sample):
    if sample.prompt == "a":
        raise KeyError("no rubric for a")
    return float(sample.index % 2)
"""
ANSWERS_NAN_FOR_A = FAILS_FOR_A.replace('raise KeyError("no rubric for a")', "return float('nan')")
FAILS = "def rm(args, sample):\n    return 1 / 0\n"
KEEPS_NOTHING = "def keep(args, samples):\n    return False\n"


def echo(request):
    return Reply(token_ids=[request.token_ids[-1], EOS], version="0")


@pytest.fixture
def play(model_dir, tmp_path):
    """play(code, *flags): a round of 2 groups of 2 over the prompts a, b, ... j with a reward function of this code."""
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"input": letter, "label": letter} for letter in LETTERS])

    def run(code, *flags, evaluation=False):
        file = tmp_path / f"reward_{len(list(tmp_path.glob('reward_*')))}.py"  # a file is loaded once per process
        file.write_text(code)
        with ScriptedEngine(echo) as engine:
            args = make_args(
                "--hf-checkpoint", model_dir, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", engine.port,
                "--prompt-data", data, "--label-key", "label", "--custom-rm-path", f"{file}:rm",
                "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 8,
                "--rollout-timeout-secs", 30, *flags,
            )  # fmt: skip
            return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args), evaluation=evaluation)

    return run


def test_by_default_a_reward_that_raises_ends_the_round_and_says_what_else_there_is(play):
    with pytest.raises(RewardError, match=r"no rubric for a.*reward_0.py:4.*--on-reward-error stop; with drop"):
        play(FAILS_FOR_A)


@pytest.mark.parametrize("code", [FAILS_FOR_A, ANSWERS_NAN_FOR_A])
def test_with_drop_the_whole_group_is_left_out_and_counted_and_no_zero_takes_its_place(play, code):
    one_by_one = ("--over-sampling-batch-size", 1)  # of two that take a's place the faster one would be kept
    output = play(code, "--on-reward-error", "drop", *one_by_one)
    assert [group[0].prompt for group in output.samples] == ["b", "c"]
    assert output.metrics["rollout/dropped_reward_error"] == 1
    assert output.metrics["rollout/reward_mean_before_filter"] == 0.5  # b and c, each 0 and 1


def test_above_the_share_that_may_be_dropped_the_run_ends_with_the_count(play):
    # 0.02 of 100 are 2: the third group is one too many
    with pytest.raises(RewardError, match=r"3 of the last 3 groups.*at most 2 of 100.*ZeroDivisionError"):
        play(FAILS, "--on-reward-error", "drop", "--max-reward-error-share", "0.02")


def test_a_reward_that_always_fails_ends_even_where_every_error_may_be_dropped(play):
    with pytest.raises(PluginError, match=r"5 groups in a row.*reward_error 5.*--max-dropped-in-a-row"):
        play(FAILS, "--on-reward-error", "drop", "--max-reward-error-share", "1", "--max-dropped-in-a-row", "5")


def test_an_evaluation_leaves_out_and_counts_prompts_whose_reward_failed(play, tmp_path):
    held_out = tmp_path / "prompts.jsonl"
    flags = ["--on-reward-error", "drop", "--eval-prompt-data", "held", held_out, "--n-samples-per-eval-prompt", 2]
    output = play(FAILS_FOR_A, *flags, evaluation=True)
    assert output.metrics["eval/held/reward_errors"] == 1
    assert output.metrics["eval/held/num_samples"] == 18  # 9 of 10 prompts, 2 answers each: a share of 0.1 is allowed
    with pytest.raises(RewardError, match=r"failed for 1 of 10 prompts, expected at most 0.09 of them.*no rubric"):
        play(FAILS_FOR_A, *flags, "--max-reward-error-share", "0.09", evaluation=True)
    with pytest.raises(RewardError, match=r"evaluation held: the reward failed for 10 of 10 prompts.*ZeroDivision"):
        play(FAILS, *flags, "--max-reward-error-share", "1", evaluation=True)


FAILS_ABOVE = """
from vime.rollout.generation import generate as completions
from vime.types import SampleStatus

async def generate(args, sample, sampling_params, evaluation=False):
    if sample.group_index >= {first} and sample.index % 2:
        sample.status = SampleStatus.FAILED
        sample.metadata["session_reason"] = "its container died"
        return sample
    return await completions(args, sample, sampling_params)
"""


@pytest.mark.parametrize("first", [7, 0])
def test_an_evaluation_leaves_out_counts_and_names_prompts_whose_samples_failed(play, tmp_path, caplog, first):
    """A broken agent costs its prompt, not a run of days; when all break it is another matter."""
    held_out, plugin = tmp_path / "prompts.jsonl", tmp_path / f"fails_{first}.py"
    plugin.write_text(FAILS_ABOVE.format(first=first))
    flags = ["--custom-generate-function-path", f"{plugin}:generate", "--eval-prompt-data", "held", held_out]
    flags += ["--n-samples-per-eval-prompt", 2]
    one = "def rm(args, sample):\n    return float(sample.index < 14)\n"
    if first == 0:
        with pytest.raises(EngineError, match="evaluation held: a sample of every prompt failed"):
            play(one, *flags, evaluation=True)
        return
    output = play(one, *flags, evaluation=True)
    assert output.metrics["eval/held/failed"] == 3
    assert output.metrics["eval/held/num_samples"] == 14
    assert output.metrics["eval/held/reward_mean"] == 1.0  # no failed sample is a zero
    assert "evaluation held: prompt 7 is left out, a sample has failed: its container died" in caplog.text


def test_a_filter_that_keeps_nothing_ends_the_round_with_its_name_and_counts(play, tmp_path):
    keep = tmp_path / "keep.py"
    keep.write_text(KEEPS_NOTHING)
    flags = ["--dynamic-sampling-filter-path", f"{keep}:keep", "--max-dropped-in-a-row", 7]
    with pytest.raises(PluginError) as ended:
        play("def rm(args, sample):\n    return 1.0\n", *flags)
    for text in ("7 groups in a row", "filter 7", "Expected one of 7", f"--dynamic-sampling-filter-path {keep}:keep"):
        assert text in str(ended.value)


def test_a_group_that_is_kept_begins_the_count_anew(play, tmp_path):
    """Of the prompts a to j every third is kept: two in a row are dropped, and three would end it."""
    keep = tmp_path / "keep.py"
    keep.write_text("def keep(args, samples):\n    return samples[0].group_index % 3 == 2\n")
    flags = ["--dynamic-sampling-filter-path", f"{keep}:keep", "--max-dropped-in-a-row", 3, "--rollout-batch-size", 1]
    output = play("def rm(args, sample):\n    return 1.0\n", *flags)
    assert [group[0].prompt for group in output.samples] == ["c"]


def test_equal_rewards_are_explained(play):
    flags = ["--dynamic-sampling-filter-path", "vime.rollout.filter_hub.check_reward_nonzero_std"]
    with pytest.raises(
        PluginError, match=r"zero_std_1 6.*is the reward right, are the prompts of the right difficulty"
    ):
        play("def rm(args, sample):\n    return 1.0\n", *flags, "--max-dropped-in-a-row", 6)


def test_in_mode_streaming_a_dropped_group_has_its_fate_and_reason_in_the_ledger(tmp_path, model_dir):
    file = tmp_path / "reward.py"
    file.write_text(FAILS_FOR_A)
    flags = ["--custom-rm-path", f"{file}:rm", "--on-reward-error", "drop"]
    with ScriptedEngine(echo) as engine, Streaming(tmp_path, engine, model_dir, *flags) as run:
        output = run.lease(0)
        assert groups_of(output) == [1, 2]
        assert output.metrics["rollout/dropped_reward_error"] == 1
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as ledger:
        fates = ledger.execute("select grp, reason from prompt_group where state = 'dropped'").fetchall()
    assert fates == [(0, "reward_error")]


def test_in_mode_streaming_a_filter_that_keeps_nothing_ends_the_round_that_waits(tmp_path, model_dir):
    keep = tmp_path / "keep.py"
    keep.write_text(KEEPS_NOTHING)
    flags = ["--dynamic-sampling-filter-path", f"{keep}:keep", "--max-dropped-in-a-row", "7"]
    with (
        ScriptedEngine(echo) as engine,
        Streaming(tmp_path, engine, model_dir, *flags) as run,
        pytest.raises(PluginError, match=r"7 groups in a row.*filter 7"),
    ):
        run.lease(0)
