import pytest

from tests.helpers.rows import make_row
from vime.handoff.ticket import check_staleness, staleness_metrics
from vime.types import StaleError, VersionSpan

MIXED = make_row(17, group_index=4, versions=(VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)))  # oldest token: version 3
FRESH = make_row(18, versions=(VersionSpan(5, 0, 3),))


def test_mean_and_maximum_of_the_oldest_tokens():
    # on weights 5: 5 - 3 = 2 and 5 - 5 = 0
    found = check_staleness([MIXED, FRESH], version=5, max_staleness=2)
    assert found == [2, 0]
    assert staleness_metrics(found) == {
        "transferqueue/sample_staleness/mean": 1.0,
        "transferqueue/sample_staleness/max": 2.0,
    }


def test_a_sample_beyond_the_bound_is_named_with_its_versions_and_the_flag():
    message = r"sample 17 of group 4: .*\[3, 5\], 2 versions behind 5 .*bound is 1 \(--transferqueue-max-staleness\)"
    with pytest.raises(StaleError, match=message):
        check_staleness([FRESH, MIXED], version=5, max_staleness=1)


def test_a_token_newer_than_the_weights_is_refused():
    with pytest.raises(StaleError, match="newer than the weights 4"):
        check_staleness([FRESH], version=4, max_staleness=9)


def test_tokens_that_are_not_trained_do_not_count():
    # the only version-3 token is masked, so the sample is fresh
    row = make_row(loss_mask=(0, 1, 1), versions=(VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)))
    assert check_staleness([row], version=5, max_staleness=0) == [0]


def test_a_sample_without_trainable_tokens_is_not_stale():
    row = make_row(response=(), versions=())
    assert check_staleness([row], version=5, max_staleness=0) == []
    assert staleness_metrics([]) == {
        "transferqueue/sample_staleness/mean": 0.0,
        "transferqueue/sample_staleness/max": 0.0,
    }


def test_recorded_rows_are_measured_and_not_refused():
    # versions 3 and 5 on weights 9 and on weights 2: 9 - 3 = 6, and 2 - 3 = -1 (recorded by a run that was further)
    assert check_staleness([MIXED], version=9, max_staleness=None) == [6]
    assert check_staleness([MIXED], version=2, max_staleness=None) == [-1]
