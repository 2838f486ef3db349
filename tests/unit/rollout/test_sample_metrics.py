"""Metrics by entry of the reward, by source and by length, and pass@k; numbers by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.config.parse import parse
from vime.rollout.metrics import MAX_SOURCES, drop_metrics, num_removed, pass_metrics, row_facts, sample_metrics
from vime.rollout.prompts import read_prompts
from vime.types import Sample

ARGS = SimpleNamespace(reward_key=None, source_key="data_source", pass_reward=1.0)


def sample(reward: Any, length: int = 1, group: int = 0, **metadata: Any) -> Sample:
    return Sample(group_index=group, reward=reward, response_length=length, metadata=metadata)


def part(metrics: dict[str, float], start: str) -> dict[str, float]:
    return {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}


def test_each_entry_of_a_reward_has_its_mean_and_deviation() -> None:
    args = SimpleNamespace(reward_key="right", source_key="data_source")
    samples = [sample({"right": 1, "style/short": 0.5, "why": "text"}), sample({"right": False, "style/short": 1.5})]
    samples += [sample({"right": 0.5, "late": float("nan")})]
    found = part(sample_metrics(args, samples, "rollout"), "rollout/reward/")
    # right: 1, 0, 0.5; deviation sqrt((0.25 + 0.25 + 0) / 3). Text and what is not finite have no mean.
    assert found == {
        "right/mean": 0.5, "right/std": pytest.approx((1 / 6) ** 0.5), "style_short/mean": 1.0, "style_short/std": 0.5,
    }  # fmt: skip


def test_a_plain_reward_has_no_entries() -> None:
    assert part(sample_metrics(ARGS, [sample(1.0)], "rollout"), "rollout/reward/") == {}


def test_sources_are_told_apart_by_the_metadata() -> None:
    samples = [
        sample(1.0, 10, data_source="openai/gsm8k"), sample(0.0, 20, data_source="openai/gsm8k"),
        sample(0.5, 40, data_source="math"), sample(0.25, 8, reasoning_gym={"task": "chain_sum"}), sample(0.0, 2),
    ]  # fmt: skip
    assert part(sample_metrics(ARGS, samples, "eval/x"), "eval/x/by_source/") == {
        "openai_gsm8k/reward_mean": 0.5, "openai_gsm8k/response_len_mean": 15.0, "openai_gsm8k/share": 0.4,
        "math/reward_mean": 0.5, "math/response_len_mean": 40.0, "math/share": 0.2,
        "chain_sum/reward_mean": 0.25, "chain_sum/response_len_mean": 8.0, "chain_sum/share": 0.2,
        "other/reward_mean": 0.0, "other/response_len_mean": 2.0, "other/share": 0.2,
    }  # fmt: skip
    assert part(sample_metrics(ARGS, [sample(1.0)], "rollout"), "rollout/by_source/") == {}


def test_rare_sources_count_together() -> None:
    samples = [sample(1.0, data_source=f"s{number}") for number in range(40)]
    found = part(sample_metrics(ARGS, samples, "rollout"), "rollout/by_source/")
    assert len({name.split("/")[0] for name in found}) == MAX_SOURCES + 1
    assert found["other/share"] == (40 - MAX_SOURCES) / 40


def test_buckets_of_length_double() -> None:
    lengths = {0: "0_15", 15: "0_15", 16: "16_31", 31: "16_31", 32: "32_63", 1000: "512_1023", 1024: "1024_2047"}
    for length, bucket in lengths.items():
        found = part(sample_metrics(ARGS, [sample(0.5, length), sample(1.0, 5000)], "rollout"), "rollout/by_length/")
        assert found == {
            f"{bucket}/reward_mean": 0.5, f"{bucket}/share": 0.5, "4096_8191/reward_mean": 1.0, "4096_8191/share": 0.5,
        }  # fmt: skip


def test_a_sample_of_several_rows_counts_once_by_source_and_by_length() -> None:
    # Sample 0 (reward 1) has rows of 10, 100 and 40 tokens, of which the last names another source; sample 1 has one.
    rows = [sample(1.0, 10, data_source="a"), sample(1.0, 100, data_source="a"), sample(1.0, 40, data_source="c")]
    rows += [sample(0.0, 12, data_source="b")]
    for row, index in zip(rows, (0, 0, 0, 1), strict=True):
        row.index = index
    found = sample_metrics(ARGS, rows, "rollout")
    assert part(found, "rollout/by_source/") == {
        "a/reward_mean": 1.0, "a/response_len_mean": 55.0, "a/share": 0.5,
        "b/reward_mean": 0.0, "b/response_len_mean": 12.0, "b/share": 0.5,
        "c/response_len_mean": 40.0, "c/share": 0.0,
    }  # fmt: skip
    assert part(found, "rollout/by_length/") == {"0_15/reward_mean": 0.5, "0_15/share": 1.0}


def test_pass_at_k_is_the_share_of_drawings_with_a_right_answer() -> None:
    """Against all drawings one by one: group 0 has 1 of 4 right, group 1 none, group 2 three of 4."""
    rights = {0: [1.0, 0.0, 0.5, 0.99], 1: [0.0] * 4, 2: [1.0, 2.0, 1.0, -1.0]}
    samples = [sample(reward, group=group) for group, rewards in rights.items() for reward in rewards]
    found = pass_metrics(ARGS, samples, "eval/x")
    expected = {}
    for size in (1, 2, 4):
        shares = []
        for rewards in rights.values():
            drawings = list(itertools.combinations(rewards, size))
            shares.append(sum(max(drawn) >= 1.0 for drawn in drawings) / len(drawings))
        expected[f"eval/x/pass@{size}"] = pytest.approx(sum(shares) / 3)
    assert found == expected
    assert pass_metrics(ARGS, [], "eval/x") == {}


def test_pass_at_k_takes_the_bar_that_the_flag_sets_and_sizes_that_every_prompt_has() -> None:
    args = SimpleNamespace(reward_key="right", pass_reward=0.5)
    samples = [sample({"right": 0.5}), sample({"right": 0.0}), sample({"right": 0.4}), sample({"right": 0.9}, group=1)]
    # group 0: one of three; group 1 has one answer, so pass@1 alone: (1/3 + 1) / 2
    assert pass_metrics(args, samples, "e") == {"e/pass@1": pytest.approx(2 / 3)}


def test_a_source_beside_the_prompt_reaches_the_metadata(tmp_path: Path) -> None:
    """As the parquet files of verl have it; the metadata's own word counts more."""
    records = [
        {"input": "a", "data_source": "one"},
        {"input": "b", "data_source": "one", "metadata": {"data_source": 2}},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    args = parse(["--hf-checkpoint", "examples/quickstart/model", "--rollout-max-context-len", "64"]).flat
    prompts = read_prompts(args, str(path), flag="--prompt-data")
    assert [prompt.metadata for prompt in prompts] == [{"data_source": "one"}, {"data_source": 2}]


def test_a_sample_of_several_rows_is_left_out_once_and_only_with_all_of_them() -> None:
    # Samples 0 and 1 have three rows each, sample 2 has one. Of sample 0 all rows are marked, of sample 1 its last two.
    rows = [Sample(group_index=0, index=index, reward=1.0, response_length=1) for index in (0, 0, 0, 1, 1, 1, 2)]
    for place in (0, 1, 2, 4, 5):
        rows[place].remove_sample = True
    assert num_removed(row_facts(ARGS, rows)) == 1
    rows[6].remove_sample = True
    assert num_removed(row_facts(ARGS, rows)) == 2


def test_reasons_of_drops_are_names_and_the_rarer_ones_count_together() -> None:
    """A filter may put numbers into its reason, and a job outside may write anything."""
    assert drop_metrics({"mixed_versions": 2, "reward 0.25 / low": 1, "reward 0.25: low": 3}) == {
        "rollout/dropped_groups": 6.0, "rollout/dropped_mixed_versions": 2.0, "rollout/dropped_reward_0.25_low": 4.0,
    }  # fmt: skip
    found = drop_metrics({f"reason {number}": number + 1 for number in range(1000)})
    assert len(found) == 34  # all, 32 by name, and the others
    assert found["rollout/dropped_reason_999"] == 1000.0
    assert found["rollout/dropped_groups"] == 500_500.0
    assert sum(count for name, count in found.items() if name != "rollout/dropped_groups") == 500_500.0
