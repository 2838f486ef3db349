"""A process that replaces its program ends what the program before had started, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.training import ROOT
from vime.config.parse import dump, parse
from vime.observability.run_dir import RunDir
from vime.ray import launch
from vime.ray.checkpoint import RunState, save_checkpoint
from vime.ray.relaunch import HANDED_ON, Loss, Program

LOSS = Loss(
    server="raylet (pid 7)",
    run_dir="/runs/one",
    is_alone=True,
    may_restart=True,
    trained_round=4,
    num_restarts=1,
    newest_round=3,
    found=None,
    loaded=None,
)
PROGRAM = """
import dataclasses, json, os, subprocess, sys, threading
import psutil
from tests.unit.ray.test_relaunch import LOSS
from vime.ray.relaunch import HANDED_ON, Program
program = Program()
program.adopt_orphans()
if program.loss is None:
    os.environ["ADDED_BY_THE_RUN"] = "1"
    if program.is_alone:  # two orphans, one of them in a session of its own
        subprocess.run(["sh", "-c", "setsid sleep 600 & sleep 600 &"], stdout=subprocess.DEVNULL, check=True)
    subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    started = [child.pid for child in psutil.Process().children()]
    print(json.dumps([os.getpid(), started]), flush=True)
    loss = dataclasses.replace(LOSS, is_alone=program.is_alone)
    threading.Thread(target=program.replace, args=[loss]).start()
    threading.Event().wait()
program.end_what_is_left()
names = sorted({"ADDED_BY_THE_RUN", HANDED_ON} & set(os.environ))
left = [child.pid for child in psutil.Process().children()]
print(json.dumps([os.getpid(), dataclasses.asdict(program.loss), names, left]))
"""


ORPHANS = """
import json, subprocess, sys, time
import psutil
from vime.ray import relaunch
relaunch.REAP_S = 0.2
relaunch.Program().adopt_orphans()
ends = time.monotonic() + 30
mine = psutil.Process()
own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
def ended():
    return [one.pid for one in mine.children() if one.status() == psutil.STATUS_ZOMBIE and one.pid != own.pid]
script = ["sh", "-c", "sleep 0.1 & sleep 0.1 & sleep 0.1 &"]
subprocess.run(script, stdout=subprocess.DEVNULL, check=True, start_new_session=True)
num_seen = 0
while time.monotonic() < ends and not (num_seen == 3 and not ended()):
    num_seen = max(num_seen, len(ended()))
    time.sleep(0.005)
time.sleep(1)  # five looks
print(json.dumps([num_seen, ended(), own.wait()]))
"""


def run(*command: str) -> list[list[object]]:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_that_the_old_program_started_is_ended_orphans_too() -> None:
    (pid, started), (new_pid, loss, names, left) = run(sys.executable, "-c", PROGRAM)
    assert isinstance(started, list)
    assert len(started) == 3
    assert not any(map(psutil.pid_exists, started))
    assert new_pid == pid
    assert loss == dataclasses.asdict(LOSS)
    assert (names, left) == ([], [])


def test_a_successor_has_the_configuration_of_the_run_not_what_its_files_say_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse(["--lr", "1e-6", "--num-rollout", "3"])
    with RunDir.create(str(tmp_path / "run"), dump(config)) as run:
        pass
    loss = dataclasses.replace(LOSS, run_dir=str(run.path))
    monkeypatch.setenv(HANDED_ON, json.dumps(dataclasses.asdict(loss)))
    found: list[Any] = []
    monkeypatch.setattr(launch, "_run", lambda config, path, *_: found.append((config, path)) or 0)
    monkeypatch.setattr(Program, "end_what_is_left", lambda _self: None)
    assert launch.main(lambda _: None, argv=["--config", str(tmp_path / "gone.toml")]) == 0
    assert found == [(config, run.path)]


def test_where_somebody_else_started_children_nothing_is_ended() -> None:
    """As a shell does that becomes the run: `server & exec python train.py`."""
    (_, started), (_, loss, _, left) = run("sh", "-c", f"sleep 600 >&- & exec {sys.executable} -c '{PROGRAM}'")
    assert isinstance(started, list)
    for pid in started:  # the shell's and the run's own
        psutil.Process(pid).kill()
    assert isinstance(loss, dict)
    assert not loss["is_alone"]
    assert len(started) == 2
    assert left == started


def test_a_successor_goes_on_counting_restarts(tmp_path: Path) -> None:
    """Round 4 is newer than any before (3), so that this is the first restart again; with 3 it is the last of two."""
    config = parse(["--max-restarts", "2"])
    restarts = launch.Restarts(config, tmp_path, LOSS)
    assert restarts.after(launch._end_of_ray(config, tmp_path, LOSS)) is not None
    assert restarts.num == 1
    old_round = launch.Restarts(config, tmp_path, LOSS)
    assert old_round.after(launch.End(code=3, is_worth_a_restart=True, trained_round=3)) is not None
    assert old_round.num == 2


@pytest.mark.parametrize(
    ("flags", "may_restart", "is_worth_it"),
    [([], True, True), ([], False, False), (["--ray-address", "127.0.0.1:6379"], True, False)],
)
def test_a_lost_ray_starts_again_unless_it_is_somebody_elses(
    tmp_path: Path, flags: list[str], may_restart: bool, is_worth_it: bool
) -> None:
    root = tmp_path / "checkpoints"
    save_checkpoint(root, RunState(rollout_id=4, version=5, data_source={}), lambda _directory: None)
    config = parse(["--device", "cpu", *flags])
    loss = launch.Restarts(config, tmp_path).loss(
        "raylet (pid 7)", path=tmp_path, is_alone=True, may_restart=may_restart, trained_round=4
    )
    end = launch._end_of_ray(config, tmp_path, loss)
    assert (end.code, end.is_worth_a_restart, end.trained_round) == (3, is_worth_it, 4)
    assert "Ray's raylet (pid 7) died. Without it nothing of this run works, so nothing could be saved. The newest" in (
        end.message
    )
    assert f"continue with --load {root}" in end.message


def test_a_command_line_that_is_refused_leaves_its_process_no_parent_of_orphans() -> None:
    """A test's process would keep the dead raylet of another run, whose workers then take it for alive."""
    code = """
import ctypes
from vime.cli.main import main
assert main(["train", "--lr", "fast"]) == 2
is_parent = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(37, ctypes.byref(is_parent), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
print(is_parent.value)
"""
    assert run(sys.executable, "-c", code) == [0]


def test_orphans_that_have_ended_are_reaped_and_the_code_of_an_own_child_is_not_lost() -> None:
    """Three programs of agents that left a child behind."""
    assert run(sys.executable, "-c", ORPHANS) == [[3, [], 7]]


LIMITED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from vime.ray.template import raise_open_files
raise_open_files()
print([resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard])
"""


def test_the_base_of_workers_may_open_as_many_files_as_rays_own_workers() -> None:
    [[soft, hard]] = run(sys.executable, "-c", LIMITED)
    assert soft == (65_536 if hard == -1 else min(hard, 65_536))
