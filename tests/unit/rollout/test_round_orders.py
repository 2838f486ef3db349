"""Rounds of modes off and buffer, whatever the order in which groups end.

Under --reference-mode the order decides nothing: what is kept, what is asked for and when, and where the data source
stands afterwards. Without it no prompt is lost, and none is used twice, over several rounds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.rollout_setup import make_args, write_jsonl, write_model_directory
from vime.config.parse import Args
from vime.rollout import group_worker
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import RoundWorker
from vime.types import DataError, DynamicFilterOutput, RolloutFnTrainOutput, Sample, SampleStatus, VersionSpan

KEEP, FILTER, FAILED, ABORTED = "keep", "filter", "failed", "aborted"
PROMPTS = 10


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


class Engine:
    """Ends groups in the order that `picks` says, and writes down what was asked and judged. Group n ends as
    `fates[n]`, later ones are kept."""

    def __init__(self, fates: list[str], picks: list[tuple[int, bool]]) -> None:
        self.fates, self.picks = fates, picks
        self.log: list[tuple[str, object]] = []
        self.waiting: dict[int, asyncio.Future[None]] = {}

    def fate(self, group_index: int) -> str:
        return self.fates[group_index] if group_index < len(self.fates) else KEEP

    async def answer(self, _args: object, group: list[Sample], _params: object) -> list[Sample]:
        number = group[0].group_index
        ended = self.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await ended
        finally:
            del self.waiting[number]
        for sample in group:
            sample.append_response_tokens([2], [-0.5], versions=[VersionSpan(0, 0, 1)])
            fate = self.fate(number)
            sample.status = SampleStatus(fate) if fate in (FAILED, ABORTED) else SampleStatus.COMPLETED
            sample.reward = None if fate == ABORTED else 1.0
        return group

    def verdict(self, _args: object, samples: list[Sample]) -> DynamicFilterOutput:
        self.log.append(("judged", samples[0].group_index))
        return DynamicFilterOutput(keep=self.fate(samples[0].group_index) == KEEP)

    async def end_groups(self) -> None:
        """Each pick ends one of the groups under way: several in one turn of the loop, or one every few turns."""
        for pick, yields in [*self.picks, *[(0, True)] * 1000]:
            open_groups = [number for number, ended in self.waiting.items() if not ended.done()]
            if open_groups and pick >= 0:
                self.waiting[open_groups[pick % len(open_groups)]].set_result(None)
            for _ in range(6 * yields):
                await asyncio.sleep(0)

    def play(self, args: Args, rollout_id: int, source: RolloutDataSourceWithBuffer) -> RolloutFnTrainOutput:
        async def both() -> RolloutFnTrainOutput:
            ending = asyncio.create_task(self.end_groups())
            try:
                async with asyncio.timeout(20):
                    return await RoundWorker(args, rollout_id, source).round()
            finally:
                ending.cancel()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_worker, "generate_and_rm_group", self.answer)
            patch.setattr(group_worker, "filter_verdict", self.verdict)
            return asyncio.run(both())


class Source(RolloutDataSourceWithBuffer):
    """Answers as many groups as `counts` says, each time that it is asked; then all that are asked for."""

    def __init__(self, args: Args, log: list[tuple[str, object]], counts: list[int]) -> None:
        super().__init__(args)
        self.log, self.counts = log, counts

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        if self.counts:
            num_groups = min(num_groups, self.counts.pop(0))
        groups = super().get_samples(num_groups)
        self.log.append(("asked", tuple(group[0].group_index for group in groups)))
        return groups


def numbers(groups: list[list[Sample]]) -> list[int]:
    return [group[0].group_index for group in groups]


FATES = st.lists(st.sampled_from([KEEP, FILTER, FILTER, FAILED, ABORTED]), max_size=8)
PICKS = st.lists(st.tuples(st.integers(-1, 5), st.booleans()), max_size=30)
COUNTS = st.lists(st.integers(0, 4), max_size=6)


@settings(max_examples=60, deadline=None)
@given(fates=FATES, picks=PICKS, counts=COUNTS, surplus=st.integers(0, 3))
def test_in_reference_mode_the_order_of_completions_decides_nothing(directory, fates, picks, counts, surplus) -> None:
    args = round_args(
        directory, "--reference-mode", "--rollout-num-engines", 1, "--over-sampling-batch-size", 3 + surplus
    )
    found = []
    for order in ([], picks):  # the first one ends groups as they were asked for
        engine = Engine(fates, order)
        source = Source(args, engine.log, list(counts))
        kept: object
        try:
            kept = numbers(engine.play(args, 0, source).samples)
        except DataError as error:  # exhausted: also that must not depend on time
            kept = str(error)
        found.append((kept, engine.log, source.save(0)))
    assert found[0] == found[1]
    if isinstance(found[0][0], list):
        assert len(found[0][0]) == 3


@settings(max_examples=60, deadline=None)
@given(fates=FATES, picks=PICKS, surplus=st.integers(0, 3), counts=COUNTS)
def test_no_prompt_is_lost_or_used_twice_over_rounds(directory, fates, picks, surplus, counts) -> None:
    args = round_args(directory, "--over-sampling-batch-size", 3 + surplus)
    source = Source(args, [], [])
    used: Counter[int] = Counter()
    num_dropped = 0
    for rollout_id in range(3):
        engine = Engine(fates, picks)
        source.log, source.counts = engine.log, [max(1, count) for count in counts]
        output = engine.play(args, rollout_id, source)
        assert len(output.samples) == 3
        used.update(numbers(output.samples))
        num_dropped += int(output.metrics["rollout/dropped_groups"])
    state = source.save(2)
    back = [group[0]["group_index"] for group in state["buffer"]]
    dropped = [number for number in range(state["next_group_index"]) if number not in used and number not in back]
    assert max(used.values()) == 1
    assert not set(back) & set(used)
    assert len(dropped) == num_dropped
    assert all(engine.fate(number) != KEEP for number in dropped)
    assert all(engine.fate(number) == KEEP for number in used)
