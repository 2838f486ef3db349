"""The one form in which rows and samples travel: chunks of rows, and records of a group."""

import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.rows import make_groups, make_row, train_groups
from vime.data import payload
from vime.data.payload import (
    bytes_to_samples,
    cut,
    join_record,
    join_samples,
    pack_rows,
    pack_rest,
    record_size,
    samples_to_bytes,
    split_record,
    unpack_rows,
)
from vime.types import HandoffError, Sample, SampleStatus, VersionSpan

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
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)),
        label=draw(JSON),
        metadata=draw(st.dictionaries(st.text(), JSON, max_size=3)),
        reward=draw(st.none() | FINITE | st.dictionaries(st.text(), st.floats(-1, 1))),
        status=draw(st.sampled_from(SampleStatus)),
        teacher_log_probs=draw(st.none() | st.lists(st.floats(-9, 0), max_size=3)),
    )
    for version in draw(st.lists(st.integers(0, 9), max_size=3)):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
        log_probs = [draw(st.floats(-50, 0, width=32)) for _ in tokens]
        trainable = draw(st.booleans())
        sample.append_response_tokens(
            tokens, log_probs, trainable=trainable, versions=[VersionSpan(version, 0, len(tokens))]
        )
    return sample


@given(train_groups(), st.integers(-1, 2**40))
def test_the_rows_of_a_chunk_come_back_equal_and_are_of_the_round_that_reads_them(group, rollout_id):
    back = unpack_rows(pack_rows(group), rollout_id=rollout_id)
    assert back == [replace(row, rollout_id=rollout_id) for row in group]


@given(train_groups())
def test_packing_again_gives_the_same_bytes(group):
    data = pack_rows(group)
    assert pack_rows(unpack_rows(data)) == data


def test_no_rows_are_legal():
    assert unpack_rows(pack_rows([])) == []


def test_the_arrays_of_a_row_that_was_read_may_be_written_to():
    """torch warns of arrays that may not, and shares the memory of those that may."""
    data = pack_rows([make_row(0), make_row(1)])
    first, second = unpack_rows(data)
    first.tokens[-1] = 99
    assert (second.tokens.tolist(), unpack_rows(data)[0].tokens[-1]) == ([7, 8, 1, 2, 3], 3)


@given(train_groups(), st.data())
def test_a_changed_byte_anywhere_in_a_chunk_is_named(group, data):
    stored = bytearray(pack_rows(group))
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(HandoffError, match="came back changed|are no chunk of rows"):
        unpack_rows(bytes(stored))


@given(train_groups(), st.data())
def test_a_chunk_cut_anywhere_is_refused(group, data):
    stored = pack_rows(group)
    for torn in (stored[: data.draw(st.integers(0, len(stored) - 1))], stored + b"\0"):
        with pytest.raises(HandoffError, match="came back changed|are no chunk of rows"):
            unpack_rows(torn)


def test_a_chunk_is_a_json_header_plain_numbers_and_a_checksum():
    data = pack_rows([make_row(0, prompt=(7,), response=(1, 2)), make_row(1, prompt=(8, 9), response=(3,))])
    magic, num_rows, length = struct.unpack_from("<4sII", data)
    header = json.loads(data[12 : 12 + length])
    assert (magic, num_rows, header) == (b"VIMG", 2, {"partition": "", "producer": "", "extra": []})
    assert (12 + length) % 8 == 0  # the numbers behind it are aligned
    # two heads of 56 bytes and two spans of 24; rows lie end to end
    at = 12 + length + 2 * 56 + 2 * 24
    assert np.frombuffer(data, "<i4", 6, at).tolist() == [7, 1, 2, 8, 9, 3]
    assert np.frombuffer(data, "<f4", 3, at + 24).tolist() == [-0.5] * 3
    assert data[at + 36 : at + 39] == b"\1\1\1"
    assert data[at + 39 :] == struct.pack("<I", zlib.crc32(data[:-4]))  # and nothing else


def with_extra(row, **extra):
    return replace(row, extra=extra)


def test_extra_fields_of_any_name_shape_and_type_come_back_as_they_were():
    fields = {
        "teacher_log_probs": np.array([-0.5, -1.0, -2.0], np.float32),
        "experts": np.arange(30, dtype=np.int16).reshape(5, 6) - 1,
        "is_right": np.array(True),
        "big": np.array([2**60 + 1, -1]),
        "third": np.array(1 / 3),
        "nothing": np.zeros((0, 4), np.int64),
        "rest": b'{"why": "\xc3\xa9"}',
        "empty": b"",
    }
    rows = [with_extra(make_row(0), **fields), with_extra(make_row(1), **fields)]
    for row in unpack_rows(pack_rows(rows)):
        assert row == with_extra(make_row(row.sample_index, rollout_id=-1), **fields)


def test_each_row_may_have_another_number_of_entries():
    rows = [with_extra(make_row(at), x=np.zeros((at, 2)), y=b"." * at) for at in range(3)]
    back = unpack_rows(pack_rows(rows))
    assert [(row.extra["x"].shape, row.extra["y"]) for row in back] == [((0, 2), b""), ((1, 2), b"."), ((2, 2), b"..")]


def test_whole_numbers_beside_fractions_are_fractions_and_numbers_beside_bytes_are_their_json():
    rows = [
        with_extra(make_row(0), x=np.array([1]), y=np.array([1, 2])),
        with_extra(make_row(1), x=np.array(0.5), y=b"?"),
    ]
    first, second = unpack_rows(pack_rows(rows))
    assert (first.extra["x"].tolist(), second.extra["x"].tolist()) == ([1.0], 0.5)
    assert (first.extra["y"], second.extra["y"]) == (b"[1, 2]", b"?")


def test_a_field_that_some_rows_of_a_group_lack_is_refused_by_name():
    with pytest.raises(HandoffError, match=r"samples \[1\]: column 'x' is missing"):
        pack_rows([with_extra(make_row(0), x=np.array(1)), make_row(1)])


def test_a_group_is_cut_where_a_chunk_is_full_and_no_row_is(monkeypatch):
    [rows] = make_groups(1, 5)  # a row weighs 4 bytes a token and 5 a response token
    sizes = [4 * row.total_length + 5 * row.response_length for row in rows]
    assert sizes == [17, 62, 44, 26, 71]  # 3, 8, 6, 4, 9 tokens; all but 2 response
    monkeypatch.setattr(payload, "CHUNK_BYTES", 80)
    assert [[row.sample_index for row in chunk] for chunk in cut(rows)] == [[0, 1, 2], [3, 4]]
    monkeypatch.setattr(payload, "CHUNK_BYTES", 79)
    assert [[row.sample_index for row in chunk] for chunk in cut(rows)] == [[0, 1], [2, 3, 4]]
    monkeypatch.setattr(payload, "CHUNK_BYTES", 1)
    assert [len(chunk) for chunk in cut(rows)] == [1] * 5
    assert list(cut([])) == []


@settings(max_examples=40)
@given(st.lists(samples(), min_size=1, max_size=3))
def test_samples_come_back_equal_finished_or_aborted(group):
    data = samples_to_bytes(group)
    assert bytes_to_samples(data) == group
    assert record_size(data) == (len(group), sum(len(sample.tokens) for sample in group))


def test_log_probabilities_of_samples_are_rounded_to_float32_and_nothing_else_is():
    sample = Sample(group_index=0, index=3, tokens=[1], reward=0.1, metadata={"x": 0.1}, teacher_log_probs=[-0.1])
    sample.append_response_tokens([5], [-0.1], versions=[VersionSpan(0, 0, 1)])
    [back] = bytes_to_samples(samples_to_bytes([sample]))
    assert back.rollout_log_probs == [float(np.float32(-0.1))]
    assert (back.reward, back.metadata, back.teacher_log_probs) == (0.1, {"x": 0.1}, [-0.1])


@pytest.mark.parametrize(("mask", "log_probs"), [(None, None), ([1], None), (None, [-0.5]), ([1, 1], [-0.25])])
def test_lists_that_do_not_line_up_come_back_as_a_plug_in_left_them(mask, log_probs):
    sample = Sample(group_index=0, tokens=[1, 2], response_length=1, loss_mask=mask, rollout_log_probs=log_probs)
    assert bytes_to_samples(samples_to_bytes([sample])) == [sample]


@given(st.lists(samples(), min_size=1, max_size=3), st.data())
def test_a_record_cut_anywhere_is_refused(group, data):
    stored = samples_to_bytes(group)
    for torn in (stored[: data.draw(st.integers(0, len(stored) - 1))], stored + b"\0"):
        for read in (bytes_to_samples, record_size, split_record):
            with pytest.raises(HandoffError, match="no record.*torn"):
                read(torn)


@given(st.binary(max_size=200))
def test_bytes_of_no_record_are_refused(data):
    for read in (bytes_to_samples, record_size):
        for bytes_ in (data, b"VIMP" + data):
            with pytest.raises(HandoffError):
                read(bytes_)
    for bytes_ in (data, b"VIMG" + data):
        with pytest.raises(HandoffError):
            unpack_rows(bytes_)


@pytest.mark.parametrize("chunk", [b"", b"VIMG", b"nothing of a chunk of rows", b"VIMG" + b"\xff" * 40])
def test_parts_of_a_record_that_are_no_chunks_are_refused(chunk):
    record = join_record([chunk], pack_rest([Sample(group_index=0)]))
    for read in (record_size, bytes_to_samples):
        with pytest.raises(HandoffError):
            read(record)


@pytest.mark.parametrize(
    "rest", [b"", b"VIMS", b"VIMS[]", b"VIMS[1]", b"VIMS{}", b"VIMS[{}]", b'VIMS[{"status": "no"}]', b"VIMX[]"]
)
def test_a_rest_that_does_not_fit_its_rows_is_refused(rest):
    with pytest.raises(HandoffError, match="not a group of samples"):
        join_samples([make_row()], rest)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"label": object()}, "label"),
        ({"label": (1, 2)}, "label"),  # would come back as a list
        ({"metadata": {"a": {1: 2}}}, "metadata"),
        ({"metadata": {"image": b"png"}}, "metadata"),
        ({"reward": float("nan")}, "reward"),
        ({"multimodal_inputs": {"x": {1, 2}}}, "multimodal_inputs"),
    ],
)
def test_what_cannot_be_stored_exactly_is_refused_by_name(change, name):
    with pytest.raises(HandoffError, match=f"group 3: {name}"):
        samples_to_bytes([replace(Sample(group_index=3, tokens=[1]), **change)])


@pytest.mark.parametrize("tokens", [["a"], [2**70], [2**31]])
def test_tokens_that_no_column_holds_are_refused_by_name(tokens):
    with pytest.raises(HandoffError, match="sample 5: tokens: a value does not fit int32"):
        samples_to_bytes([Sample(group_index=3, index=5, tokens=tokens)])


def test_groups_that_are_none_are_refused():
    for group in ([], [Sample(group_index=0), Sample(group_index=1)]):
        with pytest.raises(HandoffError, match="samples of one group"):
            samples_to_bytes(group)
    with pytest.raises(HandoffError, match="only rows"):  # nobody was to ask for the samples of this one
        bytes_to_samples(join_record([pack_rows([make_row()])], b""))
