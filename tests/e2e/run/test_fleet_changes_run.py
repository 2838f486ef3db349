"""A run whose user adds an engine and drains another while it trains: nothing is lost or trained twice."""

from functools import partial
from pathlib import Path

import pytest

from tests.helpers.training import TinyTask, Training
from vime.cli.main import main
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims

SCRIPTED = "vime.backends.vllm_utils.scripted_server"

SLOW_REWARD = """import asyncio


async def slow(args, sample, **kwargs):
    await asyncio.sleep(2)
    return float(sum(sample.tokens[-sample.response_length :]) % 5)
"""


def flags_of(task: TinyTask, num_rounds: int) -> list[str]:
    return [*task.flags(), "--transferqueue-mode", "streaming", "--num-rollout", str(num_rounds)]


def change_and_check(training: Training, run: Path, num_rounds: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Add an engine to the only one, drain the first, and then nothing may be drained."""
    training.wait_for_event("round_trained", deadline_s=500)
    assert main(["engines", str(run), "drain", "engine-0"]) == 2
    assert "no other engine serves, and the run could not go on" in capsys.readouterr().err
    assert main(["engines", str(run), "add"]) == 0, capsys.readouterr().err
    assert "engine-1 added: prompts go there" in capsys.readouterr().out
    assert main(["engines", str(run), "drain", "engine-0"]) == 0, capsys.readouterr().err
    assert "engine-0 is stopped after" in capsys.readouterr().out
    so_far = len(training.so_far().events("round_trained"))
    training.wait_for_event("round_trained", count=so_far + 2)
    assert main(["why-stuck", str(run)]) == 0, capsys.readouterr().out
    capsys.readouterr()
    assert main(["engines", str(run), "list"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert [words[:2] for words in shown] == [["engine-0", "stopped,"], ["engine-1", "serves"]]
    finished = training.finish()
    assert finished.code == 0, finished.output
    assert finished.events("run_restarted") == finished.events("engine_lost") == []
    assert [event["rollout_id"] for event in finished.events("round_trained")] == list(range(num_rounds))
    report = audit_run(run, saved=newest_checkpoint(run), claims=partial(read_claims, run))
    assert (report.findings, report.groups) == ((), {"trained": 4 * num_rounds})
    confirmed = [event["engines"] for event in finished.events("weights_confirmed")]
    assert confirmed[0] == ["engine-0"]
    assert ["engine-0", "engine-1"] in confirmed
    assert confirmed[-1] == ["engine-1"]
    assert main(["engines", str(run), "drain", "engine-1"]) == 2
    assert "it is over" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_an_engine_is_added_to_a_run_of_scripted_engines_and_another_is_drained(
    tiny_task: TinyTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "5", "VIME_SCRIPTED_LOADS_FIRST": "1"}  # a round takes over two seconds
    flags = [*flags_of(tiny_task, 16), "--debug-engine-module", SCRIPTED]
    run = tmp_path / "run"
    change_and_check(Training("train.py", flags, run, variables=pace), run, 16, capsys)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_an_engine_is_added_to_a_run_of_vllm_engines_and_another_is_drained(
    tiny_task: TinyTask, tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    """Each update of weights is checked: `vime engines` says that they serve what the trainer has."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)  # a round takes at least two seconds, an engine's start some rounds
    flags = [*flags_of(tiny_task, 60), "--update-weight-transport", transport, "--check-weight-update-equal"]
    flags += ["--custom-rm-path", f"{tmp_path / 'slow.py'}:slow"]
    run = tmp_path / "run"
    change_and_check(Training("train.py", flags, run), run, 60, capsys)
