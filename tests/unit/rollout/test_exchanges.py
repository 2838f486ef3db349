"""Samples completed from what the engine said: exactly, or refused."""

import math

import pytest

from vime.rollout.exchanges import Exchange, Record, complete
from vime.types import PluginError, Sample, SampleStatus, VersionSpan

FIRST = Exchange(prompt=(1, 2), token_ids=(7, 8, 9), log_probs=(-1.0, -2.0, -3.0), versions=(4, 4, 5))
SECOND = Exchange(prompt=(1, 2, 7, 8, 6), token_ids=(3,), log_probs=(-0.5,), versions=(5,))


def sample(tokens, mask, log_probs=None, *, prompt=(1, 2)):
    made = Sample(tokens=[*prompt, *tokens], response_length=len(tokens), status=SampleStatus.COMPLETED)
    made.loss_mask, made.rollout_log_probs = mask, log_probs
    return made


def completed(made, *exchanges):
    complete(made, Record(None, made, list(exchanges)), where="the plug-in")
    return made


def test_an_answer_that_was_cut_keeps_what_the_engine_said_of_the_rest():
    made = completed(sample([7, 8, 6, 3], [1, 1, 0, 1]), FIRST, SECOND)  # 9 was cut off, 6 is a tool's
    assert made.rollout_log_probs == [-1.0, -2.0, 0.0, -0.5]
    assert made.token_policy_versions == [VersionSpan(4, 0, 3), VersionSpan(5, 3, 4)]
    assert made.policy_version == 4


class CountedPrompt(tuple):
    """A prompt that counts how often it is compared token by token."""

    num_compared = 0
    __hash__ = tuple.__hash__

    def __eq__(self, other):
        CountedPrompt.num_compared += 1
        return tuple.__eq__(self, other)


def test_the_turns_of_a_long_session_are_not_all_compared_with_each_other():
    # 50 turns of one token, with one of a tool after each: every turn is looked up among 50 requests, of which one had
    # as many tokens before it. Comparing all of them is 2,500 times a prompt.
    CountedPrompt.num_compared = 0
    turns = [
        Exchange(CountedPrompt([1, 2] + [7, 6] * turn), token_ids=(7,), log_probs=(-1.0,), versions=(turn,))
        for turn in range(50)
    ]
    made = completed(sample([7, 6] * 50, [1, 0] * 50), *turns)
    assert made.token_policy_versions == [VersionSpan(turn, 2 * turn, 2 * turn + 2) for turn in range(50)]
    assert CountedPrompt.num_compared == 50


def test_a_missing_mask_means_that_everything_is_trained():
    made = completed(sample([7, 8, 9], None), FIRST)
    assert made.loss_mask == [1, 1, 1]
    assert made.token_policy_versions == [VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)]


def test_context_before_the_first_word_of_the_policy_is_as_old_as_that_word():
    after = Exchange(prompt=(1, 2, 6), token_ids=(3,), log_probs=(-0.5,), versions=(5,))
    assert completed(sample([6, 3], [0, 1]), after).token_policy_versions == [VersionSpan(5, 0, 2)]
    alone = completed(sample([6], [0]))
    assert (alone.token_policy_versions, alone.rollout_log_probs) == ([VersionSpan(0, 0, 1)], [0.0])


def test_what_is_whole_already_is_left_as_it_is():
    made = sample([7, 8], [1, 1], [-9.0, -9.0])
    made.token_policy_versions = [VersionSpan(1, 0, 2)]
    assert completed(made).rollout_log_probs == [-9.0, -9.0]


@pytest.mark.parametrize(
    ("made", "exchanges"),
    [
        (sample([7, 8], [1, 1]), ()),
        (sample([7, 5], [1, 1]), (FIRST,)),  # 5 was never said there
        (sample([6, 7, 8], [0, 1, 1]), (FIRST,)),  # said, but to other tokens before
        (sample([7, 8], [1, 1], prompt=(1, 3)), (FIRST,)),  # said to another prompt
        (sample([7, 8, 9, 9], [1, 1, 1, 1]), (FIRST,)),
    ],
)
def test_tokens_of_the_loss_that_nobody_said_there_are_refused(made, exchanges):
    with pytest.raises(PluginError, match=r"the plug-in: tokens \d to \d of the response.*would be a guess"):
        completed(made, *exchanges)


def test_a_log_probability_that_the_engine_did_not_say_is_refused():
    with pytest.raises(PluginError, match=r"holds -1\.5 for token 0 of the response, and the engine returned -1"):
        completed(sample([7], [1], [-1.5]), FIRST)
    assert completed(sample([7], [1], [-1.0001]), FIRST).rollout_log_probs == [-1.0]  # rounded on its way


@pytest.mark.parametrize(
    ("mask", "log_probs"), [([1], None), ([1, 1, 1], None), ([1, 1], [-1.0]), ([1, 1], [-1.0, math.nan, -1.0])]
)
def test_lists_of_another_length_are_refused(mask, log_probs):
    with pytest.raises(PluginError, match="as many entries as the response has tokens"):
        completed(sample([7, 8], mask, log_probs), FIRST)


def test_a_response_without_a_prompt_is_refused():
    with pytest.raises(PluginError, match="Expected a prompt"):
        completed(sample([7, 8], [1, 1], prompt=()), FIRST)
