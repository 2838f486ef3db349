"""--check-weight-update-equal against a scripted engine, which scores every token of the probe with -1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.fake import FakeEngine
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.ray.probe import check_engines_agree, compare_with_engines
from vime.types import PublishError, SamplingRule, VersionSpan

NUM_TOKENS = 15  # of the probe's answer


class Ranks:
    """`Trainers` whose score of the first tokens is off by these amounts."""

    def __init__(self, *off: float) -> None:
        self._off = [*off, *[0.0] * (NUM_TOKENS - len(off))]

    def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
        assert rule == SamplingRule()  # as the engine scores, whatever --rollout-temperature says
        return [[-1.0 + off for off in self._off] for _ in rows]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as running:
        running.faults.wrong_version = "1"  # which is none at all before the first update
        yield running


def check(engine: FakeEngine, ranks: Ranks, *, bf16: bool) -> float:
    fleet = FleetControl([engine.address], timeout_s=10)
    try:
        return check_engines_agree(Config().replace(bf16=bf16), cast(Any, ranks), fleet, version=1)
    finally:
        fleet.close()


def test_in_fp32_one_token_that_differs_is_enough(engine: FakeEngine) -> None:
    assert check(engine, Ranks(5e-4), bf16=False) == pytest.approx(5e-4)
    with pytest.raises(PublishError, match=r"differ from the trainer's by 0\.002"):
        check(engine, Ranks(2e-3), bf16=False)


def test_in_bf16_rounding_moves_single_tokens_and_other_weights_move_most(engine: FakeEngine) -> None:
    """Of 1,024 tokens of SmolLM2-135M one in a hundred was off by more than 0.23, the largest by 0.46; with experts
    single tokens by 5.5 (docs/agreement.md)."""
    assert check(engine, Ranks(0.46, 0.23, 5.5), bf16=True) == 0.0
    assert check(engine, Ranks(*[0.044] * NUM_TOKENS), bf16=True) == pytest.approx(0.044)  # SmolLM2's mean
    with pytest.raises(PublishError, match=r"differ from the trainer's by 0\.12"):
        check(engine, Ranks(*[0.12] * 8), bf16=True)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_score_that_is_no_number_is_no_agreement(engine: FakeEngine, bf16: bool) -> None:
    with pytest.raises(PublishError, match="differ from the trainer's by nan"):
        check(engine, Ranks(0.0, math.nan), bf16=bf16)


def test_every_engine_is_compared_and_rows_of_several_lengths_keep_their_own_tokens() -> None:
    """Engines say -1 for each token; the trainer -1.5 for one of the 2 and 3 trainable tokens of the two rows."""

    class Two:
        def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
            return [[-1.5] + [-1.0] * (row.response_length - 1) for row in rows]

    rows = [_row([5, 6, 7, 8], response_length=2), _row([5, 6, 7, 8], response_length=3)]
    with FakeEngine(name="e0") as first, FakeEngine(name="e1") as second:
        first.faults.wrong_version = second.faults.wrong_version = "1"
        fleet = FleetControl([first.address, second.address], timeout_s=10)
        found = compare_with_engines(fleet, cast(Any, Two()), rows)
        fleet.close()
    assert list(found) == ["e0", "e1"]
    for agreement in found.values():
        assert agreement.num_tokens == 5
        assert agreement.largest == pytest.approx(0.5)
        assert agreement.mean == pytest.approx(0.2)  # 2 x 0.5 / 5


def _row(tokens: list[int], response_length: int) -> TrainRow:
    return TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=np.asarray(tokens, dtype=np.int32),
        response_length=response_length,
        loss_mask=np.ones(response_length, dtype=np.uint8),
        rollout_log_probs=np.zeros(response_length, dtype=np.float32),
        token_policy_versions=[VersionSpan(1, 0, response_length)],
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
    )
