"""Engines of a run that die while another serves: the run goes on, and nothing is lost or trained twice."""

import re
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.helpers.metrics_page import undocumented
from tests.helpers.training import Finished, TinyTask, Training
from vime.cli.main import main
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims

SCRIPTED, VLLM = "vime.backends.vllm_utils.scripted_server", "vime.backends.vllm_utils.cpu_server"
TWO_ENGINES = ["--transferqueue-mode", "streaming", "--rollout-num-engines", "2", "--engine-health-interval-secs", "1"]


def engine_processes(training: Training, module: str, index: int) -> list[psutil.Process]:
    """The server of an engine, below its guard: each has a seed of its own. None for a moment when it is started."""
    seed = f"--seed {42 + index} "
    return [
        process
        for process, command in training._members()
        if f"-m {module}" in command and "guard.py" not in command and seed in command
    ]


def kill_and_wait(training: Training, module: str, index: int, *, times: int) -> None:
    """SIGKILL the engine, until it serves again. Two versions are published before it can be back, however fast it
    starts: the first may have begun before the kill."""
    [engine] = engine_processes(training, module, index)
    engine.kill()
    training.wait_for_event("engine_starting", count=times)
    ends = time.monotonic() + 60
    while not (again := [one for one in engine_processes(training, module, index) if one != engine]):
        assert time.monotonic() < ends, "it is not started again"
        time.sleep(0.02)
    again[0].suspend()
    published = len(training.so_far().events("weights_confirmed"))
    training.wait_for_event("weights_confirmed", count=published + 2)
    again[0].resume()
    training.wait_for_event("engine_readmitted", count=times)


def assert_the_run_went_on(finished: Finished, num_rounds: int, *, num_kills: int) -> None:
    """No restart of the run; 4 groups a round, each trained once, by the ledger's own history and the audit's rules."""
    assert finished.code == 0, finished.output
    assert finished.events("run_restarted") == []
    counts = {kind: len(finished.events(f"engine_{kind}")) for kind in ("lost", "starting", "ready", "readmitted")}
    assert counts == dict.fromkeys(counts, num_kills)
    report = audit_run(
        finished.run_dir, saved=newest_checkpoint(finished.run_dir), claims=partial(read_claims, finished.run_dir)
    )
    assert report.findings == ()
    assert report.receipts == (0, num_rounds - 1)
    assert report.groups == {"trained": 4 * num_rounds}
    trained = [event["rollout_id"] for event in finished.events("round_trained")]
    assert trained == list(range(num_rounds))
    lines = finished.metrics()
    assert sum(line["engines/lost"] for line in lines.values()) == num_kills
    assert sum(line["engines/readmitted"] for line in lines.values()) == num_kills
    assert lines[num_rounds - 1]["engines/serving"] == 2
    assert undocumented(name for line in lines.values() for name in line) == []
    confirmed = [len(event["engines"]) for event in finished.events("weights_confirmed")]
    assert set(confirmed) == {1, 2}  # a round was published without the lost engine, and it was in the next ones again


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_goes_on_while_one_of_two_scripted_engines_is_killed_twice_and_then_the_router(
    tiny_task: TinyTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*tiny_task.flags(), *TWO_ENGINES, "--debug-engine-module", SCRIPTED, "--num-rollout", "30"]
    pace = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "5", "VIME_SCRIPTED_LOADS_FIRST": "1"}  # a round takes over two seconds
    training = Training("train.py", flags, tmp_path / "run", variables=pace)
    training.wait_for_event("round_trained", count=2)
    kill_and_wait(training, SCRIPTED, 1, times=1)
    kill_and_wait(training, SCRIPTED, 0, times=2)
    [router] = [process for process, command in training._members() if "vllm::router" in command]
    router.kill()
    training.wait_for_event("router_ready")
    finished = training.finish()
    assert_the_run_went_on(finished, 30, num_kills=2)
    assert sum(line.get("engines/router_lost", 0) for line in finished.metrics().values()) == 1
    assert main(["engines", str(finished.run_dir)]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"engine-[01] +serves +\S+ +30 +once", shown)) == 2, shown


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_whose_two_routers_are_killed_in_turns_trains_what_a_run_with_one_that_lives_trains(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    """Under --reference-mode: the same bits, whichever router a request went through."""
    flags = [*tiny_task.flags(), *TWO_ENGINES, "--debug-engine-module", SCRIPTED, "--num-rollout", "16"]
    flags += ["--reference-mode"]
    pace = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "8"}
    training = Training("train.py", [*flags, "--vllm-router-count", "2"], tmp_path / "two", variables=pace)
    training.wait_for_event("round_trained", count=2)
    for count in (1, 2, 3):
        routers = [process for process, command in training._members() if "vllm::router" in command]
        min(routers, key=lambda process: process.create_time()).kill()
        training.wait_for_event("router_ready", count=count)
        training.wait_for_event("round_trained", count=len(training.so_far().events("round_trained")) + 1)
    finished = training.finish()
    assert finished.code == 0, finished.output
    assert finished.events("run_restarted") == []
    lost = [event["router"] for event in finished.events("router_lost")]
    assert lost in (["router-0", "router-1", "router-0"], ["router-1", "router-0", "router-1"])
    assert finished.events("engine_lost") == []
    lines = finished.metrics()
    assert sum(line.get("engines/router_lost", 0) for line in lines.values()) == 3
    report = audit_run(
        finished.run_dir, saved=newest_checkpoint(finished.run_dir), claims=partial(read_claims, finished.run_dir)
    )
    assert (report.findings, report.groups) == ((), {"trained": 4 * 16})
    one = Training("train.py", flags, tmp_path / "one").finish()
    assert one.code == 0, one.output
    assert one.events("router_lost") == []
    assert finished.confirmed_hashes() == one.confirmed_hashes()


SLOW_REWARD = '''"""A round takes at least two seconds, so that an engine's start takes some rounds and not all."""

import asyncio


async def slow(args, sample, **kwargs):
    await asyncio.sleep(2)
    return float(sum(sample.tokens[-sample.response_length :]) % 5)
'''


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trained", [[], ["--train-backend", "fsdp", "--lora-rank", "4", "--lr", "1e-2"]])
def test_a_run_goes_on_while_one_of_two_vllm_engines_is_killed(
    tiny_task: TinyTask, tmp_path: Path, trained: list[str]
) -> None:
    """Of an adapter, the engine that comes back gets the base before it."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    flags = [*tiny_task.flags(), *TWO_ENGINES, *trained, "--num-rollout", "40"]
    flags += ["--custom-rm-path", f"{tmp_path / 'slow.py'}:slow", "--check-weight-update-equal"]
    training = Training("train.py", flags, tmp_path / "run")
    training.wait_for_event("round_trained", count=2)
    kill_and_wait(training, VLLM, 1, times=1)
    finished = training.finish(900)
    assert_the_run_went_on(finished, 40, num_kills=1)
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in finished.metrics().values()) < 1e-4
