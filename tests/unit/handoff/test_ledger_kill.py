"""kill -9 of a whole run over ledger and spool, at random moments, again and again: nothing lost, nothing repeated."""

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.ledger_writer import ROUND_GROUPS, is_dropped

ROOT = Path(__file__).resolve().parents[3]
NUM_KILLS = 40


def test_a_run_killed_at_any_moment_trains_every_group_once_and_in_the_same_order(tmp_path):
    command = [sys.executable, "-m", "tests.helpers.ledger_writer", str(tmp_path), "0", str(NUM_KILLS)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert result["findings"] == []
    assert "Traceback" not in answer.stderr, answer.stderr
    effects = result["effects"]
    assert len(effects) == ROUND_GROUPS * (result["round"] + 1)
    assert result["round"] >= 15  # 40 runs of 30 steps each on average, at about 4 steps a group
    expected = [group for group in range(2 * len(effects)) if not is_dropped(group)]
    assert effects == expected[: len(effects)]
