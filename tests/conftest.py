"""What holds for every test: one thread per process, quick tiers first, no process left behind, no endless session.

Two workers of pytest-xdist share the tests, a file or a directory with common fixtures at a time (scripts/test.sh):
most tests keep one core busy. A worker is a process of the session like any other; the controller alone looks for
processes left behind, at the end.

Each pytest session marks its environment with a fresh id. Whatever the tests start inherits it, also after it became an
orphan, so the session's own processes are known exactly and no other process is ever touched.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import resource
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadFileScheduling

# Before any test module is imported: torch and OpenMP read these once.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex,  # or Ray leaves one in the user's home
    "HF_HUB_OFFLINE": "1",
    "WANDB_SILENT": "true",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(name, value)

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Fixtures that start engines and a Ray cluster, and what ends the base of launches.
pytest_plugins = [
    f"tests.helpers.{name}"
    for name in ("dist_launch", "engines", "fleet", "ray_cluster", "training")
    if (ROOT / "tests/helpers" / f"{name}.py").is_file()
]

# Timing is never asserted: on a busy machine any example may take longer than hypothesis' 200 ms.
hypothesis.settings.register_profile("vime", deadline=None)
hypothesis.settings.load_profile("vime")

TIERS = ("unit", "contract", "dist", "e2e", "gpu")
# Files and directories of tier e2e, by the seconds that they take (pytest prints the longest tests at its end).
LONGEST_FIRST = (
    *("test_training", "test_streaming_run", "test_documented_commands", "test_equivalence_ladder", "vllm_utils"),
    *("test_external_jobs", "test_agents_run", "test_adapter_run", "test_images_run", "test_lost_engines"),
    *("test_external_engines_run", "test_fleet_changes_run", "test_colocated_run"),
    *("test_refusals", "test_joined_cluster", "test_quickstart", "test_rollout_workers", "test_chaos_run"),
)
# Directories whose files share what is costly to make: ranks, Ray, engines. One worker takes all of one, but for the
# files before it: they start fleet after fleet, which takes longer than all others of their directory.
TOGETHER = (
    *("tests/contract/ray/test_engine_loss", "tests/contract/ray/test_fleet_changes", "tests/contract/ray"),
    *("tests/dist/training", "tests/contract/handoff", "tests/e2e/vllm_utils"),
)
SESSION_VARIABLE = "VIME_TEST_SESSION"
OUTER_SESSIONS = os.environ.get(SESSION_VARIABLE, "")
SESSION = uuid.uuid4().hex
DEADLINE_S = float(os.environ.get("VIME_TEST_DEADLINE", "5000"))
# The workers show their stacks first; the controller is over so many seconds later.
CONTROLLER_MARGIN_S = 20
# How long what the tests stopped may take to be gone.
GRACE_S = float(os.environ.get("VIME_TEST_GRACE", "30"))
EXIT_DEADLINE = 70
# Where scripts/test.sh has the output of scripts/lint.sh, which runs beside the tests. Not for sessions within tests.
LINT_LOG = os.environ.pop("VIME_LINT_LOG", "")
# How long lint.sh may still take when the tests are over.
LINT_DEADLINE_S = 600.0
# Test seconds of a session that ends with a table of them by file.
LONG_SESSION_S = 60.0

leaked: list[str] = []
cpu_before = 0.0


def pytest_configure(config: pytest.Config) -> None:
    os.environ[SESSION_VARIABLE] = f"{OUTER_SESSIONS}:{SESSION}" if OUTER_SESSIONS else SESSION
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        real_stderr = os.fdopen(os.dup(2), "w")
    deadline_s = DEADLINE_S + (CONTROLLER_MARGIN_S if getattr(config.option, "numprocesses", None) else 0)
    watchdog = threading.Timer(deadline_s, _end_session, [real_stderr, f"over {DEADLINE_S:g} s (VIME_TEST_DEADLINE)"])
    watchdog.daemon = True
    watchdog.start()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background: runs would inherit it, deaf to Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: _end_session(real_stderr, "ended by SIGTERM"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tiers first, and at last the files that take minutes, the longest of them first, so that no worker is left
    alone with one. GPU tests are skipped on a machine without one."""
    items.sort(key=_place)
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class Whole(LoadFileScheduling):
    """A worker gets a file, or a directory of TOGETHER, as a whole."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((directory for directory in TOGETHER if file.startswith(directory)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return Whole(config, log)


@pytest.hookimpl(trylast=True)  # behind the end of the workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that a test left behind fails the session, by name, and is ended. So does what lint.sh found."""
    if hasattr(session.config, "workerinput"):
        return
    left = session_processes()
    _, left = psutil.wait_procs(left, timeout=GRACE_S) if left else ([], [])
    for process in left:
        leaked.append(f"pid {process.pid}: {_command(process)}")
    _kill(left)
    if leaked:
        text = "the tests left these processes behind (ended now):\n" + "\n".join(leaked)
        _fail_session(session, "processes left behind", text)
    if LINT_LOG and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        error = error_of_lint(Path(LINT_LOG), LINT_DEADLINE_S)
        if error is not None:
            _fail_session(session, "scripts/lint.sh", error)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart() -> None:
    global cpu_before
    cpu_before = _cpu_s()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note the CPU seconds of a test: of this process, and of those it started that have ended and were waited for."""
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", _cpu_s() - cpu_before))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say where the session's time went, by file, and how long a worker had nothing left to do at the end."""
    wall: Counter[str] = Counter()
    cpu: Counter[str] = Counter()
    done: dict[str, float] = {}
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport) and getattr(report, "stop", 0):  # 0: an error of the session itself
            file = report.nodeid.partition("::")[0]
            wall[file] += report.duration
            cpu[file] += dict(report.user_properties).get("cpu_s", 0.0) if report.when == "teardown" else 0.0
            worker = getattr(report, "worker_id", "the process")
            done[worker] = max(done.get(worker, 0.0), report.stop)
    if sum(wall.values()) < LONG_SESSION_S:
        return
    terminalreporter.section("slowest files: seconds, CPU seconds")
    for file, seconds in wall.most_common(30):
        terminalreporter.write_line(f"{seconds:8.1f} {cpu[file]:8.1f} {file}")
    terminalreporter.write_line(f"{sum(wall.values()):8.1f} {sum(cpu.values()):8.1f} all {len(wall)} files")
    for worker, stop in sorted(done.items()):
        terminalreporter.write_line(f"{worker}: done {max(done.values()) - stop:.1f} s before the last")


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _fail_session(session: pytest.Session, name: str, text: str) -> None:
    """An error of pytest's summary and exit code that no test had."""
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    report = pytest.TestReport(
        nodeid=name,
        location=("tests/conftest.py", 0, "pytest_sessionfinish"),
        keywords={},
        outcome="failed",
        longrepr=text,
        when="teardown",
    )
    session.config.pluginmanager.getplugin("terminalreporter").stats.setdefault("error", []).append(report)


def error_of_lint(log: Path, deadline_s: float) -> str | None:
    """The output of lint.sh unless its last line says that it passed. Waits for that line at most `deadline_s`."""
    ends = time.monotonic() + deadline_s
    while True:
        said = log.read_text(errors="replace").rstrip()
        last = said.rpartition("\n")[2]
        if last == "lint: passed":
            return None
        if last.startswith("lint: FAILED"):
            return said
        if time.monotonic() > ends:
            return f"{said}\nlint.sh was not done {deadline_s:g} s after the tests"
        time.sleep(0.2)


def session_processes() -> list[psutil.Process]:
    """The live processes that carry this session's mark and their descendants, but not this process.

    Descendants count on their own because a process that sets its title overwrites its environment block. Not by
    `process_iter`: it leaves out once a process whose number another had before.
    """
    own = psutil.Process()
    found: dict[int, psutil.Process] = {child.pid: child for child in own.children(recursive=True)}
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            if process != own and SESSION in process.environ().get(SESSION_VARIABLE, ""):
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found.values() if _is_live(process) and not _is_python_helper(process)]


def _is_live(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_python_helper(process: psutil.Process) -> bool:
    """multiprocessing's tracker and fork server end with the interpreter that started them."""
    command = _command(process)
    return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "(gone)"


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _end_session(stderr: TextIO, why: str) -> None:
    """Show where every thread is, end what the tests started, and leave with an exit code that is not zero."""
    stderr.write(f"\ntest session {why}: stacks of all threads follow; the session ends here\n")
    stderr.flush()
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    _kill(session_processes())
    os._exit(EXIT_DEADLINE)


def _place(item: pytest.Item) -> tuple[int, int]:
    parts = item.path.parts
    tier = parts[parts.index("tests") + 1] if "tests" in parts else ""
    names = {item.path.stem, item.path.parent.name} if tier == "e2e" else set()
    place = next((place for place, name in enumerate(LONGEST_FIRST) if name in names), len(LONGEST_FIRST))
    return TIERS.index(tier) if tier in TIERS else len(TIERS), place
