"""`vime doctor`: each check can pass, warn and fail, and the exit code says whether one failed."""

from __future__ import annotations

import resource
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.cli import doctor
from vime.cli.doctor import Finding, Verdict
from vime.cli.main import main

MODEL = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "model"


def test_this_machine_is_judged_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--no-ray", "--hf-checkpoint", str(MODEL)])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} <= set(Verdict)
    assert [line.split(":")[0].split(maxsplit=1)[1] for line in lines[:-1]] == [
        "packages", "cores", "memory", "/dev/shm", "disk", "open files", "processes and threads", "ports", "GPU",
        "model",
    ]  # fmt: skip
    assert code == (2 if any(line.startswith("fail") for line in lines[:-1]) else 0)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_a_failure_makes_the_exit_code(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_findings", lambda _: iter([Finding(verdict, "x", "y")]))
    assert main(["doctor"]) == (2 if verdict is Verdict.FAIL else 0)


@pytest.mark.parametrize(("free_gib", "verdict"), [(1, Verdict.FAIL), (4, Verdict.WARN), (16, Verdict.PASS)])
def test_memory_and_disk_are_judged_by_what_is_free(
    free_gib: int, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=free_gib << 30, total=64 << 30)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor, "_cgroup_limit", lambda: None)
    assert doctor.check_memory().verdict is verdict
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=(free_gib << 30) - 1))
    assert doctor.check_disk(tmp_path / "not" / "there" / "yet").verdict is verdict


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30, total=64 << 30))
    monkeypatch.setattr(doctor, "_cgroup_limit", lambda: 1 << 30)
    found = doctor.check_memory()
    assert (found.verdict, "this container may still take 1.0" in found.text) == (Verdict.FAIL, True)


@pytest.mark.parametrize(("soft", "verdict"), [(256, Verdict.FAIL), (1024, Verdict.WARN), (65536, Verdict.PASS)])
def test_open_files_are_judged_with_the_command_that_raises_them(
    soft: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 65536))
    found = doctor.check_open_files()
    assert found.verdict is verdict
    assert ("ulimit -n 65536" in found.text) == (verdict is not Verdict.PASS)


def test_a_place_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert doctor.check_disk(tmp_path / "file").verdict is Verdict.FAIL


def test_ports_that_cannot_be_had_fail_and_a_proxy_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:8080")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.check_ports().verdict is Verdict.WARN
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert doctor.check_ports().verdict is Verdict.PASS

    def refused(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(socket, "create_connection", refused)
    assert doctor.check_ports().verdict is Verdict.FAIL


def test_a_driver_without_an_answer_fails_and_a_cpu_torch_beside_a_gpu_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text("")
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "version")
    monkeypatch.setattr(doctor, "gpu_names", list)
    assert doctor.check_gpu().verdict is Verdict.FAIL
    monkeypatch.setattr(doctor, "gpu_names", lambda: ["H100"])
    monkeypatch.setattr(doctor, "_version", lambda _: "2.13.0+cpu")
    assert doctor.check_gpu().verdict is Verdict.WARN
    monkeypatch.setattr(doctor, "_version", lambda _: "2.13.0")
    monkeypatch.setattr(doctor, "has_cuda", lambda: True)
    assert doctor.check_gpu().verdict is Verdict.PASS


def test_wrong_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["numpy<1", "surely-not-there", 'pytest>=1; extra == "dev"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: asked)
    found = doctor.check_packages()
    assert found.verdict is Verdict.FAIL
    assert "numpy 2" in found.text
    assert "surely-not-there is not installed" in found.text


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda model: (model / "config.json").unlink(), "no config.json there"),
        (lambda model: _cut(next(model.glob("*.safetensors"))), "not a complete safetensors file"),
        (lambda model: next(model.glob("*.safetensors")).write_bytes(b"<html>"), "not a complete safetensors file"),
        (lambda model: next(model.glob("*.safetensors")).unlink(), "no *.safetensors there"),
        (lambda model: [path.unlink() for path in model.glob("tokenizer*")], "no tokenizer there"),
    ],
)
def test_a_spoilt_model_fails(tmp_path: Path, spoil: Any, said: str) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    assert doctor.check_model(str(tmp_path / "model")).verdict is Verdict.PASS
    spoil(tmp_path / "model")
    found = doctor.check_model(str(tmp_path / "model"))
    assert (found.verdict, said in found.text) == (Verdict.FAIL, True), found.text


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_ray_that_does_not_start_fails_with_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RAY_PROGRAM", "raise SystemExit('no room for Ray')")
    found = doctor.check_ray()
    assert (found.verdict, "no room for Ray" in found.text) == (Verdict.FAIL, True)

    def hangs(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("ray", 1)

    monkeypatch.setattr(subprocess, "run", hangs)
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    found = doctor.check_ray()
    assert (found.verdict, "/scratch/ray/session_latest/logs" in found.text) == (Verdict.FAIL, True)


def test_the_last_word_of_ray_is_said_with_the_advice_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # 300 characters of an error, its beginning, and what to do: what a run says of a directory too long for a socket
    monkeypatch.setattr(doctor, "RAY_PROGRAM", "raise SystemExit('a' * 360 + '. Set RAY_TMPDIR to a short path')")
    assert doctor.check_ray().text.endswith("Set RAY_TMPDIR to a short path")


def test_flags_are_checked_as_train_checks_them() -> None:
    found = doctor.check_flags(["--lr", "fast"])
    assert (found.verdict, found.check) == (Verdict.FAIL, "flags")
    assert "--lr: invalid float value: 'fast'. See train.py --help." in found.text
    assert "no prompts: give --prompt-data FILE" in found.text  # all of it at once
