"""Sample keeps tokens, masks, log-probabilities and versions aligned; errors survive pickling."""

import json
import pickle
from pathlib import Path

import pytest

from vime.data.rows import TrainRow
from vime.types import CheckpointError, RewardError, Sample, SampleStatus, StaleError, VersionSpan, WaitTimeoutError


def answered() -> Sample:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens([3, 4, 5], [-0.1, -0.2, -0.3], versions=[VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)])
    return sample


def test_appending_keeps_everything_aligned() -> None:
    sample = answered()
    sample.append_response_tokens([9], [0.0], trainable=False, versions=[VersionSpan(2, 0, 1)])
    assert sample.tokens == [1, 2, 3, 4, 5, 9]
    assert sample.response_length == 4
    assert sample.prompt_length == 2
    assert sample.loss_mask == [1, 1, 1, 0]
    # the last span of the first call and the second call's span are one run of version 2
    assert sample.token_policy_versions == [VersionSpan(1, 0, 2), VersionSpan(2, 2, 4)]
    assert sample.weight_versions == [1, 2]
    assert sample.policy_version == 1


@pytest.mark.parametrize(
    ("tokens", "log_probs", "versions"),
    [
        ([1, 2], [-0.1], [VersionSpan(0, 0, 2)]),
        ([1, 2], [-0.1, -0.1], [VersionSpan(0, 0, 1)]),
        ([1, 2], [-0.1, -0.1], [VersionSpan(0, 1, 2)]),
        ([1, 2], [-0.1, -0.1], [VersionSpan(0, 0, 2), VersionSpan(1, 1, 2)]),
    ],
)
def test_misaligned_growth_is_refused_and_changes_nothing(tokens, log_probs, versions) -> None:
    sample = answered()
    before = sample.to_dict()
    with pytest.raises(ValueError, match="append_response_tokens"):
        sample.append_response_tokens(tokens, log_probs, versions=versions)
    assert sample.to_dict() == before


def test_sample_survives_its_dict() -> None:
    sample = answered()
    sample.status, sample.reward, sample.metadata = SampleStatus.TRUNCATED, {"acc": 0.1 + 0.2}, {"k": [1]}
    assert Sample.from_dict(sample.to_dict()) == sample


def test_the_dict_of_a_sample_shares_nothing_with_it() -> None:
    sample = answered()
    sample.metadata, sample.label, sample.teacher_log_probs = {"k": [1]}, ["a"], [-1.0]
    sample.rollout_routed_experts = [[[1, 2]]]
    before = json.dumps(sample.to_dict())
    record = sample.to_dict()
    for held in (record["tokens"], record["loss_mask"], record["rollout_log_probs"], record["teacher_log_probs"]):
        held.append(0)
    record["metadata"]["k"].append(2)
    record["label"].append("b")
    record["token_policy_versions"][0][0] = 9
    record["rollout_routed_experts"][0][0].append(3)
    assert json.dumps(sample.to_dict()) == before


def test_a_dict_reward_needs_a_key() -> None:
    sample = Sample(reward={"acc": 1.0})
    assert sample.scalar_reward("acc") == 1.0
    with pytest.raises(RewardError, match="--reward-key"):
        sample.scalar_reward()


def row(mask: list[int]) -> TrainRow:
    spans = [VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)]
    return TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=[1, 2, 3, 4],
        response_length=3,
        loss_mask=mask,
        rollout_log_probs=[0.0] * 3,
        token_policy_versions=spans,
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
    )


def test_oldest_version_counts_trainable_tokens_only() -> None:
    assert row([1, 1, 1]).oldest_version == 3
    assert row([0, 1, 1]).oldest_version == 5
    assert row([0, 0, 0]).oldest_version == 3


def test_errors_survive_pickling_with_their_message() -> None:
    for error in (WaitTimeoutError("round 3", 5, "manager", "Look at its log."), StaleError("too old")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


class OfRanks(Exception):
    """As torch's CheckpointException."""

    def __init__(self, failures: dict[int, tuple[BaseException, list[str]]]) -> None:
        super().__init__("of all ranks,\nwith tracebacks")
        self.failures = failures


@pytest.mark.parametrize(
    ("error", "is_given_up", "says"),
    [
        (KeyError("exp_avg"), True, "KeyError 'exp_avg'."),
        (OfRanks({1: (FileNotFoundError("gone\nfor ever"), [])}), True, "rank 1: FileNotFoundError gone for ever."),
        (RuntimeError("Connection closed by peer"), False, "RuntimeError Connection closed by peer."),
        (OfRanks({0: (OSError("io"), []), 1: (RuntimeError("no memory"), [])}), False, "rank 0: OSError io."),
    ],
)
def test_a_checkpoint_is_given_up_only_for_what_its_files_caused(
    error: Exception, is_given_up: bool, says: str
) -> None:
    message = str(CheckpointError.unreadable(Path("there"), error, expected="one of this model"))
    assert message.startswith(f"--load there: cannot be read: {says} Expected one of this model; ")
    assert ("--hf-checkpoint" in message) == is_given_up
    assert ("read the log of each trainer rank first" in message) != is_given_up


def test_a_checkpoint_that_cannot_be_written_says_how_much_space_is_left_where_that_is_known(tmp_path: Path) -> None:
    assert " MiB free there): rank 1: OSError. " in str(CheckpointError.unwritable(tmp_path, "rank 1: OSError"))
    assert "nowhere could not be written: OSError. " in str(CheckpointError.unwritable(tmp_path / "nowhere", "OSError"))


def test_tokens_that_are_not_trained_need_neither_log_probabilities_nor_versions() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens([3, 4], [-0.1, -0.2], versions=[VersionSpan(7, 0, 2)])
    sample.append_response_tokens([9], trainable=False)
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0]
    assert sample.loss_mask == [1, 1, 0]
    assert sample.token_policy_versions == [VersionSpan(7, 0, 3)]  # as old as what it stands behind


def test_own_attributes_survive_a_stored_group_as_far_as_json_carries_them() -> None:
    sample = Sample(tokens=[1])
    sample.num_calls, sample.handle = 2, object()
    copy = Sample.from_dict(sample.to_dict())
    assert copy.num_calls == 2
    assert not hasattr(copy, "handle")
    assert "own" not in Sample(tokens=[1]).to_dict()
