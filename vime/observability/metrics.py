"""Numbers of a run: metrics.jsonl always, TensorBoard and Weights & Biases when asked for. Same names everywhere.

Owned by the driver; `step` is the rollout id. A resumed run writes its first rounds again: `read_metrics` lets the
later line win, and the mark that `Tracker` leaves on start makes it forget rounds that the resumed run trains anew, in
metrics.jsonl and in TensorBoard. wandb continues the same run, where the later points of a step are the valid ones.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from vime.config.run import TrackingConfig
from vime.types import ConfigError, DataError
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
VERSION = "weights/version"
"""The metric that each round's own line has, and no other line."""
WANDB_DEADLINE_S = 60
WANDB_FINISH_S = 300
WANDB_ID_FILE = "wandb_id"


class _Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Writes each round's metrics to every sink that the flags ask for."""

    def __init__(
        self,
        tracking: TrackingConfig,
        run_dir: Path,
        config_dict: Mapping[str, object],
        *,
        start_round: int = 0,
    ) -> None:
        self._run_dir, self._is_resumed = run_dir, (run_dir / METRICS_FILE).is_file()
        self._sinks: list[_Sink] = [_JsonLines(run_dir, start_round)]
        if tracking.use_tensorboard:
            self._sinks.append(_TensorBoard(run_dir, start_round))
        if tracking.use_wandb:
            self._add_wandb(tracking, config_dict)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of round `step`; more may follow for the same step. NaN is written: it must be seen."""
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        for sink in list(self._sinks):
            try:
                sink.log(step, numbers)
            except Exception as error:  # boundary: wandb's process may die or be killed, and metrics.jsonl has it all
                if isinstance(sink, _JsonLines):
                    raise
                self._sinks.remove(sink)
                name = type(sink).__name__.lstrip("_")
                logger.warning("%s gets no more metrics of this start: %s: %s", name, type(error).__name__, error)

    def _add_wandb(self, tracking: TrackingConfig, config_dict: Mapping[str, object]) -> None:
        """A later start goes on without it where it does not answer: the run may have trained for days."""
        try:
            self._sinks.append(_Wandb(tracking, self._run_dir, config_dict))
        except ConfigError as error:
            if not read_metrics(self._run_dir):
                raise
            logger.warning("this start reports nothing to wandb: %s", error)

    def lacks(self, step: int, prefix: str) -> bool:
        """Whether an earlier start of this run ended before it logged any metric of that name for `step`."""
        return self._is_resumed and not any(
            name.startswith(prefix) for name in read_metrics(self._run_dir).get(step, {})
        )

    def close(self) -> None:
        """Flush and close every sink; a second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()


def read_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return metrics by round, rounds ascending. Lines of one round are joined; a torn last line is left out."""
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{run_dir}: has no {METRICS_FILE}. Expected the run directory of a Vime run.")
    rounds: dict[int, dict[str, float]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "start" in record:
                rounds = {step: metrics for step, metrics in rounds.items() if step < record["start"]}
            else:
                step, metrics = int(record["step"]), record["metrics"]
                if not all(isinstance(value, int | float) for value in metrics.values()):
                    raise TypeError("not a number")
                rounds.setdefault(step, {}).update(metrics)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            logger.warning("%s:%d: left out a line that is not a metrics record (torn by a crash?)", path, number)
    return dict(sorted(rounds.items()))


def series(rounds: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    """Return one metric by round, for the rounds that have it."""
    return {step: metrics[name] for step, metrics in rounds.items() if name in metrics}


class _JsonLines:
    def __init__(self, run_dir: Path, start_round: int) -> None:
        path = Path(run_dir) / METRICS_FILE
        is_torn = path.is_file() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        is_resumed = path.is_file()
        self._file: IO[str] = path.open("a", encoding="utf-8")
        if is_torn:
            self._file.write("\n")
        if is_resumed:
            self._write({"start": start_round, "t": time.time()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write({"step": step, "t": time.time(), "metrics": dict(metrics)})

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class _TensorBoard:
    """TensorBoard's own writer: torch.utils.tensorboard would load torch into the driver."""

    def __init__(self, run_dir: Path, start_round: int) -> None:
        """Drop the steps from `start_round` on in a resumed run: TensorBoard purges what it read of them."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = Path(run_dir) / "tensorboard"
        is_resumed = any(directory.glob("events.*"))
        self._writer = EventFileWriter(str(directory), flush_secs=10)
        if is_resumed:
            started = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=start_round, session_log=started))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Logs rounds under the metric `step`: wandb's own step must never go back, and evaluations arrive out of order."""

    def __init__(self, tracking: TrackingConfig, run_dir: Path, config_dict: Mapping[str, object]) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=tracking.wandb_project,
                group=tracking.wandb_group,
                mode=tracking.wandb_mode,  # type: ignore[arg-type]  # --wandb-mode has wandb's own choices
                dir=str(run_dir),
                name=Path(run_dir).name,
                id=_wandb_id(Path(run_dir)),
                resume="allow",
                config=dict(config_dict),
                settings=wandb.Settings(
                    init_timeout=WANDB_DEADLINE_S, login_timeout=WANDB_DEADLINE_S, silent=True, console="off"
                ),
            )
        except (wandb.Error, OSError, ValueError) as error:
            raise ConfigError(
                f"--use-wandb with --wandb-mode {tracking.wandb_mode}: wandb did not start: {error}. Log in with "
                f"`wandb login` or set WANDB_API_KEY, or use --wandb-mode offline."
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Waits for: the upload of what is left. A daemon thread: a network that is gone does not hold the run."""
        finishing = threading.Thread(target=self._run.finish, name="wandb-finish", daemon=True)
        finishing.start()
        with waiting("the last metrics to be uploaded", "https://wandb", deadline_s=WANDB_FINISH_S):
            finishing.join(WANDB_FINISH_S)
        if finishing.is_alive():
            logger.warning("wandb has not uploaded everything within %g s; `wandb sync` later", WANDB_FINISH_S)


def _wandb_id(run_dir: Path) -> str:
    """Return the wandb run of a run directory: a run that is resumed there continues it."""
    path = run_dir / WANDB_ID_FILE
    if not path.is_file():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name}: got {type(value).__name__} {value!r}, expected a number") from error
