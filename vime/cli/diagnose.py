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
from vime.observability.metrics import METRICS_FILE, read_metrics
from vime.observability.mismatch_record import MismatchRecord, read_record, record_files
from vime.observability.run_dir import check_run_dir, config_value, read_config
from vime.training.evidence import DIFFERENCE, RESCORED
from vime.types import ConfigError


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "diagnose",
        help="why trainer and engine differ about log-probabilities, from what a run has recorded",
        description="Rows are recorded in rounds above --train-rollout-diff-threshold. Nothing is started: the run may "
        "be over, and its model gone.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--round", type=int, metavar="N", help="this round, with every test (default: all, in short)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for other programs")
    parser.set_defaults(run_command=run_diagnose)


def run_diagnose(arguments: argparse.Namespace) -> None:
    """Print the cause of every recorded round. ConfigError for a round without a record, or a damaged one."""
    run: Path = arguments.run
    check_run_dir(run)
    files = record_files(run)
    paths = [path for path, round_id in files.items() if arguments.round in (None, round_id)]
    if arguments.round is not None and not paths:
        known = ", ".join(map(str, sorted(set(files.values())))) or "none"
        raise ConfigError(
            f"{run}: no logprob mismatch of round {arguments.round} is recorded. Recorded rounds: {known}."
        )
    records = {path: read_record(path) for path in paths}
    console = Console(highlight=False, soft_wrap=True)
    for path, record in records.items():
        diagnosis = diagnose(record)
        if arguments.json:
            console.print(json.dumps(_summary(record, path) | diagnosis.to_dict()), markup=False)
            continue
        for line in _lines(record, diagnosis, with_tests=arguments.round is not None):
            console.print(line)
    if not records and not arguments.json:
        for text in _nothing(run):
            console.print(Text(text))


def _summary(record: MismatchRecord, path: Path) -> dict[str, object]:
    return {
        "round": record.rollout_id,
        "compared": record.stage.words,
        "mean": record.mean,
        "largest": record.largest,
        "num_tokens": record.num_tokens,
        "threshold": record.threshold,
        "record": str(path),
    }


def _lines(record: MismatchRecord, diagnosis: Diagnosis, *, with_tests: bool) -> Iterator[Text]:
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
