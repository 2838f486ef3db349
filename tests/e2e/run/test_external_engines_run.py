"""Runs on engines that somebody else started: `vime engine` in processes that no run starts or stops."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.outside_engine import OutsideEngine
from tests.helpers.training import TinyTask, Training, train
from vime.cli.main import main
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims

SCRIPTED = ("--debug-engine-module", "vime.backends.vllm_utils.scripted_server")
PACE = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "5", "VIME_SCRIPTED_LOADS_FIRST": "1"}  # a round takes over two seconds
NUM_ROUNDS = 20


def start_two(stack: contextlib.ExitStack, directory: Path, flags: list[str]) -> tuple[OutsideEngine, OutsideEngine]:
    first = stack.enter_context(OutsideEngine(directory, flags, name="first", variables=PACE))
    shown = first.wait_ready()  # it has made the keys, which the second takes
    second = stack.enter_context(OutsideEngine(directory, flags, name="second", variables=PACE))
    second.wait_ready()
    keys = f"--rollout-external-engine-keys {directory / 'keys'}"
    assert shown == f"--rollout-external-engine-addrs {first.place} {keys}"
    return first, second


def flags_of(engines: tuple[OutsideEngine, ...]) -> list[str]:
    addresses = [engine.place for engine in engines]
    keys = str(engines[0].keys)
    return ["--rollout-external-engine-addrs", *addresses, "--rollout-external-engine-keys", keys]


def assert_free(engine: OutsideEngine) -> None:
    """It runs on, paused and nobody's."""
    assert engine.get("/vime/about")["run"] is None
    assert engine.get("/is_paused") == {"is_paused": True}


@pytest.mark.timeout(500)
def test_a_run_on_scripted_engines_of_others_outlives_one_of_them_and_leaves_them_running(
    tiny_task: TinyTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = [*tiny_task.flags(), *SCRIPTED]
    with contextlib.ExitStack() as stack:
        engines = first, second = start_two(stack, tmp_path, task)
        first.post("/vime/claim", {"run": "elsewhere:/runs/a"})
        refused = train([*task, *flags_of(engines), "--num-rollout", "1"], tmp_path / "refused")
        assert refused.code == 2
        assert f"{first.place}: it belongs to the run elsewhere:/runs/a" in refused.output
        first.post("/vime/claim", {"run": "elsewhere:/runs/a", "release": True})
        flags = [*task, *flags_of(engines), "--transferqueue-mode", "streaming", "--num-rollout", str(NUM_ROUNDS)]
        flags += ["--engine-health-interval-secs", "1", "--vllm-router-count", "2"]
        training = Training("train.py", flags, tmp_path / "run")
        training.wait_for_event("round_trained", count=2)
        second.kill()
        training.wait_for_event("engine_lost")
        published = len(training.so_far().events("weights_confirmed"))
        training.wait_for_event("weights_confirmed", count=published + 2)  # the first may have begun before the kill
        second.start()
        training.wait_for_event("engine_readmitted")
        finished = training.finish()
        assert finished.code == 0, finished.output
        assert "reaching 2 vLLM engine(s), starting 2 routers" in finished.output
        assert finished.events("run_restarted") == []
        report = audit_run(
            finished.run_dir, saved=newest_checkpoint(finished.run_dir), claims=partial(read_claims, finished.run_dir)
        )
        assert (report.findings, report.groups) == ((), {"trained": 4 * NUM_ROUNDS})
        confirmed = [event["engines"] for event in finished.events("weights_confirmed")]
        assert confirmed[0] == confirmed[-1] == ["engine-0", "engine-1"]
        assert ["engine-0"] in confirmed
        assert main(["engines", str(finished.run_dir)]) == 0
        assert "engine-1  serves" in capsys.readouterr().out
        for engine in engines:
            assert_free(engine)
            assert engine.stop() == 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "gloo", "disk"])
def test_two_runs_after_each_other_on_a_vllm_engine_of_others(
    tiny_task: TinyTask, tmp_path: Path, transport: str
) -> None:
    """Log-probabilities of trainer and engine agree after each update; the second run finds the engine as it was."""
    task = [*tiny_task.flags(), "--check-weight-update-equal", "--update-weight-transport", transport]
    with OutsideEngine(tmp_path, tiny_task.flags()) as engine:
        engine.wait_ready()
        hashes = []
        for name in ("a", "b"):
            finished = train([*task, *flags_of((engine,)), "--num-rollout", "3"], tmp_path / name)
            assert finished.code == 0, finished.output
            assert max(line["train/train_rollout_logprob_abs_diff"] for line in finished.metrics().values()) < 1e-4
            hashes.append(finished.confirmed_hashes())
            assert_free(engine)
        assert hashes[0][0] == hashes[1][0]  # both began with the same weights
        assert engine.stop() == 0
