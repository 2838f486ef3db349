"""A run directory of any length, with everything that the report shows, written without a run."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.helpers.kept import round_groups
from vime.config.checks import resolve
from vime.config.parse import dump, parse
from vime.observability.events import EventKind, EventLog
from vime.observability.machine_facts import write_machine_facts
from vime.observability.run_dir import RunDir
from vime.observability.samples import DroppedGroup, SampleStore
from vime.types import Sample, SampleStatus, VersionSpan

NASTY = "</script><img src=http://example.invalid/x.png onerror=alert(1)> & \u2028 \ud800"
SEED = 0


def write_run(root: Path, *, num_rounds: int, groups: int = 32, error: str | None = None) -> Path:
    """`num_rounds` rounds of `groups` groups; answers are kept of up to ten of them. Group numbers count up from 0."""
    flags = ["--hf-checkpoint", "model", "--num-rollout", str(num_rounds), "--lr", "1e-6", "--reward-key", "right"]
    randoms, number = random.Random(SEED), 0
    with RunDir.create(str(root), dump(resolve(parse(flags)))) as run:
        write_machine_facts(run.path)
        events = EventLog(run.path, "driver")
        events.emit(EventKind.RUN_STARTED)
        store = SampleStore(run.path, 64 << 20)
        with (run.path / "metrics.jsonl").open("w") as file:
            for round_id in range(num_rounds):
                metrics = round_metrics(randoms, round_id / num_rounds)
                if round_id % max(1, num_rounds // 20) == 0:
                    metrics |= {f"eval/held/pass@{size}": min(1.0, 0.1 * size) for size in (1, 2, 4)}
                    metrics["eval/held/reward_mean"] = round_id / num_rounds
                metrics["weights/version"] = round_id + 1.0
                file.write(json.dumps({"step": round_id, "t": 0.0, "metrics": metrics}) + "\n")
                kept = [[Sample(group_index=number + place)] for place in range(groups)]
                dropped = [DroppedGroup(group_index=number + groups, reason="zero_std")]
                if round_id % max(1, num_rounds // 10) == 0:
                    kept = [[answer(group[0].group_index, place, randoms) for place in range(4)] for group in kept]
                    store.write(round_id, round_groups(kept), dropped)
                else:
                    store._write_fates(round_id, round_groups(kept), dropped)
                number += groups + 1
        (run.path / "logs" / "trainer-0.log").write_text(
            "".join(
                f"2026-01-01 10:00:00,{place:03} WARNING x: row {place} is long {NASTY[:40]}\n" for place in range(99)
            )
        )
        if error is None:
            events.emit(EventKind.RUN_FINISHED)
        else:
            events.emit(EventKind.RUN_FAILED, error=error)
        return run.path


def round_metrics(randoms: random.Random, share: float) -> dict[str, float]:
    """Some eighty metrics, each with noise: what does not compress."""
    names = ["rollout/reward_mean", "rollout/response_len_mean", "rollout/response_len_p95", "rollout/truncated_ratio"]
    names += [f"rollout/reward/{entry}/{kind}" for entry in ("right", "short") for kind in ("mean", "std")]
    names += [f"rollout/by_source/{name}/reward_mean" for name in ("gsm8k", "math", "aime")]
    names += [f"rollout/by_length/{name}/{kind}" for name in ("0_15", "16_31") for kind in ("reward_mean", "share")]
    names += [
        f"train/{name}" for name in ("loss", "ppo_kl", "kl_loss", "entropy", "grad_norm", "pg_clipfrac", "ess", "lr")
    ]
    names += [f"transferqueue/sample_staleness/{kind}" for kind in ("mean", "max")]
    names += [f"perf/{name}" for name in ("wait_time", "train_time", "step_time", "tokens_per_sec", "peak_memory")]
    names += [f"perf/other_{place}" for place in range(40)]
    return {name: share + randoms.random() for name in names} | {"rollout/num_samples": 4.0, "rollout/num_tokens": 12.0}


def answer(group: int, index: int, randoms: random.Random) -> Sample:
    sample = Sample(group_index=group, index=index, prompt=f"question {group} {NASTY}", tokens=[1, 2], label="x")
    sample.append_response_tokens([3, 4, 5], [-0.5] * 3, versions=[VersionSpan(2, 0, 3)])
    sample.response = "".join(randoms.choice("abcdefgh ") for _ in range(5000)) + NASTY
    sample.reward, sample.status = {"right": float(index % 2), "short": 0.5}, SampleStatus.COMPLETED
    return sample
