"""Say whether a run of scripts/run-images-cpu.sh learned what docs/images.md promises. Exit code 1 when it did not.

python examples/images/check.py runs/images-20260101-120000
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LEAST_AFTER = 0.60  # share of held-out pictures; docs/log.md has the table that it comes from
MOST_BEFORE = 0.35  # a guess is right once in six
MOST_SWAPPED = 0.35  # with the picture of another: once in six for whoever looks, and for whoever guesses
SETS = ("held_out", "swapped")


def shares(run_dir: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Share of right answers by evaluation set, before the first round and after the last."""
    lines = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [
        {name: metrics[f"eval/{name}/reward_mean"] for name in SETS}
        for metrics in lines
        if all(f"eval/{name}/reward_mean" in metrics for name in SETS)
    ]
    if len(found) < 2:
        sys.exit(f"check: {run_dir} has {len(found)} evaluations, expected one before the training and one after it.")
    return found[0], found[-1]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: check.py RUN_DIR")
    run_dir = Path(sys.argv[1])
    before, after = shares(run_dir)
    said = (
        f"{before['held_out']:.2f} of the held-out pictures right before, {after['held_out']:.2f} after; "
        f"{after['swapped']:.2f} with each other's pictures"
    )
    promised = f"at most {MOST_BEFORE:.2f}, at least {LEAST_AFTER:.2f}; at most {MOST_SWAPPED:.2f}"
    if (
        before["held_out"] > MOST_BEFORE
        or after["held_out"] < LEAST_AFTER
        or max(before["swapped"], after["swapped"]) > MOST_SWAPPED
    ):
        sys.exit(
            f"The run did NOT learn what docs/images.md promises: {said}; expected {promised}. Please report it, with "
            f"config.json and metrics.jsonl of {run_dir} and what lscpu says."
        )
    sys.stdout.write(f"It learned to look: {said} (docs/images.md promises {promised}).\n")


if __name__ == "__main__":
    main()
