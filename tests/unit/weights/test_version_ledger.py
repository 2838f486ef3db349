"""The version ledger: one place where versions are born, and what makes one served."""

import pytest

from vime.types import EngineReport, PublishError
from vime.weights.versions import VersionLedger, check_reports


def report(engine: str, version: int, content_hash: str = "h") -> EngineReport:
    return EngineReport(engine=engine, version=version, content_hash=content_hash, num_tensors=3)


def test_a_new_run_trains_version_0_and_serves_none():
    ledger = VersionLedger()
    assert (ledger.trained, ledger.serving) == (0, None)


def test_advance_makes_a_version_and_confirm_serves_it():
    ledger = VersionLedger()
    assert ledger.confirm([report("e0", 0)], "h") == 0
    assert ledger.advance() == 1
    assert (ledger.trained, ledger.serving) == (1, 0)
    ledger.confirm([report("e0", 1), report("e1", 1)], "h")
    assert (ledger.trained, ledger.serving) == (1, 1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(report("e1", 0), "e1 serves version 0"), (report("e1", 1, "x"), "e1 serves version 1 with hash x")],
)
def test_one_engine_that_differs_is_named_and_nothing_is_served(wrong, named):
    ledger = VersionLedger()
    ledger.advance()
    with pytest.raises(PublishError, match=named) as refused:
        ledger.confirm([report("e0", 1), wrong], "h")
    assert "expected version 1 with hash h" in str(refused.value)
    assert "e0 serves" not in str(refused.value)
    assert ledger.serving is None


def test_no_report_is_no_confirmation():
    with pytest.raises(PublishError, match="no engine reported"):
        VersionLedger().confirm([], "h")


def test_a_missing_engine_is_noticed():
    with pytest.raises(PublishError, match=r"\['e0'\].*\['e0', 'e1'\]"):
        check_reports([report("e0", 2)], version=2, content_hash="h", engines=["e0", "e1"])


def test_restore_continues_at_the_checkpoint_and_serves_nothing_yet():
    ledger = VersionLedger()
    ledger.restore(7)
    assert (ledger.trained, ledger.serving, ledger.advance()) == (7, None, 8)


def test_restore_is_refused_after_training_began_and_for_negative_versions():
    ledger = VersionLedger()
    with pytest.raises(ValueError, match="-1"):
        ledger.restore(-1)
    ledger.advance()
    with pytest.raises(ValueError, match="restore before training"):
        ledger.restore(3)
