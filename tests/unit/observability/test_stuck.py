"""Who blocks: the verdict on made-up processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.observability import stuck
from vime.observability.stuck import OVERDUE_S, PATIENCE_S, Chain, Kind, Names, Verdict, judge
from vime.observability.waits import RunProcess, SeenWait, SeenWork, State, read_run
from vime.utils.waits import DIRECTORY, FORMAT

NOW = 1_000_000.0


def process(name: str, *waits: SeenWait, **fields) -> RunProcess:
    values = {"pid": 100, "cpu_share": 0.0, "last_seen": NOW, **fields}
    return RunProcess(name=name, waits=waits, **values)


def wait(name: str, *owners: str, age_s: float = 40.0, deadline_s: float | None = 1800.0, count: int = 1) -> SeenWait:
    return SeenWait(name=name, owners=owners, age_s=age_s, deadline_s=deadline_s, count=count)


def verdict(*processes: RunProcess, ended: str = "not finished") -> Verdict:
    return judge(processes, ended)


GENERATION = process("driver", wait("a round of generation", "RolloutManager", age_s=43))
MANAGER = process(
    "rollout-manager",
    wait("the groups of round 3", age_s=43),
    wait("a completion", "router", "engine", age_s=41, count=4),
    work=(SeenWork(name="generate_round (rollout_id 3)", age_s=43),),
)


def test_a_stopped_engine_is_named_through_the_manager_that_waits_for_it() -> None:
    stopped = process("engine-1", state=State.STOPPED, detail="VLLM::EngineCore, pid 7: SIGSTOP")
    found = verdict(GENERATION, MANAGER, process("router"), process("engine-0", cpu_share=0.9), stopped)
    assert found.is_stuck
    assert found.line == (
        "driver waits 43 s for 'a round of generation' from rollout-manager, which waits 41 s for 'a completion' (4 of "
        "them, the oldest 41 s) from engine-1; engine-1 (pid 100) is STOPPED (VLLM::EngineCore, pid 7: SIGSTOP)"
    )


def test_an_engine_that_is_started_again_is_named_and_does_not_block_the_run() -> None:
    """Of the engine that died the file is still there; the other engine does its work."""
    driver = process("driver", *GENERATION.waits, work=(SeenWork(name="starting again: engine-1", age_s=12),))
    dead = process("engine-1", state=State.DEAD)
    found = verdict(driver, MANAGER, process("router"), process("engine-0", cpu_share=0.9), dead)
    assert not found.is_stuck
    assert found.line.endswith("from engine-0; engine-0 is at work; engine-1 is lost and starts again since 12 s")
    both = verdict(driver, MANAGER, process("router"), process("engine-0", state=State.DEAD), dead)
    assert both.is_stuck  # nobody starts engine-0 again
    assert "engine-0 (pid 100) is DEAD; engine-1 is lost and starts again since 12 s" in both.line


def test_a_working_engine_is_no_reason_to_worry_however_idle_the_router_is() -> None:
    found = verdict(GENERATION, MANAGER, process("router"), process("engine-0", cpu_share=0.9))
    assert not found.is_stuck
    assert found.line.endswith("from engine-0; engine-0 is at work")


def test_a_lost_engine_that_no_node_has_room_for_is_said_and_is_not_stuck() -> None:
    driver = process("driver", *GENERATION.waits, work=(SeenWork(name="no node has room for engine-1", age_s=40),))
    dead = process("engine-1", state=State.DEAD)
    found = verdict(driver, MANAGER, process("router"), process("engine-0", cpu_share=0.9), dead)
    assert not found.is_stuck
    assert found.line.endswith("; engine-1 is lost, and no node of the cluster has room for it since 40 s")


def test_of_several_routers_the_one_is_named_that_is_stopped_or_away() -> None:
    up, engine = process("router-0"), process("engine-0", cpu_share=0.9)
    stopped = verdict(GENERATION, MANAGER, up, process("router-1", state=State.STOPPED), engine)
    assert stopped.is_stuck
    assert stopped.line.endswith("(4 of them, the oldest 41 s) from router-1; router-1 (pid 100) is STOPPED")
    driver = process("driver", *GENERATION.waits, work=(SeenWork(name="starting again: router-1", age_s=4),))
    away = verdict(driver, MANAGER, up, process("router-1", state=State.DEAD), engine)
    assert not away.is_stuck
    assert away.line.endswith("engine-0 is at work; router-1 is lost and starts again since 4 s")


def test_owners_that_all_idle_are_named_once_patience_is_over() -> None:
    idle = [GENERATION, MANAGER, process("router"), process("engine-0")]
    found = verdict(*idle)
    assert found.is_stuck
    assert found.line.endswith("from router; router, engine-0: alive, but no wait is known and no CPU is used")
    short = process("rollout-manager", wait("a completion", "router", "engine", age_s=PATIENCE_S - 1))
    assert not verdict(GENERATION, short, process("router"), process("engine-0")).is_stuck


@pytest.mark.parametrize("state", [State.DEAD, State.STOPPED, State.SILENT])
def test_a_rank_that_is_gone_explains_its_peers_in_their_collective(state: State) -> None:
    driver = process("driver", wait("trainer ranks to train", "trainer-0", "trainer-1", age_s=300))
    at_work = process("trainer-0", cpu_share=1.0, work=(SeenWork(name="round 3, optimizer step 1", age_s=299),))
    found = verdict(driver, at_work, process("trainer-1", state=state, pid=77))
    assert found.is_stuck
    assert "from trainer-1; trainer-1 (pid 77) is " + str(state) in found.line


def test_a_dead_process_says_more_than_a_stopped_one() -> None:
    driver = process("driver", wait("trainer ranks to train", "trainer"))
    found = verdict(driver, process("trainer-0", state=State.STOPPED), process("trainer-1", state=State.DEAD))
    assert "trainer-1 (pid 100) is DEAD" in found.line


def test_what_a_working_process_is_at_is_told() -> None:
    work = (SeenWork(name="round 3", age_s=9), SeenWork(name="optimizer step 1", age_s=4))
    found = verdict(
        process("driver", wait("ranks to train", "trainer-0")), process("trainer-0", work=work, cpu_share=1)
    )
    assert not found.is_stuck
    assert found.line.endswith("trainer-0 has been at 'optimizer step 1' for 4 s")


def test_two_that_wait_for_each_other_are_a_circle_once_it_has_lasted() -> None:
    driver = process("driver", wait("ranks to save", "trainer-0"))
    first = process("trainer-0", wait("rank 1 to write", "trainer-1", age_s=90))
    second = process("trainer-1", wait("rank 0 to write", "trainer-0", age_s=80))
    found = verdict(driver, first, second)
    assert found.is_stuck
    assert "from trainer-1, which waits 80 s for 'rank 0 to write' from trainer-0, which waits for them: a circle" in (
        found.line
    )
    # the second has just begun to wait: the first may get its answer in this moment
    assert not verdict(driver, first, process("trainer-1", wait("rank 0 to write", "trainer-0", age_s=1))).is_stuck


def test_a_producer_that_waits_for_the_trainer_while_others_generate_is_no_circle() -> None:
    """Streaming: the manager waits for a slot that the driver will free, and for answers that are being computed."""
    manager = process("rollout-manager", wait("a slot", "driver", age_s=100), wait("a completion", "engine", age_s=50))
    found = verdict(GENERATION, manager, process("engine-0", cpu_share=1.0))
    assert not found.is_stuck


def test_a_deadline_that_ended_nothing_is_named_innermost_first() -> None:
    driver = process("driver", wait("a round", "rollout-manager", age_s=200, deadline_s=190))
    manager = process("rollout-manager", wait("a reward", "http://judge/score", age_s=75, deadline_s=60))
    found = verdict(driver, manager)
    assert found.is_stuck
    assert found.line.endswith(
        "'a reward' from http://judge/score, 15 s past its deadline of 60 s, which did not end it"
    )


def test_something_outside_the_run_is_waited_for_until_its_deadline() -> None:
    manager = process("rollout-manager", wait("a reward", "http://judge/score", age_s=50, deadline_s=60))
    found = verdict(GENERATION, manager)
    assert not found.is_stuck
    assert found.line.endswith("http://judge/score is outside the run")


def test_an_agent_that_works_is_outside_of_the_run_and_not_stuck_until_its_deadline() -> None:
    manager = process("rollout-manager", wait("the agent of sample 5 to end", "agent", age_s=50, deadline_s=60))
    found = verdict(GENERATION, manager)
    assert not found.is_stuck
    assert "'the agent of sample 5 to end' from agent; agent is outside the run" in found.line
    late = process("rollout-manager", wait("the agent of sample 5 to end", "agent", age_s=70, deadline_s=60))
    assert verdict(GENERATION, late).is_stuck
    endless = process("rollout-manager", wait("an environment that is late to return", "agent", deadline_s=None))
    assert verdict(GENERATION, endless).is_stuck, "nothing bounds it"


def test_an_engine_that_idles_is_named_although_agents_are_waited_for_too() -> None:
    agents = wait("the agent of sample 5 to end", "agent", age_s=50, deadline_s=300)
    manager = process("rollout-manager", agents, wait("a completion", "engine-0", age_s=45, deadline_s=600))
    found = verdict(GENERATION, manager, process("engine-0"))
    assert found.is_stuck
    assert "engine-0: alive, but no wait is known and no CPU is used" in found.line


def test_an_owner_that_never_showed_itself_is_named() -> None:
    driver = process("driver", wait("engines to start", "engine-0", "engine-1"))
    found = verdict(driver, process("engine-0", wait("the server to be ready")))
    assert found.is_stuck
    assert "engine-1 is no process that has shown itself in this run" in found.line


def test_a_wait_in_the_process_itself_ends_the_chain_there() -> None:
    manager = process("rollout-manager", wait("the reward function judge", age_s=38, deadline_s=60, count=3))
    found = verdict(GENERATION, manager)
    assert not found.is_stuck
    assert found.line.endswith(
        "rollout-manager waits 38 s for 'the reward function judge' (3 of them, the oldest 38 s) in itself"
    )


def test_a_stopped_process_is_told_when_nobody_is_known_to_wait_for_it() -> None:
    driver = process("driver", wait("ranks to train", "trainer-0"))
    found = verdict(driver, process("trainer-0", cpu_share=1.0), process("router", state=State.STOPPED))
    assert found.is_stuck
    assert found.line.startswith("router (pid 100) is STOPPED; meanwhile driver waits 40 s")


def test_a_stopped_driver_is_the_party() -> None:
    found = verdict(process("driver", wait("a round", "rollout-manager"), state=State.STOPPED), MANAGER)
    assert found.is_stuck
    assert found.line == "driver (pid 100) is STOPPED"


def test_many_ranks_that_all_wait_for_all_are_walked_once_each() -> None:
    """Every path through 64 ranks would be more than there are atoms. They meet in a moment, or never."""
    driver = process("driver", wait("ranks to save", "trainer"))
    for age_s, is_stuck in ((1, False), (PATIENCE_S + 1, True)):
        ranks = [process(f"trainer-{index}", wait("peers", "trainer", age_s=age_s)) for index in range(64)]
        found = verdict(driver, *ranks)
        assert (found.is_stuck, found.line.endswith("a circle")) == (is_stuck, True)


def test_a_finished_run_is_not_stuck_and_a_failed_one_says_its_error() -> None:
    dead = [process(name, state=State.DEAD) for name in ("driver", "engine-0")]
    assert not verdict(*dead, ended="finished").is_stuck
    failed = verdict(*dead, ended="failed: engine-0 lives but does not work\nmore")
    assert failed.is_stuck
    assert failed.line == "the run has ended: engine-0 lives but does not work"


def test_a_killed_run_says_what_was_waited_for_last_and_who_was_gone_before() -> None:
    dead = {"state": State.DEAD}
    manager = process("rollout-manager", *MANAGER.waits, **dead)
    driver = process("driver", *GENERATION.waits, **dead)
    gone = process("engine-0", last_seen=NOW - 40, pid=8, **dead)
    found = verdict(driver, manager, gone, process("router", **dead))
    assert found.is_stuck
    assert "the run is dead: driver (pid 100) ended without a last word" in found.line
    assert "engine-0 (pid 8) was gone 40 s before." in found.line
    assert (
        "At the end driver waits 43 s for 'a round of generation' from rollout-manager, which waits 41 s" in found.line
    )


def test_what_outlived_a_dead_run_is_listed() -> None:
    found = verdict(process("driver", state=State.DEAD), process("engine-0", state=State.STOPPED))
    assert found.line.endswith("Still there: engine-0.")


def test_an_owner_is_a_process_a_family_of_them_or_a_class() -> None:
    names = ["driver", "rollout-manager", "engine-0", "engine-1", "engine-10", "trainer-0", "SimpleStorageUnit-0"]
    everyone = [process(name) for name in names]

    def owned(owner: str, but: str = "driver") -> list[str]:
        [asking] = [each for each in everyone if each.name == but]
        return [each.name for each in Names(everyone).owned_by(owner, but=asking)]

    assert owned("engine") == ["engine-0", "engine-1", "engine-10"]
    assert owned("engine", but="engine-1") == ["engine-0", "engine-10"]
    assert owned("engine-1") == ["engine-1"]
    assert owned("RolloutManager") == ["rollout-manager"]
    assert owned("SimpleStorageUnit") == ["SimpleStorageUnit-0"]
    assert owned("vLLM") == []


def slow_owned_by(owner: str, processes, *, but):
    """`Names.owned_by` as it was: every name compared."""
    plain = owner.lower().replace("-", "")
    named = [each for each in processes if re.fullmatch(rf"{re.escape(plain)}\d*", each.name.lower().replace("-", ""))]
    exact = [each for each in named if each.name.lower().replace("-", "") == plain]
    return [each for each in exact or named if each is not but]


def slow_chains(by_name, start):
    """`stuck._chains` as it was, quadratic in ranks that wait for each other: every link of every process is queued."""
    everyone, todo, visited = list(by_name.values()), [((), start)], set()
    while todo:
        links, at = todo.pop(0)
        if at.name in visited:
            continue
        visited.add(at.name)
        if at.state is not State.ALIVE:
            yield Chain(links=links, end=at, kind=OF_STATE[at.state])
            continue
        late = next((each for each in at.waits if each.left_s is not None and each.left_s < -OVERDUE_S), None)
        if late is not None:
            yield Chain(links=(*links, (at, late)), end=", ".join(late.owners) or at, kind=Kind.OVERDUE)
        steps = [(each, owner) for each in at.waits for owner in each.owners]
        if not steps:
            kind = Kind.WITHIN if at.waits else Kind.BUSY if at.is_busy else Kind.IDLE
            yield Chain(links=links, end=at, kind=kind)
        for each, owner in steps:
            further, parties = (*links, (at, each)), slow_owned_by(owner, everyone, but=at)
            if not parties:
                yield Chain(links=further, end=owner, kind=Kind.OUTSIDE if "://" in owner else Kind.ABSENT)
            todo += [(further, party) for party in parties]


OF_STATE = {State.DEAD: Kind.DEAD, State.STOPPED: Kind.STOPPED, State.SILENT: Kind.SILENT}
NAMES = ["driver", "rollout-manager", "router", "engine-0", "engine-1", "engine-12", "trainer-0", "trainer-1", "ledger"]
OWNERS = [*NAMES, "engine", "trainer", "RolloutManager", "engine-", "http://judge", "nobody", "ledger1"]


@st.composite
def runs(draw):
    waits = st.builds(
        wait,
        st.sampled_from("abc"),
        *(st.sampled_from(OWNERS),) * 2,
        age_s=st.sampled_from([1.0, 40.0, 41.0, 90.0]),
        deadline_s=st.sampled_from([None, 10.0, 1800.0]),
    )
    names = ["driver", *draw(st.lists(st.sampled_from(NAMES[1:]), unique=True))]
    return [
        process(
            name,
            *draw(st.lists(waits, max_size=3)),
            state=draw(st.sampled_from([State.ALIVE] * 5 + list(OF_STATE))),
            cpu_share=draw(st.sampled_from([0.0, 0.9])),
        )
        for name in names
    ]


@given(runs())
@settings(max_examples=300, deadline=None)
def test_chains_are_those_of_looking_at_every_link_of_every_process(everyone):
    by_name = {each.name: each for each in everyone}
    assert list(stuck._chains(by_name, by_name["driver"])) == list(slow_chains(by_name, by_name["driver"]))


def test_ranks_that_all_wait_for_all_others_are_looked_at_once_each():
    """4,096 ranks in a collective that one of them has not reached: 17 million links, of which 4,096 are followed."""
    ranks = [process(f"trainer-{rank}", wait("its peers", "trainer")) for rank in range(4095)]
    late = process("trainer-4095", state=State.STOPPED)
    links = []
    names = Names.owned_by

    def counted(self, owner, *, but):
        links.append(owner)
        return names(self, owner, but=but)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Names, "owned_by", counted)
        found = verdict(process("driver", wait("trainer ranks to train", "trainer")), *ranks, late)
    assert found.is_stuck
    assert found.line.endswith("from trainer-4095; trainer-4095 (pid 100) is STOPPED")
    assert len(links) == 1


def owes(name: str, *, age_s: float) -> SeenWait:
    return wait("groups 3, 5", f"job://{name}", age_s=age_s, deadline_s=60.0)


def test_a_job_outside_that_is_silent_for_half_of_its_lease_is_named_with_its_groups_and_what_to_do() -> None:
    manager = process("rollout-manager", wait("the groups of round 3", age_s=43))
    for silent_s, is_stuck in ((30.0, False), (31.0, True), (61.0, True)):
        ledger = process("ledger", owes("job-a", age_s=silent_s), owes("job-b", age_s=4.0))
        found = verdict(GENERATION, manager, ledger)
        assert found.is_stuck == is_stuck
        assert ("job-a" in found.line, "job-b" in found.line) == (is_stuck, False)
    assert "its leases end in 0 s" in found.line
    found = verdict(GENERATION, manager, process("ledger", owes("job-a", age_s=43.0)))
    assert found.line == (
        "job job-a, outside the run, has groups 3, 5 and has not been heard of for 43 s; its leases end in 17 s, and "
        "others get them. If it is dead, start it again with its token, and they get them at once; `vime producers "
        "RUN` shows every job; meanwhile driver waits 43 s for 'a round of generation' from rollout-manager; "
        "rollout-manager waits 43 s for 'the groups of round 3' in itself"
    )


def test_a_stopped_engine_explains_a_run_before_a_job_that_is_silent() -> None:
    stopped = process("engine-0", state=State.STOPPED)
    found = verdict(GENERATION, MANAGER, process("router"), stopped, process("ledger", owes("job-a", age_s=50.0)))
    assert (found.is_stuck, "STOPPED" in found.line) == (True, True)


WHOLE = {
    "format": FORMAT, "process": "router", "pid": 7, "start": 1, "place": "elsewhere", "epoch": 0.0,
    "waits": [{"name": "w", "owners": ["engine"], "count": 1, "since": 0.0, "deadline_s": None}],
    "work": [{"name": "x", "since": 0.0}],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"pid": []}, {"epoch": "x"}, {"waits": 3}, {"waits": [3]}, {"work": [{"name": "x"}]}, {"pid": float("inf")}, None],
)
def test_a_process_s_file_of_another_structure_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object] | None
) -> None:
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / "whole.json").write_text(json.dumps(WHOLE))
    (tmp_path / DIRECTORY / "other.json").write_text(json.dumps([] if changes is None else {**WHOLE, **changes}))
    [read] = read_run(tmp_path, sample_s=0)
    assert (read.name, read.waits[0].owners, read.work[0].name) == ("router", ("engine",), "x")
    assert "other.json: left out, it cannot be read" in caplog.text
