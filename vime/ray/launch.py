"""From a command line to an exit code: what train.py and train_async.py share.

Exit codes: 0 done, 2 refused configuration, 3 run failed (what was trained is saved where the trainers are whole), 130
interrupted by Ctrl-C, SIGTERM or a closed terminal, with the state saved.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from vime.config.parse import Config, dump, parse_command_line
from vime.config.queue_checks import STREAMING
from vime.handoff.audit import audit_run
from vime.observability.events import EventKind, EventLog
from vime.observability.logs import setup_logging
from vime.observability.run_dir import RunDir
from vime.observability.screen import Screen
from vime.ray.assembly import open_machine
from vime.ray.checkpoint import find_start
from vime.ray.interrupts import Interrupts
from vime.ray.machine import Machine
from vime.ray.preflight import preflight
from vime.ray.rescue import rescue
from vime.ray.waits import Interrupted
from vime.types import VimeError

logger = logging.getLogger(__name__)

INTERRUPTED = 130
Rhythm = Callable[[Machine], None]


def main(rhythm: Rhythm, *, is_async: bool = False) -> int:
    """Run `rhythm` on the machine that the command line describes."""
    try:
        config = parse_command_line()
        preflight(config, is_async=is_async)
        run_dir = RunDir.create(config.tracking.run_dir, dump(config), resume=config.model.load is not None)
    except VimeError as error:
        sys.stderr.write(f"refused: {error}\n")
        return error.exit_code
    with run_dir:
        return _run(config, run_dir.path, rhythm)


def _run(config: Config, path: Path, rhythm: Rhythm) -> int:
    setup_logging(path, "driver")
    events = EventLog(path, "driver")
    events.emit(EventKind.RUN_STARTED)
    screen = Screen(run_dir=path)
    try:
        with Interrupts() as interrupts, open_machine(config, path, screen, interrupts, events) as machine:
            code = _drive(machine, rhythm, events)
    except VimeError as error:
        return _failed(screen, events, str(error), path, error.exit_code)
    except Interrupted as interruption:  # later than start-up, `_drive` takes it and saves
        events.emit(EventKind.RUN_FAILED, error=f"interrupted during {interruption}")
        screen.failed(f"interrupted during {interruption}: this run has trained nothing, so there is nothing to save.")
        return INTERRUPTED
    except KeyboardInterrupt:
        events.emit(EventKind.RUN_FAILED, error="stopped at once by a second signal")
        screen.failed(
            "stopped at once by a second signal: rounds trained since the last checkpoint are not saved. --load goes "
            f"on from the last one, if there is one: {config.model.save or path / 'checkpoints'}"
        )
        return INTERRUPTED
    except Exception as error:  # boundary: an unforeseen failure still ends with a message and exit code 3
        return _failed(screen, events, _unforeseen(error), path, VimeError.exit_code)
    if code == 0 and config.queue.transferqueue_mode == STREAMING:
        code = _audited(config, path, screen, events)
    if code == 0:
        events.emit(EventKind.RUN_FINISHED)
        screen.finish()
    return code


def _audited(config: Config, path: Path, screen: Screen, events: EventLog) -> int:
    """Every run of mode streaming ends with its audit: 0, or 3 with what was found."""
    root = Path(config.model.save) if config.model.save else path / "checkpoints"
    try:
        report = audit_run(path, checkpoint_round=find_start(str(root)).rollout_id - 1)
    except VimeError as error:
        return _failed(screen, events, f"the audit of this run could not be made: {error}", path, error.exit_code)
    if report.findings:
        return _failed(screen, events, f"the audit found {report.summary(path)}", path, VimeError.exit_code)
    screen.note(f"audit: every promise kept, {report.counts()}")
    return 0


def _drive(machine: Machine, rhythm: Rhythm, events: EventLog) -> int:
    """The rhythm itself; whatever ends it, the last trained round is booked and saved before the machine goes."""
    try:
        rhythm(machine)
        machine.watchers.screen.activity("finishing the last checkpoint")
        machine.saver.finish()
    except Interrupted as interruption:
        message, code = f"interrupted during {interruption}", INTERRUPTED
    except VimeError as error:
        message, code = str(error), error.exit_code
    except Exception as error:  # boundary: an unforeseen failure costs no trained round either
        message, code = _unforeseen(error), VimeError.exit_code
    else:
        return 0
    is_safe, outcome = rescue(machine)
    if code == INTERRUPTED and not is_safe:
        code = VimeError.exit_code  # 130 says that nothing is lost
    return _failed(machine.watchers.screen, events, f"{message}\n{outcome}", machine.run_dir, code)


def _unforeseen(error: Exception) -> str:
    logger.exception("run failed")
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {Path(last.filename).name}:{last.lineno})"


def _failed(screen: Screen, events: EventLog, message: str, path: Path, code: int) -> int:
    events.emit(EventKind.RUN_FAILED, error=message)
    screen.failed(f"{message}\nLogs: {path / 'logs'}")
    return code
