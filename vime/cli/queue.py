"""`vime queue ls|show|export|import RUN` and `vime audit RUN`: the ledger and the spool of a run, live or dead."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vime.handoff.audit import MAX_SHOWN, AuditReport, audit_run
from vime.handoff.audit_checkpoints import audit_checkpoints
from vime.handoff.ledger_types import SPOOL_NAME, LedgerMark, Task
from vime.handoff.payload import payload_size
from vime.handoff.queue_view import export_queue, import_queue, read_group, read_overview
from vime.handoff.spool import SpoolReader
from vime.types import HandoffError, VimeError


class AuditFailedError(VimeError):
    """The audit found breaches."""


def add_parsers(commands: Any) -> None:
    """Add `audit` and `queue` to the command line; each names its function as `run_command`."""
    parser = commands.add_parser("audit", help="check that a run kept every promise; exit 3 when one was broken")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.set_defaults(run_command=run_audit)
    queue = commands.add_parser("queue", help="look at the queue of a run, or copy it")
    actions = queue.add_subparsers(dest="action", required=True)
    for name, text, call in (
        ("ls", "groups by state, rounds that are not durable, who works on what", run_ls),
        ("show", "one group: its row, its history, its payload", run_show),
        ("export", "write ledger and needed payloads to a file", run_export),
        ("import", "make the queue of a run directory from such a file", run_import),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("run", type=Path, metavar="RUN", help="the run directory")
        if name == "show":
            action.add_argument("group", type=int, help="index of the group")
            action.add_argument("--partition", default="train", help="its partition (default: train)")
        elif name != "ls":
            action.add_argument("file", type=Path, help="the exported file")
        action.set_defaults(run_command=call)


def run_audit(arguments: argparse.Namespace) -> None:
    """Print what was checked; raises AuditFailedError, which ends the command with 3, when a promise was broken."""
    run: Path = arguments.run
    checkpoint, report = look_twice(run)
    files = audit_checkpoints(checkpoint_root(run))
    report = replace(report, findings=(*report.findings, *files.findings))
    for state, total in sorted(report.groups.items()):
        say(f"{total:>10,} groups {state}, {report.tokens[state]:,} tokens")
    say(
        f"{report.num_rounds:,} rounds, {report.num_lines:,} lines of history, "
        f"{'no checkpoint' if checkpoint is None else f'checkpoint of round {checkpoint}'}, "
        f"{'spool read' if (run / SPOOL_NAME).is_dir() else 'no spool'}"
    )
    if files.read:
        say(f"checkpoints read to the last byte: {', '.join(files.read)}")
    if files.unknown:
        say(f"checkpoints without a manifest, whose bytes nobody can check: {', '.join(files.unknown)}")
    if report.findings:
        raise AuditFailedError(report.summary(run))
    say("every promise kept")


def look_twice(run: Path) -> tuple[int | None, AuditReport]:
    """Round of the newest checkpoint, and the audit.

    Ledger, checkpoint and spool of a run that is alive are not of one moment: what a first look misses, a second one
    finds somewhere else. A breach is what two looks see, or one look at a run in which nothing moved.
    """
    newest, report = _first_look(run)
    if not report.findings:
        return newest[0], report
    again = newest_checkpoint(run)
    second = audit_run(run, checkpoint_round=again[0], mark=again[1])
    if (again, second.num_lines) != (newest, report.num_lines):
        second = replace(second, findings=tuple(found for found in second.findings if found in report.findings))
    return again[0], second


def _first_look(run: Path) -> tuple[tuple[int | None, LedgerMark | None], AuditReport]:
    """A file may go between its name and its bytes, once; what is really gone is gone the second time too."""
    with contextlib.suppress(HandoffError):
        newest = newest_checkpoint(run)
        return newest, audit_run(run, checkpoint_round=newest[0], mark=newest[1])
    newest = newest_checkpoint(run)
    return newest, audit_run(run, checkpoint_round=newest[0], mark=newest[1])


def run_ls(arguments: argparse.Namespace) -> None:
    overview = read_overview(arguments.run)
    for (partition, state), (total, tokens) in overview.groups.items():
        say(f"{partition:<16} {state:<8} {total:>9,} groups {tokens:>14,} tokens")
    for reason, count in overview.dropped.items():
        say(f"dropped: {count:,} groups, {reason}")
    for producer, count in overview.in_flight.items():
        say(f"in flight: {count:,} groups at {producer}")
    for round_id, state, num_groups, holder in overview.rounds[-MAX_SHOWN:]:
        say(f"round {round_id}: {state}, {num_groups} groups, {holder}")
    say(f"version served: {overview.serving}; spool: {overview.spool_bytes:,} bytes")


def run_show(arguments: argparse.Namespace) -> None:
    view = read_group(arguments.run, arguments.partition, arguments.group)
    say(f"group {arguments.partition}/{arguments.group}")
    for name, value in view.fields.items():
        if value is not None:
            say(f"  {name}: {value}")
    for sequence, event, attempt, round_id, note in view.history:
        place = "" if round_id is None else f", round {round_id}"
        number = "" if attempt is None else f" attempt {attempt}"
        say(f"  line {sequence}: {event}{number}{place} {note}".rstrip())
    newest, checksum = view.fields["attempt"], view.fields["checksum"]
    if not isinstance(newest, int) or not isinstance(checksum, int):
        return
    task = Task(arguments.partition, arguments.group, newest)
    try:
        data = SpoolReader(arguments.run / SPOOL_NAME).read(task, checksum)
        num_rows, num_tokens = payload_size(data)
        say(f"  payload: {len(data):,} bytes, {num_rows} rows, {num_tokens:,} tokens")
    except HandoffError as error:
        say(f"  payload: {error}")


def run_export(arguments: argparse.Namespace) -> None:
    count = export_queue(arguments.run, arguments.file)
    say(f"{arguments.file}: the ledger and {count:,} payloads")


def run_import(arguments: argparse.Namespace) -> None:
    count = import_queue(arguments.run, arguments.file)
    say(f"{arguments.run}: the ledger and {count:,} payloads")


def say(text: str) -> None:
    """One line, never wrapped or coloured: reasons and names are not ours to interpret."""
    Console(highlight=False, markup=False, soft_wrap=True).print(text)


def checkpoint_root(run: Path) -> Path:
    """Where a run saves: --save, or RUN/checkpoints, also when the run directory moved since."""
    record = run / "config.json"
    try:
        save = json.loads(record.read_text()).get("model", {}).get("save") if record.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise HandoffError(f"{record}: where the run saves cannot be read: {error}") from error
    return Path(save) if save and Path(save).is_dir() else run / "checkpoints"


def newest_checkpoint(run: Path) -> tuple[int | None, LedgerMark | None]:
    """Round of the checkpoint that the marker names, and what it keeps of its ledger; None without."""
    root = checkpoint_root(run)
    try:
        marker = root / "latest_checkpointed_iteration.txt"
        if not marker.is_file() or (text := marker.read_text().strip()) == "none":
            return None, None
        name = f"iter_{int(text):07d}" if text.isdigit() else text
        state = json.loads((root / name / "run_state.json").read_text())
        return int(state["rollout_id"]), LedgerMark(**state["ledger"]) if state.get("ledger") else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise HandoffError(f"{root}: which checkpoint is the newest cannot be read: {error}") from error
