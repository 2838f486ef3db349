import pytest

from tests.helpers.rows import make_row
from vime.data.columns import COLUMNS, check_requested
from vime.types import ConfigError


def test_no_column_is_declared_twice():
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)


def test_every_column_that_is_always_carried_is_an_attribute_of_a_row():
    row = make_row()
    assert all(hasattr(row, column.attribute) for column in COLUMNS if column.attribute is not None)


def test_every_optional_column_may_be_requested_and_so_may_a_name_that_nobody_knows():
    check_requested([*(column.name for column in COLUMNS if column.is_optional), "what_a_plug_in_wrote"])


@pytest.mark.parametrize(
    ("name", "reason"), [("tokens", "is always stored"), ("raw_reward", "is always stored"), ("a-b", "no name of")]
)
def test_a_field_that_cannot_be_requested_is_refused_before_start(name, reason):
    with pytest.raises(ConfigError, match=f"--transfer-queue-extra-data-fields '?{name}'?: .*{reason}"):
        check_requested([name])
