"""Worlds of --separate-roles work side by side, and none is left working when one failed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vime.config.parse import parse
from vime.handoff.receipts import SteppedGroup
from vime.ray import trainers as trainers_module
from vime.ray.placement import ANYWHERE
from vime.ray.trainers import RankRound, TrainedRound, Trainers
from vime.types import ClusterError, Role

FLAGS = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--use-opd", "--opd-teacher-load", "x"]
FLAGS += ["--separate-roles", "reference", "teacher", "--transferqueue-mode", "buffer"]


@pytest.mark.parametrize("broken", [(), (Role.REFERENCE,), (Role.REFERENCE, Role.TEACHER)])
def test_every_world_computes_before_one_is_waited_for(
    broken: tuple[Role, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class FakeRanks:
        def __init__(
            self, _config: Any, _run_dir: Path, _address: Any, roles: tuple[Role, ...], _place_of: Any
        ) -> None:
            self.role = roles[0]

        def begin(self, method: Callable[..., Any], *arguments: Any) -> Callable[..., list[Any]]:
            if self.role is Role.ACTOR:
                return partial(self.train, arguments[0].given)
            order.append(f"{self.role} begins")

            def wait() -> list[Any]:
                order.append(f"{self.role} ends")
                if self.role in broken:
                    raise ClusterError(f"{self.role} ranks to {method.__name__}: died")
                return [{str(self.role): {0: 1.0}}]

            return wait

        def train(self, given: object, *, on_poll: object) -> list[Any]:
            assert given == {"reference": {0: 1.0}, "teacher": {0: 1.0}}
            # two replicas that hold three rows and one row: peaks are compared, staleness is pooled
            rounds = ((1.0, [0, 1, 1], 0.5), (2.5, [2], 0.25))
            return [
                RankRound(
                    metrics={trainers_module.PEAK_MEMORY: peak},
                    staleness=staleness,
                    fetch_s=fetch_s,
                    taught={},
                    stepped=[SteppedGroup(7, 1, rows=len(staleness), tokens=10, trainable=4, content=2**64 - 1)],
                )
                for peak, staleness, fetch_s in rounds
            ]

    monkeypatch.setattr(trainers_module, "Ranks", FakeRanks)
    monkeypatch.setattr(trainers_module.ray, "put", lambda value: value)
    trainers = Trainers(parse(FLAGS), tmp_path, None, ANYWHERE)
    if broken:
        with pytest.raises(ClusterError, match="reference ranks to compute: died"):
            trainers.train(0, None, 0, is_judged=False)
    else:
        trained = trainers.train(0, None, 0, is_judged=False)
        assert isinstance(trained, TrainedRound)
        # one group, of which each replica has rows: 3 + 1, and twice 2**64 - 1 is 2**64 - 2 modulo 2**64
        assert trained.stepped == [SteppedGroup(7, 1, rows=4, tokens=20, trainable=8, content=2**64 - 2)]
        assert trained.metrics == {
            "transferqueue/sample_staleness/mean": 1.0,  # (0 + 1 + 1 + 2) / 4
            "transferqueue/sample_staleness/max": 2.0,
            "perf/peak_memory": 2.5,
            "transferqueue/get_latency": 0.5,  # of the slower one
        }
    assert order == ["reference begins", "teacher begins", "reference ends", "teacher ends"]
