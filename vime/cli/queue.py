"""`vime queue ls|show|export|import RUN` and `vime audit RUN`: the ledger and the spool of a run, live or dead."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from vime.cli.commands import Commands
from vime.config.queue_checks import EXTERNAL, STREAMING
from vime.data.payload import record_size
from vime.handoff.audit import MAX_SHOWN, AuditReport, SavedFacts, audit_run
from vime.handoff.audit_checkpoints import audit_checkpoints
from vime.handoff.ledger_file import has_history
from vime.handoff.ledger_types import LEDGER_NAME, SPOOL_NAME, LedgerMark, Task
from vime.handoff.queue_view import export_queue, import_queue, read_group, read_overview
from vime.handoff.spool import Spools
from vime.observability.claims import read_claims
from vime.observability.run_dir import check_run_dir, config_value
from vime.types import HandoffError, VimeError


class AuditFailedError(VimeError):
    """The audit found breaches."""


def add_parsers(commands: Commands) -> None:
    """Add `audit` and `queue` to the command line; each names its function as `run_command`."""
    parser = commands.add_parser("audit", help="check that a run kept every promise; exit 3 when one was broken")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.set_defaults(run_command=run_audit)
    queue = commands.add_parser("queue", help="look at the queue of a run, or copy it")
    actions = queue.add_subparsers(dest="action", required=True)
    for name, text, call in (
        ("ls", "groups by state, rounds that are not durable, which producer works on what", run_ls),
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
    _check_run(run)
    saved, report = look_twice(run)
    files = audit_checkpoints(checkpoint_root(run))
    report = replace(report, findings=(*report.findings, *files.findings))
    checkpoint = "no checkpoint" if saved is None else f"checkpoint of round {saved.round_id}"
    if has_ledger(run):
        for state, total in sorted(report.groups.items()):
            say(f"{total:>10,} groups {state}, {report.tokens[state]:,} tokens")
        spool = "spool read" if (run / SPOOL_NAME).is_dir() else "no spool"
        say(f"{report.num_rounds:,} rounds, {report.num_lines:,} lines of history, {checkpoint}, {spool}")
    else:
        say(f"not of mode streaming: there is no ledger; {checkpoint}")
    say(f"compared with {report.shown()}, the metrics and the events")
    if files.read:
        say(f"checkpoints read to the last byte: {', '.join(files.read)}")
    if files.unknown:
        say(f"checkpoints without a manifest, whose bytes cannot be checked: {', '.join(files.unknown)}")
    if report.findings:
        raise AuditFailedError(report.summary(run))
    say("every promise kept")


def _check_run(run: Path) -> None:
    """Refuse what is no run. A queue that was imported is a ledger without a configuration."""
    ledger = run / LEDGER_NAME
    if not (ledger.is_file() or has_history(ledger)):
        check_run_dir(run)


def look_twice(run: Path) -> tuple[SavedFacts | None, AuditReport]:
    """Return the facts of the newest checkpoint, and the audit.

    Ledger, checkpoint and spool of a live run are not read at one moment: what a first look misses, a second look finds
    somewhere else. A breach is what two looks see, or one look at a run in which nothing changed.
    """
    saved, report = _first_look(run)
    if not report.findings:
        return saved, report
    again, second = _look(run)
    if (again, second.num_lines, second.receipts) != (saved, report.num_lines, report.receipts):
        second = replace(second, findings=tuple(found for found in second.findings if found in report.findings))
    return again, second


def _first_look(run: Path) -> tuple[SavedFacts | None, AuditReport]:
    """Retry once: a file may be removed between listing and reading it. A file that is really gone is missing again."""
    with contextlib.suppress(HandoffError):
        return _look(run)
    return _look(run)


def _look(run: Path) -> tuple[SavedFacts | None, AuditReport]:
    saved = newest_checkpoint(run)
    has_spool = config_value(_config(run), "queue", "transferqueue_durable") is True
    claims = partial(read_claims, run)
    return saved, audit_run(run, saved=saved, claims=claims, has_ledger=has_ledger(run), has_spool=has_spool)


def run_ls(arguments: argparse.Namespace) -> None:
    _check_run(arguments.run)
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
    _check_run(arguments.run)
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
        data = Spools(arguments.run / SPOOL_NAME).read(task, checksum)
        num_rows, num_tokens = record_size(data)
        say(f"  payload: {len(data):,} bytes, {num_rows} rows, {num_tokens:,} tokens")
    except HandoffError as error:
        say(f"  payload: {error}")


def run_export(arguments: argparse.Namespace) -> None:
    _check_run(arguments.run)
    count = export_queue(arguments.run, arguments.file)
    say(f"{arguments.file}: the ledger and {count:,} payloads")


def run_import(arguments: argparse.Namespace) -> None:
    count = import_queue(arguments.run, arguments.file)
    say(f"{arguments.run}: the ledger and {count:,} payloads")


def say(text: str) -> None:
    """Print one line, never wrapped or coloured: reasons and names must not be read as markup."""
    Console(highlight=False, markup=False, soft_wrap=True).print(text)


def has_ledger(run: Path) -> bool:
    """Whether the run has a ledger, as those of mode streaming have."""
    mode = config_value(_config(run), "queue", "transferqueue_mode", STREAMING)
    return mode in (STREAMING, EXTERNAL) or (run / LEDGER_NAME).exists()


def checkpoint_root(run: Path) -> Path:
    """Return where a run saves: --save, or RUN/checkpoints, also when the run directory moved since."""
    save = config_value(_config(run), "model", "save")
    return Path(save) if isinstance(save, str) and save and Path(save).is_dir() else run / "checkpoints"


def newest_checkpoint(run: Path) -> SavedFacts | None:
    """Return the facts of the checkpoint that the marker names; None without one."""
    root = checkpoint_root(run)
    try:
        marker = root / "latest_checkpointed_iteration.txt"
        if not marker.is_file() or (text := marker.read_text().strip()) == "none":
            return None
        name = f"iter_{int(text):07d}" if text.isdigit() else text
        state = json.loads((root / name / "run_state.json").read_text())
        mark = LedgerMark(**state["ledger"]) if state.get("ledger") else None
        return SavedFacts(round_id=int(state["rollout_id"]), mark=mark, receipt=state.get("receipt"))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise HandoffError(f"{root}: which checkpoint is the newest cannot be read: {error}") from error


def _config(run: Path) -> dict[str, object]:
    """Return the configuration of the run; empty when there is none."""
    record = run / "config.json"
    try:
        config = json.loads(record.read_text()) if record.is_file() else {}
        if not all(isinstance(part, dict) for part in (config, config.get("model", {}), config.get("queue", {}))):
            raise ValueError("it is no configuration")
    except (OSError, ValueError, AttributeError) as error:
        raise HandoffError(f"{record}: where the run saves cannot be read: {error}") from error
    return dict(config)
