"""What `vime chaos` sees of a training run, without training: four versions, a checkpoint after each, failpoints.

python chaos_script.py --run-dir DIR ... [--fault forgets|leaves|hides|fails|works|differs]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from vime.observability.events import EventKind, EventLog
from vime.utils.failpoints import Point, failpoint

ROUNDS = 4

parser = argparse.ArgumentParser()
parser.add_argument("--run-dir", type=Path)
parser.add_argument("--fault", default="")
arguments, _ = parser.parse_known_args()
arguments.run_dir.mkdir(parents=True, exist_ok=True)
saved = arguments.run_dir / "saved"
is_resumed = saved.exists()
first = int(saved.read_text()) if is_resumed else 0
events = EventLog(arguments.run_dir, "driver")
if arguments.fault == "hides":  # like a process whose title covers its environment
    subprocess.Popen(["sleep", "300"], start_new_session=True, env={})
for version in range(first, ROUNDS + 1):
    content = f"{version}-again" if is_resumed and arguments.fault == "forgets" else str(version)
    if arguments.fault == "differs":
        content = f"{version} of another kind"
    events.emit(EventKind.WEIGHTS_CONFIRMED, version=version, content_hash=content, engines=[])
    if version == first and arguments.fault == "works":
        events.emit(EventKind.PART_STARTED, part="first_weights", waited_s=0.0)
        num_lives = len((arguments.run_dir / "events" / "driver.jsonl").read_text().split("first_weights")) - 1
        if num_lives < 3:
            signal.pause()  # until it is killed
    failpoint(Point.OPTIMIZER)
    saved.write_text(str(version))
if is_resumed and arguments.fault == "leaves":
    subprocess.Popen(["sleep", "300"], start_new_session=True)
sys.exit(3 if is_resumed and arguments.fault == "fails" else 0)
