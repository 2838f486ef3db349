"""From flags and rows to a plan, its work and its metrics."""

import json
import logging
from pathlib import Path

import pytest

from tests.helpers.rows import make_row
from vime.batching.flops import RoundWork, forward_flops, layer_flops, train_flops
from vime.config.hf_config import read_model_shape
from vime.config.parse import Config, parse
from vime.data.rows import TrainRow, facts_of
from vime.ray.planning import RoundPlanner
from vime.ray.rollout_manager import ManagerInfo
from vime.ray.startup import _num_rollout
from vime.types import ConfigError

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "head_dim": 8,
    "intermediate_size": 2,
    "vocab_size": 4,
    "max_position_embeddings": 512,
}


def config_of(directory: Path, **flags: object) -> Config:
    (directory / "config.json").write_text(json.dumps(SHAPE))
    defaults = {"hf_checkpoint": str(directory), "device": "cpu", "actor_num_gpus_per_node": 2}
    return Config().replace(**{**defaults, **flags})


def rows_of(*lengths: int) -> list[TrainRow]:
    return [make_row(index, prompt=[1], response=[2] * (length - 1)) for index, length in enumerate(lengths)]


LENGTHS = (100, 50, 50, 50, 50, 40, 30, 30)
"""Four rows a rank. By length the longest meets 50, 40 and 30; were work the square of the length, it would meet 40, 30
and 30, because 50 x 50 x 4 is as much as 100 x 100."""


def test_without_balance_ranks_get_consecutive_rows_and_the_imbalance_is_said(tmp_path: Path) -> None:
    planned = RoundPlanner(config_of(tmp_path)).plan(0, facts_of([rows_of(30, 10, 10, 10)]))
    # 40 and 20 tokens: 40 / 30 - 1
    assert planned.metrics["perf/dp_imbalance_tokens"] == pytest.approx(1 / 3)
    assert planned.metrics["perf/padding_waste"] == 0
    assert planned.metrics["perf/dp_imbalance_flops"] > 1 / 3  # the long row is quadratic


def test_balance_by_flops_weighs_a_long_row_more_than_balance_by_length(tmp_path: Path) -> None:
    by_length = RoundPlanner(config_of(tmp_path, balance_data=True)).plan(0, facts_of([rows_of(*LENGTHS)])).metrics
    by_flops = RoundPlanner(config_of(tmp_path, balance_data=True, balance_data_by="flops"))
    planned = by_flops.plan(0, facts_of([rows_of(*LENGTHS)]))
    assert planned.metrics["perf/dp_imbalance_flops"] < by_length["perf/dp_imbalance_flops"]
    assert planned.plan.rows_of(0) == (0, 5, 6, 7)


def test_a_sample_of_several_rows_counts_once_and_its_early_batches_need_not_divide_over_the_ranks(
    tmp_path: Path,
) -> None:
    """Samples 0, 1, 2 and 3 of one group, 1 of three rows; two ranks. In one step of 4 samples, in two of 2, and in an
    early batch of 1 sample with 3 more to follow."""

    def numbered(*samples: int) -> list[TrainRow]:
        return [make_row(index, prompt=[1], response=[2] * 4) for index in samples]

    rows = facts_of([numbered(0, 1, 1, 1, 2, 3)])
    [step] = RoundPlanner(config_of(tmp_path, global_batch_size=4)).plan(0, rows).plan.steps
    assert (step.num_samples, step.num_rows) == (4, 6)
    assert step.sample_tokens == ((1, 12), (2, 12), (3, 12))
    steps = RoundPlanner(config_of(tmp_path, global_batch_size=2)).plan(0, rows).plan.steps
    assert [(step.num_samples, step.num_rows) for step in steps] == [(2, 4), (2, 2)]
    planner = RoundPlanner(config_of(tmp_path, global_batch_size=4))
    begun = planner.plan(0, facts_of([numbered(1, 1, 1)]), is_early_batch=True)
    rest = planner.plan(0, facts_of([numbered(0, 2, 3)]), [begun])
    sizes = [(step.num_samples, step.num_rows, step.num_tokens) for step in (*begun.plan.steps, *rest.plan.steps)]
    assert sizes == [(1, 3, 12), (3, 3, 12)]


def test_a_row_over_the_limit_is_warned_of_once_and_stands_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, use_dynamic_batch_size=True, max_tokens_per_gpu=20, actor_num_gpus_per_node=1)
    planner = RoundPlanner(config)
    with caplog.at_level(logging.WARNING):
        first = planner.plan(0, facts_of([rows_of(30, 5)]))
        planner.plan(1, facts_of([rows_of(40, 5)]))
    assert first.plan.steps[0].micro_batches == (((0,), (1,)),)
    [record] = caplog.records
    assert "row 0 has 30 tokens, over the 20" in record.getMessage()
    assert "may need more memory" in record.getMessage()


def test_work_counts_the_passes_that_the_algorithm_asks_for(tmp_path: Path) -> None:
    rows = rows_of(9, 5)
    plain = RoundPlanner(config_of(tmp_path)).plan(0, facts_of([rows])).work
    shape = read_model_shape(str(tmp_path))
    train = sum(train_flops(shape, row.total_length, row.response_length) for row in rows)
    forward = sum(forward_flops(shape, row.total_length, row.response_length) for row in rows)
    assert (plain.num_tokens, plain.model_flops, plain.executed_flops) == (14, train, train)
    # a KL term: the reference once forward. Two steps: the old policy too
    with_kl = RoundPlanner(config_of(tmp_path, use_kl_loss=True)).plan(0, facts_of([rows])).work
    assert with_kl.model_flops == train + forward
    two_steps = config_of(tmp_path, use_kl_loss=True, global_batch_size=1, actor_num_gpus_per_node=1)
    assert RoundPlanner(two_steps).plan(0, facts_of([rows])).work.model_flops == train + 2 * forward


def test_each_further_pass_is_work_of_what_learns(tmp_path: Path) -> None:
    rows, shape = rows_of(9, 5), read_model_shape(str(config_of(tmp_path).model.hf_checkpoint))
    one, three = (
        RoundPlanner(config_of(tmp_path, advantage_estimator="ppo", num_ppo_epochs=passes))
        .plan(0, facts_of([rows]))
        .work
        for passes in (1, 3)
    )
    train = sum(train_flops(shape, row.total_length, row.response_length) for row in rows)
    forward = sum(forward_flops(shape, row.total_length, row.response_length) for row in rows)
    critic = 3 * sum(layer_flops(shape, row.total_length) for row in rows)
    # two further passes of both, and from the second step on the old policy is another one: once forward
    assert three.model_flops - one.model_flops == 2 * (train + critic) + forward


def test_a_round_of_the_critic_alone_counts_no_learning_of_the_policy(tmp_path: Path) -> None:
    rows = rows_of(9, 5)
    config = config_of(tmp_path, advantage_estimator="ppo", num_critic_only_steps=1, use_kl_loss=True)
    shape = read_model_shape(str(tmp_path))
    forward = sum(forward_flops(shape, row.total_length, row.response_length) for row in rows)
    critic = 4 * sum(layer_flops(shape, row.total_length) for row in rows)  # predicts, and learns at three times that
    alone, both = (RoundPlanner(config).plan(rollout_id, facts_of([rows])).work for rollout_id in (0, 1))
    # alone: the policy forward, to be compared with the engines; nobody reads the reference of the KL loss
    assert (alone.model_flops, alone.executed_flops) == (forward + critic, forward + critic)
    # then the policy learns (3) beside the reference (1)
    assert both.model_flops == 4 * forward + critic
    # a KL penalty is part of what the critic learns from: the reference is read from the beginning
    penalised = config.replace(use_kl_loss=False, kl_coef=0.1)
    assert RoundPlanner(penalised).plan(0, facts_of([rows])).work.model_flops == 2 * forward + critic


def test_a_teacher_is_run_forward_once(tmp_path: Path) -> None:
    rows = rows_of(9, 5)
    config = config_of(tmp_path, use_opd=True, opd_teacher_load=str(tmp_path))
    shape = read_model_shape(str(tmp_path))
    forward = sum(forward_flops(shape, row.total_length, row.response_length) for row in rows)
    # the policy learns (3), and distillation compares the teacher (1) with the old policy (1)
    assert RoundPlanner(config).plan(0, facts_of([rows])).work.model_flops == 5 * forward


def test_an_adapter_costs_no_gradients_of_the_weights_and_its_base_is_run_forward_as_the_reference(
    tmp_path: Path,
) -> None:
    rows = rows_of(9, 5)
    config = config_of(tmp_path, lora_rank=4, recompute_granularity="full")
    shape = read_model_shape(str(tmp_path))
    forward = sum(forward_flops(shape, row.total_length, row.response_length) for row in rows)
    again = sum(layer_flops(shape, row.total_length) for row in rows)
    plain, with_kl = (
        RoundPlanner(config.replace(use_kl_loss=is_used)).plan(0, facts_of([rows])).work for is_used in (False, True)
    )
    # forward, and backward towards the inputs alone; then the base forward too
    assert (plain.model_flops, plain.executed_flops) == (2 * forward, 2 * forward + again)
    assert with_kl.model_flops == 3 * forward


def test_rates_by_hand() -> None:
    # 2 ranks, 4 s: 8e15 executed FLOPs are 1000 TFLOP/s a rank, over its peak of 989; model FLOPs are half of them
    work = RoundWork(num_tokens=400, model_flops=4 * 10**15, executed_flops=8 * 10**15)
    rates = work.rates(4.0, num_ranks=2, device_name="NVIDIA H200", bf16=True)
    assert rates["perf/train_tokens_per_sec"] == 100
    assert rates["perf/train_tflops"] == pytest.approx(1000)
    assert rates["perf/hfu"] == pytest.approx(1000 / 989)
    assert rates["perf/mfu"] == pytest.approx(500 / 989)
    assert "perf/mfu" not in work.rates(4.0, num_ranks=2, device_name="cpu", bf16=False)


def test_epochs_that_the_critic_alone_uses_up_are_refused() -> None:
    flags = ["--num-epoch", "2", "--rollout-batch-size", "4", "--num-critic-only-steps"]
    info = ManagerInfo(num_prompts=12)  # 3 rounds an epoch
    assert _num_rollout(parse([*flags, "5"]), info) == 6
    with pytest.raises(ConfigError, match="--num-critic-only-steps 6 with --num-epoch 2, which is 6 rounds"):
        _num_rollout(parse([*flags, "6"]), info)
