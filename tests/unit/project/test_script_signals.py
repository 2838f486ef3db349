"""A signal to a script that trains reaches train.py, once: the second one would mean "at once, unsaved"."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Stands for python: as train.py it writes down its process, says that it is there, and which signals it gets; a moment
# after the last one it ends as a run that was saved. Any other program has a line of output.
PYTHON = f"""#!{sys.executable} -IS
import os, signal, sys
if sys.argv[1] != "train.py":
    print("ran", *sys.argv[1:], flush=True)
    sys.exit()
asked = {{signal.SIGINT, signal.SIGTERM, signal.SIGHUP}}
signal.pthread_sigmask(signal.SIG_BLOCK, asked)
with open("pid", "w") as file:
    file.write(str(os.getpid()))
print("train.py is there", flush=True)
limit_s = 20
while (found := signal.sigtimedwait(asked, limit_s)) is not None:
    print("got", signal.Signals(found.si_signo).name, flush=True)
    limit_s = 0.2
sys.exit(0 if limit_s == 20 else 130)
"""
NVIDIA_SMI = "#!/usr/bin/env bash\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'\n"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with the scripts, whose python and install.sh are stand-ins."""
    texts = {".venv/bin/python": PYTHON, "scripts/install.sh": "#!/usr/bin/env bash\n", "nvidia-smi": NVIDIA_SMI}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for name in ("quickstart.sh", "run-images-cpu.sh", "gpu_day.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    yield tmp_path
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # of a script that left it


@pytest.mark.parametrize(
    ("flags", "name", "to_the_group"),
    [
        (["--lr", "1e-4"], "SIGTERM", False),
        (["--lr", "1e-4"], "SIGINT", False),
        (["--lr", "1e-4"], "SIGINT", True),
        ([], "SIGINT", True),
    ],
)
@pytest.mark.parametrize("script", ["quickstart.sh", "run-images-cpu.sh"])
def test_a_signal_reaches_train_once_and_the_script_ends_after_it_with_its_code(
    place: Path, script: str, flags: list[str], name: str, to_the_group: bool
) -> None:
    """To the group: what a terminal does for Ctrl-C, and when it is closed."""
    process = subprocess.Popen(
        [place / "scripts" / script, *flags], env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert any(line == "train.py is there\n" for line in process.stdout)
    send = os.killpg if to_the_group else os.kill
    send(process.pid, signal.Signals[name])
    said = process.communicate(timeout=60)[0]
    assert (said.splitlines(), process.returncode) == ([f"got {name}"], 130)


@pytest.mark.parametrize(("script", "check"), [("quickstart.sh", "quickstart"), ("run-images-cpu.sh", "images")])
def test_what_was_trained_without_flags_is_checked(place: Path, script: str, check: str) -> None:
    python = place / ".venv/bin/python"
    python.write_text(PYTHON.replace("limit_s = 20", "limit_s = 0").replace("limit_s == 20", "limit_s == 0"))
    run = [place / "scripts" / script]
    done = subprocess.run(run, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].startswith(f"ran examples/{check}/check.py runs/")


def test_the_quick_start_of_a_day_with_gpus_ends_at_its_limit(place: Path) -> None:
    done = subprocess.run(
        [place / "scripts/gpu_day.sh", "out", "quickstart"], env={"PATH": f"{place}:/usr/bin:/bin", "BUDGET": "5"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (place / "out/quickstart.log").read_text().splitlines()[-1] == "got SIGINT", done.stdout
    assert "FAILED" in done.stdout.splitlines()[-1]
