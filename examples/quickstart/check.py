"""Say whether a run of the quick start learned what docs/quickstart.md promises. Exit code 1 when it did not.

python examples/quickstart/check.py runs/20260101-120000
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LEAST_REWARD = 0.80  # mean of the last ten rounds; docs/log.md has the table that it comes from
ROUNDS = 30


def mean_rewards(run_dir: Path) -> tuple[float, float]:
    """Mean reward of the first three and of the last ten rounds."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line)["metrics"] for line in lines]
    rewards = [metrics["rollout/reward_mean"] for metrics in records if "rollout/reward_mean" in metrics]
    if len(rewards) != ROUNDS:
        sys.exit(f"check: {run_dir} has {len(rewards)} rounds, expected {ROUNDS}: no whole run of the quick start.")
    return sum(rewards[:3]) / 3, sum(rewards[-10:]) / 10


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: check.py RUN_DIR")
    run_dir = Path(sys.argv[1])
    first, last = mean_rewards(run_dir)
    said = f"reward {first:.2f} in the first 3 rounds, {last:.2f} in the last 10"
    if last < LEAST_REWARD:
        sys.exit(
            f"The quick start did NOT learn what docs/quickstart.md promises: {said}, expected at least "
            f"{LEAST_REWARD:.2f}. Please report it, with config.json and metrics.jsonl of {run_dir} and what lscpu says"
        )
    sys.stdout.write(f"It learned: {said} (docs/quickstart.md promises at least {LEAST_REWARD:.2f}).\n")


if __name__ == "__main__":
    main()
