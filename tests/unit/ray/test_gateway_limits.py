"""What the gateway of a run asks the ledger for follows from the flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.config.parse import parse
from vime.ray.gateway import _limits


@pytest.mark.parametrize("bound", ["groups", "tokens", "bytes"])
def test_room_is_asked_for_when_the_queue_has_a_bound_and_only_then(tmp_path: Path, bound: str) -> None:
    flags = ["--hf-checkpoint", str(write_model_directory(tmp_path)), "--transferqueue-mode", "streaming"]
    assert not _limits(parse(flags)).has_capacity
    assert _limits(parse([*flags, f"--transferqueue-max-{bound}", "4096"])).has_capacity
