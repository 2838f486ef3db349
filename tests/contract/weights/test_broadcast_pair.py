"""What the GPU tests of NCCL run, over gloo: a sender and a receiver, each in a process, sound and with a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.broadcast_pair import hashes


@pytest.mark.parametrize("fault", ["none", "swapped"])
def test_what_was_received_has_the_hash_of_what_was_sent_unless_its_bytes_are_others(
    fault: str, tmp_path: Path
) -> None:
    sent, received = hashes(tmp_path, "gloo", fault)
    assert received != ""
    assert (received == sent) == (fault == "none")
