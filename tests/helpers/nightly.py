"""Which cases of a launch are for the night: a launch costs what its cases cost, whichever tests are selected."""

from __future__ import annotations

from pathlib import Path

import pytest


def is_night(request: pytest.FixtureRequest, place: Path) -> bool:
    """Whether this session runs a test of `place`, a file or a directory, that is marked `nightly`."""
    return any(item.path.is_relative_to(place) and item.get_closest_marker("nightly") for item in request.session.items)
