"""Let the workers of a local Ray begin as copies of a process that has imported what they need (decision 0036).

A worker of Ray is a new Python that imports torch, Ray and this package: 2 to 9 CPU seconds, in each of eight processes
of the smallest run. Here a base process imports what does not depend on Ray, once for this driver. When Ray asks for a
worker (`vime/ray/fork_worker.py`), the base forks a template for the environment that Ray gives its workers, which
imports Ray and the rest, and forks for each worker. A copy starts in milliseconds, also after a kill, and shares the
memory of all imports.

A copy has what a new process would have: Ray's arguments, environment, directory, standard streams, signal mask,
process group, niceness and rank for the kernel's out-of-memory killer. Where something is asked for that only a new
program can have, there is no copy, and Ray starts the worker as ever: a variable that differs from those of the base's
imports, another Python, a runtime environment. So it is without Linux, on nodes that others started, and with CUDA.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from vime.handoff.queue_modules import load_modules
from vime.ray import fork_worker
from vime.utils import die_with_parent
from vime.utils.imports import without_collector

OF_RAY = ("RAY_", "PYTHONBREAKPOINT")
"""Variables that begin so are Ray's: its own modules read them, which the base does not import, or `breakpoint()`."""
OF_RAYS_SERVERS = {"SPT_NOENV": "1"}
"""What Ray's servers give their workers beside these: for setproctitle."""
BASE_MODULES = ("httpx", "aiohttp", "msgspec", "transformers.tokenization_utils_base", "vime.training.columns")
WORKER_MODULES = ("ray._private.workers.default_worker", "vime.ray.rollout_manager", "vime.ray.engines")
QUEUE_MODULES = ("tensordict",)
"""Not TransferQueue itself: its import draws from Ray's random numbers, see `_draw_alike`."""
WORKER_PROGRAM = "default_worker.py"
MOST_FILES = 65_536
END_S = 10.0
MESSAGE_S = 10.0
Request = Mapping[str, object]


def raise_open_files() -> None:
    """Raise this process's limit of open files as Ray does for its own: copies have that of the base, and a login's is
    often 1,024, which the connections of one router exceed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class BaseProcess:
    """The base of this process's Rays, one after the other. It ends with this process, however that ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None
        self._environment: dict[str, str] = {}

    def worker_program(self, stock_program: str) -> str | None:
        """Return the program with which a Ray started afterwards starts its workers, which then wait for `begin`. None
        where there are no copies: `stock_program`, which is Ray's own. Sets two variables for Ray's workers."""
        if sys.platform != "linux":
            return None
        if self._process is not None and (self._process.poll() is not None or _without_ray() != self._environment):
            self.end()
        if self._process is None:
            name = f"vime-template-{os.getpid()}-{secrets.token_hex(8)}"
            os.environ |= {fork_worker.ADDRESS: name, fork_worker.STOCK_PROGRAM: stock_program}
            self._listener = listener(name)
        return fork_worker.__file__

    def begin(self, *, with_queue: bool) -> None:
        """Start the base, unless it runs or there are no copies."""
        if self._listener is None:
            return
        self._environment = _without_ray()
        number = self._listener.fileno()
        command = [sys.executable, "-m", __name__, str(number), *(["--with-queue"] if with_queue else [])]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the driver alone
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # warnings of imports; what failed is said to who asks for a copy
                env={**os.environ, **OF_RAYS_SERVERS},
                pass_fds=[number],
                process_group=0,  # a SIGTERM to the driver's group asks for a save, which needs workers
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._listener.close()  # the base's alone: who asks is refused when it is gone
        self._listener = None
        atexit.register(self.end)

    def end(self) -> None:
        """End the base and its templates; copies live on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)
            self._process = None


def listener(name: str) -> socket.socket:
    """Return a socket at which workers ask; they wait there until a base accepts."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind("\0" + name)  # abstract: no file that a kill would leave
    bound.listen(socket.SOMAXCONN)
    return bound


def _without_ray() -> dict[str, str]:
    """Return what the base's imports may read. Ray itself sets one variable of its servers here, too."""
    return {name: value for name, value in os.environ.items() if not name.startswith((*OF_RAY, *OF_RAYS_SERVERS))}


class Refused(Exception):
    """No copy can be what was asked for; why."""


class Copy(Exception):
    """Raised in a copy, so that it leaves the template's code before it runs its own: what it was asked to be."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request


class Base:
    """Makes a template for each environment of Ray's workers, and hands requests on to it."""

    def __init__(self, listener: socket.socket) -> None:
        self._own = dict(os.environ)
        self._templates: dict[frozenset[tuple[str, str]], socket.socket] = {}
        self._listener = listener

    def serve(self, modules: Sequence[str], *, with_queue: bool) -> None:
        """Import, then serve for ever. Raises Copy in a copy."""
        failure = _import(modules)
        if with_queue and not failure:
            load_modules(*QUEUE_MODULES)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps templates and copies
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(MESSAGE_S)
            with connection, contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not a message of ours
                if not fork_worker.is_own(connection):
                    continue
                request, streams = fork_worker.receive(connection)
                with _closed(streams):
                    try:
                        if failure:
                            raise Refused(failure)
                        check(request, self._own)
                    except Refused as reason:
                        fork_worker.send(connection, {"refused": str(reason)})
                        continue
                    self._hand_on(request, (*streams, connection.fileno()))

    def _hand_on(self, request: Request, descriptors: tuple[int, ...]) -> None:
        environment = cast("dict[str, str]", request["environment"])
        key = frozenset(environment.items())
        if (template := self._templates.get(key)) is not None:
            try:
                fork_worker.send(template, request, descriptors)
            except OSError:  # it ended with its Ray
                self._templates.pop(key).close()
            else:
                return
        template, theirs = socket.socketpair()
        if os.fork() == 0:
            for other in (self._listener, template, *self._templates.values()):
                other.close()  # or the template would not see the base's end
            os.environ.clear()
            os.environ.update(environment)
            sys.path[0] = os.path.dirname(_parsed(request)[0][0])  # now: the import of Ray puts a directory before it
            serve_copies(theirs)
        theirs.close()
        self._templates[key] = template
        fork_worker.send(template, request, descriptors)


def serve_copies(control: socket.socket) -> None:
    """In a template: import the rest, then fork for each request until the base or Ray's raylet ends. Raises Copy in a
    copy."""
    failure = _import(WORKER_MODULES)
    if not failure and _draw_alike():
        failure = "an import has drawn from Ray's random numbers, so copies would give equal ids to their tasks"
    gc.freeze()  # pages that no collection writes to stay shared
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    while control.fileno() in select.select([control.fileno(), raylet], [], [])[0]:
        try:
            request, (*streams, connection) = fork_worker.receive(control)
        except ConnectionError:
            break
        with (
            _closed([*streams, connection]),
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(connection)) as to,
        ):
            if failure:
                fork_worker.send(to, {"refused": failure})
            elif pid := os.fork():
                _tell(to, pid)
            else:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                control.close()
                os.close(raylet)
                raise Copy(request)
    os._exit(0)  # nothing of the driver's or the base's runs here


def _draw_alike() -> bool:
    """Whether two copies of this process would draw equal ids from Ray. Its generator is in C++, gets its state at its
    first use, and a fork inherits that. Two tasks of one id end the actor that gets both."""
    from ray._raylet import UniqueID  # the base must not import it

    drawn = []
    for _ in range(2):
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, UniqueID.from_random().binary())
            os._exit(0)
        os.close(write)
        drawn.append(os.read(read, 64))
        os.close(read)
    return drawn[0] == drawn[1]


def _tell(asker: socket.socket, pid: int) -> None:
    """Tell who asked for it of a copy; end the copy that nobody waits for any more."""
    try:
        fork_worker.send(asker, {"pid": pid})
    except OSError:
        os.kill(pid, signal.SIGKILL)


def _import(modules: Sequence[str]) -> str:
    """Import modules without the collector. Return why it failed, empty if it did not: whoever needs them says so too,
    but a copy without them would be slower than a new process."""
    try:
        with without_collector():
            for module in modules:
                importlib.import_module(module)
    except Exception:  # boundary: a module may raise anything while it is imported
        return traceback.format_exc()
    return ""


@contextlib.contextmanager
def _closed(descriptors: Sequence[int]) -> Iterator[None]:
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def check(request: Request, own: Mapping[str, str]) -> None:
    """Raise Refused when a copy of what imported with the environment `own` would not be what is asked for."""
    wanted = cast("dict[str, str]", request["environment"])
    for variable in sorted(own.keys() | wanted.keys()):
        if own.get(variable) != wanted.get(variable) and not variable.startswith(OF_RAY):
            raise Refused(f"{variable} is {wanted.get(variable)!r}, and was {own.get(variable)!r} during the imports")
    program, context = _parsed(request)
    if not program or Path(program[0]).name != WORKER_PROGRAM:
        raise Refused(f"another program, {program[:1]}")
    if (python := context.pop("py_executable", None)) not in (None, sys.executable):
        raise Refused(f"another Python, {python}")
    if wishes := sorted(name for name, value in context.items() if value):
        raise Refused(f"a runtime environment with {', '.join(wishes)}")


def _parsed(request: Request) -> tuple[list[str], dict[str, object]]:
    """Return the worker's program with its arguments, and Ray's context for it: what its setup_worker.py reads."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, left = parser.parse_known_args(cast("list[str]", request["arguments"]))
    if known.language != "PYTHON":
        raise Refused(f"another language, {known.language}")
    return left, json.loads(known.serialized_runtime_env_context or "{}")


def become(request: Request) -> None:
    """Take the place that the request describes, as a new process would have it, and run the worker's program."""
    os.environ.clear()  # imports have added to it
    os.environ.update(cast("dict[str, str]", request["environment"]))
    os.chdir(cast("str", request["directory"]))
    os.setpriority(os.PRIO_PROCESS, 0, cast("int", request["niceness"]))
    if request["leads_group"]:  # with it the raylet ends what a worker has started
        os.setpgid(0, 0)
    with contextlib.suppress(OSError):  # lower than this process's, which only root may ask for
        Path("/proc/self/oom_score_adj").write_text(cast("str", request["oom_score_adj"]))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, cast("list[int]", request["blocked_signals"]))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator does so in a fork
    (program, *arguments), _ = _parsed(request)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def main(number: str, *options: str) -> None:
    """Be a base with the listening socket that has this file descriptor."""
    with socket.socket(fileno=int(number)) as listening:
        listening.set_inheritable(False)
        try:
            Base(listening).serve(BASE_MODULES, with_queue="--with-queue" in options)
        except Copy as copy:
            request = copy.request
    become(request)


if __name__ == "__main__":
    main(*sys.argv[1:])
