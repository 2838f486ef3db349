"""Which tokens are compared, and what is said about them."""

from __future__ import annotations

import pickle
from dataclasses import replace

from vime.data.rows import TrainRow
from vime.training.evidence import COMPARED, DIFFERENCE, LARGEST, MeasuredMismatch, merge, of_rows
from vime.training.mismatch import LogprobMismatch, comparable
from vime.types import VersionSpan

ROW = TrainRow(
    sample_index=0, group_index=0, rollout_id=2, tokens=(5, 6, 7, 8, 9), response_length=4, loss_mask=(1, 0, 1, 1),
    rollout_log_probs=(-1.0, -1.0, -2.0, -3.0), token_policy_versions=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 4)),
    reward=0.0, raw_reward=0.0, status="completed", truncated=False,
)  # fmt: skip


def test_a_token_is_compared_when_it_trains_and_the_version_sampled_it() -> None:
    assert comparable(ROW, 2) == [False, False, True, True]
    assert comparable(ROW, 1) == [True, False, False, False]
    assert comparable(ROW, 3) == [False] * 4


def test_rows_are_compared_at_every_trainable_token() -> None:
    # |-1.5 + 1|, |-2 + 2|, |-3.25 + 3|: the second token does not train
    found = of_rows([ROW], [[-1.5, -9.0, -2.0, -3.25]])
    assert (found.num_tokens, found.mean, found.largest) == (3, 0.25, 0.5)
    assert found.suspects[0].difference == 0.25


def test_without_a_token_to_compare_no_difference_is_reported() -> None:
    assert MeasuredMismatch(num_tokens=0, mean=0.0, largest=0.0).metrics() == {COMPARED: 0.0}
    assert MeasuredMismatch(num_tokens=2, mean=0.5, largest=1.0).metrics() == {
        DIFFERENCE: 0.5,
        LARGEST: 1.0,
        COMPARED: 2.0,
    }


def test_the_worst_rows_of_all_ranks_come_first() -> None:
    def of(*differences: float) -> MeasuredMismatch:
        rows = [replace(ROW, sample_index=int(10 * difference)) for difference in differences]
        logps = [[logp - difference for logp in ROW.rollout_log_probs] for difference in differences]
        return of_rows(rows, logps)

    merged = merge([of(0.1, 0.5, 0.3), of(0.4, 0.2)])
    assert [suspect.row.sample_index for suspect in merged.suspects] == [5, 4, 3, 2]


def test_a_disagreement_travels_between_processes_with_its_numbers() -> None:
    error = pickle.loads(pickle.dumps(LogprobMismatch(of_rows([ROW], [[-1.5, -9.0, -2.0, -3.25]]))))
    assert error.measured.num_tokens == 3
    assert "disagree by 0.25 nats a token (largest 0.5) over 3 tokens" in str(error)
