import pytest

from vime.utils.errors import first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a\nb"), "a"),
        (ValueError("\n  a  \r\nb"), "a"),
        (ValueError(), "ValueError"),
        (RuntimeError("\n"), "RuntimeError"),
    ],
)
def test_an_error_is_named_by_its_first_line_and_without_a_text_by_its_type(error: Exception, said: str) -> None:
    assert first_line(error) == said
