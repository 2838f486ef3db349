"""The documented plug-in examples, loaded the way a run loads them and run against a scripted engine."""

import pytest
import torch

from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import EXAMPLES, make_args, write_jsonl, write_model_directory
from tests.helpers.scripted_engine import Reply, ScriptedEngine
from vime.rollout.plugins import check_plugins, load_data_source, plugin
from vime.rollout.vllm_rollout import close_generation, generate_rollout
from vime.types import ConfigError

A, B, EOS, QUESTION_MARK = 5, 6, 2, 46
CUSTOM = EXAMPLES / "customization"


@pytest.fixture
def play(tmp_path):
    """play(engine, *flags): one round of one group of three, prompt "b", label "a"."""
    model = write_model_directory(tmp_path / "model")
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"input": "b", "label": "a"}, {"input": "c", "label": "a"}])

    def run(engine, *flags):
        args = make_args(
            "--hf-checkpoint", model, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", engine.port,
            "--prompt-data", data, "--label-key", "label", "--rollout-batch-size", 1, "--n-samples-per-prompt", 3,
            "--rollout-max-response-len", 8, "--rollout-timeout-secs", 30, *flags,
        )  # fmt: skip
        check_plugins(args)
        source = load_data_source(args)
        output = generate_rollout(args, 0, source)
        return args, output, source

    yield run
    close_generation()


def only_the_first_is_right(request):
    return Reply(token_ids=[A if request.sample == 0 else B, EOS])


def test_reward(play):
    with ScriptedEngine(only_the_first_is_right) as engine:
        args, output, _ = play(engine, "--custom-rm-path", f"{CUSTOM}/reward.py:reward", "--reward-key", "score")
    # 2 tokens are within the free 10: the whole bonus of 0.2
    assert [s.reward for s in output.samples[0]] == [
        {"score": 1.2, "accuracy": 1.0},
        {"score": 0.0, "accuracy": 0.0},
        {"score": 0.0, "accuracy": 0.0},
    ]
    assert [row.raw_reward for row in trained_rows(args, output.samples, 0)[0]] == [1.2, 0.0, 0.0]


def test_group_reward(play):
    def script(request):
        return Reply(token_ids=[[A, EOS], [3, B, 4, A, EOS], [B, EOS]][request.sample])

    with ScriptedEngine(script) as engine:
        _, output, _ = play(engine, "--custom-rm-path", f"{CUSTOM}/reward.py:group_reward", "--group-rm")
    assert [s.reward for s in output.samples[0]] == [1.2, 1.0, 0.0]


def test_generate_asks_again_and_trains_only_what_the_policy_said(play):
    def script(request):
        return Reply(token_ids=[A if request.token_ids[-1] == QUESTION_MARK else B, EOS])

    with ScriptedEngine(script) as engine:
        args, output, _ = play(
            engine, "--custom-generate-function-path", f"{CUSTOM}/generate.py:generate_with_hint",
            "--rm-type", "exact_match",
        )  # fmt: skip
    sample = output.samples[0][0]
    assert sample.tokens == [1, B, B, EOS, QUESTION_MARK, A, EOS]
    assert sample.loss_mask == [1, 1, 0, 1, 1]
    assert (sample.response, sample.reward, sample.metadata["first_answer"]) == ("a", 1.0, "b")
    assert trained_rows(args, output.samples, 0)[0][0].num_trainable == 4


def test_filter_counts_its_reasons(play):
    def script(request):
        if request.token_ids[-1] == B:
            return Reply(token_ids=[A, A], finish_reason="length")
        return only_the_first_is_right(request)

    with ScriptedEngine(script) as engine:
        _, output, _ = play(
            engine, "--dynamic-sampling-filter-path", f"{CUSTOM}/filter.py:keep_mixed_groups",
            "--rollout-sample-filter-path", f"{CUSTOM}/filter.py:leave_out_truncated", "--rm-type", "exact_match",
        )  # fmt: skip
    assert output.metrics["rollout/dropped_truncated"] == 1
    assert output.samples[0][0].prompt == "c"
    assert not any(sample.remove_sample for sample in output.samples[0])


def test_data_source_continues_after_a_restart(play):
    flags = ("--data-source-path", f"{CUSTOM}/data_source.py:AdditionSource", "--rm-type", "exact_match")
    with ScriptedEngine(only_the_first_is_right) as engine:
        args, output, source = play(engine, *flags)
    left, right = output.samples[0][0].prompt.rstrip("=").split("+")
    assert output.samples[0][0].label == str(int(left) + int(right))
    source.add_samples(source.get_samples(1))
    restored = load_data_source(args)
    restored.load(source.save(0))
    assert restored.get_samples(3) == source.get_samples(3)


def test_post_process_replaces_the_normalisation(play):
    with ScriptedEngine(only_the_first_is_right) as engine:
        args, output, _ = play(
            engine, "--custom-reward-post-process-path", f"{CUSTOM}/post_process.py:leave_one_out",
            "--rm-type", "exact_match",
        )  # fmt: skip
    assert [row.reward for row in trained_rows(args, output.samples, 0)[0]] == [1.0, -0.5, -0.5]


def test_loss_answers_every_token_by_its_advantage():
    args = make_args("--loss-type", "custom_loss", "--custom-loss-path", f"{CUSTOM}/loss.py:reinforce")
    check_plugins(args)
    columns = {"advantage": torch.tensor([1.0, -1.0])}
    loss_T = plugin(args, "custom_loss_path")(args, torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.5]), columns)
    # -(1 * -1) - .01 * .5, -(-1 * -2) - .01 * .5
    assert loss_T.tolist() == pytest.approx([0.995, -2.005])


def test_a_loss_with_other_parameters_is_refused(tmp_path):
    (tmp_path / "loss.py").write_text("def loss(logp_T): return logp_T\n")
    with pytest.raises(ConfigError, match=r"--custom-loss-path .*loss.py:loss: cannot be called as \(args, logp_T"):
        check_plugins(make_args("--loss-type", "custom_loss", "--custom-loss-path", f"{tmp_path}/loss.py:loss"))
