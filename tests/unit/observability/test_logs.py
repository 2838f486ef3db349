"""Log files: everything in the file, warnings on the screen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from vime.observability.logs import setup_logging


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def test_the_file_gets_everything_and_the_screen_gets_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = setup_logging(tmp_path, "trainer-0")
    logging.getLogger("vime.test").info("loaded 3 tensors")
    logging.getLogger("vime.test").warning("slow disk")
    assert path == tmp_path / "logs" / "trainer-0.log"
    assert "loaded 3 tensors" in path.read_text()
    assert "slow disk" in path.read_text()
    assert capsys.readouterr().err == "WARNING trainer-0: slow disk\n"


def test_a_second_call_takes_the_place_of_the_first(tmp_path: Path) -> None:
    first = setup_logging(tmp_path / "a", "driver")
    second = setup_logging(tmp_path / "b", "driver")
    logging.getLogger("vime.test").info("once")
    assert "once" not in first.read_text()
    assert second.read_text().count("once") == 1


def test_libraries_that_chatter_are_held_to_warnings(tmp_path: Path) -> None:
    path = setup_logging(tmp_path, "driver")
    logging.getLogger("httpx").info("HTTP Request: POST /generate")
    assert "HTTP Request" not in path.read_text()


def test_a_log_on_a_full_disk_costs_one_line_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's handlers print the stack of whoever logged, for each line."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").symlink_to("/dev/full")
    setup_logging(tmp_path, "driver")
    for _ in range(3):
        logging.getLogger("vime").info("a line")
    said = capsys.readouterr().err
    assert said.count("driver.log cannot be written: [Errno 28] No space left on device") == 1
    assert "Traceback" not in said
