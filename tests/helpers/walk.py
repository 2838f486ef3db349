"""The pages docs/walk-off.md and docs/walk-streaming.md, and what a real run says of them.

A page has two parts. "## The way": numbered lines, each `file::function` and what happens there, one line for each
change of file on the way of a prompt to published weights. "## Beside the way": the other files, or directories, of
which a round may enter some.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "tests" / "helpers" / "walk_site"
_STEP = re.compile(r"^(\d+)\. `vime/([\w/]+\.py)::([\w.]+)`", re.MULTILINE)
_BESIDE = re.compile(r"`vime/([\w/]+(?:\.py|/))`")
_COUNT = re.compile(r"\*\*(\d+) steps in (\d+) files\*\*")


@dataclass(frozen=True)
class Step:
    number: int
    file: str
    function: str


@dataclass(frozen=True)
class Page:
    steps: tuple[Step, ...]
    beside: tuple[str, ...]  # files, and directories that end with a slash
    said: tuple[int, int]  # the page's own count of steps and files

    @property
    def files(self) -> set[str]:
        return {step.file for step in self.steps}


def read_page(path: Path) -> Page:
    way, _, beside = path.read_text(encoding="utf-8").partition("## Beside the way")
    steps = tuple(Step(int(number), file, function) for number, file, function in _STEP.findall(way))
    [(num_steps, num_files)] = _COUNT.findall(way)
    return Page(steps=steps, beside=tuple(_BESIDE.findall(beside)), said=(int(num_steps), int(num_files)))


def environment(directory: Path) -> dict[str, str]:
    """Of a run whose processes write down what they enter, under `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    return {"VIME_WALK": str(directory), "VIME_WALK_ROOT": str(ROOT), "PYTHONPATH": f"{SITE}:{ROOT}"}


def entered(trace: Path, run_dir: Path, *, rollout_id: int) -> list[tuple[float, str, str]]:
    """(seconds, file, function) of each entry from the moment that the round before was trained until the weights of
    round `rollout_id` are confirmed, in order. A round is asked for while the weights of the one before move."""
    events = [json.loads(line) for line in (run_dir / "events" / "driver.jsonl").read_text().splitlines()]
    begins = next(e["mono"] for e in events if e["kind"] == "round_trained" and e["rollout_id"] == rollout_id - 1)
    ends = next(e["mono"] for e in events if e["kind"] == "weights_confirmed" and e["version"] == rollout_id + 1)
    found = []
    for path in trace.glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            at, _, where = line.partition(" ")
            if begins <= float(at) <= ends:
                file, _, function = where.partition(":")
                found.append((float(at), file, function))
    return sorted(found)


def faults(page: Page, trace: list[tuple[float, str, str]]) -> list[str]:
    """What is wrong with a page, by what a run entered: steps that the run did not make in this order, files that it
    entered and the page does not have."""
    found, at = [], 0
    for step in page.steps:
        rest = range(at, len(trace))
        place = next((n for n in rest if trace[n][1] == step.file and trace[n][2] == step.function), None)
        if place is None:
            is_known = any((file, function) == (step.file, step.function) for _, file, function in trace)
            found.append(f"{step}: {'entered only before the step above it' if is_known else 'never entered'}")
        else:
            at = place
    files = {file for _, file, _ in trace}
    others = sorted(file for file in files - page.files if not file.startswith(page.beside))
    return [*found, *(f"{file} was entered and is not on the page" for file in others)]
