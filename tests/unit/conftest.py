"""What holds for every unit test: none leaves a wait or a work open, which the next test would take for its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vime.utils import waits


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = set(waits._OPEN)
    yield
    left = [stretch.name for key, stretch in waits._OPEN.items() if key not in before]
    assert not left, f"the test left these waits or works of vime.utils.waits open: {left}"
