"""A round in which some samples have several rows, trained in several ways, as cases for `megatron_worker.run`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers import reference_policy as reference
from tests.helpers.engine_contract import SETTINGS, exported
from tests.helpers.megatron_models import make_rows
from tests.helpers.megatron_worker import TOTAL_STEPS, Bench, Case
from vime.batching.plan import plan_round
from vime.data.rows import TrainRow
from vime.training.early import BegunRound
from vime.training.mismatch import Judge
from vime.training.worker import TrainWorker
from vime.types import RoundPlan

SAMPLES = (0, 1, 1, 1, 2, 3, 3, 4)
"""The sample of each of the eight rows: the second has three, the fourth two."""
PORTIONS = ((0, 4), (4, 5), (5, 8))  # rows of early batches: samples are whole
WAYS: dict[str, dict[str, Any]] = {
    "in packs of three": {"micro_batch_size": 3},
    "in one pack": {"micro_batch_size": 8},
    "row by row": {"micro_batch_size": 1},
    "by tokens": {"micro_batch_size": None, "max_tokens_per_micro_batch": 60},
    "balanced": {"micro_batch_size": 2, "is_balanced": True},
}
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo"},
    "per token": {"calculate_per_token_loss": True},
}


def several_rows() -> list[TrainRow]:
    """Rows of a sample share index, reward and prompt."""
    rows = make_rows()
    for number, row in enumerate(rows):
        first = rows[SAMPLES.index(SAMPLES[number])]
        prompt = first.tokens[: len(first.tokens) - first.response_length].tolist()
        answer = row.tokens[len(row.tokens) - row.response_length :].tolist()
        rows[number] = dataclasses.replace(
            row, tokens=[*prompt, *answer], sample_index=SAMPLES[number], reward=first.reward, raw_reward=1.0
        )
    return rows


def plan(
    rows: list[TrainRow],
    samples: list[int],
    dp_size: int,
    *,
    micro_batch_size: int | None,
    max_tokens_per_micro_batch: int | None = None,
    is_balanced: bool = False,
) -> RoundPlan:
    """One optimizer step."""
    lengths = [row.total_length for row in rows]
    return plan_round(
        0,
        lengths,
        [row.num_trainable for row in rows],
        dp_size=dp_size,
        samples_per_step=len(set(samples)),
        micro_batch_size=micro_batch_size,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        loads=lengths if is_balanced else None,
        sample_numbers=[samples[number] - samples[0] for number in range(len(samples))],
    )


def as_single_rows(rows: list[TrainRow], *, per_token: bool) -> list[TrainRow]:
    """Return rows that are samples by themselves, and whose rewards make up for it.

    At ratio 1 the loss is linear in the reward A. A row of n tokens in a sample of N, of M samples, adds
    -A sum / N / M; as one of 8 samples it adds -A' sum / n / 8. So A' = A (n / N) (8 / M). Per token nothing differs.
    """
    if per_token:
        return [dataclasses.replace(row, sample_index=number) for number, row in enumerate(rows)]
    tokens = {sample: sum(rows[at].num_trainable for at in range(8) if SAMPLES[at] == sample) for sample in SAMPLES}
    return [
        dataclasses.replace(
            row,
            sample_index=number,
            reward=row.reward * row.num_trainable / tokens[SAMPLES[number]] * len(rows) / len(tokens),
        )
        for number, row in enumerate(rows)
    ]


def several(bench: Bench) -> dict[str, Any]:
    """Weights and metrics after one step in each way."""
    config, backend = bench.backend()
    rows, dp_size = several_rows(), backend.place.dp_size
    answer: dict[str, Any] = {}

    def train(way: str, chosen: list[TrainRow], planned: RoundPlan) -> None:
        worker = TrainWorker(config, backend, total_steps=TOTAL_STEPS)
        metrics = worker.train_round(planned, dict(enumerate(chosen)))
        answer[way] = {"metrics": metrics, "weights": exported(worker.actor)}

    singles = as_single_rows(rows, per_token=config.algo.calculate_per_token_loss)
    train("as samples of one row", singles, plan(singles, list(range(8)), dp_size, micro_batch_size=3))
    for way, options in WAYS.items():
        train(way, rows, plan(rows, list(SAMPLES), dp_size, **options))
    with sharing_prompts():
        train("with shared prompts", rows, plan(rows, list(SAMPLES), dp_size, micro_batch_size=8))
    # fewer rows than ranks: one of two has none
    train("one row", rows[:1], plan(rows[:1], [0], dp_size, micro_batch_size=1))

    worker = TrainWorker(config, backend, total_steps=TOTAL_STEPS)
    begun = BegunRound(config, worker, 0)
    parts = [
        (
            plan(rows[first:last], list(SAMPLES[first:last]), dp_size, micro_batch_size=2),
            dict(enumerate(rows[first:last])),
        )
        for first, last in PORTIONS
    ]
    for part in parts[:-1]:
        begun.begin(*part)
    metrics = begun.finish(*parts[-1], Judge(version=0))
    answer["in early batches"] = {"metrics": metrics, "weights": exported(worker.actor)}
    backend.close()
    return answer


@contextlib.contextmanager
def sharing_prompts() -> Iterator[None]:
    """Compute the prompt that rows share once, however many calls of attention that takes (megatron on the CPU)."""
    from vime.backends.megatron_utils import step

    usual, step._tokens_per_call = step._tokens_per_call, lambda _chunks: 0.0
    try:
        yield
    finally:
        step._tokens_per_call = usual


def is_for_the_night(setting: str, recipe: str) -> bool:
    """Rows of a sample on one and on two replicas, of either backend; recipes differ in the divisor only."""
    return setting == "megatron-pp2" or (recipe != "grpo" and setting != "megatron-dp2-distributed")


def several_rows_cases(models: Path, *, is_night: bool) -> list[Case]:
    flags = {"hf_checkpoint": str(models / "qwen2"), "rollout_temperature": reference.TEMPERATURE}
    return [
        Case(
            name=f"{setting}-several-{recipe}",
            do="tests.helpers.several_rows_cases:several",
            world=world,
            flags={**flags, **layout, **RECIPES[recipe]},
        )
        for setting, (world, layout) in SETTINGS.items()
        for recipe in RECIPES
        if is_night or not is_for_the_night(setting, recipe)
    ]
