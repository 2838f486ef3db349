"""One trainer rank on a GPU with NCCL, and the engines that tests ask it for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist_launch import launch
from tests.helpers.megatron_worker import Case

NEEDS_TE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
IMPLEMENTATIONS = ["local", pytest.param("transformer_engine", marks=NEEDS_TE)]
"""--transformer-impl of the megatron engine."""


def run_on_gpu(directory: Path, do: str, *, flags: dict[str, Any], **arguments: Any) -> Any:
    case = Case(
        name="gpu", do=do, flags={"device": "cuda", "distributed_backend": "nccl", **flags}, arguments=arguments
    )
    [answer] = launch(
        "tests.helpers.megatron_worker:run",
        world_size=1,
        directory=directory,
        arguments={"cases": [case]},
        deadline_s=240,
    )
    return answer["gpu"]
