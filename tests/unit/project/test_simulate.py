"""The simulation of a large run: what it conserves, a case with a known answer, and what it prints."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.simulate import knees
from benchmarks.simulated_run import (
    COSTS,
    JSON_BYTES,
    Assumed,
    Clock,
    Group,
    Process,
    Run,
    Server,
    Simulation,
    simulate,
)

ROOT = Path(__file__).resolve().parents[3]
SMALL = Run(engines=64, groups=64, ranks=256, sources=32, warm_up=4, rounds=6)


class Recorded(Simulation):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.drawn: dict[int, Group] = {}

    def _draw(self, number: int) -> Group:
        assert number not in self.drawn, "a group is issued once"
        self.drawn[number] = super()._draw(number)
        return self.drawn[number]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("is_async", [True, False])
def test_every_group_is_trained_once_or_in_flight(workers: int, is_async: bool) -> None:
    run = dataclasses.replace(SMALL, workers=workers, is_async=is_async)
    simulation = Recorded(run)
    simulation.simulate()
    trained = run.groups * (run.warm_up + run.rounds)
    assert simulation.tokens_trained == sum(simulation.drawn[number].tokens for number in range(trained))
    running = sum(worker.running for worker in simulation.workers)
    ready = sum(count for round_id, count in simulation.num_ready.items() if round_id * run.groups >= trained)
    assert simulation.issued == trained + running + ready
    assert simulation.issued - simulation.released <= (run.staleness + 1) * run.groups
    # behind the engines but not trained: what was generated and is no engine's any more
    under_way = sum(engine.load for engine in simulation.engines)
    left = [group.tokens for number, group in simulation.drawn.items() if number >= trained]
    assert 0 <= simulation.tokens_generated - simulation.tokens_trained <= sum(left)
    assert under_way <= running


def test_a_server_with_random_arrivals_keeps_them_waiting_as_theory_says() -> None:
    """M/D/1 with load 0.7 and service of 1 s: the mean wait is 0.7 / (2 x (1 - 0.7)) = 1.167 s."""
    clock, server, chance, waits = Clock(), Server("one"), random.Random(0), []

    def arrival() -> Process:
        began = clock.now
        yield server, 1.0
        waits.append(clock.now - began - 1.0)

    def arrivals() -> Process:
        for _ in range(100_000):
            yield chance.expovariate(0.7)
            clock.start(arrival())

    clock.start(arrivals())
    clock.run(lambda: False)
    assert len(waits) == 100_000
    assert sum(waits) / len(waits) == pytest.approx(1.167, rel=0.05)
    assert server.busy_s / clock.now == pytest.approx(0.7, rel=0.02)


def test_what_a_server_can_bear_is_one_over_its_cost_of_a_token() -> None:
    """The worker's network interface of 1 GB/s gets JSON_BYTES a token: 1e9 / 133 = 7.5 M tokens/s fill it. What is
    under way at the two ends of the measured time shifts that by little."""
    result = simulate(dataclasses.replace(SMALL, workers=1, rounds=20, assumed=Assumed(nic_bytes_s=1e9)))
    assert result.kinds["worker's network"].limit_tokens_s == pytest.approx(1e9 / JSON_BYTES, rel=0.01)


def test_more_workers_bring_more_tokens_until_the_knee_and_none_behind_it() -> None:
    """256 engines offer 1.3 M tokens/s: one worker is full before, four are not."""
    run = dataclasses.replace(SMALL, engines=256, groups=256, ranks=1024, sources=128)
    one, two, four, eight = (simulate(dataclasses.replace(run, workers=count)) for count in (1, 2, 4, 8))
    assert one.ranked[0] == "coordinator"
    assert one.tokens_s < 0.95 * two.tokens_s < two.tokens_s < 1.02 * four.tokens_s
    assert eight.tokens_s == pytest.approx(four.tokens_s, rel=0.05)
    assert simulate(dataclasses.replace(run, seed=0)) == simulate(dataclasses.replace(run, seed=0))


def test_the_knee_of_one_worker_is_the_worker() -> None:
    _, [first] = knees(Run(workers=1, rounds=4), most=512, count=1, fewest=128)
    assert (first.full, first.cause, first.without) == ("coordinator", "coordinator", ())
    assert 256 <= first.engines <= 512


def test_json_has_the_columns_that_the_page_names() -> None:
    flags = ["--workers", "2", "--engines", "32", "--groups", "32", "--tokens", "1024", "--json"]
    command = [sys.executable, str(ROOT / "benchmarks/simulate.py"), *flags]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    [run] = json.loads(said)["runs"]
    page = (ROOT / "docs/scale.md").read_text()
    [named] = re.findall(r"^`--json`: (.*)$", page, re.MULTILINE)
    columns = re.findall(r"`(\w+)`", named)
    assert {"tokens_s", "utilisation", "limit_tokens_s"} <= set(columns)
    for column in columns:
        assert column in run or all(column in kind for kind in run["kinds"].values()), column


def test_every_cost_says_where_it_was_measured() -> None:
    for name, cost in COSTS.items():
        assert cost.seconds > 0, name
        assert cost.source, name
