"""Workers of a real Ray as copies of a template: what a new process would be; a new process where that cannot be."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.helpers.processes import assert_ended
from tests.helpers.training import ROOT
from vime.ray import fork_worker
from vime.ray.template import listener

DEADLINE_S = 240.0
NOBODY = 65534
RUN = """
import json, os, signal, sys
from pathlib import Path
from tests.contract.ray.test_template import look, program_of
from tests.helpers.processes import assert_ended
from vime.config.parse import parse
from vime.ray.cluster import start_ray, stop_ray
start_ray(parse(["--device", "cpu", "--transferqueue-mode", "streaming", "--enable-vime-transfer-queue"]))
import ray, psutil
class Looker:
    def look(self): return look()
    def pid(self): return os.getpid()
def start(**options): return ray.remote(Looker).options(num_cpus=0, **options).remote()
def say(**facts): print(json.dumps(facts), flush=True)
def raylet(): return next(c for c in psutil.Process().children() if c.name() == "raylet")
def base(): return next(c for c in psutil.Process().children() if "vime.ray.template" in " ".join(c.cmdline()))
"""
COMPARED = (
    "environment",
    "directory",
    "niceness",
    "blocked",
    "handlers",
    "signals",
    "groups",
    "rank for the killer",
    "umask",
    "path",
    "arguments",
    "files",
    "limits",
)
SET_BY_CASE = "VIME_OF_THIS_CASE"


def look() -> dict[str, Any]:
    """What a process finds around itself, and whether its parts work."""
    import random
    import resource

    import numpy
    from ray._raylet import UniqueID

    ended = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode
    return {
        "pid": os.getpid(),
        "is_copy": program_of(os.getppid()) == "vime.ray.template",
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "handlers": {
            name: str(signal.getsignal(name)).partition(" at ")[0]
            for name in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
        },
        "signals": [line for line in fork_worker.read_own("status").splitlines() if line[:6] in ("SigBlk", "SigIgn")],
        "groups": [os.getsid(0), os.getpgid(0) == os.getpid()],
        "rank for the killer": fork_worker.read_own("oom_score_adj"),
        "umask": os.umask(0o22),
        "path": sys.path,
        "arguments": [os.path.basename(sys.argv[0]), *(argument.partition("=")[0] for argument in sys.argv[1:])],
        "files": sorted(set(_kinds_of_files())),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "child": ended,
        "draws": [random.random(), float(numpy.random.random()), UniqueID.from_random().hex()],
        "has_torch": "torch" in sys.modules,
    }


def _kinds_of_files() -> Iterator[str]:
    """Sockets and pipes that belong to nobody in a new process would show as further entries of their kind."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the directory itself
            continue
        if target.startswith("socket:"):
            yield "socket of a template" if _is_unix_pair(int(entry)) else "socket"


def _is_unix_pair(descriptor: int) -> bool:
    """Whether it is an unnamed Unix socket, as between a base and its template, or a base's own."""
    with socket.socket(fileno=os.dup(descriptor)) as seen:
        if seen.family != socket.AF_UNIX:
            return False
        return "vime-template" in str(seen.getsockname()) or (not seen.getsockname() and not seen.getpeername())


def program_of(pid: int) -> str:
    arguments = psutil.Process(pid).cmdline()
    return "vime.ray.template" if "vime.ray.template" in arguments else os.path.basename((arguments or [""])[0])


def lines_of(code: str, **environment: str) -> list[dict[str, Any]]:
    process = subprocess.run(
        [sys.executable, "-c", RUN + code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        check=False,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert process.returncode in (0, -signal.SIGKILL), process.stderr[-4000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Two copies; then a worker with a variable of its own, which is a new process of the same Ray."""
    return lines_of(
        f"""
for options in ({{}}, {{}}, dict(runtime_env=dict(env_vars={{"{SET_BY_CASE}": "1"}}))):
    say(**ray.get(start(**options).look.remote()))
"""
    )


def test_a_worker_is_a_copy_and_has_its_imports(reports: list[dict[str, Any]]) -> None:
    first, second, new = reports
    assert [first["is_copy"], second["is_copy"], new["is_copy"]] == [True, True, False]
    assert [first["has_torch"], new["has_torch"]] == [True, False]
    assert first["pid"] != second["pid"]


@pytest.mark.parametrize("what", COMPARED)
def test_a_copy_has_what_a_new_process_has(reports: list[dict[str, Any]], what: str) -> None:
    copy, _, new = reports
    if what == "environment":
        assert new[what].pop(SET_BY_CASE) == "1"
    assert copy[what] == new[what]


def test_copies_draw_their_own_random_numbers_and_see_their_children_end(reports: list[dict[str, Any]]) -> None:
    assert len({value for report in reports for value in report["draws"]}) == 9
    assert [report["child"] for report in reports] == [3, 3, 3]


def test_a_base_that_was_killed_leaves_copies_alive_and_workers_start_as_new_processes() -> None:
    [facts] = lines_of(
        """
before = start(); before_pid = ray.get(before.pid.remote())
base().kill()
after = ray.get(start().look.remote())
say(before=[before_pid, ray.get(before.pid.remote())], after=after["is_copy"])
"""
    )
    assert facts["before"][0] == facts["before"][1]
    assert facts["after"] is False


def test_nothing_is_left_when_the_driver_is_killed() -> None:
    [facts] = lines_of(
        """
pid = ray.get(start().pid.remote())
say(pids=[child.pid for child in psutil.Process().children(recursive=True)], worker=pid)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert facts["worker"] in facts["pids"]
    assert_ended(facts["pids"])


def test_workers_and_template_end_with_their_raylet_and_the_next_ray_has_its_own() -> None:
    [first, second] = lines_of(
        """
for number in range(2):
    pid = ray.get(start().pid.remote())
    found = psutil.Process(pid).parent()
    say(is_copy=program_of(found.pid) == "vime.ray.template", template=found.pid, base=base().pid, worker=pid)
    if number == 0:
        stop_ray()
        assert_ended([found])
        start_ray(parse(["--device", "cpu"]))
"""
    )
    assert first["is_copy"]
    assert second["is_copy"]
    assert first["base"] == second["base"]
    assert first["template"] != second["template"]


DRAWING = """
import json
from ray._raylet import UniqueID
from vime.ray.template import _draw_alike
before = _draw_alike()
UniqueID.from_random()
print(json.dumps([before, _draw_alike()]))
"""


def test_copies_that_would_give_equal_ids_to_their_tasks_are_noticed_before_there_is_one() -> None:
    """The import of TransferQueue drew an id. Two rollout workers then asked the ledger with tasks of one id, which
    ended its process, again and again; the run went on, and only the walk of a round showed it."""
    asked = subprocess.run([sys.executable, "-c", DRAWING], cwd=ROOT, check=True, timeout=60, capture_output=True)
    assert json.loads(asked.stdout) == [False, True]


@pytest.fixture
def base() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A base with few imports of its own: its name and process."""
    name = f"vime-template-test-{os.getpid()}-{time.monotonic_ns()}"
    with listener(name) as listening:
        number = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "vime.ray.template", str(number)], cwd=ROOT, pass_fds=[number]
        )
    try:
        yield name, process
    finally:
        process.kill()
        process.wait(30)


def connected(name: str) -> socket.socket:
    """A connection to a base, which may still be importing."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(60)
    connection.connect("\0" + name)
    return connection


REFUSALS = {
    "a variable": ({"environment": {"LANG": "xx"}}, "LANG is"),
    "another program": ({"arguments": ["--language=PYTHON", "evil.py"]}, "another program"),
    "another language": ({"arguments": ["--language=JAVA", "default_worker.py"]}, "another language"),
    "a runtime environment": (
        {
            "arguments": [
                "--language=PYTHON",
                '--serialized-runtime-env-context={"command_prefix": ["x"]}',
                "default_worker.py",
            ]
        },
        "command_prefix",
    ),
    "another Python": (
        {
            "arguments": [
                "--language=PYTHON",
                '--serialized-runtime-env-context={"py_executable": "/x"}',
                "default_worker.py",
            ]
        },
        "another Python",
    ),
}


def test_what_no_copy_can_be_is_refused_and_broken_requests_end_nothing(
    base: tuple[str, subprocess.Popen[bytes]],
) -> None:
    name, process = base
    own = dict(psutil.Process(process.pid).environ())
    plain = {
        "environment": own,
        "arguments": ["--language=PYTHON", "default_worker.py"],
        "directory": "/",
        "niceness": 0,
    }
    for broken in (b"", b"\xff\xff", b"\0\0\0\2{}", b"\0\0\0\2[]", b"\0\0\0\4null", b"\0\0\0\1\xff"):
        with connected(name) as connection:
            connection.sendall(broken)
    for change, reason in REFUSALS.values():
        with connected(name) as connection:
            asked = {**plain, **change}
            if "environment" in change:
                asked["environment"] = {**own, **change["environment"]}  # type: ignore[dict-item]
            fork_worker.send(connection, asked)
            reply, _ = fork_worker.receive(connection)
            assert reason in str(reply.get("refused")), reply
    assert process.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as another user")
def test_another_user_gets_no_copy(base: tuple[str, subprocess.Popen[bytes]]) -> None:
    name, _ = base
    connected(name).close()
    asking = f"import os; from vime.ray.fork_worker import ask_for_copy; os.setuid({NOBODY})"
    code = f"{asking}; print(ask_for_copy('{name}', []))"
    asked = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60, capture_output=True, text=True
    )
    assert asked.stdout.strip() == "None"
    assert "another user" in asked.stderr
