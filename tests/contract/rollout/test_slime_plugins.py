"""Plug-ins written for slime run unchanged: rewards, filters, post-processing and generate functions of its examples'
shapes, against a scripted engine. What cannot be known exactly is refused."""

from pathlib import Path

import pytest

from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import make_args
from tests.helpers.scripted_engine import Reply, ScriptedEngine
from vime.rollout import engine_client
from vime.rollout.generation import close_clients, eval_sampling_params, train_sampling_params
from vime.rollout.group_worker import filter_verdict, generate_and_rm_group, mark_samples
from vime.rollout.loops import rollout_loop
from vime.rollout.plugins import check_plugins, is_of_slime, plugin
from vime.types import ConfigError, PluginError, Sample, SampleStatus, VersionSpan

PLUGINS = Path(__file__).parents[2] / "helpers" / "slime_plugins"
A, B, EOS = 5, 6, 2


@pytest.fixture
def run(model_dir, monkeypatch):
    """run(engine, group, *flags): a group from pending to scored, as a round does it."""
    monkeypatch.setattr(engine_client, "LONGEST_BACKOFF_S", 0.01)

    def run(engine, group, *flags, evaluation=False):
        args = arguments(model_dir, *flags, port=engine.port)
        check_plugins(args)
        params = (eval_sampling_params if evaluation else train_sampling_params)(args)
        work = generate_and_rm_group(args, group, params, evaluation=evaluation)
        return args, rollout_loop().run(work, name="test group", timeout_s=30)

    yield run
    close_clients()


def arguments(model_dir, *flags, port=1):
    return make_args(
        "--hf-checkpoint", model_dir, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", port,
        "--rollout-max-response-len", 8, "--generate-timeout-secs", 20, "--n-samples-per-prompt", 2, *flags,
    )  # fmt: skip


def group(size=2):
    return [
        Sample(group_index=3, index=number, session_id="group-3", prompt="a", tokens=[A], label={"target": "a"})
        for number in range(size)
    ]


def path(name):
    file, _, function = name.partition(":")
    return f"{PLUGINS / file}:{function}"


def answers(request):
    """The second turn is of newer weights than the first."""
    is_first = request.number == 0
    return Reply(token_ids=[A, EOS], version="3" if is_first else "4", log_prob=-0.25 if is_first else -0.75)


def one_turn_each(_request):
    return Reply(token_ids=[A, EOS], version="4")


GENERATE = ("--max-staleness", 1, "--custom-rm-path", path("rewards.py:of_label"))


def test_a_tool_loop_trains_what_the_policy_said_and_its_versions(run):
    flags = ["--custom-generate-function-path", path("tool_loop.py:generate"), "--reward-key", "score"]
    flags += ["--custom-rm-path", path("rewards.py:of_tool_use"), "--max-staleness", 1]
    with ScriptedEngine(answers) as engine:
        args, (sample,) = run(engine, group(1), *flags)
    assert sample.tokens == [A, A, EOS, B, A, EOS]
    assert sample.loss_mask == [1, 1, 0, 1, 1]
    assert sample.rollout_log_probs == [-0.25, -0.25, 0.0, -0.75, -0.75]
    assert sample.token_policy_versions == [VersionSpan(3, 0, 3), VersionSpan(4, 3, 5)]
    assert sample.num_calls == 1
    assert sample.reward["score"] == pytest.approx(-0.9)  # wrong, and one tool call: -1 + 0.1
    assert "pred" not in sample.reward
    (row,) = trained_rows(args, [[sample]], rollout_id=4)[0]
    assert row.oldest_version == 3
    assert Sample.from_dict(sample.to_dict()).num_calls == 1
    assert engine.requests[0]["sampling_params"]["max_tokens"] == 4
    assert "spaces_between_special_tokens" not in engine.requests[0]["sampling_params"]


def test_turns_made_of_text_stand_behind_the_samples_own_tokens(run):
    flags = ["--custom-generate-function-path", path("search.py:generate"), *GENERATE]
    with ScriptedEngine(answers) as engine:
        _, (sample,) = run(engine, group(1), *flags)
        second = engine.requests[1]
    assert second["token_ids"] == [A, A, EOS, B, B]  # not what encoding "a<eos>bb" again might cut
    assert second["sampling_params"]["stop"] == ["##"]
    assert sample.token_policy_versions == [VersionSpan(3, 0, 4), VersionSpan(4, 4, 6)]
    assert sample.rollout_log_probs == [-0.25, -0.25, 0.0, 0.0, -0.75, -0.75]
    assert sample.status is SampleStatus.COMPLETED


def test_fields_set_by_hand_get_the_versions_of_their_requests(run):
    flags = ["--custom-generate-function-path", path("turns.py:set_fields"), *GENERATE]
    with ScriptedEngine(answers) as engine:
        _, (sample,) = run(engine, group(1), *flags)
    assert sample.token_policy_versions == [VersionSpan(3, 0, 3), VersionSpan(4, 3, 5)]
    assert sample.policy_version == 3
    assert sample.metadata["evaluation"] is False
    with ScriptedEngine(answers) as engine:
        _, (sample,) = run(engine, group(1), *flags, evaluation=True)
    assert sample.metadata["evaluation"] is True


def test_a_sample_made_anew_gets_log_probabilities_and_versions_of_its_request(run):
    flags = ["--custom-generate-function-path", path("turns.py:new_sample"), *GENERATE]
    with ScriptedEngine(one_turn_each) as engine:
        args, made = run(engine, group(), *flags)
    for number, sample in enumerate(made):
        assert sample.status is SampleStatus.COMPLETED
        assert (sample.group_index, sample.index) == (3, number)
        assert sample.rollout_log_probs == [-0.5, -0.5]
        assert sample.token_policy_versions == [VersionSpan(4, 0, 2)]
    assert len(trained_rows(args, [made], rollout_id=4)[0]) == 2


def test_agents_keep_attributes_on_args_for_one_call(run):
    flags = ["--custom-generate-function-path", path("turns.py:agents"), "--custom-rm-path"]
    flags += [path("rewards.py:of_label"), "--label-key", "label"]
    with ScriptedEngine(one_turn_each) as engine:
        args, made = run(engine, group(), *flags)
    assert len(made) == 6  # three agents for each of two samples
    assert {sample.role for sample in made} == {"solver-0", "solver-1", "solver-2"}
    assert {sample.reward for sample in made} == {0.5}  # right, and halved by the plug-in
    assert not hasattr(args, "results")
    assert all(sample.token_policy_versions == [VersionSpan(4, 0, 2)] for sample in made)


def test_tokens_that_no_request_explains_are_refused(run):
    flags = ["--custom-generate-function-path", path("turns.py:guesses"), *GENERATE]
    with ScriptedEngine(one_turn_each) as engine, pytest.raises(PluginError, match="would be a guess"):
        run(engine, group(1), *flags)


def test_rewards_of_a_sample_and_of_a_group(run):
    with ScriptedEngine(one_turn_each) as engine:
        _, made = run(engine, group(), "--custom-rm-path", path("rewards.py:of_label"))
        assert [sample.reward for sample in made] == [1.0, 1.0]
        _, made = run(engine, group(), "--custom-rm-path", path("rewards.py:of_group"), "--group-rm")
        assert [sample.reward for sample in made] == [0.5, 0.5]


def finished(*rewards, status=SampleStatus.COMPLETED):
    made = group(len(rewards))
    for sample, reward in zip(made, rewards, strict=True):
        sample.append_response_tokens([A, EOS], [-0.5, -0.5], versions=[VersionSpan(0, 0, 2)])
        sample.reward, sample.status = reward, status
    return made


def test_a_filter_reads_rewards_and_answers_with_a_tensor(model_dir):
    args = arguments(model_dir, "--dynamic-sampling-filter-path", path("rewards.py:keep_spread"))
    assert filter_verdict(args, finished(0.0, 1.0)).keep is True
    verdict = filter_verdict(args, finished(1.0, 1.0))
    assert (verdict.keep, verdict.reason) == (False, "no_spread_1.0")


def test_a_sample_filter_marks_what_leaves_the_loss(model_dir):
    args = arguments(model_dir, "--rollout-sample-filter-path", path("rewards.py:drop_truncated"))
    groups = [finished(1.0, 0.0), finished(1.0, 0.0, status=SampleStatus.TRUNCATED)]
    mark_samples(args, groups)
    assert [[sample.remove_sample for sample in one] for one in groups] == [[False, False], [True, True]]


def test_post_processing_sees_all_samples_in_a_row(model_dir):
    args = arguments(model_dir, "--custom-reward-post-process-path", path("rewards.py:minus_mean"))
    groups = trained_rows(args, [finished(1.0, 0.0), finished(3.0, 0.0)], rollout_id=0)
    assert [[row.reward for row in one] for one in groups] == [[0.5, -0.5], [1.5, -1.5]]
    assert [row.raw_reward for row in groups[1]] == [3.0, 0.0]


def test_what_is_not_here_is_refused_when_loaded_with_every_line(model_dir):
    args = arguments(model_dir, "--dynamic-sampling-filter-path", path("foreign.py:keep"))
    with pytest.raises(ConfigError) as refusal:
        check_plugins(args)
    assert "foreign.py:4: slime.utils.data.Dataset is not among the names of slime" in str(refusal.value)
    assert "foreign.py:9: a group that the filter rejects is never kept" in str(refusal.value)


def test_a_plug_in_of_vime_keeps_its_own_conventions(model_dir):
    example = Path(__file__).parents[3] / "examples/customization/filter.py"
    args = arguments(model_dir, "--dynamic-sampling-filter-path", f"{example}:keep_mixed_groups")
    assert not is_of_slime(plugin(args, "dynamic_sampling_filter_path"))
