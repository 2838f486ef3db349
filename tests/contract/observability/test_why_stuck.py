"""`vime why-stuck` on real processes: three that wait for each other, one of them stopped, killed, or idle.

The same claims on made-up processes: tests/unit/observability/test_stuck.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vime.cli.main import main
from vime.observability import stuck
from vime.observability.events import EventKind, EventLog
from vime.observability.stuck import explain

DEADLINE_S = 60.0
# A process of a run that waits for its standard input: `owner` is who should write to it.
WAITS = """
import sys
from pathlib import Path
from vime.utils.waits import doing, open_registry, waiting
run_dir, process, *owners = sys.argv[1:]
open_registry(Path(run_dir), process)
with doing(f"the work of {process}"), waiting(f"what {process} needs", *owners, deadline_s=600):
    sys.stdin.read()
"""
# An engine that waits for nothing, with a server below it, as vLLM's core is below its actor.
SERVES = """
import subprocess, sys
from pathlib import Path
from vime.utils.waits import open_registry
open_registry(Path(sys.argv[1]), sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "core"], stdin=subprocess.PIPE)
Path(sys.argv[1], "core.pid").write_text(str(child.pid))
sys.stdin.read()
"""


class Run:
    """A run directory and the processes that the test started for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "events").mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, code: str, name: str, *owners: str) -> None:
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-c", code, str(self.directory), name, *owners], stdin=subprocess.PIPE
        )

    def has_shown(self, name: str, *, with_wait: bool) -> bool:
        files = list((self.directory / "waits").glob(f"{name}.*.json"))
        return bool(files) and (not with_wait or bool(json.loads(files[0].read_text())["waits"]))

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(DEADLINE_S)

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
            process.kill()
            process.wait(DEADLINE_S)


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """driver -> rollout-manager -> engine-0, each seen to wait for the next."""
    made = Run(tmp_path / "run")
    try:
        made.start(WAITS, "driver", "rollout-manager")
        made.start(WAITS, "rollout-manager", "engine")
        made.start(SERVES, "engine-0")
        for name in ("driver", "rollout-manager"):
            until(lambda name=name: made.has_shown(name, with_wait=True))
        until((made.directory / "core.pid").exists)
        yield made
    finally:
        made.end()


def test_who_is_stopped_killed_and_what_a_dead_run_waited_for(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One story, because starting processes is what takes time."""
    monkeypatch.setattr(stuck, "PATIENCE_S", 1e9)  # however slow this machine is
    chain = "'what driver needs' from rollout-manager, which waits"
    assert main(["why-stuck", str(run.directory)]) == 0  # the engine idles, which has not lasted
    out = capsys.readouterr().out
    assert "nothing is stuck: driver waits" in out
    assert "on the work of rollout-manager" in out

    core = int((run.directory / "core.pid").read_text())
    os.kill(core, signal.SIGSTOP)
    until(lambda: "SIGSTOP" in explain(run.directory, sample_s=0).line)
    assert main(["why-stuck", str(run.directory)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert chain in last
    assert f"; engine-0 (pid {run.processes['engine-0'].pid}) is STOPPED (" in last
    assert f"pid {core}: SIGSTOP)" in last
    assert any(line.startswith("engine-0") and "STOPPED" in line for line in lines)
    os.kill(core, signal.SIGCONT)
    os.kill(core, signal.SIGKILL)

    run.kill("engine-0")
    assert main(["why-stuck", str(run.directory)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("is DEAD")

    for name in ("rollout-manager", "driver"):
        run.kill(name)
    assert main(["why-stuck", str(run.directory)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "the run is dead: driver" in last
    assert chain in last

    events = EventLog(run.directory, "driver")
    events.emit(EventKind.RUN_FAILED, error="engine-0 died")
    assert main(["why-stuck", str(run.directory)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the run has ended: engine-0 died"
    events.emit(EventKind.RUN_FINISHED)
    assert main(["why-stuck", str(run.directory)]) == 0
    events.close()


def test_a_pid_that_another_process_has_now_is_not_the_process_of_the_run(run: Run) -> None:
    [path] = (run.directory / "waits").glob("engine-0.*.json")
    record = json.loads(path.read_text())
    run.kill("engine-0")
    path.write_text(json.dumps({**record, "pid": os.getpid()}))  # this test: alive, and started at another time
    assert explain(run.directory, sample_s=0).line.endswith("is DEAD")
    # on another host the pid says nothing; the file was written a moment ago, and in the year 2001 it was not
    path.write_text(json.dumps({**record, "place": "elsewhere"}))
    assert not explain(run.directory, sample_s=0).is_stuck
    os.utime(path, (1e9, 1e9))
    assert explain(run.directory, sample_s=0).line.endswith("is SILENT (on elsewhere)")


def test_what_is_no_run_or_wrote_no_waits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why-stuck", str(tmp_path)]) == 2
    (tmp_path / "events").mkdir()
    (tmp_path / "config.json").write_text("{}")
    assert main(["why-stuck", str(tmp_path)]) == 3
    assert "no process has said what it waits for" in capsys.readouterr().err
