"""Saves checkpoints in a process that may be killed, and checks what is left of them.

    python -m tests.helpers.checkpoint_writer

reads one JSON request a line, serves each in a forked child, and answers with JSON lines:
    {"root": DIR, "rollout_id": N, "kill_at": K, "is_async": BOOL}   one save; the child kills itself before its K-th
                        step on the file system (as Python's audit events tell), or ends
    {"root": DIR}       saves round after round until killed, every other one in the background; answers {"pid": PID}
                        at once
and, when the child is gone, {"was_killed": BOOL}.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.ray.checkpoint import RunState, find_start, read_run_state
from vime.ray.saver import Saver
from vime.utils.manifest import Entry

KEEP = 2
NUM_FILES, NUM_PIECES = 2, 4
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}


class TokenTrainers:
    """Writes files that all repeat one token, at once or in a thread."""

    def __init__(self, rollout_id: int, token: str) -> None:
        self._line = f"{rollout_id} {token}\n"

    def write(self, directory: Path) -> None:
        for index in range(NUM_FILES):
            folder = directory / f"part{index}"
            folder.mkdir()
            with (folder / "weights").open("w") as file:
                for _ in range(NUM_PIECES):
                    file.write(self._line)
                    file.flush()

    def save(self, directory: Path, *, in_background: bool = False) -> "ThreadSave":
        written = ThreadSave(lambda: self.write(directory))
        if not in_background:
            written.join()
        return written


class ThreadSave(threading.Thread):
    """What a trainer answers to `save`, with a thread in the place of ranks."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._write, self._failure = write, None
        self.start()

    def run(self) -> None:
        try:
            self._write()
        except Exception as failure:
            self._failure = failure

    def is_over(self) -> bool:
        return not self.is_alive()

    def wait(self, name: str, deadline_s: float) -> dict[str, Entry]:
        self.join(deadline_s)
        assert not self.is_alive(), name
        if self._failure is not None:
            raise self._failure
        return {}


def save(root: Path, rollout_id: int, *, is_async: bool = False) -> None:
    """One checkpoint whose every file repeats one random token, which its run state names."""
    token = secrets.token_hex(8)
    state = RunState(rollout_id=rollout_id, version=rollout_id + 1, data_source={"token": token})
    saver = Saver(
        root, is_async=is_async, keep=KEEP, protected=None, deadline_s=30, on_saved=lambda _round, _path: None
    )
    saver.save(state, TokenTrainers(rollout_id, token))
    saver.finish()


def content(checkpoint: Path) -> tuple[int, str]:
    """Round and token of a checkpoint, after every file was found whole and of the same save."""
    state = read_run_state(checkpoint)
    token = state.data_source["token"]
    expected = f"{state.rollout_id} {token}\n" * NUM_PIECES
    files = sorted(path for path in (checkpoint / "model").rglob("*") if path.is_file())
    assert [str(path.relative_to(checkpoint)) for path in files] == [
        f"model/part{index}/weights" for index in range(NUM_FILES)
    ]
    assert [path.read_text() for path in files] == [expected] * NUM_FILES
    assert state.version == state.rollout_id + 1
    return state.rollout_id, token


def save_until_step(root: Path, rollout_id: int, kill_at: int, *, is_async: bool) -> None:
    steps = 0

    def count(event: str, _: Any) -> None:
        nonlocal steps
        if event not in STEPS:  # os.kill is an event too
            return
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(root, rollout_id, is_async=is_async)


def save_until_killed(root: Path) -> None:
    """Goes on where the last process was killed, as a resumed run does; every third round is saved twice."""
    rollout_id = find_start(str(root)).rollout_id
    while True:
        for _ in range(2 if rollout_id % 3 == 0 else 1):
            save(root, rollout_id, is_async=rollout_id % 2 == 0)
        rollout_id += 1


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                if "kill_at" in request:
                    save_until_step(
                        Path(request["root"]),
                        request["rollout_id"],
                        request["kill_at"],
                        is_async=request["is_async"],
                    )
                else:
                    save_until_killed(Path(request["root"]))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        if "kill_at" not in request:
            answer(pid=pid)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        answer(was_killed=code == -signal.SIGKILL, code=code)


def answer(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve()
