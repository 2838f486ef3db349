"""Metrics: the same numbers in every sink, and a resumed run that writes rounds again."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from vime.config.run import TrackingConfig
from vime.observability import metrics
from vime.observability.metrics import Tracker, read_metrics, series
from vime.types import ConfigError, DataError


def test_several_logs_of_one_round_are_joined(tmp_path: Path) -> None:
    tracker = Tracker(TrackingConfig(), tmp_path, {})
    tracker.log(1, {"train/loss": 0.25})
    tracker.log(0, {"rollout/reward_mean": 0.5})
    tracker.log(1, {"rollout/reward_mean": 0.75})
    tracker.close()
    rounds = read_metrics(tmp_path)
    assert list(rounds.items()) == [
        (0, {"rollout/reward_mean": 0.5}),
        (1, {"train/loss": 0.25, "rollout/reward_mean": 0.75}),
    ]
    assert series(rounds, "train/loss") == {1: 0.25}


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    Tracker(TrackingConfig(), tmp_path, {}).log(0, {"train/loss": 1.0})
    assert read_metrics(tmp_path) == {0: {"train/loss": 1.0}}


def test_a_resumed_run_forgets_the_rounds_that_it_trains_anew(tmp_path: Path) -> None:
    first = Tracker(TrackingConfig(), tmp_path, {})
    for step in range(4):
        first.log(step, {"train/loss": float(step)})
    first.close()
    # Resumed from the checkpoint after round 1: round 2 comes again, round 3 has not come yet.
    resumed = Tracker(TrackingConfig(), tmp_path, {}, start_round=2)
    resumed.log(2, {"train/loss": 20.0})
    assert series(read_metrics(tmp_path), "train/loss") == {0: 0.0, 1: 1.0, 2: 20.0}


def test_a_torn_last_line_is_left_out_and_does_not_swallow_the_mark_of_the_next_run(tmp_path: Path) -> None:
    first = Tracker(TrackingConfig(), tmp_path, {})
    first.log(0, {"train/loss": 1.0})
    first.log(1, {"train/loss": 2.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "metr')
    assert list(read_metrics(tmp_path)) == [0, 1]
    Tracker(TrackingConfig(), tmp_path, {}, start_round=1)
    assert list(read_metrics(tmp_path)) == [0]


def test_a_loss_that_is_not_a_number_is_kept_visible(tmp_path: Path) -> None:
    Tracker(TrackingConfig(), tmp_path, {}).log(0, {"train/loss": float("nan")})
    assert math.isnan(read_metrics(tmp_path)[0]["train/loss"])


@pytest.mark.parametrize(
    "line", ['{"step": 1, "metrics": {"a": null}}', '{"step": Infinity, "metrics": {}}', '{"step": 1, "metrics": []}']
)
def test_a_line_of_another_structure_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    """It was a traceback in whatever adds up or draws the numbers."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "metrics": {"a": 1.0}}\n' + line + "\n")
    assert read_metrics(tmp_path) == {0: {"a": 1.0}}
    assert "metrics.jsonl:2: left out a line that is not a metrics record" in caplog.text


def test_a_value_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="metric train/loss: got str 'high'"):
        Tracker(TrackingConfig(), tmp_path, {}).log(0, {"train/loss": "high"})  # type: ignore[dict-item]


def test_closing_twice_is_allowed(tmp_path: Path) -> None:
    tracker = Tracker(TrackingConfig(), tmp_path, {})
    tracker.close()
    tracker.close()


def test_no_metrics_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no metrics\.jsonl"):
        read_metrics(tmp_path)


def test_tensorboard_reads_the_numbers_back_and_torch_is_not_loaded(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from vime.config.run import TrackingConfig
from vime.observability.metrics import Tracker
tracker = Tracker(TrackingConfig(use_tensorboard=True), Path({str(tmp_path)!r}), {{}})
tracker.log(0, {{"train/loss": 0.5}})
tracker.log(7, {{"train/loss": 0.25}})
tracker.close()
sys.exit("torch" in sys.modules or "wandb" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    scalars = [(entry.step, entry.value) for entry in read.Scalars("train/loss")]
    assert scalars == [(0, 0.5), (7, 0.25)]


def test_tensorboard_forgets_the_rounds_that_a_resumed_run_trains_anew(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = TrackingConfig(use_tensorboard=True)
    first = Tracker(tracking, tmp_path, {})
    for step in range(4):
        first.log(step, {"train/loss": float(step)})
    first.close()
    (tmp_path / "tensorboard").joinpath(next((tmp_path / "tensorboard").iterdir())).rename(
        tmp_path / "tensorboard" / "events.out.tfevents.1.first"  # files are read by name, which is a second
    )
    resumed = Tracker(tracking, tmp_path, {}, start_round=2)
    resumed.log(2, {"train/loss": 20.0})
    resumed.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(entry.step, entry.value) for entry in read.Scalars("train/loss")] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_wandb_goes_on_in_the_run_of_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **how: asked.append(how) or Mock())
    for name in ("one", "one", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        Tracker(TrackingConfig(use_wandb=True), tmp_path / name, {}).close()
    first, again, other = (how["id"] for how in asked)
    assert first == again != other
    assert {how["resume"] for how in asked} == {"allow"}


def test_a_network_that_is_gone_does_not_hold_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    never = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **_: Mock(finish=never.wait))
    monkeypatch.setattr(metrics, "WANDB_FINISH_S", 0.05)
    Tracker(TrackingConfig(use_wandb=True), tmp_path, {}).close()
    assert "wandb has not uploaded everything" in caplog.text
    never.set()


def test_wandb_works_offline(tmp_path: Path) -> None:
    """In a process of its own: wandb keeps a service process and global state."""
    code = f"""
from pathlib import Path
from vime.config.run import TrackingConfig
from vime.observability.metrics import Tracker
tracker = Tracker(TrackingConfig(use_wandb=True, wandb_mode="offline"), Path({str(tmp_path)!r}), {{"lr": 1e-6}})
tracker.log(1, {{"train/loss": 0.5}})
tracker.log(0, {{"rollout/reward_mean": 0.25}})
tracker.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=90, env=os.environ | {"WANDB_SILENT": "true"})
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = recorded.read_bytes()
    assert b"train/loss" in content
    assert b"rollout/reward_mean" in content


def test_a_run_that_has_trained_goes_on_without_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its service may be down at a restart, and its process may be killed: a run of days must not end with that."""
    import wandb

    def refuse(**_: Any) -> None:
        raise wandb.errors.CommError("no answer")

    def killed(_: Any) -> None:
        raise ConnectionResetError("wandb-core is gone")

    monkeypatch.setattr(wandb, "init", lambda **_: Mock(log=killed))
    tracker = Tracker(TrackingConfig(use_wandb=True), tmp_path, {})
    for step in range(3):
        tracker.log(step, {"train/loss": 0.5})
    assert caplog.text.count("Wandb gets no more metrics of this start: ConnectionResetError") == 1
    tracker.close()
    monkeypatch.setattr(wandb, "init", refuse)
    Tracker(TrackingConfig(use_wandb=True), tmp_path, {}, start_round=3).log(3, {"train/loss": 0.4})
    assert "this start reports nothing to wandb" in caplog.text
    assert sorted(read_metrics(tmp_path)) == [0, 1, 2, 3]


def test_wandb_that_does_not_start_names_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("api_key not configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match="--wandb-mode offline"):
        Tracker(TrackingConfig(use_wandb=True), tmp_path, {})
