"""Damage in the last record of a spool has a name when the ledger knows the record; it was cut off in silence."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path

import pytest

from tests.helpers.ledger_cases import issue, lease, open_ledger
from vime.data.payload import record_size, samples_to_bytes
from vime.handoff.audit import audit
from vime.handoff.ledger_types import Payload
from vime.handoff.spool import Spool, SpoolReader
from vime.handoff.spool_check import check_spool
from vime.handoff.spool_format import START_BYTES, SpoolDamageError
from vime.types import Sample

NAME = b'["train", 2, 1]'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Groups 0 to 2 are in ledger and spool, in this order; the test says what becomes of them."""
    return tmp_path


def write(run: Path, *, until: str = "ready") -> Path:
    """Answers the segment. `until`: what becomes of the groups; `spooled`: the ledger never hears of the last one."""
    ledger, spool = open_ledger(run), Spool(run / "spool")
    for task in issue(ledger, 3):
        data = samples_to_bytes([Sample(group_index=task.group, tokens=[1, 2, 3])])
        [checksum] = spool.append([(task, data)])
        assert checksum == zlib.crc32(data)
        size = {"num_bytes": len(data), "num_tokens": record_size(data)[1], "num_rows": 1}
        if until == "partial":
            ledger.prompts.retry(task, "aborted", partial=checksum)
        elif until != "spooled" or task.group < 2:
            ledger.prompts.commit(task, Payload(checksum=checksum, **size, min_version=0, max_version=0))
    if until == "durable":
        ledger.rounds.trained(0, lease(ledger, 0, 3).fence)
        ledger.rounds.durable(0)
    ledger.close()
    spool.close()
    [segment] = (run / "spool").glob("*.vsp")
    return segment


def check(run: Path, *, may_be_torn: bool = False) -> None:
    check_spool(run, run / "ledger.db", train="train", may_be_torn=may_be_torn)


def last_offset(run: Path) -> int:
    *_, (_, _, place) = SpoolReader(run / "spool").entries()
    return place.offset


PLACES = {"start": 6, "checksum": 22, "name": START_BYTES + 3, "payload": START_BYTES + len(NAME) + 5, "end": -1}


@pytest.mark.parametrize("until", ["ready", "durable", "partial"])
@pytest.mark.parametrize("place", PLACES)
def test_one_flipped_bit_in_the_last_record_is_refused_by_name_and_is_a_finding(
    run: Path, place: str, until: str
) -> None:
    segment = write(run, until=until)
    offset = last_offset(run)
    data = bytearray(segment.read_bytes())
    at = offset + PLACES[place] if place != "end" else len(data) - 1
    data[at] ^= 4
    segment.write_bytes(data)
    for may_be_torn in (False, True):
        with pytest.raises(SpoolDamageError, match=f"offset {offset}, group .*train/2#1.*the ledger knows the record"):
            check(run, may_be_torn=may_be_torn)
    report = audit(run / "ledger.db", checkpoint_round=0 if until == "durable" else None, spool=run / "spool")
    assert any(finding.check == "spool" and f"offset {offset}" in finding.message for finding in report.findings)
    assert segment.read_bytes() == data


@pytest.mark.parametrize("until", ["ready", "durable"])
def test_a_known_record_that_is_cut_off_is_refused_unless_a_power_cut_may_tear_it(
    run: Path, until: str, caplog: pytest.LogCaptureFixture
) -> None:
    segment = write(run, until=until)
    offset, size = last_offset(run), segment.stat().st_size
    for end in (size - 1, offset + START_BYTES + len(NAME), offset + START_BYTES + len(NAME) - 1, offset + START_BYTES):
        os.truncate(segment, end)
        with pytest.raises(SpoolDamageError, match=r"train/2#1.*the ledger knows the record as stored"):
            check(run)
        with caplog.at_level(logging.WARNING):
            check(run, may_be_torn=True)
        assert "group train/2#1. It is generated again (--transferqueue-fsync never)" in caplog.text


def test_a_record_that_the_ledger_never_heard_of_may_be_cut_off_at_any_byte(run: Path) -> None:
    segment = write(run, until="spooled")
    offset, data = last_offset(run), segment.read_bytes()
    for end in [*range(offset, offset + START_BYTES + len(NAME) + 2, 3), len(data) - 1]:
        segment.write_bytes(data[:end])
        check(run)
    segment.write_bytes(data[:offset] + bytes(5000))  # zeros after a power cut
    check(run)
    assert audit(run / "ledger.db", checkpoint_round=None, spool=run / "spool").findings == ()
    Spool(run / "spool").close()
    check(run)


def test_a_whole_spool_and_no_spool_pass(run: Path) -> None:
    write(run)
    check(run)
    (run / "spool").rename(run / "elsewhere")
    check(run)
