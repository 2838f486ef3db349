"""A run directory as `vime plan --like` reads it, of a run whose every second is known."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.kept import round_groups
from vime.config.parse import Config
from vime.observability.samples import SampleStore
from vime.types import Sample, SampleStatus, VersionSpan

GROUP_S, PROMPT_S, TOKEN_S, CROWDED_S = 0.125, 0.03125, 0.015625, 0.0009765625
ROUNDS = [(1, 5), (2, 5), (1, 10), (2, 20), (4, 10), (8, 40), (3, 7), (1, 64)]
"""Prompts that are sent at once in each round, and tokens of each completion."""


def record_run(
    path: Path, rounds: list[tuple[int, int]] = ROUNDS, *, most: int = 64, mode: str | None = None, model: str = "m"
) -> Path:
    """Write a run whose round i sent `rounds[i][0]` prompts at once, for 2 completions of `rounds[i][1]` tokens each;
    the first two took an hour."""
    config = Config().replace(
        hf_checkpoint=model, actor_num_nodes=2, actor_num_gpus_per_node=4, rollout_num_engines=1,
        rollout_max_response_len=most, transferqueue_mode=mode,
    )  # fmt: skip
    (path / "events").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    store, group, now = SampleStore(path, 1 << 24), 0, 1000.0
    manager, driver, metrics = [], [], []

    def span(name: str, ended: float, seconds: float, **fields: object) -> str:
        record = {"t": ended, "mono": ended, "process": "rollout-manager", "kind": "span_ended", "name": name}
        return json.dumps({**record, "duration_s": seconds, "error": None, **fields})

    for number, (count, length) in enumerate(rounds):
        seconds = GROUP_S + PROMPT_S * count + length * (TOKEN_S + CROWDED_S * (2 * count - 1))
        seconds = seconds if number > 1 else 3600.0
        groups = [[answered(group + place, length) for _ in range(2)] for place in range(count)]
        store.write(number, round_groups(groups), [])
        manager += [
            span("generate_group", now + seconds + 1e-6 * place, seconds, group=group + place) for place in range(count)
        ]
        manager.append(span("generate_round", now + seconds, seconds, rollout_id=number))
        manager.append(span("plan_round", now + seconds + 0.25, 0.1, rollout_id=number))
        handed = {"t": now + seconds + 0.5, "mono": 0.0, "process": "driver", "kind": "round_generated"}
        driver.append(json.dumps({**handed, "rollout_id": number}))
        trained_s = 2.0 + 0.125 * (2 * count * length + 2 * count * 3)
        known = {
            "rollout/num_tokens": 2 * count * length,
            "rollout/num_samples": 2 * count,
            "rollout/num_groups": count,
            "rollout/dropped_groups": count / 3,
            "perf/train_time": trained_s,
            "perf/wait_time": seconds,
            "perf/update_weights_time": 0.75,
            "perf/pause_time": 0.5,
            "perf/agreement_time": 0.0625 * (number % 2),
            "transferqueue/sample_staleness/mean": float(number % 2),
            "perf/save_time": 100.0,
            "perf/step_time": seconds + trained_s + 0.75 + 0.0625 * (number % 2) + 100.0 + 0.375,
        }
        metrics.append(json.dumps({"step": number, "metrics": known}))
        group, now = group + count, now + 4000.0
    (path / "events/rollout-manager.jsonl").write_text("\n".join(manager) + "\n")
    (path / "events/driver.jsonl").write_text("\n".join(driver) + "\n")
    (path / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    return path


def answered(group: int, length: int) -> Sample:
    sample = Sample(group_index=group, index=0, prompt="q", tokens=[7, 8, 9], label="x")
    sample.append_response_tokens([1] * length, [-0.5] * length, versions=[VersionSpan(4, 0, length)])
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    return sample
