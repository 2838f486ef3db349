"""A rollout job outside that is killed with SIGKILL while it has leases: `vime why-stuck` names it before they end. The
ledger is the actor of a run, behind a real gateway."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.gateway_run import ROOT, GatewayRun
from vime.cli.main import main
from vime.gateway.tokens import Scope
from vime.handoff.ledger_types import LedgerRules
from vime.observability import stuck
from vime.observability.stuck import Verdict, explain
from vime.ray.ledger_actor import LedgerClient
from vime.utils.waits import close_registry, open_registry, waiting

LEASE_S = 120.0
DEADLINE_S = 60.0
# Leases two groups, says so, and sends heartbeats until it is killed.
JOB = """
import sys, time
import tests.helpers.gateway_run as run
client = run.job_client(*sys.argv[1:3])
client.post("/v1/producers/register", json={})
run.confirm(client)
print(*(prompt["group"] for prompt in run.lease(client, 2)), flush=True)
while True:
    client.post("/v1/producers/heartbeat", json={})
    time.sleep(4)
"""


@pytest.fixture
def run(ray_cluster: None, tmp_path: Path) -> Iterator[GatewayRun]:
    """Its driver, this process, waits for a round."""
    directory = tmp_path / "run"
    (directory / "events").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    rules = LedgerRules(max_slots=2, max_staleness=1, lease_timeout_s=LEASE_S)
    ledger = LedgerClient.start(directory, rules, run_id=tmp_path.name, deadline_s=DEADLINE_S)
    run = GatewayRun(directory, port=ledger, limits={"lease_timeout_s": LEASE_S})
    open_registry(directory, "driver")
    with waiting("a round of generation", "ledger", deadline_s=600):
        yield run
    close_registry()
    run.close()
    ledger._actor.kill()


def until(directory: Path, condition: Callable[[Verdict], bool]) -> Verdict:
    ends = time.monotonic() + DEADLINE_S
    while not condition(found := explain(directory, sample_s=0)):
        assert time.monotonic() < ends, found
        time.sleep(0.1)
    return found


def shown(found: Verdict) -> str:
    """What the ledger's process waits for from jobs."""
    [ledger] = [process for process in found.processes if process.name == "ledger"] or [None]
    return "" if ledger is None else " ".join(f"{wait.name} of {wait.owners[0]}" for wait in ledger.waits)


def test_why_stuck_names_the_job_its_groups_since_when_and_what_to_do(
    run: GatewayRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, token = tmp_path / "run", run.tokens.make("job-a", (Scope.TRAIN,), seconds=600)
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, run.server.url, token], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "0 1\n"
        assert not until(directory, lambda found: "://job-a" in str(found.processes)).is_stuck, "it is at work"
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait(DEADLINE_S)
        job.stdout.close()
    monkeypatch.setattr(stuck, "GONE_SHARE", 2 / LEASE_S)  # 2 s; half a lease would be a minute
    found = until(directory, lambda found: found.is_stuck)
    assert found.line.startswith("job job-a, outside the run, has groups 0, 1 and has not been heard of for "), found
    assert shown(found) == "groups 0, 1 of job://job-a"
    assert main(["why-stuck", str(directory)]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    for said in ("its leases end in 1", "start it again with its token", "vime producers", "; meanwhile driver waits"):
        assert said in last
    again = run.client("job-b")
    again.headers["authorization"] = f"Bearer {token}"
    assert again.post("/v1/producers/register", json={}).status_code == 200, "it begins anew and has no leases"
    assert not until(directory, lambda found: not shown(found)).is_stuck
