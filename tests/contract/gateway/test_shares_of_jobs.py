"""A job that is fast and one that loads weights slowly share the groups of a run: over real HTTP, with the real
ledger, spool and audit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.gateway_run import HASH, GatewayRun, confirm, group_of, lease, own_of
from vime.gateway.messages import WeightManifest
from vime.handoff.audit import audit
from vime.handoff.round_ledger import RoundLedger

SLOTS = 4


@pytest.fixture
def run(tmp_path: Path) -> Iterator[GatewayRun]:
    """Each round trains all of the four slots."""
    run = GatewayRun(tmp_path, max_slots=SLOTS, max_staleness=0, groups_per_round=SLOTS, num_rounds=5)
    yield run
    run.close()
    report = audit(tmp_path / "ledger.db", checkpoint_round=None, spool=tmp_path / "spool")
    assert report.findings == ()


class Client:
    """A job that makes one lease after the other, each under one name until it brings something."""

    def __init__(self, http: httpx.Client, name: str, *, brings: bool = False) -> None:
        self.http, self.name, self.brings, self.number = http, name, brings, 0

    def work(self, version: int) -> int:
        """Lease and put until there is no slot; return how many groups that made."""
        made, spans = 0, {"versions": [[0, 3, version]]}
        while True:
            name = f"{self.name} {self.number}"
            if self.brings:
                count = int(self.http.post("/v1/groups/own", json=own_of(name, **spans)).status_code == 200)
            else:
                prompts = lease(self.http, count=SLOTS, request=name)
                for prompt in prompts:
                    put = self.http.post("/v1/groups", json=group_of(prompt, **spans)).json()
                    assert put["is_committed"], put
                count = len(prompts)
            if not count:
                return made
            made, self.number = made + count, self.number + 1


def train(run: GatewayRun, round_id: int) -> None:
    """Train the groups of all slots, and serve the weights."""
    found = run.port.call(RoundLedger.lease, round_id, version=round_id, holder="t", count=SLOTS).lease
    assert found is not None
    run.port.call(RoundLedger.trained, round_id, found.fence)
    version = round_id + 1
    run.weights.release(WeightManifest(version=version, content_hash=f"{HASH}{version}", location=""))
    run.port.call(RoundLedger.release, version)


@pytest.mark.parametrize("brings", [False, True], ids=["leases", "prompts of its own"])
def test_a_fast_job_and_one_that_loads_slowly_make_two_groups_of_four_each(run: GatewayRun, brings: bool) -> None:
    """Without shares the fast one had all four before the slow one had loaded anything. Also when the fast one brings
    prompts of its own."""
    fast, slow = Client(run.client("fast"), "f", brings=brings), Client(run.client("slow"), "s")
    made = [(fast.work(0), slow.work(0))]
    assert made == [(SLOTS, 0)], "nobody else waited"
    for version in (1, 2, 3):
        assert fast.work(version - 1) == 0, "it waits too"
        train(run, version - 1)
        assert run.gateway.weights.lag("slow")
        confirm(fast.http, version)
        first = fast.work(version)  # while the other one loads
        confirm(slow.http, version)
        made.append((first, slow.work(version)))
    assert made[1:] == [(2, 2)] * 3


def test_a_job_that_wants_one_group_at_a_time_gets_it_and_leaves_the_other_slots(run: GatewayRun) -> None:
    fast, slow = Client(run.client("fast"), "f"), run.client("slow")
    assert (fast.work(0), lease(slow, count=1), fast.work(0)) == (SLOTS, [], 0)
    train(run, 0)
    confirm(fast.http, 1)
    assert fast.work(1) == SLOTS - 1
    refusal = fast.http.post("/v1/leases", json={"request": "more"}).json()
    assert "1 other producers wait too and who holds the fewest groups is first" in refusal["waits_for"]
    confirm(slow, 1)
    assert len(lease(slow, count=1)) == 1


def test_a_job_that_has_left_or_was_never_there_leaves_all_to_the_other(run: GatewayRun) -> None:
    fast, slow = Client(run.client("fast"), "f"), Client(run.client("slow"), "s")
    assert (fast.work(0), slow.work(0), fast.work(0)) == (SLOTS, 0, 0)
    slow.http.post("/v1/producers/leave", json={})
    train(run, 0)
    confirm(fast.http, 1)
    assert fast.work(1) == SLOTS


def test_at_staleness_1_no_round_waits_for_a_slow_job_and_its_late_group_is_not_trained(tmp_path: Path) -> None:
    """Two rounds of slots. The slow job holds two of eight, whose groups would be two versions old when they come."""
    run = GatewayRun(tmp_path, max_slots=2 * SLOTS, max_staleness=1, groups_per_round=SLOTS, num_rounds=6)
    try:
        fast, slow = Client(run.client("fast"), "f"), run.client("slow")
        held = lease(slow, count=2, request="s")
        assert fast.work(0) == 6
        for version in (1, 2):
            train(run, version - 1)
            confirm(fast.http, version)
            assert fast.work(version) == SLOTS, "each slot that a round frees, and no more"
        assert slow.post("/v1/groups", json=group_of(held[0], versions=[[0, 3, 0]])).json()["is_committed"]
        found = run.port.call(RoundLedger.lease, 2, version=2, holder="t", count=SLOTS).lease
        assert found is not None
        assert len(found.groups) == SLOTS
        assert min(group.payload.min_version for group in found.groups) == 1
    finally:
        run.close()
