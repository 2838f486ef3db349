"""What the user sees during a run: what it is doing, how far it is, how well it learns, how long it will take.

On a terminal: a spinner for each stage of start-up, then a progress bar. Elsewhere (a pipe, a log file): one plain
line per stage, per round and per evaluation, without control codes. On a terminal every N-th round leaves such a line,
and RUN_DIR/logs/progress.log gets all of them with their dates. Owned by the driver's main thread.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.text import Text

from vime.observability.curve import RESPONSE_LENGTH, REWARD
from vime.observability.report import duration, plain, show_report
from vime.observability.summary import RunSummary, summarise

PROGRESS_FILE = "progress.log"
TOKENS_PER_S = "perf/tokens_per_sec"
OF_EVAL = ("reward_mean", "pass@", "response_len_mean", "truncated_ratio")
# Time left is estimated from the latest rounds: the first have one-time costs, and completions grow in training.
ROUNDS_IN_ESTIMATE = 10


class Screen:
    """The order of calls: stage*, begin, (activity | round_done | note_eval)*, stage*, then finish or failed."""

    def __init__(self, run_dir: Path, *, stream: TextIO | None = None, log_interval: int = 10) -> None:
        """`log_interval`: on a terminal, rounds between two permanent lines."""
        self._run_dir, self._log_interval = Path(run_dir), log_interval
        self._log = _ProgressLog(self._run_dir)
        self._console = _Console(file=stream or sys.stdout, highlight=False)
        self.is_live = self._console.is_terminal  # otherwise `activity` is not shown
        self._started = self._stage_started = self._round_started = time.monotonic()
        self._stage: str | None = None
        self._total = 0
        self._durations: deque[float] = deque(maxlen=ROUNDS_IN_ESTIMATE)
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._bar = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=None, visible=False)
        self._say(f"Run directory: {self._run_dir}")

    def stage(self, text: str) -> None:
        """Show what the run starts to do now, outside of rounds; ends the previous stage."""
        self._end_stage()
        self._bar.update(self._task, visible=False)
        self._stage, self._stage_started = text, time.monotonic()
        stage = f"[{duration(time.monotonic() - self._started)}] {text}"
        if self._console.is_terminal:
            self._log.write(stage)
        else:
            self._say(stage)
        self._show(text)

    def begin(self, start_round: int, total_rounds: int) -> None:
        """Begin the rounds: from `start_round` (0, or later when resuming) to `total_rounds`."""
        self._end_stage()
        self._total, self._round_started = total_rounds, time.monotonic()
        self._bar.update(self._task, total=total_rounds, completed=start_round, visible=True)
        self._say(
            f"training: rounds {start_round} to {total_rounds - 1}" if start_round < total_rounds else "no rounds"
        )
        self._show("")

    def activity(self, text: str) -> None:
        """Show what happens inside the round or stage; on a terminal only."""
        self._show(f"{self._stage}: {text}" if self._stage else text)

    def round_done(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Move the bar; `metrics` are the round's, a name that is not there is left out of the line."""
        now = time.monotonic()
        self._durations.append(now - self._round_started)
        self._round_started = now
        line = ", ".join([*_figures(metrics), f"{self._durations[-1]:.1f} s", f"left {self._time_left(rollout_id)}"])
        self._bar.update(self._task, completed=rollout_id + 1, description=line)
        round_line, number = f"round {rollout_id + 1}/{self._total}: {line}", rollout_id + 1
        if not self._console.is_terminal or number % self._log_interval == 0 or number == self._total:
            self._say(round_line)
        else:
            self._log.write(round_line)
        self._show("")

    def note_eval(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Print one line about an evaluation of the weights before round `rollout_id`; metrics.jsonl has the rest of
        it."""
        shown = ", ".join(
            f"{name.removeprefix('eval/')} {value:.3g}"
            for name, value in sorted(metrics.items())
            if "/by_" not in name and name.rpartition("/")[2].startswith(OF_EVAL)
        )
        when = f"after {rollout_id} of {self._total} rounds" if rollout_id else "before the first round"
        self._say(f"evaluation {when}: {shown}")

    def note(self, text: str) -> None:
        """Print a permanent line."""
        self._say(text)

    def warn(self, text: str) -> None:
        """Print a permanent line: something is wrong and the run continues."""
        self._say(f"warning: {text}")

    def finish(self, summary: RunSummary | None = None) -> None:
        """Show the end screen; without `summary` it is read from the run directory."""
        self._close_live()
        with contextlib.suppress(OSError):
            show_report(summary or summarise(self._run_dir), self._console)

    def failed(self, message: str) -> None:
        """Print the end of a run that did not finish, on stderr: what happened and where to look."""
        self._close_live(is_done=False)
        self._log.write(f"failed: {message}")
        page = self._run_dir / "report.html"
        report = f"Report: {page}\n" if page.is_file() else ""
        with contextlib.suppress(OSError):  # whoever read it has ended, or the disk is full
            sys.stderr.write(f"failed: {message}\n{report}Run directory: {self._run_dir}\n")
            sys.stderr.flush()

    def _time_left(self, rollout_id: int) -> str:
        per_round = sum(self._durations) / len(self._durations)
        return duration(per_round * max(0, self._total - rollout_id - 1))

    def _end_stage(self, *, is_done: bool = True) -> None:
        if self._stage is not None and self._console.is_terminal:
            elapsed = time.monotonic() - self._stage_started
            mark = "done" if is_done else "stopped"
            self._say(f"{self._stage} ... {mark} ({elapsed:.1f} s)")
        self._stage = None

    def _show(self, text: str) -> None:
        """The line that is redrawn: spinner, text and (once rounds began) the bar."""
        if not self._console.is_terminal:
            return
        label = Text(plain(text, limit=max(20, self._console.width - 20)))
        self._spinner.update(text=label)
        parts = [self._spinner, self._bar] if self._bar.tasks[0].visible else [self._spinner]
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        self._live.update(Group(*parts))

    def _say(self, line: str) -> None:
        self._log.write(line)
        with contextlib.suppress(OSError):  # of a disk that is full, where output goes to a file
            self._console.print(Text(line), soft_wrap=True)

    def _close_live(self, *, is_done: bool = True) -> None:
        self._end_stage(is_done=is_done)
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on without a screen when whoever read it has ended (`| head`, `| tee` in a terminal that was closed).
        rich itself would end the process, unsaved."""
        with contextlib.suppress(SystemExit, OSError):
            super().on_broken_pipe()


class _ProgressLog:
    """RUN_DIR/logs/progress.log. On a full disk its lines are lost, and the run continues."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "logs" / PROGRESS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, text: str) -> None:
        date = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{date} {line}\n" for line in text.splitlines()))


def _figures(metrics: Mapping[str, float]) -> list[str]:
    named = ((REWARD, "reward {:.3f}"), (RESPONSE_LENGTH, "length {:.1f}"), (TOKENS_PER_S, "{:.0f} tokens/s"))
    return [form.format(metrics[name]) for name, form in named if name in metrics]
