"""Which cases of a launch are for the night: a launch costs what its cases cost, whichever tests are selected."""

from __future__ import annotations

import pytest


def is_night(request: pytest.FixtureRequest) -> bool:
    """Whether this session runs a test of the fixture's file that is marked `nightly`."""
    return any(item.path == request.path and item.get_closest_marker("nightly") for item in request.session.items)
