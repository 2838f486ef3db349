"""Broken inputs of a clumsy user: what each is, and what the command line says of it before any process starts.

`tests/unit/ray/test_broken_inputs.py` calls the command line's own entry with each. As a program it starts train.py
with each of them and prints a table of answers, seconds and exit codes:

    python -m tests.helpers.broken_inputs [--here] [NAME ...]

`--here` calls the entry in this process, so that the imports (half a second to a second) are paid once.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from tests.helpers import broken_flags, broken_models, broken_records  # noqa: F401  each fills CASES
from tests.helpers.broken_world import CASES, Case, World
from vime.observability.run_dir import RunDir, claimed_checkpoints
from vime.ray.preflight import read_command_line
from vime.types import ConfigError, VimeError

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


def main(names: Sequence[str]) -> int:
    """Start train.py with each case and print what it answers."""
    sys.stdout.write("| input | answer (first line) | seconds | exit |\n|---|---|---|---|\n")
    slowest, wrong, is_here = 0.0, 0, "--here" in names
    names = [name for name in names if name != "--here"]
    for each in CASES.values():
        if names and each.name not in names:
            continue
        with tempfile.TemporaryDirectory() as directory:
            code, answer, seconds = answer_of(each, Path(directory), is_here=is_here)
        shown = answer.replace(directory, "DIR").replace("|", "\\|")
        sys.stdout.write(f"| {each.name} | {shown[:200]} | {seconds:.1f} | {code} |\n")
        sys.stdout.flush()
        slowest, wrong = max(slowest, seconds), wrong + (code != 2)
    sys.stdout.write(
        f"\n{len(names) or len(CASES)} inputs, slowest {slowest:.1f} s, {wrong} not refused with exit code 2\n"
    )
    return int(wrong > 0)


def answer_of(each: Case, directory: Path, *, is_here: bool) -> tuple[int | str, str, float]:
    """Exit code, first line and seconds of train.py, or of its entry in this process."""
    world = World(directory).make()
    broken = each.breaks(world) or ()
    flags = [*world.flags(), "--run-dir", str(directory / "run"), *broken]
    began = time.monotonic()
    code, said = (_call if is_here else _start)(flags, world.environment)
    seconds = time.monotonic() - began
    lines = [line for line in said.splitlines() if not line.startswith("note: ")]
    first = " ".join(lines[:2]) if lines and lines[0].endswith("problems") else next(iter(lines), "")
    return code, first, seconds


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
