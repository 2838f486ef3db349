"""Which completions of an aborted group are continued, which begin again, and which tokens leave the loss."""

import asyncio

import pytest

from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import make_args
from vime.rollout.abort_scope import AbortScope, is_aborting
from vime.rollout.convert import encoded_group
from vime.rollout.partial import (
    PartialStats,
    is_unfinished,
    oldest_allowed,
    resume,
    settle_versions,
    trainable_versions,
    without_completion,
)
from vime.rollout.worker import payload_of
from vime.types import Sample, SampleStatus, StaleError, VersionSpan

CORRECT = make_args("--max-staleness", 1)
MASK = make_args("--mixed-version-policy", "mask")
REJECT = make_args("--mixed-version-policy", "reject")


def answer(*versions, index=0, status=SampleStatus.COMPLETED, trainable=True):
    """One token for each version."""
    sample = Sample(group_index=0, index=index, tokens=[1, 9], status=status, metadata={"level": 1})
    for version in versions:
        spans = [VersionSpan(version, 0, 1)]
        sample.append_response_tokens([7], [-0.5], trainable=trainable, versions=spans)
    sample.reward = None if status is SampleStatus.ABORTED else 1.0
    return sample


def prompts(count):
    return [Sample(group_index=0, index=index, tokens=[1, 9], metadata={"level": 1}) for index in range(count)]


class TestResume:
    def lengths(self, args, kept, *, oldest, fresh=None):
        stats = PartialStats()
        group = resume(args, kept, fresh or prompts(len(kept)), stats, oldest=oldest)
        return [sample.response_length for sample in group], stats

    def test_a_token_too_old_to_be_trained_makes_its_answer_begin_anew_and_no_other(self):
        kept = [answer(3, 4), answer(4, 4, index=1), answer(3, index=2, status=SampleStatus.ABORTED)]
        lengths, stats = self.lengths(CORRECT, kept, oldest=4)
        assert lengths == [0, 2, 0]
        assert (stats.resumed_groups, stats.resumed_tokens, stats.discarded_tokens) == (1, 2, 3)

    def test_with_the_mask_an_open_answer_goes_on_and_a_finished_one_needs_a_token_to_train(self):
        kept = [answer(3, 3), answer(3, 4, index=1), answer(3, index=2, status=SampleStatus.ABORTED)]
        lengths, stats = self.lengths(MASK, kept, oldest=4)
        assert lengths == [0, 2, 1]
        assert (stats.resumed_tokens, stats.discarded_tokens) == (3, 2)

    def test_tokens_of_a_tool_are_of_no_version_that_matters(self):
        assert self.lengths(CORRECT, [answer(0, trainable=False)], oldest=4)[0] == [1]

    def test_an_answer_without_tokens_is_its_prompt(self):
        kept = [answer(status=SampleStatus.ABORTED)]
        stats = PartialStats()
        [sample] = resume(CORRECT, kept, prompts(1), stats, oldest=0)
        assert (sample.status, stats.resumed_groups) == (SampleStatus.PENDING, 0)

    @pytest.mark.parametrize(("oldest", "expected"), [(3, [1, 1, 2]), (4, [0, 0])])
    def test_several_answers_to_one_prompt_are_kept_or_begun_anew_together(self, oldest, expected):
        kept = [answer(4), answer(3), answer(4, 4, index=1)]  # a fan-out: two answers of sample 0
        assert self.lengths(CORRECT, kept, oldest=oldest, fresh=prompts(2))[0] == expected

    def test_without_answer_is_the_prompt_alone(self):
        assert without_completion(answer(3, 4, index=1)) == prompts(2)[1]

    def test_without_answer_a_prompt_has_its_images(self):
        sample = answer(3)
        sample.multimodal_inputs = {"images": ["data:image/png;base64,AAAA"], "prompt_ids": [1], "prompt_length": 2}
        assert without_completion(sample).multimodal_inputs == sample.multimodal_inputs


class TestVersions:
    def masks(self, args, samples, *, oldest):
        stats = PartialStats()
        return settle_versions(args, samples, stats, oldest=oldest), [s.loss_mask for s in samples], stats.masked_tokens

    def test_correct_changes_nothing(self):
        assert self.masks(CORRECT, [answer(3, 4)], oldest=3) == (None, [[1, 1]], 0)

    def test_mask_leaves_the_newest_version_of_each_answer_within_the_bound(self):
        samples = [answer(3, 4, 4), answer(3, index=1), answer(2, 2, index=2)]
        assert self.masks(MASK, samples, oldest=3) == (None, [[0, 1, 1], [1], [0, 0]], 3)

    def test_reject_names_a_reason_when_one_answer_has_two_versions(self):
        assert self.masks(REJECT, [answer(3), answer(4, index=1)], oldest=0)[0] is None
        assert self.masks(REJECT, [answer(3), answer(3, 4, index=1)], oldest=0)[0] == "mixed_versions"

    def test_the_versions_of_a_group_are_those_of_its_trainable_tokens(self):
        samples = [answer(2, 2), answer(4, index=1)]
        samples[0].loss_mask = [0, 0]
        assert trainable_versions(samples[0]) == set()
        assert ledger_versions(samples) == (4, 4)
        samples[1].loss_mask = [0]
        assert ledger_versions(samples) == (2, 4)

    def test_an_answer_that_is_context_alone_may_be_of_any_age(self):
        samples = [answer(2, 2), answer(4, index=1)]
        with pytest.raises(StaleError, match="sample 0"):
            trained_rows(MASK, [samples], 4)
        settle_versions(MASK, samples, PartialStats(), oldest=4)
        [group] = trained_rows(MASK, [samples], 4)
        assert [row.num_trainable for row in group] == [0, 1]

    def test_the_oldest_version_a_round_may_train(self):
        assert [oldest_allowed(CORRECT, version) for version in (0, 1, 5)] == [0, 0, 4]
        assert oldest_allowed(make_args("--debug-rollout-only"), 5) == 0  # the weights never move


def ledger_versions(samples):
    """Oldest and newest version of the group, as the ledger gets them."""
    payload = payload_of(encoded_group(CORRECT, samples), samples)
    return payload.min_version, payload.max_version


def test_a_group_is_unfinished_while_an_answer_or_a_reward_may_still_come():
    unscored = answer(3)
    unscored.reward = None
    assert is_unfinished([answer(3), unscored])
    assert is_unfinished([answer(3), answer(3, status=SampleStatus.ABORTED)])
    assert not is_unfinished([answer(3)])
    assert not is_unfinished([unscored, answer(status=SampleStatus.FAILED)])


def test_a_halt_ends_the_tasks_it_governs_and_no_others():
    async def run():
        halt, began, seen = AbortScope(), asyncio.Event(), {}
        aborted = asyncio.Event()

        async def abort(request_ids):
            seen["aborted"] = request_ids
            aborted.set()

        async def work():
            with halt.holding("r1", abort):
                began.set()
                await aborted.wait()
            seen["work"] = is_aborting()

        async def governed():
            halt.activate()
            task = asyncio.create_task(work())
            await began.wait()
            await halt.end([task])

        async def evaluation():
            await aborted.wait()
            seen["evaluation"] = is_aborting()

        other = asyncio.create_task(evaluation())
        await asyncio.create_task(governed())
        await other
        return seen

    assert asyncio.run(run()) == {"aborted": ["r1"], "work": True, "evaluation": False}


def test_a_halt_waits_no_longer_than_its_deadline():
    async def run():
        halt, never = AbortScope(), asyncio.Event()
        task = asyncio.create_task(never.wait())
        await halt.end([task], deadline_s=0.01)
        was_done = task.done()
        task.cancel()
        return was_done

    assert asyncio.run(run()) is False
