"""A round of which the carrier lost rows, on ranks that play one role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vime.config.parse import Config
from vime.training.worker import TrainWorker
from vime.types import HandoffError, Role, RoundPlan, StepPlan

PLAN = RoundPlan(rollout_id=4, steps=(StepPlan(micro_batches=(((0, 1),),), num_samples=2, num_tokens=2),))


@pytest.mark.parametrize("role", [Role.CRITIC, Role.REFERENCE])
@pytest.mark.parametrize("method", ["forward_columns", "update"])
def test_ranks_of_a_separate_role_name_the_round_and_the_rows_that_are_missing(role: Role, method: str) -> None:
    backend: Any = SimpleNamespace(place=SimpleNamespace(dp_rank=0, holds_tokens=True), build=lambda _: None)
    worker = TrainWorker(Config(), backend, total_steps=1, roles=(role,))
    columns = () if method == "forward_columns" else ({},)
    with pytest.raises(HandoffError, match=r"round 4: the plan gives rows \[0, 1\]"):
        getattr(worker, method)(PLAN, {}, *columns)
