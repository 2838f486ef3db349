"""Samples to training rows and to files: normalisation, alignment, versions; bit-exact recording."""

import dataclasses
import json
import math
import random

import pytest

from tests.helpers.rollout_setup import make_args
from vime.rollout.convert import to_train_groups
from vime.rollout.record import load_rollout, save_rollout, save_samples
from vime.types import DataError, HandoffError, PluginError, RewardError, Sample, SampleStatus, StaleError, VersionSpan


def sample(index, reward, *, group=0, version=0, status=SampleStatus.COMPLETED, log_probs=(-0.5, -1.25)):
    made = Sample(group_index=group, index=index, prompt="a", tokens=[1, 5], reward=reward, status=status)
    spans = [VersionSpan(version, 0, len(log_probs))]
    made.append_response_tokens([6] * len(log_probs), list(log_probs), versions=spans)
    return made


def test_rewards_are_normalised_within_their_group():
    groups = [[sample(0, 1.0), sample(1, 0.0)], [sample(2, 3.0, group=1), sample(3, 3.0, group=1)]]
    first, second = to_train_groups(make_args(), groups, 0)
    # mean 0.5, deviations +-0.5, unbiased std sqrt(0.5) = 0.707107: +-0.707106 after the epsilon of 1e-6
    assert [row.reward for row in first.rows] == pytest.approx([0.7071058, -0.7071058], abs=1e-6)
    assert [row.raw_reward for row in first.rows] == [1.0, 0.0]
    assert [row.reward for row in second.rows] == [0.0, 0.0]
    assert (first.group_index, second.group_index) == (0, 1)
    unscaled = to_train_groups(make_args("--disable-grpo-std-normalization"), groups, 0)
    assert [row.reward for row in unscaled[0].rows] == [0.5, -0.5]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # rewards 3 and 1: mean 2; RLOO 3 - 1 = 2; REINFORCE++ leaves them, its baseline takes the mean off
        ("gspo", [0.7071058, -0.7071058]),
        ("cispo", [0.7071058, -0.7071058]),
        ("rloo", [2.0, -2.0]),
        ("reinforce_plus_plus", [3.0, 1.0]),
        ("ppo", [3.0, 1.0]),
        ("reinforce_plus_plus_baseline", [1.0, -1.0]),
    ],
)
def test_the_estimator_decides_what_becomes_of_the_rewards(estimator, expected):
    groups = [[sample(0, 3.0), sample(1, 1.0)]]
    rows = to_train_groups(make_args("--advantage-estimator", estimator), groups, 0)[0].rows
    assert [row.reward for row in rows] == pytest.approx(expected, abs=1e-6)
    assert [row.raw_reward for row in rows] == [3.0, 1.0]


def test_an_answer_to_imitate_needs_no_reward():
    groups = [[sample(0, None), sample(1, 0.5)]]
    rows = to_train_groups(make_args("--loss-type", "sft_loss"), groups, 0)[0].rows
    assert [(row.reward, row.raw_reward) for row in rows] == [(0.0, 0.0), (0.5, 0.5)]


def test_teacher_log_probabilities_travel_only_when_asked_for():
    group = [sample(0, 1.0), sample(1, 0.0)]
    for one in group:
        one.teacher_log_probs = [-0.75, -2.0]
    asked = make_args("--transfer-queue-extra-data-fields", "teacher_log_probs")
    assert to_train_groups(asked, [group], 0)[0].rows[0].extra == {"teacher_log_probs": (-0.75, -2.0)}
    assert to_train_groups(make_args(), [group], 0)[0].rows[0].extra == {}


@pytest.mark.parametrize("values", [None, [-1.0], [-1.0, math.inf]])
def test_an_answer_without_its_teachers_log_probabilities_is_refused(values):
    group = [sample(0, 1.0), sample(1, 0.0)]
    group[1].teacher_log_probs, group[0].teacher_log_probs = values, [-1.0, -1.0]
    with pytest.raises(HandoffError, match="sample 1 of group 0: teacher_log_probs"):
        to_train_groups(make_args("--transfer-queue-extra-data-fields", "teacher_log_probs"), [group], 0)


def test_a_row_carries_the_sample_unchanged():
    groups = [[sample(4, 1.0, version=3, status=SampleStatus.TRUNCATED), sample(5, 0.0, version=3)]]
    row = to_train_groups(make_args(), groups, 3)[0].rows[0]
    assert (row.sample_index, row.group_index, row.rollout_id) == (4, 0, 3)
    assert (row.tokens, row.response_length, row.loss_mask) == ((1, 5, 6, 6), 2, (1, 1))
    assert row.rollout_log_probs == (-0.5, -1.25)
    assert row.token_policy_versions == (VersionSpan(3, 0, 2),)
    assert (row.status, row.truncated) == ("truncated", True)


def test_a_removed_sample_stays_in_the_mean_and_leaves_the_loss():
    group = [sample(0, 1.0), sample(1, 0.0)]
    group[0].remove_sample = True
    rows = to_train_groups(make_args("--disable-grpo-std-normalization"), [group], 0)[0].rows
    assert [row.loss_mask for row in rows] == [(0, 0), (1, 1)]
    assert [row.reward for row in rows] == [0.5, -0.5]


def test_a_dict_reward_is_read_at_its_key():
    group = [sample(0, {"acc": 1.0, "x": 7.0}), sample(1, {"acc": 0.0, "x": 7.0})]
    rows = to_train_groups(make_args("--reward-key", "acc"), [group], 0)[0].rows
    assert [row.raw_reward for row in rows] == [1.0, 0.0]


class TestPostProcess:
    @pytest.fixture
    def with_function(self, tmp_path):
        def write(body):
            (tmp_path / "post.py").write_text(f"def post(args, groups): {body}")
            return make_args("--custom-reward-post-process-path", f"{tmp_path}/post.py:post")

        return write

    def test_it_replaces_the_normalisation(self, with_function):
        args = with_function("return [[s.reward * 2 for s in g] for g in groups]")
        rows = to_train_groups(args, [[sample(0, 1.0), sample(1, 0.5)]], 0)[0].rows
        assert [(row.reward, row.raw_reward) for row in rows] == [(2.0, 1.0), (1.0, 0.5)]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("return [[1.0]]", r"groups of sizes \[1\], expected \[2\]"),
            ("return [[1.0, float('nan')]]", "nan for sample 1.*expected a finite number of at most 3.4e"),
            ("return [[-1e39, 1.0]]", "-1e\\+39 for sample 0.*expected a finite number of at most 3.4e"),
            ("return 3", "TypeError"),
        ],
    )
    def test_a_misshapen_answer_is_refused(self, with_function, body, message):
        with pytest.raises(PluginError, match=message):
            to_train_groups(with_function(body), [[sample(0, 1.0), sample(1, 0.5)]], 0)


@pytest.mark.parametrize("reward", [1e300, -4e38, math.inf, math.nan, {"score": 1e300}])
def test_a_reward_that_no_float32_holds_is_refused_by_name(reward):
    """Its square overflows in the group's deviation, which made every advantage of the group 0."""
    groups = [[sample(0, 1.0), sample(1, 0.5)]]
    groups[0][1].reward = reward
    with pytest.raises(RewardError, match=r"sample 1: the reward is .*at most 3.4e\+38.*--custom-rm-path"):
        to_train_groups(make_args("--reward-key", "score"), groups, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": SampleStatus.ABORTED}, "sample 0 of group 0 is aborted"),
        ({"status": SampleStatus.PENDING}, "is pending"),
        ({"loss_mask": [1]}, "'loss_mask': 1"),
        ({"loss_mask": [1, 2]}, r"loss_mask holds \[1, 2\]"),
        ({"rollout_log_probs": [-1.0]}, "'rollout_log_probs': 1"),
        ({"rollout_log_probs": [-1.0, math.nan]}, "not finite"),
        ({"tokens": [6, 6]}, "tokens 2"),
        ({"response_length": 0, "loss_mask": [], "rollout_log_probs": []}, "at least one response token"),
        ({"token_policy_versions": []}, "cover 0 of 2"),
        ({"token_policy_versions": [VersionSpan(0, 0, 1)]}, "cover 1 of 2"),
        ({"token_policy_versions": [VersionSpan(0, 1, 2)]}, "do not tile"),
        ({"group_index": 8}, r"samples of groups \[0, 8\]"),
    ],
)
def test_a_misaligned_sample_is_refused(changes, message):
    group = [dataclasses.replace(sample(0, 1.0), **changes), sample(1, 0.0)]
    with pytest.raises(HandoffError, match=message):
        to_train_groups(make_args(), [group], 0)


@pytest.mark.parametrize(("version", "bound", "fits"), [(5, 0, True), (4, 0, False), (4, 1, True), (6, 1, False)])
def test_versions_must_lie_within_the_staleness_bound_of_the_round(version, bound, fits):
    groups = [[sample(0, 1.0, version=version), sample(1, 0.0, version=version)]]
    args = make_args("--transferqueue-max-staleness", bound)
    if fits:
        assert to_train_groups(args, groups, 5)
    else:
        with pytest.raises(StaleError, match=rf"versions \[{version}\] in round 5"):
            to_train_groups(args, groups, 5)
    assert to_train_groups(make_args("--load-debug-rollout-data", "x_{rollout_id}"), groups, 5)


def test_a_recorded_round_reads_back_bit_for_bit(tmp_path):
    draw = random.Random(3)
    groups = [
        [
            sample(g * 2 + i, draw.random(), group=7 - g, log_probs=[-draw.expovariate(1) for _ in range(9)])
            for i in range(2)
        ]
        for g in range(3)
    ]
    groups[0][0].metadata = {"k": [1, {"x": None}]}
    path = tmp_path / "deep" / "rollout_4.jsonl"
    save_rollout(path, groups)
    assert load_rollout(path) == groups
    assert [file.name for file in path.parent.iterdir()] == ["rollout_4.jsonl"]


def test_a_failed_write_leaves_the_former_file(tmp_path):
    path = tmp_path / "rollout_0.jsonl"
    save_rollout(path, [[sample(0, 1.0)]])
    bad = sample(1, 0.0)
    bad.metadata = {"x": object()}
    with pytest.raises(DataError, match="sample 1 cannot be recorded"):
        save_rollout(path, [[bad]])
    assert load_rollout(path) == [[sample(0, 1.0)]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "no samples"),
        ('{"position": 0}\n', r"r\.jsonl:1: not a recorded"),
        ("x\n", r"r\.jsonl:1"),
    ],
)
def test_an_unreadable_recording_is_refused(tmp_path, content, message):
    path = tmp_path / "r.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_rollout(path)


def test_evaluation_samples_are_written_one_a_line(tmp_path):
    path = tmp_path / "eval" / "held_out_0.jsonl"
    save_samples(path, [sample(0, 1.0), sample(1, 0.0)])
    assert [Sample.from_dict(json.loads(line)) for line in path.open()] == [sample(0, 1.0), sample(1, 0.0)]
