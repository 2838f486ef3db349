import pytest

from vime.handoff.columns import COLUMNS, check_requested
from vime.types import ConfigError


def test_no_column_is_declared_twice():
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)


def test_every_optional_column_that_has_a_writer_may_be_requested():
    check_requested([column.name for column in COLUMNS if column.is_optional and column.writer is not None])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_column", "not a known column"),
        ("multimodal_train_inputs", "no part of Vime writes it"),
        ("tokens", "always carried"),
    ],
)
def test_a_column_that_cannot_be_requested_is_refused_before_start(name, reason):
    with pytest.raises(ConfigError, match=f"--transfer-queue-extra-data-fields {name}: .*{reason}"):
        check_requested([name])
