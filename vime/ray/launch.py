"""From a command line to an exit code: what train.py and train_async.py share.

Exit codes: 0 done, 2 refused configuration, 3 run failed (what was trained is saved where the trainers are whole), 130
interrupted by Ctrl-C, SIGTERM or a closed terminal, with the state saved.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray

from vime.config.parse import Config, dump
from vime.handoff.audit import SavedFacts, audit_run
from vime.handoff.queue_view import ledger_fates
from vime.observability.claims import read_claims
from vime.observability.events import EventKind, EventLog, open_events
from vime.observability.html_report import write_report
from vime.observability.logs import setup_logging
from vime.observability.machine_facts import write_machine_facts
from vime.observability.run_dir import RunDir, claimed_checkpoints
from vime.observability.screen import Screen
from vime.observability.unit_costs import recorded_config
from vime.ray.checkpoint import checkpoint_root, find_latest, find_start, newest_checkpoint, read_run_state
from vime.ray.checkpoint_damage import refuse_damage
from vime.ray.cluster import NO_PATIENCE, Patience
from vime.ray.components import Components
from vime.ray.interrupts import Interrupts
from vime.ray.preflight import read_command_line
from vime.ray.relaunch import Loss, Program
from vime.ray.save_on_failure import save_on_failure
from vime.ray.startup import start_components
from vime.ray.waits import Interrupted
from vime.types import ClusterError, ConfigError, VimeError, may_pass

logger = logging.getLogger(__name__)

INTERRUPTED = 130
Schedule = Callable[[Components], None]


def main(
    schedule: Schedule, *, is_async: bool = False, argv: Sequence[str] | None = None, called: str | None = None
) -> int:
    """Run `schedule` with the components that the command line describes. `argv` has no program name; None takes that
    of this process. `called` is the name that --help shows."""
    program = Program()
    program.hide_secrets()
    loss = program.loss
    with contextlib.ExitStack() as claims:
        try:
            program.end_what_is_left()
            program_name = called or Path(sys.argv[0]).name
            if loss is None:
                config = read_command_line(argv, is_async=is_async, program=program_name)
            else:
                config = recorded_config(Path(loss.run_dir))  # what files and the hub say by now is another run's
            sign = claims.enter_context(claimed_checkpoints(config.model.save))
            run_dir = claims.enter_context(
                RunDir.create(
                    config.tracking.run_dir if loss is None else loss.run_dir,
                    dump(config),
                    resume=config.model.load is not None or loss is not None,
                )
            )
            sign(run_dir.path)
        except (VimeError, OSError) as error:  # OSError: of a disk that is full
            sys.stderr.write(f"refused: {error}\n")
            return ConfigError.exit_code  # for every error here: nothing was started
        return _run(config, run_dir.path, schedule, program)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one attempt (a start of all components, up to their stop) ended."""

    code: int
    message: str = ""
    is_worth_a_restart: bool = False  # something died or hung; not: a wrong flag, plug-in, reward, or the user
    is_safe: bool = False  # nothing is lost of what was trained
    outcome: str = ""  # what became of what was trained, for the user; a part of `message`
    trained_round: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """What all attempts of a run share."""

    path: Path
    schedule: Schedule
    program: Program
    restarts: Restarts
    screen: Screen
    events: EventLog
    interrupts: Interrupts


def _run(config: Config, path: Path, schedule: Schedule, program: Program) -> int:
    program.adopt_orphans()
    setup_logging(path, "driver")
    events = open_events(path, "driver")
    screen = Screen(run_dir=path, log_interval=config.tracking.log_interval)
    with Interrupts() as interrupts:
        restarts = Restarts(config, path, program.loss)
        attempts = Attempts(
            path=path,
            schedule=schedule,
            program=program,
            restarts=restarts,
            screen=screen,
            events=events,
            interrupts=interrupts,
        )
        if program.loss is None:
            events.emit(EventKind.RUN_STARTED)
            write_machine_facts(path)
            end = _attempt(config, attempts)
        else:
            end = _end_of_ray(config, path, program.loss)
        while not interrupts.is_asked and (again := restarts.after(end)) is not None:
            events.emit(EventKind.RUN_RESTARTED, error=end.message, load=again.model.load)
            screen.warn(f"{end.message}\nstarting again: {restarts}")
            end = _attempt(again, attempts, before=end)
    if end.code == 0 and not config.debug.debug_rollout_only:
        end = _audited(config, path, screen)
    if end.code:
        events.emit(EventKind.RUN_FAILED, error=end.message)
    else:
        events.emit(EventKind.RUN_FINISHED)
    write_report(path, ledger_fates)
    if end.code:
        screen.failed(f"{end.message}\nLogs: {path / 'logs'}")
    else:
        screen.finish()
    return end.code


class Restarts:
    """Whether a run whose part died starts again: --max-restarts times in a row without a round trained between.

    From the newest checkpoint that it wrote itself, or else from where it was started: that may be an older one.
    """

    def __init__(self, config: Config, path: Path, loss: Loss | None = None) -> None:
        """`loss`: continue counting where the previous program ended."""
        self._config, self._limit = config, config.cluster.max_restarts
        self._root = checkpoint_root(config, path)
        self._found: Path | None = None  # the newest checkpoint before this run saved one
        self.loaded: Path | None = None  # what --load meant then
        self.num, self._trained = 0, -1
        if loss is not None:
            self.num, self._trained = loss.num_restarts, loss.newest_round
            self._found = None if loss.found is None else Path(loss.found)
            self.loaded = None if loss.loaded is None else Path(loss.loaded)
            return
        with contextlib.suppress(VimeError, OSError):  # reported where it is needed
            self._found = find_latest(self._root)
            self.loaded = find_start(config.model.load).checkpoint

    def after(self, end: End) -> Config | None:
        """Return the configuration of the next attempt, which continues from the newest checkpoint; None when there is
        none."""
        if end.trained_round > self._trained:
            self.num, self._trained = 0, end.trained_round
        if not end.is_worth_a_restart or self.num >= self._limit:
            return None
        self.num += 1
        try:
            is_saved = find_latest(self._root) != self._found
        except (VimeError, OSError) as error:  # the run ends as it did: with its own message, saved and reported
            logger.error("it is not started again, because its checkpoints cannot be read: %s", error)
            return None
        return self._config.replace(load=str(self._root)) if is_saved else self._config

    def loss(self, server: str, *, path: Path, is_alone: bool, may_restart: bool, trained_round: int) -> Loss:
        """Return what the program that replaces this one after the death of `server` must know."""
        return Loss(
            server=server,
            run_dir=str(path),
            is_alone=is_alone,
            may_restart=is_alone and may_restart,
            trained_round=trained_round,
            num_restarts=self.num,
            newest_round=self._trained,
            found=None if self._found is None else str(self._found),
            loaded=None if self.loaded is None else str(self.loaded),
        )

    def __str__(self) -> str:
        return f"restart {self.num} of {self._limit} without a trained round (--max-restarts)"


def _attempt(config: Config, attempts: Attempts, *, before: End | None = None) -> End:
    """Run one attempt: start every part, drive it, and stop it again. `before`: how the one before it ended. A failure
    in the start-up of the first attempt ends the run, because it is most likely a mistake that the user should see at
    once; one in the stop of the parts changes nothing of how the attempt ended."""
    is_later, components, ended = before is not None, None, None

    def go_on_without_ray(server: str) -> None:
        """Called by the thread that watches Ray's servers. There is hardly time for more: the library is about to end
        this process."""
        loss = attempts.restarts.loss(
            server,
            path=attempts.path,
            is_alone=attempts.program.is_alone,
            may_restart=(is_later or components is not None) and not attempts.interrupts.is_asked,
            trained_round=-1 if components is None else components.trained_round,
        )
        attempts.program.replace(loss)

    try:
        if is_later and (checkpoint := find_start(config.model.load).checkpoint) is not None:
            refuse_damage(checkpoint)  # in the first attempt `preflight` did
        with start_components(
            config,
            attempts.path,
            attempts.screen,
            attempts.interrupts,
            attempts.events,
            go_on_without_ray,
            patience=_patience(config, attempts) if is_later else NO_PATIENCE,
        ) as components:
            components.saver.protect(attempts.restarts.loaded)
            ended = _drive(components, attempts.schedule)
    except (Exception, KeyboardInterrupt) as error:  # boundary: an unforeseen failure ends with a message too
        if ended is None:
            return _end_of_start(error, before, checkpoint_root(config, attempts.path))
        logger.exception("the parts could not be stopped")
        attempts.screen.warn(f"the parts could not be stopped: {type(error).__name__}: {error}")
    return ended


def _end_of_start(error: BaseException, before: End | None, root: Path) -> End:
    """Return how an attempt ended whose schedule has not begun, or was ended by a second signal."""
    if isinstance(error, KeyboardInterrupt):
        message = "stopped at once by a second signal: rounds trained since the last checkpoint are not saved. "
        return End(code=INTERRUPTED, message=f"{message}--load continues from the last one, if there is one: {root}")
    if isinstance(error, Interrupted):  # later than start-up, `_drive` takes it and saves
        what = f"interrupted during {error}"
        if before is None:
            return End(code=INTERRUPTED, message=f"{what}: this run has trained nothing, so there is nothing to save.")
        return End(code=INTERRUPTED if before.is_safe else before.code, message=f"{before.message}\n{what} after that.")
    if isinstance(error, VimeError):
        message, code, may_help = str(error), error.exit_code, may_pass(error)
    else:
        message, code, may_help = _unforeseen(error), VimeError.exit_code, _is_passing(error)
    if before is None:
        return End(code=code, message=message)
    message = f"{message}\n{before.outcome}".rstrip()  # of the last attempt that trained
    return End(code=code, message=message, is_worth_a_restart=may_help, is_safe=before.is_safe, outcome=before.outcome)


def _patience(config: Config, attempts: Attempts) -> Patience:
    """Return how long a restart waits for nodes of a cluster that others own; a local Ray has what the run needs."""
    seconds = 0.0 if config.cluster.ray_address is None else config.cluster.start_timeout_secs
    return Patience(seconds=seconds, tell=attempts.screen.warn)


def _drive(components: Components, schedule: Schedule) -> End:
    """Run the schedule. Whatever ends it, the last trained round is recorded and saved before the components stop."""
    is_worth_a_restart = False
    try:
        schedule(components)
        components.watchers.screen.activity("finishing the last checkpoint")
        components.saver.finish()
    except Interrupted as interruption:
        message, code = f"interrupted during {interruption}", INTERRUPTED
    except VimeError as error:
        message, code, is_worth_a_restart = str(error), error.exit_code, may_pass(error)
    except (Exception, SystemExit) as error:  # boundary: an unforeseen failure costs no trained round either
        message, code, is_worth_a_restart = _unforeseen(error), VimeError.exit_code, _is_passing(error)
    else:
        return End(code=0, is_safe=True)
    is_safe, outcome = save_on_failure(components)
    if code == INTERRUPTED and not is_safe:
        code = VimeError.exit_code  # 130 says that nothing is lost
    return End(
        code=code,
        message=f"{message}\n{outcome}",
        is_worth_a_restart=is_worth_a_restart,
        is_safe=is_safe,
        outcome=outcome,
        trained_round=components.trained_round,
    )


def _end_of_ray(config: Config, path: Path, loss: Loss) -> End:
    """Return how the previous program ended: by the loss of a server of Ray."""
    loaded = None if config.model.load is None else Path(config.model.load)
    error = ClusterError(
        f"Ray's {loss.server} died. Without it nothing of this run works, so nothing could be saved. "
        f"{newest_checkpoint(checkpoint_root(config, path), loaded)}"
    )
    is_ours = config.cluster.ray_address is None  # only its owner may restart a joined cluster
    return End(
        code=error.exit_code,
        message=str(error),
        is_worth_a_restart=is_ours and loss.may_restart and may_pass(error),
        trained_round=loss.trained_round,
    )


def _audited(config: Config, path: Path, screen: Screen) -> End:
    """Audit the run: every run that trained ends with this."""
    try:
        newest = find_latest(checkpoint_root(config, path))
        saved = None
        if newest is not None:
            state = read_run_state(newest)
            saved = SavedFacts(round_id=state.rollout_id, mark=state.ledger, receipt=state.receipt)
        has_ledger = config.queue.has_ledger
        report = audit_run(
            path,
            saved=saved,
            claims=partial(read_claims, path),
            has_ledger=has_ledger,
            has_spool=config.queue.transferqueue_durable,
        )
    except VimeError as error:
        return End(code=error.exit_code, message=f"the audit of this run could not be made: {error}")
    if report.findings:
        return End(code=VimeError.exit_code, message=f"the audit found {report.summary(path)}")
    counts = f"{report.counts()}, " if has_ledger else ""
    screen.note(f"audit: every promise kept, {counts}{report.shown()}")
    return End(code=0)


def _is_passing(error: BaseException) -> bool:
    """Whether it is an error of Ray outside a wait: a server of Ray that does not respond, or an actor that is gone."""
    return isinstance(error, ray.exceptions.RayError) or may_pass(error)


def _unforeseen(error: BaseException) -> str:
    logger.error("run failed", exc_info=error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {Path(last.filename).name}:{last.lineno})"
