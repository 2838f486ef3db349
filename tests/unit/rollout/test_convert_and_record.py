"""Samples to training rows and to files: normalisation, alignment, versions; bit-exact recording."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest

from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import make_args
from vime.data.rows import trained_tokens
from vime.rollout.convert import encoded_group, group_rows, mark_removed, set_custom_rewards
from vime.rollout.metrics import row_facts
from vime.rollout.record import load_rollout, save_rollout, save_samples
from vime.types import DataError, HandoffError, PluginError, RewardError, Sample, SampleStatus, StaleError, VersionSpan


def sample(index, reward, *, group=0, version=0, status=SampleStatus.COMPLETED, log_probs=(-0.5, -1.25)):
    made = Sample(group_index=group, index=index, prompt="a", tokens=[1, 5], reward=reward, status=status)
    spans = [VersionSpan(version, 0, len(log_probs))]
    made.append_response_tokens([6] * len(log_probs), list(log_probs), versions=spans)
    return made


def test_rewards_are_normalised_within_their_group():
    groups = [[sample(0, 1.0), sample(1, 0.0)], [sample(2, 3.0, group=1), sample(3, 3.0, group=1)]]
    first, second = trained_rows(make_args(), groups, 0)
    # mean 0.5, deviations +-0.5, unbiased std sqrt(0.5) = 0.707107: +-0.707106 after the epsilon of 1e-6
    assert [row.reward for row in first] == pytest.approx([0.7071058, -0.7071058], abs=1e-6)
    assert [row.raw_reward for row in first] == [1.0, 0.0]
    assert [row.reward for row in second] == [0.0, 0.0]
    assert [{row.group_index for row in group} for group in (first, second)] == [{0}, {1}]
    unscaled = trained_rows(make_args("--disable-grpo-std-normalization"), groups, 0)
    assert [row.reward for row in unscaled[0]] == [0.5, -0.5]


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
    rows = trained_rows(make_args("--advantage-estimator", estimator), groups, 0)[0]
    assert [row.reward for row in rows] == pytest.approx(expected, abs=1e-6)
    assert [row.raw_reward for row in rows] == [3.0, 1.0]


def test_an_answer_to_imitate_needs_no_reward():
    groups = [[sample(0, None), sample(1, 0.5)]]
    rows = trained_rows(make_args("--loss-type", "sft_loss"), groups, 0)[0]
    assert [(row.reward, row.raw_reward) for row in rows] == [(0.0, 0.0), (0.5, 0.5)]


def test_teacher_log_probabilities_travel_only_when_asked_for():
    group = [sample(0, 1.0), sample(1, 0.0)]
    for one in group:
        one.teacher_log_probs = [-0.75, -2.0]
    asked = make_args("--transfer-queue-extra-data-fields", "teacher_log_probs")
    assert trained_rows(asked, [group], 0)[0][0].extra["teacher_log_probs"].tolist() == [-0.75, -2.0]
    assert trained_rows(make_args(), [group], 0)[0][0].extra == {}


def with_fields(*names):
    return make_args("--transfer-queue-extra-data-fields", *names)


def test_a_field_of_any_name_travels_numbers_as_an_array_and_all_else_as_bytes():
    group = [sample(0, 1.0), sample(1, 0.0)]
    for at, one in enumerate(group):
        one.difficulty = 0.25 + at  # an attribute that a plug-in set
        one.metadata = {
            "counts": [1, 2 + at],
            "grid": np.arange(6, dtype=np.int16).reshape(2, 3),
            "is_easy": bool(at),
            "topic": "alg\u00e8bre",
            "uneven": [[1], [2, 3]],
            "facts": {"a": [1, None]},
            "raw": b"\x00png",
            "difficulty": "not this one: the attribute comes first",
        }
    names = ("difficulty", "counts", "grid", "is_easy", "topic", "uneven", "facts", "raw")
    first, second = trained_rows(with_fields(*names), [group], 0)[0]
    assert set(first.extra) == set(names)
    assert [row.extra["difficulty"].tolist() for row in (first, second)] == [0.25, 1.25]
    assert [row.extra["counts"].tolist() for row in (first, second)] == [[1, 2], [1, 3]]
    assert [row.extra["is_easy"].tolist() for row in (first, second)] == [False, True]
    assert (first.extra["grid"].dtype, first.extra["grid"].tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    assert [json.loads(first.extra[name]) for name in ("topic", "uneven", "facts")] == [
        "alg\u00e8bre", [[1], [2, 3]], {"a": [1, None]},
    ]  # fmt: skip
    assert first.extra["raw"] == b"\x00png"


@pytest.mark.parametrize("metadata", [{}, {"topic": None}])
def test_an_answer_without_a_requested_field_is_refused_by_name(metadata):
    group = [sample(0, 1.0), sample(1, 0.0)]
    group[0].metadata, group[1].metadata = {"topic": "a"}, metadata
    with pytest.raises(HandoffError, match=r"sample 1 of group 0: field 'topic' was requested .*did not write it"):
        trained_rows(with_fields("topic"), [group], 0)


@pytest.mark.parametrize("value", [{"a": object()}, {"a": math.nan}, {1, 2}, ["a", math.inf]])
def test_a_field_that_no_json_holds_is_refused_by_name(value):
    group = [sample(0, 1.0), sample(1, 0.0)]
    group[0].metadata, group[1].metadata = {"topic": "a"}, {"topic": value}
    with pytest.raises(HandoffError, match="sample 1 of group 0: field 'topic' cannot be stored"):
        trained_rows(with_fields("topic"), [group], 0)


def test_facts_and_notes_of_a_group_say_what_metrics_ask():
    group = [sample(0, {"acc": 1.0, "fmt": True, "why": "x"}), sample(1, {"acc": 0.5}, status=SampleStatus.TRUNCATED)]
    group[0].metadata, group[1].remove_sample = {"data_source": "openai/gsm8k"}, True
    args = make_args("--reward-key", "acc", "--source-key", "data_source")
    encoded = encoded_group(args, group, producer_id="w")
    assert list(encoded.facts.completions()) == row_facts(args, group)
    assert list(encoded.facts.notes.sources) == ["openai_gsm8k", ""]
    assert encoded.facts.notes.producer == "w"
    bare = encoded_group(make_args(), [sample(0, 1.0)]).facts.notes
    assert (list(bare.entries), list(bare.sources)) == ([], [])


def test_a_group_is_stored_with_its_samples_only_where_somebody_may_ask_for_them():
    group = [sample(0, 1.0), sample(1, 0.0)]
    assert encoded_group(make_args(), group, with_samples=True).samples() == group
    assert encoded_group(make_args(), group).rest == b""


def test_a_row_carries_its_attempt_its_partition_and_who_generated_it():
    group = [sample(0, 1.0), sample(1, 0.0)]
    for one in group:
        one.attempt = 3
    rows = group_rows(make_args(), group, partition_id="train", producer_id="worker-1")
    assert {(row.attempt, row.partition_id, row.producer_id) for row in rows} == {(3, "train", "worker-1")}


def test_a_sample_filter_of_rounds_takes_rows_of_stored_groups_out_of_the_loss(tmp_path):
    (tmp_path / "mark.py").write_text(
        "def mark(args, groups):\n    for group in groups:\n        group[0].remove_sample = group[0].reward > 0.5\n"
    )
    args = make_args("--rollout-sample-filter-path", f"{tmp_path / 'mark.py'}:mark")
    groups = [[sample(0, 1.0), sample(1, 0.0)], [sample(2, 0.0, group=1), sample(3, 1.0, group=1)]]
    facts = [encoded_group(args, group).facts for group in groups]
    mark_removed(args, facts, lambda: groups)
    assert [found.rows["is_removed"].tolist() for found in facts] == [[1, 0], [0, 0]]
    assert [trained_tokens(found.rows).tolist() for found in facts] == [[0, 2], [2, 2]]


def test_without_a_plug_in_that_must_see_them_no_samples_are_asked_for():
    facts = [encoded_group(make_args(), [sample(0, 1.0), sample(1, 0.0)]).facts]

    def never():
        raise AssertionError("the samples were read")

    mark_removed(make_args(), facts, never)
    set_custom_rewards(make_args(), facts, never)


@pytest.mark.parametrize("values", [None, [-1.0], [-1.0, math.inf]])
def test_an_answer_without_its_teachers_log_probabilities_is_refused(values):
    group = [sample(0, 1.0), sample(1, 0.0)]
    group[1].teacher_log_probs, group[0].teacher_log_probs = values, [-1.0, -1.0]
    with pytest.raises(HandoffError, match="sample 1 of group 0: teacher_log_probs"):
        trained_rows(make_args("--transfer-queue-extra-data-fields", "teacher_log_probs"), [group], 0)


def test_a_row_carries_the_sample_unchanged():
    groups = [[sample(4, 1.0, version=3, status=SampleStatus.TRUNCATED), sample(5, 0.0, version=3)]]
    row = trained_rows(make_args(), groups, 3)[0][0]
    assert (row.sample_index, row.group_index, row.rollout_id) == (4, 0, 3)
    assert (row.tokens.tolist(), row.response_length, row.loss_mask.tolist()) == ([1, 5, 6, 6], 2, [1, 1])
    assert row.rollout_log_probs.tolist() == [-0.5, -1.25]
    assert row.token_policy_versions == (VersionSpan(3, 0, 2),)
    assert (row.status, row.truncated) == ("truncated", True)


def test_a_removed_sample_stays_in_the_mean_and_leaves_the_loss():
    group = [sample(0, 1.0), sample(1, 0.0)]
    group[0].remove_sample = True
    rows = trained_rows(make_args("--disable-grpo-std-normalization"), [group], 0)[0]
    assert [row.loss_mask.tolist() for row in rows] == [[0, 0], [1, 1]]
    assert [row.reward for row in rows] == [0.5, -0.5]


def test_a_dict_reward_is_read_at_its_key():
    group = [sample(0, {"acc": 1.0, "x": 7.0}), sample(1, {"acc": 0.0, "x": 7.0})]
    rows = trained_rows(make_args("--reward-key", "acc"), [group], 0)[0]
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
        rows = trained_rows(args, [[sample(0, 1.0), sample(1, 0.5)]], 0)[0]
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
            trained_rows(with_function(body), [[sample(0, 1.0), sample(1, 0.5)]], 0)


@pytest.mark.parametrize("reward", [1e300, -4e38, math.inf, math.nan, {"score": 1e300}])
def test_a_reward_that_no_float32_holds_is_refused_by_name(reward):
    """Its square overflows in the group's deviation, which made every advantage of the group 0."""
    groups = [[sample(0, 1.0), sample(1, 0.5)]]
    groups[0][1].reward = reward
    with pytest.raises(RewardError, match=r"sample 1: the reward is .*at most 3.4e\+38.*--custom-rm-path"):
        trained_rows(make_args("--reward-key", "score"), groups, 0)


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
        trained_rows(make_args(), [group], 0)


@pytest.mark.parametrize(("version", "bound", "fits"), [(5, 0, True), (4, 0, False), (4, 1, True), (6, 1, False)])
def test_versions_must_lie_within_the_staleness_bound_of_the_round(version, bound, fits):
    groups = [[sample(0, 1.0, version=version), sample(1, 0.0, version=version)]]
    args = make_args("--transferqueue-max-staleness", bound)
    if fits:
        assert trained_rows(args, groups, 5)
    else:
        with pytest.raises(StaleError, match=rf"versions \[{version}\] in round 5"):
            trained_rows(args, groups, 5)
    assert trained_rows(make_args("--load-debug-rollout-data", "x_{rollout_id}"), groups, 5)


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
    save_rollout(path, groups, partition_id="train_0", producer_ids=["a"] * len(groups))
    assert load_rollout(path) == groups
    assert [file.name for file in path.parent.iterdir()] == ["rollout_4.jsonl"]


def test_a_failed_write_leaves_the_former_file(tmp_path):
    path = tmp_path / "rollout_0.jsonl"
    save_rollout(path, [[sample(0, 1.0)]], partition_id="train_0", producer_ids=["a"])
    bad = sample(1, 0.0)
    bad.metadata = {"x": object()}
    with pytest.raises(DataError, match="sample 1 cannot be recorded"):
        save_rollout(path, [[bad]], partition_id="train_0", producer_ids=["a"])
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


def test_a_recorded_sample_says_the_names_that_the_rfc_gives_a_row(tmp_path):
    path = tmp_path / "rollout_0.jsonl"
    old = sample(3, 1.0)
    old.token_policy_versions = [VersionSpan(4, 0, 1), VersionSpan(5, 1, old.response_length)]
    save_rollout(path, [[old]], partition_id="train_groups", producer_ids=["rollout-worker-1.7.abc"])
    assert json.loads(path.read_text())["row"] == {
        "global_index": 3,
        "partition_id": "train_groups",
        "producer_id": "rollout-worker-1.7.abc",
        "version_start": 4,
        "version_end": 5,
    }
