"""Which ledger a run of mode `streaming` continues with: compared before anything starts, by id and not by path.

A checkpoint keeps a mark of its ledger (`vime/handoff/ledger_identity.py`). The ledger that has it may lie in this
run's directory, beside the checkpoint (a run directory that moved), or where the checkpoint was written; from another
directory it is copied. A checkpoint from before ledgers had ids has only the path where it was written.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from vime.handoff.ledger_file import check_is_there
from vime.handoff.ledger_identity import find_obstacle
from vime.handoff.ledger_schema import check_content, open_for_reading
from vime.handoff.ledger_types import LEDGER_NAME, LedgerMark
from vime.handoff.ledger_undo import lasting_file
from vime.observability.events import EventKind, read_events
from vime.ray.checkpoint import LEDGER_RUN, read_run_state
from vime.types import ConfigError

ORIGIN_NAME = "ledger.origin"  # in a run directory: the run whose queue was copied
OTHER_WAY = "Choose a new run directory, or continue in the one that wrote the checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChoice:
    """`origin`: directory of the run whose queue is to be copied first; None when the run continues with its own."""

    origin: Path | None = None
    mark: LedgerMark | None = None
    note: str = ""  # what a user should know


def choose_ledger(run_dir: Path | None, checkpoint: Path | None) -> LedgerChoice:
    """Return the ledger with which a run in `run_dir` (None: a new directory) continues from `checkpoint` (None: the
    start).

    Raises ConfigError or LedgerFileError when there is none, or only another one.
    """
    if run_dir is not None:
        check_is_there(run_dir / LEDGER_NAME)
    own = None if run_dir is None or not (run_dir / LEDGER_NAME).is_file() else run_dir
    if checkpoint is None:
        if own is not None:
            _check_whole(own / LEDGER_NAME)
        if run_dir is not None and own is None and _has_trained(run_dir):
            raise ConfigError(
                f"--run-dir {run_dir}: holds a run of mode streaming that has trained (events/), but no {LEDGER_NAME}: "
                "its prompts would be trained a second time. Put the file back, or choose a new run directory."
            )
        return LedgerChoice()
    state = read_run_state(checkpoint)
    written = Path(str(state.data_source[LEDGER_RUN]))
    if state.ledger is None:
        return _by_path(run_dir, own, written, checkpoint)
    beside = checkpoint.resolve().parent.parent
    refusals = []
    for directory in [own] if own is not None else dict.fromkeys((beside, written)):
        path = directory / LEDGER_NAME
        check_is_there(path)
        if not path.is_file():
            refusals.append(f"there is no {path}")
            continue
        _check_whole(path)
        lasting = lasting_file(path, state.rollout_id)
        if lasting != path:  # the run puts it in place of `path`
            _check_whole(lasting)
        with closing(open_for_reading(lasting)) as connection:
            obstacle = find_obstacle(connection, state.ledger, state.rollout_id)
        if obstacle is None:
            return LedgerChoice(origin=None if directory == own else directory, mark=state.ledger)
        refusals.append(f"{path}: {obstacle.rstrip('.')}")
    raise ConfigError(
        f"--load {checkpoint}: belongs to the ledger {state.ledger.ledger_id} at line {state.ledger.sequence}, which "
        f"knows what it has trained; but {'; '.join(refusals)}. {OTHER_WAY}, or put a copy of its {LEDGER_NAME} back."
    )


def _by_path(run_dir: Path | None, own: Path | None, written: Path, checkpoint: Path) -> LedgerChoice:
    """Choose for a checkpoint from before ledgers had ids."""
    note = (
        f"--load {checkpoint}: is from before ledgers had ids; its ledger is taken to be that of {written}, by its path"
    )
    if own is not None:
        mark = own / ORIGIN_NAME
        if own == written or (mark.is_file() and mark.read_text() == str(written)):
            return LedgerChoice(note=note)
        raise ConfigError(
            f"--run-dir {own}: has a queue of its own, but the checkpoint belongs to that of {written}. {OTHER_WAY}."
        )
    if run_dir == written or not (written / LEDGER_NAME).is_file():
        raise ConfigError(
            f"--load {checkpoint}: was written by the run in {written}, which has no {LEDGER_NAME} any more, so it is "
            "unknown which groups it trained. Load with the run directory in its place."
        )
    return LedgerChoice(origin=written, note=note)


def _check_whole(ledger: Path) -> None:
    with closing(open_for_reading(ledger)) as connection:
        check_content(connection, ledger)


def _has_trained(run_dir: Path) -> bool:
    """Whether a run of mode streaming has trained a round in this directory, by its events."""
    events = read_events(run_dir) if (run_dir / "events").is_dir() else []
    ledgers = [at for at, event in enumerate(events) if event.fields.get("part") == "ledger"]
    return bool(ledgers) and any(event.kind == EventKind.ROUND_TRAINED for event in events[ledgers[0] :])
