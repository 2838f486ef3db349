"""A node of a joined cluster dies with its engines: the others serve, and what it had starts again on another node."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.ray_head import Head, joined_node, live_in, running_head
from tests.helpers.training import ROOT, TinyTask, Training, interrupt

SOONER = {f"RAY_health_check_{name}": "1000" for name in ("initial_delay_ms", "period_ms", "timeout_ms")}
"""Ray's own time until it takes a node for dead is some 15 s."""
ENGINE, TRAINER = "ray::EngineActor", "ray::Trainer"


def actors(node: psutil.Process) -> dict[str, psutil.Process]:
    """The actors of a node, by their titles; of equal ones the last."""
    found = {}
    for process in node.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[" ".join(process.cmdline())] = process
    return {title: process for title, process in found.items() if title.startswith("ray::")}


def end_node(node: psutil.Process) -> None:
    """Its raylet is killed, and what it had started ends with it."""
    next(child for child in node.children(recursive=True) if child.name() == "raylet").kill()


def has_engines_only(node: psutil.Process) -> bool:
    titles = [title for title in actors(node) if "Agent" not in title and "IDLE" not in title]  # without Ray's own
    return bool(titles) and all(title.startswith(ENGINE) for title in titles)


def told(command: str, run_dir: Path) -> str:
    said = subprocess.run(
        [sys.executable, "-m", "vime", command, str(run_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return said.stdout


def six_engines(head: Head, tiny_task: TinyTask) -> list[str]:
    """All that the cluster has room for: 2 CPUs of the head and 1 of each other node."""
    return [
        *(*tiny_task.flags(), "--debug-engine-module", "vime.backends.vllm_utils.scripted_server"),
        *("--transferqueue-mode", "streaming", "--num-rollout", "2000", "--save-interval", "1"),
        *("--keep-checkpoints", "2", "--rollout-num-engines", "6", "--engine-health-interval-secs", "1"),
        *("--ray-address", head.address, "--update-weight-transport", "gloo"),
    ]


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends, "it has not come about within 60 s"


def num_trained(training: Training) -> int:
    return len(training.so_far().events("round_trained"))


def wait_for_rounds(training: Training, more: int) -> None:
    training.wait_for_event("round_trained", count=num_trained(training) + more)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_engines_of_a_dead_node_and_a_restart_wait_for_another_node(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run_dir = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    live_in(home, monkeypatch)
    monkeypatch.setenv("VIME_SCRIPTED_TOKENS_PER_SECOND", "20")
    flags = ["--num-cpus", "2"]
    with contextlib.ExitStack() as nodes:
        head = nodes.enter_context(running_head(home, with_dashboard=False, flags=flags, **SOONER))
        others = [nodes.enter_context(joined_node(head, num_cpus=1)) for _ in range(2)]
        training = Training("train.py", six_engines(head, tiny_task), run_dir)
        nodes.callback(training.kill)
        training.wait_for_event("round_trained", count=3)

        end_node(next(node for node in others if has_engines_only(node)))
        training.wait_for_event("engine_without_node", count=2)
        wait_for_rounds(training, 3)
        assert told("engines", run_dir).count("waits for a node with room") == 2
        no_room = "is lost, and no node of the cluster has room for it"
        until(lambda: told("why-stuck", run_dir).count(no_room) == 2)  # it shows what has lasted for a second
        third = nodes.enter_context(joined_node(head, num_cpus=1))
        training.wait_for_event("engine_readmitted", count=2)
        assert training.so_far().events("run_restarted") == []

        assert has_engines_only(third)
        end_node(third)
        training.wait_for_event("engine_without_node", count=4)
        [trainer] = [
            process
            for node in [psutil.Process(head.pid), *others]
            if node.is_running()
            for title, process in actors(node).items()
            if title.startswith(TRAINER)
        ]
        trainer.kill()
        training.wait_for_event("run_restarted")
        until(lambda: "until it is there" in training.so_far().output)
        assert "3 of 3 are free" in training.so_far().output
        nodes.enter_context(joined_node(head, num_cpus=1))
        wait_for_rounds(training, 3)
        served = training.so_far().events("weights_confirmed")[-1]["engines"]
        assert sorted(served) == [f"engine-{index}" for index in range(6)]
        interrupt(training, signal.SIGINT)
        ended = training.finish()
        assert ended.code == 130, ended.output
        assert len(ended.events("run_restarted")) == 1
        assert "every promise kept" in told("audit", run_dir)
