"""One trainer rank on a GPU with NCCL, and the engines that tests ask it for."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
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


ON_GPU = {"device": "cuda", "distributed_backend": "nccl"}


def run_on_gpu(launched: Path, do: str, /, *, flags: dict[str, Any], **arguments: Any) -> Any:
    """The answer of one case, see `megatron_worker`; what is `launched` writes there. `arguments` are the case's."""
    case = Case(name="gpu", do=do, flags={**ON_GPU, **flags}, arguments=arguments)
    return run_all_on_gpu([case], launched)["gpu"]


def run_all_on_gpu(cases: Sequence[Case], directory: Path) -> dict[str, Any]:
    """Answers by the name of the case, one after another in one process."""
    [answers] = launch(
        "tests.helpers.megatron_worker:run",
        world_size=1,
        directory=directory,
        arguments={"cases": [dataclasses.replace(case, flags={**ON_GPU, **case.flags}) for case in cases]},
        deadline_s=240,
    )
    return answers
