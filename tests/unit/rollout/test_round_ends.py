"""How a round ends early: one error, raised as itself, by whoever it comes from; a cancellation; and nothing that goes
on behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.rollout_setup import make_args, write_jsonl, write_model_directory
from vime.config.parse import Args
from vime.rollout import group_worker
from vime.rollout.abort_scope import current_abort_scope, is_aborting
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import RoundWorker
from vime.types import DynamicFilterOutput, PluginError, Sample, SampleStatus, VersionSpan, WaitTimeoutError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model_directory(tmp_path_factory.mktemp("model"), positions=32)
    write_jsonl(made / "prompts.jsonl", [{"input": letter, "label": letter} for letter in "abcdefghij"])
    return made


def round_args(directory: Path, *flags: object) -> Args:
    return make_args(
        "--hf-checkpoint", directory, "--prompt-data", directory / "prompts.jsonl", "--label-key", "label",
        "--rm-type", "exact_match", "--rollout-batch-size", 3, "--n-samples-per-prompt", 2,
        "--rollout-max-response-len", 8, "--rollout-timeout-secs", 20, *flags,
    )  # fmt: skip


class Broken(RolloutDataSourceWithBuffer):
    """Raises where it is told to."""

    raises_at = ""
    num_calls = 0

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        self.num_calls += 1
        if self.raises_at == "second get_samples" and self.num_calls == 2:
            raise KeyError("no more")
        return super().get_samples(num_groups)

    def group_at(self, group_index: int) -> list[Sample]:
        if self.raises_at == "group_at":
            raise TimeoutError("the data base is slow")
        return super().group_at(group_index)


def finished(sample: Sample, num_tokens: int = 1) -> None:
    sample.append_response_tokens([2] * num_tokens, [-0.5] * num_tokens, versions=[VersionSpan(0, 0, num_tokens)])
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0


async def at_once(_args: object, group: list[Sample], _params: object) -> list[Sample]:
    await asyncio.sleep(0)
    for sample in group:
        finished(sample)
    return group


def keeps_none(_args: object, _samples: list[Sample]) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=False)


def broken_filter(_args: object, samples: list[Sample]) -> DynamicFilterOutput:
    raise PluginError(f"filter: group {samples[0].group_index}")


async def play(worker: RoundWorker) -> list[list[Sample]]:
    before = asyncio.all_tasks()
    try:
        async with asyncio.timeout(15):
            return (await worker.round()).samples
    finally:
        assert asyncio.all_tasks() == before, "something goes on behind the end of the round"


@pytest.mark.parametrize("flags", [(), ("--reference-mode", "--rollout-num-engines", 1)])
@pytest.mark.parametrize("all_fail", [True, False])
def test_a_filter_that_raises_ends_the_round_with_one_error(directory, monkeypatch, flags, all_fail) -> None:
    args = round_args(directory, "--over-sampling-batch-size", 6, *flags)

    def judge(given: object, samples: list[Sample]) -> DynamicFilterOutput:
        if all_fail or samples[0].group_index == 1:
            return broken_filter(given, samples)
        return DynamicFilterOutput(keep=True)

    monkeypatch.setattr(group_worker, "generate_and_rm_group", at_once)
    monkeypatch.setattr(group_worker, "filter_verdict", judge)
    with pytest.raises(PluginError, match=rf"^filter: group {0 if all_fail else 1}$"):
        asyncio.run(play(RoundWorker(args, 0, RolloutDataSourceWithBuffer(args))))


@pytest.mark.parametrize("flags", [(), ("--reference-mode", "--rollout-num-engines", 1)])
def test_a_data_source_that_raises_later_ends_the_round_as_itself(directory, monkeypatch, flags) -> None:
    args = round_args(directory, *flags)
    source = Broken(args)
    source.raises_at = "second get_samples"
    monkeypatch.setattr(group_worker, "generate_and_rm_group", at_once)
    monkeypatch.setattr(group_worker, "filter_verdict", keeps_none)
    with pytest.raises(PluginError, match=r"--data-source-path .*raised KeyError: 'no more'"):
        asyncio.run(play(RoundWorker(args, 0, source)))


def test_a_timeout_of_a_data_source_is_not_taken_for_the_deadline_of_the_round(directory, monkeypatch) -> None:
    args = round_args(directory)
    source = Broken(args)
    group = source.get_samples(1)[0]
    finished(group[0])
    source.add_samples([group])
    source.raises_at = "group_at"
    monkeypatch.setattr(group_worker, "generate_and_rm_group", at_once)
    with pytest.raises(Exception, match="the data base is slow") as raised:
        asyncio.run(play(RoundWorker(args, 0, source)))
    assert not isinstance(raised.value, WaitTimeoutError)


def test_a_cancelled_round_ends_every_group(directory, monkeypatch) -> None:
    args, ended = round_args(directory), []

    async def never(_args: object, group: list[Sample], _params: object) -> list[Sample]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(group[0].group_index)
        return group

    monkeypatch.setattr(group_worker, "generate_and_rm_group", never)

    async def both() -> None:
        work = asyncio.create_task(RoundWorker(args, 0, RolloutDataSourceWithBuffer(args)).round())
        for _ in range(5):
            await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(both())
    assert sorted(ended) == [0, 1, 2]


# --- --partial-rollout: whatever is cut, and whenever

LENGTH = 4
"""Tokens of a completion: 10, 11, 12, 13 by position."""


class CuttingEngine:
    """Gives each group of a round a few tokens at a time, in a drawn order; answers an abort with what there is."""

    def __init__(self, version: int, picks: list[int]) -> None:
        self.version, self.picks = version, picks

    def grow(self, samples: list[Sample]) -> None:
        for sample in samples:
            if sample.response_length < LENGTH:
                sample.append_response_tokens(
                    [10 + sample.response_length], [-1.0 - self.version], versions=[VersionSpan(self.version, 0, 1)]
                )

    async def answer(self, _args: object, group: list[Sample], _params: object) -> list[Sample]:
        todo = [s for s in group if s.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        aborted, scope = asyncio.Event(), current_abort_scope()
        assert scope is not None

        async def abort(_requests: list[str]) -> None:
            aborted.set()

        with scope.holding(f"{id(group)}", abort):
            while any(sample.response_length < LENGTH for sample in todo):
                if aborted.is_set() or is_aborting():
                    for sample in todo:
                        is_whole = sample.response_length == LENGTH
                        sample.status = SampleStatus.COMPLETED if is_whole else SampleStatus.ABORTED
                    return group
                self.grow(todo)
                for _ in range(1 + (self.picks.pop(0) if self.picks else 0)):
                    await asyncio.sleep(0)
        for sample in todo:
            sample.status = SampleStatus.COMPLETED
        for sample in group:
            sample.reward = 1.0
        return group


@settings(max_examples=60, deadline=None)
@given(
    picks=st.lists(st.integers(0, 9), max_size=60),
    surplus=st.integers(1, 4),
    policy=st.sampled_from(["correct", "mask"]),
    dropped=st.sets(st.integers(0, 12), max_size=5),
)
def test_partial_rounds_lose_no_prompt_and_keep_each_token_with_its_version(
    directory, picks, surplus, policy, dropped
) -> None:
    args = round_args(
        directory, "--over-sampling-batch-size", 3 + surplus, "--partial-rollout", "--max-staleness", 1,
        "--mixed-version-policy", policy,
    )  # fmt: skip
    source, used, left_out = RolloutDataSourceWithBuffer(args), [], []
    picks = list(picks)

    def judge(_args: object, samples: list[Sample]) -> DynamicFilterOutput:
        if (number := samples[0].group_index) in dropped:
            left_out.append(number)
        return DynamicFilterOutput(keep=number not in dropped)

    for version in range(4):
        engine = CuttingEngine(version, picks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_worker, "generate_and_rm_group", engine.answer)
            patch.setattr(group_worker, "filter_verdict", judge)
            groups = asyncio.run(play(RoundWorker(args, version, source)))
        assert len(groups) == 3
        used += [group[0].group_index for group in groups]
        for sample in [sample for group in groups for sample in group]:
            assert sample.tokens[sample.prompt_length :] == [10, 11, 12, 13]
            assert sample.rollout_id == version
            versions = [span.version for span in sample.token_policy_versions for _ in range(span.start, span.end)]
            assert sample.rollout_log_probs == [-1.0 - each for each in versions]
            assert all(v >= version - 1 for v, is_on in zip(versions, sample.loss_mask, strict=True) if is_on)
        state = source.save(version)
        back = [group[0]["group_index"] for group in state["buffer"]]
        assert sorted(used + left_out + back) == list(range(state["next_group_index"]))
        assert {sample["rollout_id"] for group in state["buffer"] for sample in group} <= {-1}
