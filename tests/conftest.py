"""What holds for every test: one thread per process, quick tiers first, no process left behind, no endless session.

Each pytest session marks its environment with a fresh id. Whatever the tests start inherits it, also after it became an
orphan, so the session's own processes are known exactly and no other process is ever touched.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import uuid
from pathlib import Path

for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "WANDB_SILENT": "true",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(name, value)

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Fixtures that start engines and a Ray cluster.
pytest_plugins = [
    f"tests.helpers.{name}" for name in ("engines", "ray_cluster") if (ROOT / "tests/helpers" / f"{name}.py").is_file()
]

TIERS = ("unit", "contract", "dist", "e2e", "gpu")
SESSION_VARIABLE = "VIME_TEST_SESSION"
OUTER_SESSIONS = os.environ.get(SESSION_VARIABLE, "")
SESSION = uuid.uuid4().hex
DEADLINE_S = float(os.environ.get("VIME_TEST_DEADLINE", "1500"))
# How long what the tests stopped may take to be gone.
GRACE_S = 10.0
EXIT_DEADLINE = 70

leaked: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    os.environ[SESSION_VARIABLE] = f"{OUTER_SESSIONS}:{SESSION}" if OUTER_SESSIONS else SESSION
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        real_stderr = os.fdopen(os.dup(2), "w")
    watchdog = threading.Timer(DEADLINE_S, _end_session, [real_stderr, f"over {DEADLINE_S:g} s (VIME_TEST_DEADLINE)"])
    watchdog.daemon = True
    watchdog.start()
    # When a call holds the interpreter lock no Python thread runs: this one is a C thread.
    faulthandler.dump_traceback_later(DEADLINE_S + 30, exit=True, file=real_stderr)
    signal.signal(signal.SIGTERM, lambda *_: _end_session(real_stderr, "ended by SIGTERM"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tiers first; GPU tests are skipped on a machine without one."""
    items.sort(key=lambda item: TIERS.index(tier) if (tier := _tier(item)) in TIERS else len(TIERS))
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that a test left behind fails the session, by name, and is ended."""
    left = session_processes()
    _, left = psutil.wait_procs(left, timeout=GRACE_S) if left else ([], [])
    for process in left:
        leaked.append(f"pid {process.pid}: {_command(process)}")
    _kill(left)
    if leaked:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        report = pytest.TestReport(
            nodeid="processes left behind",
            location=("tests/conftest.py", 0, "pytest_sessionfinish"),
            keywords={},
            outcome="failed",
            longrepr="the tests left these processes behind (ended now):\n" + "\n".join(leaked),
            when="teardown",
        )
        reporter.stats.setdefault("error", []).append(report)


def session_processes() -> list[psutil.Process]:
    """The live processes that carry this session's mark, except this one and Python's own resource tracker."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            is_ours = SESSION in process.environ().get(SESSION_VARIABLE, "")
            is_live = is_ours and process.status() != psutil.STATUS_ZOMBIE
            is_helper = is_live and process.ppid() == os.getpid() and _is_python_helper(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if is_live and not is_helper:
            found.append(process)
    return found


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


def _end_session(stderr: object, why: str) -> None:
    """Show where every thread is, end what the tests started, and leave with an exit code that is not zero."""
    stderr.write(f"\ntest session {why}: stacks of all threads follow; the session ends here\n")
    stderr.flush()
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    _kill(session_processes())
    os._exit(EXIT_DEADLINE)


def _tier(item: pytest.Item) -> str:
    parts = item.path.parts
    return parts[parts.index("tests") + 1] if "tests" in parts else ""
