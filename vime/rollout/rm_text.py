"""Rewards by comparing text: the graders that the field's data sets come with, as plain functions.

`boxed` and `marked_answer` find the answer in a completion; `dapo_score`, `token_f1` and `choice_score` compare it with
a label. None of them evaluates an expression: math-verify does that (`rm_math.py`).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

DAPO_TAIL = 300
"""DAPO looks for the answer in this many last characters (Yu et al. 2025, appendix)."""
INVALID = "[INVALID]"
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_UNITS = re.compile(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}")
_DROPPED = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\ ", r"\%", r"\$", "$", "%", "°", r"^{\circ}", r"^\circ")
_LETTER = r"\(?\s*([A-Z])\s*\)?(?![a-zA-Z])"
_FONTS = re.compile(r"\\(?:text|math)[a-z]*\{([^{}]*)\}|[*$]")
"""What a chosen letter is set in: `\\textbf{B}`, `**B**`, `$B$`."""
_CHOICES = (
    re.compile(r"\\boxed\{\s*" + _LETTER),
    re.compile(r"(?i:answer)\s*(?i:is|:)\s*(?i:option|choice|:)?\s*" + _LETTER),  # "Answer: B. Option A is wrong."
    re.compile(r"(?i:answer|option|choice)\s*(?i:is|:)?\s*(?i:option|choice|:)?\s*" + _LETTER),
    re.compile(r"(?:^|\s|\()([A-Z])(?:\)|\.|\s*$)"),
)


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` of `text`; None without one. Braces inside are counted."""
    starts = {match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)}
    last, opened = None, list[int]()  # in one pass: a completion may repeat an open box for thousands of tokens
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (start := opened.pop()) in starts and (last is None or start > last[0]):
            last = start, brace.start()
    return None if last is None else text[slice(*last)]


def after_thinking(response: str) -> str | None:
    """Return the part after the last `</think>`, or after the first `###Response`; None when there is neither."""
    if "</think>" in response:
        return response.rpartition("</think>")[2]
    return response.partition("###Response")[2] if "###Response" in response else None


def dapo_score(solution_str: str, ground_truth: object, strict_box_verify: bool = False) -> dict[str, float | str]:
    """Return 1 or -1: whether the last line `Answer: ...`, or with `strict_box_verify` the last box, is the label.

    As in DAPO the two are compared as text after both are normalised; `pred` is what was found.
    """
    tail = solution_str[-DAPO_TAIL:]
    found = boxed(solution_str) if strict_box_verify else (_ANSWER_LINE.findall(tail) or [None])[-1]
    pred = INVALID if found is None else found.strip()
    is_right = found is not None and _plain_math(pred) == _plain_math(str(ground_truth))
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right), "pred": pred}


def token_f1(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """Return (F1, precision, recall) over words, without case, punctuation and articles (SQuAD, Rajpurkar et al. 2016).

    An answer that is yes, no or noanswer is right as a whole or not at all.
    """
    predicted, expected = _words(prediction), _words(ground_truth)
    decided = {("yes",), ("no",), ("noanswer",)}
    if predicted != expected and decided & {tuple(predicted), tuple(expected)}:
        return 0.0, 0.0, 0.0
    common = sum((Counter(predicted) & Counter(expected)).values())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall), precision, recall


def choice_score(response: str, label: object, metadata: Mapping[str, object] | None = None) -> float:
    """Return 1.0 when the completion chooses the right letter of a multiple-choice problem.

    The right letter is metadata's "correct_letter", or the label: a letter, its number from 0, or the text of one of
    metadata's "choices".
    """
    known = dict(metadata or {})
    texts = _listed(known.get("choices"))
    letters = [
        str(letter).upper()
        for letter in _listed(known.get("valid_letters")) or string.ascii_uppercase[: len(texts) or 8]
    ]
    right = _right_letter(known.get("correct_letter", label), letters, texts)
    chosen = _chosen_letter((after_thinking(response) or response).strip(), letters)
    return float(right is not None and chosen == right)


def _listed(value: object) -> list[object]:
    """Return what metadata lists, or names by letters; empty when it has neither."""
    return list(value.values() if isinstance(value, Mapping) else cast("Iterable[object]", value or ()))


def _right_letter(label: object, letters: Sequence[str], texts: Sequence[object]) -> str | None:
    if isinstance(label, float) and label.is_integer():  # of a column of numbers in which one is missing
        label = int(label)
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    text = str(label).strip()
    if text.upper() in letters:
        return text.upper()
    same = [place for place, choice in enumerate(texts) if _words(str(choice)) == _words(text)]
    return letters[same[0]] if same and same[0] < len(letters) else None


def _chosen_letter(answer: str, letters: Sequence[str]) -> str | None:
    answer = _FONTS.sub(r"\1", answer)
    for pattern in _CHOICES:
        found: list[str] = [letter for letter in pattern.findall(answer) if letter in letters]
        if found:
            return found[-1]
    return None


def _words(text: str) -> list[str]:
    kept = "".join(" " if letter in string.punctuation else letter for letter in text.lower())
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _plain_math(text: str) -> str:
    """Normalise the ways in which an answer is written: `$\\frac12$` and `\\frac{1}{2}`, `1,000` and `1000`."""
    text = text.strip().rstrip(".").rpartition("=")[2]
    inside = boxed(text)
    text = _UNITS.sub(r"\1", inside if inside is not None else text)
    for word in _DROPPED:
        text = text.replace(word, "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([^\s{}\\])\s*([^\s{}\\])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*([^\s{}\\])", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", text.strip())
    return re.sub(r"\s+", "", text).strip("*{}").lower()
