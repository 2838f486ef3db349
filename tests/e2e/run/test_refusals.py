"""What bad input gets: what, got, expected, next action; exit 2 before start or 3 later; nothing left running."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from tests.helpers.training import Finished, TinyTask, Training, interrupt, train
from vime.observability.run_dir import claimed_checkpoints
from vime.ray.launch import main

SCRIPTED = ("--debug-engine-module", "vime.backends.vllm_utils.scripted_server")
Refusal = Callable[..., str]


def refused(task: TinyTask, run_dir: Path, *extra: str, code: int, says: list[str]) -> None:
    finished = train([*task.flags(), "--num-rollout", "1", *extra], run_dir)
    assert finished.code == code, finished.output
    for text in says:
        assert text in finished.output, finished.output


@pytest.fixture
def refused_at_once(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refusal:
    """What train.py says to further flags, with code 2, before it starts a process. In this process: one of its own
    takes seconds of imports; `test_contradicting_flags_are_refused_before_start` has one."""

    def said(*extra: str) -> str:
        words = ["train.py", "--run-dir", str(tmp_path / "run"), *tiny_task.flags(), "--num-rollout", "1", *extra]
        monkeypatch.setattr("sys.argv", words)
        assert main(lambda _: pytest.fail("the run began")) == 2
        assert not (tmp_path / "run").exists()
        error = capsys.readouterr().err
        assert error.startswith("refused: ")
        return error

    return said


def test_contradicting_flags_are_refused_before_start(tiny_task: TinyTask, tmp_path: Path) -> None:
    refused(tiny_task, tmp_path / "run", "--kl-loss-coef", "0.1", code=2, says=["--use-kl-loss"])
    assert not (tmp_path / "run").exists()


def test_a_router_port_in_use_is_refused_before_start(refused_at_once: Refusal) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refused_at_once("--vllm-router-port", port)
    assert f"{port} is in use" in said


def test_a_second_run_with_the_same_save_is_refused_before_start(refused_at_once: Refusal, tmp_path: Path) -> None:
    save = tmp_path / "save"
    with claimed_checkpoints(str(save)) as sign:
        sign(tmp_path / "first")
        said = refused_at_once("--save", str(save))
    for part in ("--save", f"pid {os.getpid()}", str(tmp_path / "first")):
        assert part in said


def test_a_field_that_nobody_writes_ends_the_run_by_name_at_the_first_group(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    """Any name is a field that a plug-in may write, so nobody knows before it has been called."""
    finished = train(
        [*tiny_task.flags(), "--num-rollout", "1", *SCRIPTED, "--transfer-queue-extra-data-fields", "value_targets"],
        tmp_path / "run",
    )
    assert finished.code == 3
    for part in ("'value_targets' was requested", "--transfer-queue-extra-data-fields", "did not write it"):
        assert part in finished.output
    assert finished.events("round_trained") == []


def test_a_field_that_is_carried_anyway_is_refused_before_start(refused_at_once: Refusal) -> None:
    said = refused_at_once("--transfer-queue-extra-data-fields", "loss_masks")
    assert "loss_masks" in said
    assert "always stored" in said


def test_an_unknown_engine_flag_is_refused_before_start(refused_at_once: Refusal) -> None:
    assert "max-num-seq" in refused_at_once("--vllm-max-num-seq", "4")


def test_a_line_that_is_not_json_is_named_and_nothing_is_left(refused_at_once: Refusal, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input": "1:ab=", "label": "b"}\n{"input": \n')
    said = refused_at_once("--prompt-data", str(bad))
    assert "bad.jsonl:2" in said
    assert "JSON" in said


def named(finished: Finished, plugin: Path, says: str) -> None:
    """The run ended at once with what a plug-in raised, and where."""
    assert finished.code == 3, finished.output
    assert f"raised {says}" in finished.output
    assert f"{plugin}:" in finished.output
    assert not finished.events("run_restarted")
    logs = "".join(path.read_text(errors="replace") for path in (finished.run_dir / "logs").glob("*.log"))
    assert "Traceback" in logs


def test_a_reward_that_raises_ends_the_run_naming_its_line(tiny_task: TinyTask, tmp_path: Path) -> None:
    """Also SystemExit, which ends no process of a run. The next run takes the directory: this one failed in the first
    round, nothing was generated that could be trained."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text("import sys\nasync def rm(args, sample, **kwargs):\n    sys.exit(7)\n")
    flags = [*tiny_task.flags(), "--num-rollout", "1", *SCRIPTED]
    failed = train([*flags, "--custom-rm-path", f"{plugin}:rm"], tmp_path / "run")
    named(failed, plugin, "SystemExit: 7")
    again = train(flags, tmp_path / "run")
    assert again.code == 0, again.output
    assert (tmp_path / "run" / "earlier-starts" / "1" / "logs").is_dir()


def test_ctrl_c_in_start_up_ends_it_and_promises_no_save(tiny_task: TinyTask, tmp_path: Path) -> None:
    run = Training("train.py", [*tiny_task.flags(), "--num-rollout", "1"], tmp_path / "run")
    run.wait_for_event("part_started")  # Ray stands, engines and trainers are starting
    interrupt(run)
    finished = run.finish()
    assert finished.code == 130, finished.output
    assert "there is nothing to save" in finished.output
    assert "saving the state" not in finished.output


def test_a_loss_that_raises_ends_the_first_start_and_names_its_line(tiny_task: TinyTask, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("def loss(args, logp_T, entropy_T, columns):\n    return columns['no_such']\n")
    more = ["--num-rollout", "2", "--custom-loss-path", f"{plugin}:loss", "--loss-type", "custom_loss"]
    named(train([*tiny_task.flags(), *more, *SCRIPTED], tmp_path / "run"), plugin, "KeyError")


def test_an_engine_that_does_not_start_shows_its_last_log_lines(tiny_task: TinyTask, tmp_path: Path) -> None:
    refused(
        tiny_task,
        tmp_path / "run",
        "--vllm-quantization",
        "awq",
        code=3,
        says=["engine", "log"],
    )


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_ray_cpus_are_said_at_once(tiny_task: TinyTask, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    refused(
        tiny_task,
        tmp_path / "run",
        "--ray-address",
        address,
        "--rollout-num-engines",
        "99",
        code=3,
        says=["Ray CPU", "--rollout-num-engines"],
    )


@pytest.mark.parametrize("script", ["train.py", "train_async.py"])
def test_help_lists_the_groups(script: str, tmp_path: Path) -> None:
    finished = train(["--help"], tmp_path / "run", script=script)
    assert finished.code == 0
    assert "--transferqueue-mode" in finished.output
