"""The life of a server child under the guard, with small servers in place of vLLM."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import assert_ended
from tests.helpers.rollout_setup import write_model_directory
from vime.backends.vllm_utils.guard import session_members
from vime.backends.vllm_utils.process import ServerProcess, server_environment
from vime.config.parse import Config
from vime.ray.cluster import GENERATION_NICENESS, yield_to_trainers
from vime.types import EngineError, WaitTimeoutError
from vime.utils.http import HttpFailure
from vime.utils.network import free_port

DEADLINE_S = 30.0

# A server with a child of its own, as the API server has EngineCore. Prints both ids when it listens.
SERVER = """
import http.server, os, signal, subprocess, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
print("pids", os.getpid(), child.pid, flush=True)
server.serve_forever()
"""


# A server that changes the first variable that Ray happens to give, as vLLM changes some, and then takes a title.
TITLED = (
    """
import os
first = os.environ.pop("FIRST_OF_OWNER")
os.environ["LATER"] = first
import setproctitle
setproctitle.setproctitle("VLLM::EngineCore")
"""
    + SERVER
)


def make_server(tmp_path: Path, *arguments: str, code: str = SERVER) -> ServerProcess:
    port = free_port()
    return ServerProcess(
        "small",
        [sys.executable, "-c", code, str(port), *arguments],
        env=server_environment({}),
        log_path=tmp_path / "small.log",
        ready_url=f"http://127.0.0.1:{port}/",
        grace_s=0.3,
    )


def server_and_child(server: ServerProcess) -> list[psutil.Process]:
    [line] = [line for line in server.log_tail().splitlines() if line.startswith("pids ")]
    return [psutil.Process(int(pid)) for pid in line.split()[1:]]


@pytest.fixture
def server(tmp_path):
    made = make_server(tmp_path)
    made.start()
    made.wait_ready(DEADLINE_S)
    yield made
    made.stop()


def test_a_server_has_the_niceness_of_its_owner_also_against_other_sessions(tmp_path):
    """Linux weighs sessions against each other; without a weight of its own this one had as much as all others."""
    owner = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.contract.vllm_utils.test_server_process import make_server
os.nice(7)
server = make_server(Path({str(tmp_path)!r}))
server.start()
server.wait_ready(30)
group = Path(f"/proc/{{server.pid}}/autogroup")
of_session = group.read_text().split()[-1] if group.exists() else "none"
print(os.nice(0), os.getpriority(os.PRIO_PROCESS, server.pid), of_session)
server.stop()
"""
    said = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert said.returncode == 0, said.stderr
    own, of_server, of_session = said.stdout.split()
    assert (of_server, of_session) in ((own, own), (own, "none"))
    assert int(own) > os.nice(0) or own == "19"


def test_a_server_that_has_started_yields_with_all_its_threads_and_as_a_session(server):
    yield_to_trainers(Config().replace(device="cpu"), session=server.pid)
    threads = [thread.id for process in server_and_child(server) for thread in process.threads()]
    niceness = min(19, os.nice(0) + GENERATION_NICENESS)
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in [server.pid, *threads]} == {niceness}
    group = Path(f"/proc/{server.pid}/autogroup")
    assert not group.exists() or group.read_text().split()[-1] == str(niceness)


def test_the_title_of_a_server_can_be_read_whichever_variable_comes_first(tmp_path, monkeypatch):
    """setproctitle finds the command line in front of the first variable of the environment, unless that was changed.
    Ray gives its workers their variables in any order: of some engines the core could not be told from its server."""
    ours = dict(os.environ)
    for name in ours:
        monkeypatch.delenv(name)
    for name, value in ({"FIRST_OF_OWNER": "1"} | ours).items():
        monkeypatch.setenv(name, value)
    titled = make_server(tmp_path, code=TITLED)
    titled.start()
    titled.wait_ready(DEADLINE_S)
    process = server_and_child(titled)[0]
    said, environment = " ".join(process.cmdline()), process.environ()
    titled.stop()
    assert said.startswith("VLLM::EngineCore")
    assert environment["FIRST_OF_OWNER"] == "1"  # what it began with is still there


def test_stop_ends_the_server_its_child_and_the_guard(server):
    processes, session = server_and_child(server), server.pid
    assert server.is_alive()
    server.stop()
    assert not server.is_alive()
    assert_ended(processes)
    assert session_members(session) == []


def test_a_server_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    server = make_server(tmp_path, "stubborn")
    server.start()
    server.wait_ready(DEADLINE_S)
    processes = server_and_child(server)
    server.stop()
    assert_ended(processes)


def test_temporary_files_that_a_killed_server_leaves_are_removed(server):
    [process, _] = server_and_child(server)
    temporary = Path(process.environ()["TMPDIR"])
    assert temporary.stat().st_mode & 0o077 == 0
    (temporary / "left-behind").touch()
    process.kill()
    assert_ended([server.pid])
    assert not temporary.exists()


def test_temporary_files_of_a_killed_guard_are_removed_by_the_next_one(server, tmp_path):
    """Ray kills the guard with the actor that started it."""
    temporary = Path(server_and_child(server)[0].environ()["TMPDIR"])
    second, third = (make_server(tmp_path / name) for name in ("second", "third"))
    second.start()
    second.wait_ready(DEADLINE_S)
    assert temporary.exists()  # in use
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    assert temporary.exists()
    third.start()
    third.wait_ready(DEADLINE_S)
    assert not temporary.exists()
    of_others = [Path(server_and_child(each)[0].environ()["TMPDIR"]) for each in (second, third)]
    assert all(each.exists() for each in of_others)
    for each in (second, third):
        each.stop()
    assert not any(each.exists() for each in of_others)


FORKED = """
import ctypes, os, sys, time
sys.path.insert(0, {root!r})
from vime.backends.vllm_utils.guard import die_with_parent
from vime.backends.vllm_utils.cpu_server import tie_forked_processes
hook, read = sys.argv[1], int(sys.argv[2])
library = ctypes.CDLL
ctypes.CDLL = lambda *a, **b: (os.read(read, 1), library(*a, **b))[1]  # the parent ends before the kernel is asked
if hook == "fork":
    tie_forked_processes()
parent = os.getpid()
if os.fork() == 0:
    if hook == "guard":
        die_with_parent(parent)
    print("alive", flush=True)
    time.sleep(600)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("hook", ["guard", "fork"])
def test_a_process_whose_parent_ends_before_the_kernel_is_asked_ends_too(hook):
    """Otherwise a router of an actor that is killed while it starts lives on, and listens in place of the next."""
    read, write = os.pipe()
    code = FORKED.format(root=str(Path(__file__).parents[3]))
    parent = subprocess.Popen(
        [sys.executable, "-c", code, hook, str(read)], pass_fds=[read], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline().strip() == str(parent.pid)
    [child] = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait(DEADLINE_S)
    os.write(write, b"go")
    assert_ended([child])
    assert parent.stdout.read() == ""
    for end in (read, write):
        os.close(end)
    parent.stdout.close()


def test_stop_may_be_called_twice_and_check_says_that_it_was_stopped(server):
    server.stop()
    server.stop()
    with pytest.raises(EngineError, match="it was stopped"):
        server.check()


def test_a_killed_server_takes_its_child_along_even_before_stop(server):
    api_server, child = server_and_child(server)
    api_server.kill()
    assert_ended([api_server, child])
    with pytest.raises(EngineError, match="small ended with exit code 137"):  # 128 + SIGKILL
        server.wait_ready(DEADLINE_S)


def test_a_killed_guard_takes_the_server_along_and_stop_clears_the_rest(server):
    processes, session = server_and_child(server), server.pid
    os.kill(session, signal.SIGKILL)
    assert_ended(processes[:1])
    server.stop()
    assert_ended(processes)
    assert session_members(session) == []


def test_a_stopped_server_is_named_within_the_deadline_of_its_probe(server):
    url = server._ready_url
    server.probe(url, DEADLINE_S)
    api_server = server_and_child(server)[0]
    api_server.suspend()  # SIGSTOP: it lives, its port accepts, nothing answers
    with pytest.raises(EngineError, match=rf"small lives \(pid {server.pid}\).*no response within 0.5 s") as hangs:
        server.probe(url, 0.5)
    assert "pids" in str(hangs.value)  # its last log lines
    api_server.resume()
    server.probe(url, DEADLINE_S)
    with pytest.raises(EngineError, match="got status 404"):
        server.probe(url + "absent", DEADLINE_S)


def test_a_server_whose_guard_still_clears_up_is_not_said_to_live(server):
    guard = psutil.Process(server.pid)
    guard.suspend()
    server_and_child(server)[0].kill()
    threading.Timer(0.3, guard.resume).start()
    with pytest.raises(EngineError, match="small ended with exit code 137"):
        server.probe(server._ready_url, DEADLINE_S)


def test_a_server_that_is_stopped_while_it_is_asked_is_said_to_be_stopped(server, monkeypatch):
    """Its actor answers and stops it in two threads."""

    def closed(*_: object, **__: object) -> None:
        server.stop()
        raise HttpFailure("the client is closed")

    monkeypatch.setattr(server._http, "call", closed)
    with pytest.raises(EngineError, match="is not running: it was never started, or it was stopped"):
        server.probe("http://127.0.0.1:1/health", 5)


def test_a_stopped_server_is_stopped_for_good_by_its_owner(server):
    processes = server_and_child(server)
    processes[0].suspend()
    server.stop()
    assert_ended(processes)


def test_a_server_that_ends_early_is_reported_at_once_with_its_last_lines(tmp_path):
    code = "import sys; [print('line', number) for number in range(40)]; sys.exit('\x1b[31mno such\x1b[0m model: x')"
    server = make_server(tmp_path, code=code)
    server.start()
    with pytest.raises(EngineError, match="exit code 1") as ended:
        server.wait_ready(10 * DEADLINE_S)
    shown = str(ended.value)
    assert "no such model: x" in shown
    assert "line 39" in shown
    assert "line 5\n" not in shown  # 30 lines, not all
    server.stop()


def test_a_clean_exit_is_a_failure_too(tmp_path):
    server = make_server(tmp_path, code="pass")
    server.start()
    with pytest.raises(EngineError, match="exit code 0"):
        server.wait_ready(DEADLINE_S)
    server.stop()


def test_a_server_that_never_answers_ends_the_wait_at_its_deadline(tmp_path):
    server = make_server(tmp_path, code="import signal; print('loading', flush=True); signal.pause()")
    server.start()
    with pytest.raises(WaitTimeoutError, match=r"waited 0\.5 s for small to be ready"):
        server.wait_ready(0.5)
    assert server.is_alive()
    server.stop()
    assert not server.is_alive()


OWNER = """
import sys
from pathlib import Path
from vime.backends.vllm_utils.process import ServerProcess, server_environment
code, port, directory = sys.argv[1:]
server = ServerProcess("small", [sys.executable, "-c", code, port], env=server_environment({}),
    log_path=Path(directory) / "small.log", ready_url=f"http://127.0.0.1:{port}/")
server.start()
server.wait_ready(30)
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_owner_is_killed_nothing_survives(how, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, SERVER, str(free_port()), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    session = int(owner.stdout.readline())
    members = [psutil.Process(pid) for pid in session_members(session)]
    assert len(members) == 3  # guard, server, its child
    owner.send_signal(how)
    owner.wait(DEADLINE_S)
    assert_ended(members)
    owner.stdin.close()
    owner.stdout.close()


SCRIPTED = """
import atexit, runpy
atexit.register(print, "interpreters ended:", 2 - 1, flush=True)
runpy.run_module("vime.backends.vllm_utils.scripted_server", run_name="__main__", alter_sys=True)
"""


def test_a_scripted_server_ends_without_the_end_of_its_interpreter(tmp_path):
    """In which threads of a gloo group whose sender is gone abort the process, or use a core for long."""
    port = free_port()
    model = write_model_directory(tmp_path / "model")
    server = ServerProcess(
        "scripted",
        [sys.executable, "-c", SCRIPTED, "--model", str(model), "--port", str(port)],
        env=server_environment({}),
        log_path=tmp_path / "log",
        ready_url=f"http://127.0.0.1:{port}/health",
    )
    server.start()
    try:
        server.wait_ready(DEADLINE_S)
        [process] = psutil.Process(server.pid).children()
        process.terminate()
        server._child.wait(DEADLINE_S)
        with pytest.raises(EngineError, match="exit code 0"):
            server.check()
        assert "interpreters ended: 1" not in server.log_tail()  # the log begins with the command
    finally:
        server.stop()
