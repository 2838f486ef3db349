import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.rows import make_row, train_groups
from vime.handoff.payload import MAGIC, bytes_to_rows, bytes_to_samples, payload_size, rows_to_bytes, samples_to_bytes
from vime.types import HandoffError, Sample, SampleStatus, VersionSpan

EXTRA = ("teacher_log_probs",)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def samples(draw, group_index=0):
    sample = Sample(
        group_index=group_index,
        index=draw(st.integers(0, 2**40)),
        prompt=draw(st.text() | st.lists(st.dictionaries(st.text(), st.text()), max_size=2)),
        tokens=draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=5)),
        label=draw(JSON),
        metadata=draw(st.dictionaries(st.text(), JSON, max_size=3)),
        reward=draw(st.none() | FINITE | st.dictionaries(st.text(), st.floats(-1, 1))),
        status=draw(st.sampled_from(SampleStatus)),
        teacher_log_probs=draw(st.none() | st.lists(st.floats(-9, 0), max_size=3)),
    )
    for version in draw(st.lists(st.integers(0, 9), max_size=3)):
        tokens = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
        log_probs = [draw(st.floats(-50, 0)) for _ in tokens]
        trainable = draw(st.booleans())
        sample.append_response_tokens(
            tokens, log_probs, trainable=trainable, versions=[VersionSpan(version, 0, len(tokens))]
        )
    return sample


@given(train_groups())
def test_training_rows_come_back_equal(group):
    data = rows_to_bytes(group.rows, EXTRA)
    assert bytes_to_rows(data) == group.rows
    assert payload_size(data) == (len(group.rows), sum(len(row.tokens) for row in group.rows))


@settings(max_examples=40)
@given(st.lists(samples(), min_size=1, max_size=3))
def test_samples_come_back_equal_finished_or_aborted(group):
    data = samples_to_bytes(group)
    assert bytes_to_samples(data) == group
    assert payload_size(data) == (len(group), sum(len(sample.tokens) for sample in group))


@given(train_groups(), st.data())
def test_a_payload_cut_anywhere_is_refused(group, data):
    stored = rows_to_bytes(group.rows, EXTRA)
    end = data.draw(st.integers(0, len(stored) - 1))
    with pytest.raises(HandoffError, match="damaged"):
        bytes_to_rows(stored[:end])
    with pytest.raises(HandoffError, match="damaged"):
        bytes_to_rows(stored + b"\0")


@given(st.binary(max_size=200))
def test_bytes_of_no_payload_are_refused(data):
    for read in (bytes_to_rows, bytes_to_samples, payload_size):
        for bytes_ in (data, MAGIC + data):
            with pytest.raises(HandoffError):
                read(bytes_)


@given(st.integers(0, 10**6))
def test_a_flipped_bit_gives_an_error_or_a_legal_group(position):
    """The spool's checksums catch damage; the codec alone must at least never crash in another way."""
    stored = bytearray(rows_to_bytes([make_row(0), make_row(1)]))
    stored[position % len(stored)] ^= 1 << position % 8
    with contextlib.suppress(HandoffError):
        bytes_to_rows(bytes(stored))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"label": object()}, "label"),
        ({"label": (1, 2)}, "label"),  # would come back as a list
        ({"metadata": {"a": {1: 2}}}, "metadata"),
        ({"metadata": {"image": b"png"}}, "metadata"),
        ({"reward": float("nan")}, "reward"),
        ({"multimodal_inputs": {"x": {1, 2}}}, "multimodal_inputs"),
        ({"tokens": ["a"]}, "tokens"),
        ({"tokens": [2**70]}, "tokens"),
    ],
)
def test_what_cannot_be_stored_exactly_is_refused_by_name(change, name):
    with pytest.raises(HandoffError, match=f"group 3: {name}"):
        samples_to_bytes([replace(Sample(group_index=3, tokens=[1]), **change)])


def test_groups_that_are_none_are_refused():
    for group in ([], [Sample(group_index=0), Sample(group_index=1)]):
        with pytest.raises(HandoffError, match="samples of one group"):
            samples_to_bytes(group)
    with pytest.raises(HandoffError, match="holds rows, expected samples"):
        bytes_to_samples(rows_to_bytes([make_row()]))


def test_the_bytes_are_a_json_header_and_plain_numbers():
    data = rows_to_bytes([make_row()])
    length = int.from_bytes(data[4:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (data[:4], header["kind"], header["num_rows"], header["num_tokens"]) == (MAGIC, "rows", 1, 5)
    assert header["columns"][0] == ["tokens", "int32", 5]
    assert np.frombuffer(data, dtype="<i4", count=5, offset=8 + length).tolist() == [7, 8, 1, 2, 3]
    sizes = [np.dtype(dtype).itemsize * count for _, dtype, count in header["columns"]]
    assert len(data) == 8 + length + sum(sizes)  # nothing else
