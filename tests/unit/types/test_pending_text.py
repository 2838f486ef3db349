"""The text of a completion is decoded when somebody reads it, once, and is what it would have been at once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from vime.data.payload import bytes_to_samples, samples_to_bytes
from vime.types import PendingText, Sample, VersionSpan

DECODED: list[list[int]] = []


def decode(tokens: Sequence[int]) -> str:
    """1, 2 -> "bc"."""
    DECODED.append(list(tokens))
    return "".join(chr(ord("a") + token) for token in tokens)


@pytest.fixture
def sample() -> Sample:
    """Prompt 0; response 1, 2."""
    DECODED.clear()
    made = Sample(group_index=3, index=7, tokens=[0], prompt="a")
    made.append_response_tokens([1, 2], [-0.5, -0.25], versions=[VersionSpan(0, 0, 2)])
    made.set_pending_text(PendingText([1, 2], decode))
    return made


def test_text_is_decoded_once_and_when_it_is_read(sample: Sample) -> None:
    assert DECODED == []
    assert (sample.response, sample.response) == ("bc", "bc")
    assert DECODED == [[1, 2]]


def test_tokens_that_are_appended_before_the_text_is_read_are_not_in_it(sample: Sample) -> None:
    sample.append_response_tokens([3], [0.0], trainable=False)
    assert sample.response == "bc"  # as when it was decoded at once: who appends tokens says their text


def test_text_that_is_appended_stands_behind_it(sample: Sample) -> None:
    sample.append_response_tokens([3], [0.0], trainable=False, text=" tool")
    assert sample.response == "bc tool"


def test_what_a_plug_in_writes_takes_its_place(sample: Sample) -> None:
    sample.response = "mine"
    assert (sample.response, DECODED) == ("mine", [])


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda given: pickle.loads(pickle.dumps(given))])
def test_copies_read_it_too(sample: Sample, copied) -> None:
    other = copied(sample)
    assert DECODED == []
    assert other.response == "bc"
    assert other == sample


def test_a_record_of_a_sample_has_its_text(sample: Sample) -> None:
    assert sample.to_dict()["response"] == "bc"
    assert Sample.from_dict(sample.to_dict()) == sample


def test_what_is_stored_unread_is_decoded_by_who_reads_it(sample: Sample) -> None:
    data = samples_to_bytes([sample])
    [back] = bytes_to_samples(data, decode)
    assert DECODED == []
    assert back.response == "bc"
    assert DECODED == [[1, 2]]


def test_what_was_read_before_it_was_stored_is_not_decoded_again(sample: Sample) -> None:
    assert sample.response == "bc"
    [back] = bytes_to_samples(samples_to_bytes([sample]), decode)
    assert (back.response, DECODED) == ("bc", [[1, 2]])


def test_text_of_other_tokens_than_the_rows_is_stored_as_text(sample: Sample) -> None:
    """A tool's tokens stand behind: the row's response is 1, 2, 3, the text that of 1, 2."""
    sample.append_response_tokens([3], [0.0], trainable=False)
    [back] = bytes_to_samples(samples_to_bytes([sample]), decode)
    assert (back.response, DECODED) == ("bc", [[1, 2]])


def test_a_plug_in_may_put_an_array_in_the_place_of_the_tokens(sample: Sample) -> None:
    sample.tokens = np.array(sample.tokens)  # type: ignore[assignment]
    [back] = bytes_to_samples(samples_to_bytes([sample]), decode)
    assert (back.tokens, back.response) == ([0, 1, 2], "bc")


def test_what_a_plug_in_writes_is_read_back_as_it_is(sample: Sample) -> None:
    sample.response = None  # type: ignore[assignment]
    assert sample.response is None


@dataclass
class WithOwnField(Sample):
    score: float = 0.0


@dataclass
class WithOwnResponse(Sample):
    response: str = ""


@dataclass(slots=True)
class WithSlots(Sample):
    score: float = 0.0


@pytest.mark.parametrize("kind", [WithOwnField, WithOwnResponse, WithSlots])
def test_a_plug_ins_own_kind_of_sample_has_the_text_too(sample: Sample, kind: type[Sample]) -> None:
    other = kind(**{entry.name: getattr(sample, entry.name) for entry in fields(Sample) if entry.name != "response"})
    assert other.response == ""
    other.set_pending_text(PendingText([1, 2], decode))
    assert (other.response, replace(other, index=1).response) == ("bc", "bc")
