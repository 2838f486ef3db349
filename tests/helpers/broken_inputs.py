"""Broken inputs of a clumsy user: what each is, and what the command line says of it before any process starts.

`tests/unit/ray/test_broken_inputs.py` calls the command line's own entry with each. As a program it starts train.py
with each of them and prints a table of answers, seconds and exit codes:

    python -m tests.helpers.broken_inputs [--here] [--slice I/N] [NAME ...]

`--here` calls the entry in this process, so that the imports (half a second to a second) are paid once. `--slice 0/3`
takes the first third of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.helpers import broken_flags, broken_models, broken_records  # noqa: F401  each fills CASES
from tests.helpers.broken_world import CASES, Case, World
from vime.observability.run_dir import RunDir, claimed_checkpoints
from vime.ray.preflight import read_command_line
from vime.types import ConfigError, VimeError

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


def main(words: Sequence[str]) -> int:
    """Start train.py with each case and print what it answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; all without one")
    parser.add_argument("--here", action="store_true", help="call the entry in this process")
    parser.add_argument("--slice", default="0/1", metavar="I/N", help="the I-th of N equal parts of the table, from 0")
    options = parser.parse_args(words)
    part, num_parts = map(int, options.slice.split("/"))
    sys.stdout.write("| input | answer (first line) | seconds | CPU s | exit | |\n|---|---|---|---|---|---|\n")
    answers = []
    for each in list(CASES.values())[part::num_parts]:
        if options.names and each.name not in options.names:
            continue
        with tempfile.TemporaryDirectory() as directory:
            answer = answer_of(each, Path(directory), is_here=options.here)
        shown = answer.first_line.replace(directory, "DIR").replace("|", "\\|")
        sys.stdout.write(
            f"| {each.name} | {shown[:200]} | {answer.seconds:.1f} | {answer.cpu_s:.1f} | {answer.code} | "
            f"{answer.fault} |\n"
        )
        sys.stdout.flush()
        answers.append(answer)
    sys.stdout.write(f"\n{summary(answers)}\n")
    return int(any(answer.fault for answer in answers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What train.py made of one case. `fault`: what is wrong with the answer; empty: nothing."""

    code: int | str
    first_line: str
    seconds: float
    cpu_s: float  # of the process and its children; 0 where it was called here
    fault: str


def summary(answers: Sequence[Answer]) -> str:
    """How long answers took, and their exit codes."""

    def shown(values: Sequence[float]) -> str:
        ordered = sorted(values)
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return f"median {statistics.median(ordered):.1f}, p95 {p95:.1f}, max {ordered[-1]:.1f}"

    codes = Counter(str(answer.code) for answer in answers)
    return (
        f"{len(answers)} inputs. Seconds: {shown([answer.seconds for answer in answers])}. "
        f"CPU s: {shown([answer.cpu_s for answer in answers])}. "
        f"Exit codes: {', '.join(f'{count} x {code}' for code, count in codes.most_common())}. "
        f"{sum(bool(answer.fault) for answer in answers)} answered badly."
    )


def answer_of(each: Case, directory: Path, *, is_here: bool) -> Answer:
    """What train.py, or its entry in this process, says of the case."""
    world = World(directory).make()
    broken = each.breaks(world) or ()
    flags = [*world.flags(), "--run-dir", str(directory / "run"), *broken]
    began, cpu_before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    code, said = (_call if is_here else _start)(flags, world.environment)
    seconds, cpu_after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in said.splitlines() if not line.startswith("note: ")]
    first = " ".join(lines[:2]) if lines and lines[0].endswith("problems") else next(iter(lines), "")
    faults = {
        f"exit code {code}": code != 2,
        "a traceback": "Traceback (most recent call last)" in said,
        "a run began": (directory / "run" / "events").exists(),
        "other words": any(text not in said for text in each.says),
    }
    return Answer(
        code=code,
        first_line=first,
        seconds=seconds,
        cpu_s=cpu_after.ru_utime + cpu_after.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime,
        fault=", ".join(fault for fault, is_so in faults.items() if is_so),
    )


def _start(flags: list[str], environment: dict[str, str]) -> tuple[int | str, str]:
    try:
        ended = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *flags],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return "-", "no answer"
    return ended.returncode, ended.stderr


def _call(flags: list[str], environment: dict[str, str]) -> tuple[int | str, str]:
    """What `main` does before a run begins; a run that would begin is none."""
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stderr(io.StringIO()):
        try:
            config = read_command_line(flags, is_async=False)
            with claimed_checkpoints(config.model.save), RunDir.create(config.tracking.run_dir, "{}"):
                return 0, "not refused"
        except VimeError as error:
            return ConfigError.exit_code, f"refused: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
