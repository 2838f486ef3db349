"""Weights from one GPU to another over NCCL, as trainer and engine do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.broadcast_pair import hashes
from tests.helpers.faulty_sender import OTHER_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a process: two of them"),
]


def test_what_the_engine_received_over_nccl_has_the_hash_of_what_was_sent(tmp_path: Path) -> None:
    sent, received = hashes(tmp_path, "nccl")
    assert sent == received != ""


@pytest.mark.parametrize("fault", OTHER_BYTES)
def test_other_bytes_than_were_sent_over_nccl_have_another_hash(fault: str, tmp_path: Path) -> None:
    sent, received = hashes(tmp_path, "nccl", fault)
    assert received not in ("", sent)
