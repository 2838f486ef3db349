"""`vime diagnose RUN`: why trainer and engine gave the same tokens different log-probabilities (docs/agreement.md)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vime.cli.commands import Commands
from vime.observability.diagnosis import Diagnosis, diagnose
from vime.observability.events import EventKind, read_events
from vime.observability.metrics import METRICS_FILE, read_metrics
from vime.observability.mismatch_record import MismatchRecord, read_record, record_files
from vime.observability.run_dir import check_run_dir, config_value, read_config
from vime.training.evidence import DIFFERENCE, RESCORED
from vime.types import ConfigError, DataError


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "diagnose",
        help="why trainer and engine differ about log-probabilities, from what a run has recorded",
        description="Rows are recorded in rounds above --train-rollout-diff-threshold. Nothing is started: the run may "
        "be over, and its model gone.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument(
        "--round",
        type=int,
        metavar="N",
        help="the record of this round's cause, with every test (default: all, in short)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for other programs")
    parser.set_defaults(run_command=run_diagnose)


def run_diagnose(arguments: argparse.Namespace) -> None:
    """Print the cause of every recorded round. ConfigError for a round without a record, or a damaged one."""
    run: Path = arguments.run
    check_run_dir(run)
    files = record_files(run)
    later = _rounds_of(run) if files else {}
    wanted = arguments.round
    paths = [path for path, number in files.items() if wanted in (None, number, *later.get(path.name, []))]
    if arguments.round is not None and not paths:
        known = ", ".join(map(str, sorted(set(files.values())))) or "none"
        raise ConfigError(
            f"{run}: no logprob mismatch of round {arguments.round} is recorded. Recorded rounds: {known}."
        )
    records = {path: read_record(path) for path in paths}
    console = Console(highlight=False, soft_wrap=True)
    for path, record in records.items():
        diagnosis = diagnose(record)
        also = [round_id for round_id in later.get(path.name, []) if round_id != record.rollout_id]
        if arguments.json:
            console.print(json.dumps(_summary(record, path, also) | diagnosis.to_dict()), markup=False)
            continue
        for line in _lines(record, diagnosis, also, with_tests=arguments.round is not None):
            console.print(line)
    if not records and not arguments.json:
        for text in _nothing(run):
            console.print(Text(text))


def _rounds_of(run: Path) -> dict[str, list[int]]:
    """File name of a record -> the rounds with its cause. Empty where the events are gone."""
    found: dict[str, list[int]] = {}
    try:
        events = read_events(run, "driver", with_spans=False)
    except DataError:
        return found
    for event in events:
        if event.kind == EventKind.DISAGREEMENT:
            found.setdefault(Path(str(event.fields["path"])).name, []).append(int(str(event.fields["rollout_id"])))
    return found


def _summary(record: MismatchRecord, path: Path, also: list[int]) -> dict[str, object]:
    return {
        "round": record.rollout_id,
        "compared": record.stage.words,
        "mean": record.mean,
        "largest": record.largest,
        "num_tokens": record.num_tokens,
        "threshold": record.threshold,
        "record": str(path),
        "also_in": also,
    }


def _lines(record: MismatchRecord, diagnosis: Diagnosis, also: list[int], *, with_tests: bool) -> Iterator[Text]:
    line = Text(f"round {record.rollout_id}", style="bold")
    line.append(
        f", {record.stage.words}: {record.mean:.3g} nats a token apart (largest {record.largest:.3g}, "
        f"{record.num_tokens} tokens), expected at most {record.threshold:g}",
        style="not bold",
    )
    yield line
    yield Text("  cause     ") + Text(str(diagnosis.cause), style="bold red")
    yield Text(f"  evidence  {diagnosis.summary}")
    yield Text(f"  next      {diagnosis.advice}")
    if also:
        yield Text(f"  also in   round {', '.join(map(str, also))}: the same cause, not recorded again")
    if with_tests:
        for finding in diagnosis.findings:
            yield Text(f"  {'shown    ' if finding.is_shown else 'not shown'} {finding.cause}: {finding.evidence}")
        rows = ", ".join(f"sample {row.sample_index} of group {row.group_index}" for row in record.rows)
        yield Text(f"  rows      {rows}")


def _nothing(run: Path) -> Iterator[str]:
    """What the run has measured, and how a round comes to be recorded."""
    rounds = read_metrics(run) if (run / METRICS_FILE).is_file() else {}
    measured = [metrics[name] for metrics in rounds.values() for name in (DIFFERENCE, RESCORED) if name in metrics]
    config = read_config(run)
    threshold = config_value(config, "agreement", "train_rollout_diff_threshold")
    action = config_value(config, "agreement", "on_train_rollout_diff")
    found = f"the largest mean of {len(measured)} comparisons is {max(measured):.3g} nats a token" if measured else ""
    yield f"No logprob mismatch is recorded in {run}: {found or 'no round of it was compared'}."
    yield (
        f"Rows are recorded when the mean is above --train-rollout-diff-threshold (here {threshold}), with "
        f"--on-train-rollout-diff warn or stop (here {action}). Lower the "
        "threshold to record what is below it."
    )
    if (run / "agreement").is_dir():
        yield f"An older version of Vime has written its causes into {run / 'agreement'}."
