"""What `vime conformance --producer` says of calls whose order is unusual."""

from __future__ import annotations

from vime.gateway.judge import Session, judge
from vime.gateway.messages import WeightManifest
from vime.gateway.scripted import Record


def call(path: str, began: float, ended: float, **body: object) -> Record:
    return Record(began=began, ended=ended, method="POST", path=path, body=body, status=200, response={})


def found(*records: Record, name: str = "leaves when no prompt is left") -> str:
    manifests = (WeightManifest(version=0, content_hash="h", location="", files=[]),)
    session = Session(records=records, manifests=manifests, lease_timeout_s=3.0, committed=0, exit_code=0)
    [check] = [check for check in judge(session) if check.name == name]
    return check.found


def test_a_long_poll_that_ends_behind_leave_was_made_before_it() -> None:
    assert found(call("/v1/producers/leave", 4.0, 4.1), call("/v1/leases", 1.0, 5.0)) == ""


def test_what_was_called_behind_leave_is_named() -> None:
    said = found(call("/v1/producers/leave", 4.0, 4.1), call("/v1/leases", 4.2, 5.0))
    assert said == "its last call was /v1/leases, not leave"


def test_a_job_that_did_not_leave_is_told_its_last_call() -> None:
    assert found(call("/v1/groups", 1.0, 2.0)) == "its last call was /v1/groups, not leave"


REGISTERED = call("/v1/producers/register", 0.0, 0.1, engines=2)
HASHES = "reports the right hash of every version"


def loaded(*engines: str) -> Record:
    return call("/v1/weights/loaded", 1.0, 1.1, version=0, engines=dict.fromkeys(engines, "h"))


def test_engines_of_a_job_may_be_reported_one_by_one_and_the_missing_ones_are_counted() -> None:
    assert found(REGISTERED, loaded("a"), loaded("b"), name=HASHES) == ""
    said = found(REGISTERED, loaded("a"), loaded("a"), name=HASHES)
    assert said == "version 0: 1 engines were reported, 2 were registered"


def test_a_job_that_registers_no_number_of_engines_reports_one_hash() -> None:
    assert found(call("/v1/producers/register", 0.0, 0.1), loaded("a"), name=HASHES) == ""
