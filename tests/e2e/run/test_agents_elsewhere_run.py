"""A run whose samples are played by programs that run elsewhere, one of which is killed: real Ray, megatron, queue.

The engine is a scripted one. The example of docs/agents.md plays from the start to the end. A second program plays one
session with a reward of its own, then claims another one, makes a turn, and is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.helpers.agents_outside import listening_flags, wait
from tests.helpers.metrics_page import undocumented
from tests.helpers.training import ROOT, TinyTask, Training
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims
from vime.utils.network import free_port

ROUNDS, GROUPS, SAMPLES = 2, 2, 2
KILLED = """
import pathlib, signal, sys
import httpx

root, key_file, marker = sys.argv[1:]
headers = {"Authorization": "Bearer " + pathlib.Path(key_file).read_text().strip()}

def claim():
    while (answer := httpx.post(root + "/v1/sessions", headers=headers, timeout=60)).status_code == 204:
        pass
    task = answer.raise_for_status().json()
    own = {"Authorization": "Bearer " + task["key"]}
    body = {"messages": [{"role": "user", "content": task["prompt"]}]}
    httpx.post(task["base_url"] + "/chat/completions", json=body, headers=own, timeout=60).raise_for_status()
    return task, own

task, own = claim()
url = task["base_url"] + "/sessions/" + task["id"] + "/complete"
httpx.post(url, json={"reward": 0.25}, headers=own, timeout=60).raise_for_status()
task, own = claim()
place = pathlib.Path(marker)
place.with_suffix(".new").write_text(task["id"])
place.with_suffix(".new").rename(place)
signal.pause()
"""


def listens(port: int) -> bool:
    """Whether a server is there. Looked at in the kernel's table: a connection would be a client of it."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def test_two_programs_elsewhere_feed_a_run_and_one_that_is_killed_costs_one_group(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    port, marker, key = free_port(), tmp_path / "claimed", tmp_path / "key"
    (tmp_path / "killed.py").write_text(KILLED)
    flags = listening_flags(tiny_task, tmp_path, port, rounds=ROUNDS, groups=GROUPS, samples=SAMPLES)
    flags += ["--agent-timeout-secs", "15"]
    url = f"http://127.0.0.1:{port}"
    example = [str(ROOT / "examples/agents/outside.py"), url, str(key), "--patience-secs", "10"]
    agents: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, *words]
        agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return agents[-1]

    training = Training("train.py", flags, tmp_path / "run")
    try:
        wait(training, lambda: listens(port))
        victim = start(str(tmp_path / "killed.py"), url, str(key), str(marker))
        wait(training, lambda: marker.exists() or victim.poll() is not None)
        assert victim.poll() is None, victim.communicate()
        os.kill(victim.pid, signal.SIGKILL)
        player = start(*example)
        run = training.finish()
        said, _ = player.communicate(timeout=60)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(30)
        training.kill()
    assert run.code == 0, run.output
    assert f"agents elsewhere: {url}/v1/sessions, from the first prompt on, with the key in {key}" in run.output
    assert player.returncode == 0, said
    report = audit_run(run.run_dir, saved=None, claims=partial(read_claims, run.run_dir))
    assert report.findings == ()
    assert report.groups["trained"] == GROUPS * ROUNDS
    metrics = run.metrics()
    assert sorted(metrics) == list(range(ROUNDS))
    for line in metrics.values():
        assert line["train/num_samples"] == GROUPS * SAMPLES
    assert undocumented(name for line in metrics.values() for name in line) == []
    dropped = sum(line.get("rollout/dropped_failed", 0.0) for line in metrics.values())
    assert dropped == 1  # the group whose sample the killed program had
    # Both samples of the first group were the killed program's; those of the four that were trained are the example's.
    assert said.endswith(f"\n{GROUPS * ROUNDS * SAMPLES} sessions played\n"), said
