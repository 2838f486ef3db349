import pytest

from vime.handoff.columns import COLUMNS, check_requested
from vime.types import ConfigError


def test_no_column_is_declared_twice():
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)


def test_a_column_with_a_writer_may_be_requested():
    check_requested(["teacher_log_probs"])


@pytest.mark.parametrize("name", ["no_such_column", "rollout_routed_experts", "tokens"])
def test_a_column_that_nobody_writes_on_request_is_refused_before_start(name):
    with pytest.raises(ConfigError, match=rf"--transfer-queue-extra-data-fields {name}: .*teacher_log_probs"):
        check_requested([name])
