"""Graders of text: each finds the answer where its data set's convention puts it."""

import re
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.rollout.rm_text import after_thinking, boxed, choice_score, dapo_score, token_f1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{open", "1"),
        (r"\fbox{3} \boxed {4}", "4"),
        ("nothing", None),
        (r"\boxed{}", ""),
        (r"} \boxed{a{b}c} {", "a{b}c"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{a \boxed{b c}", "b c"),
    ],
)
def test_the_last_whole_box_is_found(text, found):
    assert boxed(text) == found


@given(st.lists(st.sampled_from(["{", "}", r"\boxed{", r"\fbox {", "x", "\\"]), max_size=14).map("".join))
def test_a_box_is_found_by_counting_braces_from_its_own(text):
    found = None
    for start in [match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)]:
        depths = list(accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in text[start:]))
        if -1 in depths:
            found = text[start : start + depths.index(-1)]
    assert boxed(text) == found


@pytest.mark.timeout(20)
def test_a_completion_that_repeats_an_open_box_takes_no_minutes():
    """It was quadratic: 65 s for 8,000, on the loop that generates."""
    assert boxed(r"\boxed{" * 200_000) is None


def test_the_part_behind_the_reasoning_is_found():
    assert after_thinking("a</think>b</think> c") == " c"
    assert after_thinking("x ###Response 3") == " 3"
    assert after_thinking("no marks") is None


@pytest.mark.parametrize(
    ("answer", "label", "score"),
    [
        ("so\nAnswer: 34", "34", 1),
        ("Answer: 12\nAnswer: 34", 34, 1),
        (r"Answer: $\dfrac12$", r"\frac{1}{2}", 1),
        ("answer: 1,000.", "1000", 1),
        ("Answer: x = 5", "5", 1),
        (r"Answer: \boxed{7}", "7", 1),
        ("Answer: 35", "34", -1),
        ("34", "34", -1),
        ("Answer: 34" + " " * 400, "34", -1),  # beyond the tail that DAPO looks at
    ],
)
def test_dapo_looks_at_the_last_answer_line(answer, label, score):
    said = dapo_score(answer, label)
    assert (said["score"], said["acc"]) == (score, max(score, 0))
    if answer == "34":
        assert said["pred"] == "[INVALID]"


def test_dapo_with_a_strict_box_looks_at_the_box_alone():
    assert dapo_score(r"\boxed{3}", "3", strict_box_verify=True)["score"] == 1
    assert dapo_score("Answer: 3", "3", strict_box_verify=True)["score"] == -1


def test_f1_counts_common_words():
    # prediction: cat sat; label: cat sat down -> precision 2/2, recall 2/3, F1 0.8
    assert token_f1("The cat sat!", "a cat sat down") == (pytest.approx(0.8), 1.0, pytest.approx(2 / 3))
    assert token_f1("yes it is", "yes") == (0.0, 0.0, 0.0)
    assert token_f1("Yes.", "yes")[0] == 1.0
    assert token_f1("", "x")[0] == 0.0


@pytest.mark.parametrize(
    ("response", "label", "metadata", "score"),
    [
        ("The answer is (B).", "B", {}, 1),
        (r"<think>(A)?</think> \boxed{\text{C}}", "C", {}, 1),
        ("Answer: D", 3, {}, 1),  # the fourth letter
        ("I think B) fits", "Paris", {"choices": ["Rome", "Paris"]}, 1),
        ("(A)", "Paris", {"choices": {"A": "Rome", "B": "Paris"}}, 0),
        ("A or B", None, {"correct_letter": "E"}, 0),
        ("no letter here", "A", {}, 0),
        ("Answer: A", "not a choice", {"choices": ["x", "y"]}, 0),
        ("Because Apples fall", "A", {}, 0),
        (r"\boxed{\textbf{B}}", "B", {}, 1),
        (r"\boxed{\mathrm{(B)}}", "B", {}, 1),
        (r"\text{B}", "B", {}, 1),  # what boxed_gpqa leaves of a box
        ("Answer: $B$", "B", {}, 1),
        ("**Answer:** **B**", "B", {}, 1),
        ("**B**", "B", {}, 1),
        ("**B**", "A", {}, 0),
        ("Answer: B. Option A is wrong because x", "B", {}, 1),
        ("Answer: B. Option A is wrong because x", "A", {}, 0),
        ("Option A is wrong, I take option B", "B", {}, 1),
        ("Answer choice A is wrong since it ignores heat. Therefore the correct option is C.", "C", {}, 1),
        ("These are the answer choices. Answer choice B is incorrect. Option D matches the data.", "D", {}, 1),
        ("My first answer was A, but answer A fails. The right choice: D", "D", {}, 1),
        ("Answer: D", 3.0, {}, 1),
    ],
)
def test_the_chosen_letter_is_compared_with_the_right_one(response, label, metadata, score):
    assert choice_score(response, label, metadata) == score
