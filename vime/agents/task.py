"""What an agent is told, and how it is run: a program of its own process group, or a function."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

from vime.rollout.loops import LoopThread
from vime.types import LARGEST_REWARD, VimeError
from vime.utils import die_with_parent
from vime.utils.waits import AGENT, waiting

SHOWN_BYTES = 400
"""How much of a program's last output its reason for failing holds."""
LONGEST_VARIABLE = 128 << 10
"""Bytes of an environment variable with its name, `=` and the zero at its end: MAX_ARG_STRLEN of Linux (execve(2))."""
MOST_THREADS = 256


class AgentFailed(VimeError):
    """The agent gave no sample; the message is the reason. Its group is treated as one with a failed sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """What an agent gets. `base_url` is for OpenAI's SDK, `anthropic_base_url` for Anthropic's; `api_key` for both."""

    base_url: str
    anthropic_base_url: str
    api_key: str
    session_id: str
    prompt: str | list[dict[str, object]]
    label: object = None
    metadata: Mapping[str, object] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the variables of --agent-command. A prompt or label that is no text is JSON."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "VIME_PROMPT": _text(self.prompt),
            "VIME_LABEL": "" if self.label is None else _text(self.label),
            "VIME_SESSION": self.session_id,
            **dict.fromkeys(("no_proxy", "NO_PROXY"), self._no_proxy()),
        }

    def _no_proxy(self) -> str:
        """Return the hosts that are asked without a proxy: it would get the key of the session, or not reach it."""
        given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        return ",".join(filter(None, (given, urlsplit(self.base_url).hostname)))


async def run_command(command: str, task: AgentTask, *, timeout_s: float) -> None:
    """Run the program to its end; AgentFailed when it cannot be started, for an exit code other than 0, and after
    `timeout_s`. Whatever is left of its process group is ended, also when this is cancelled; the program ends with this
    process, however that ends."""
    program, *arguments = shlex.split(command)
    found = shutil.which(program)
    if found is None:
        raise AgentFailed(f"--agent-command: there is no program {program!r} any more")
    launcher = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
    with ExitStack() as files:
        try:
            output = files.enter_context(tempfile.TemporaryFile())
            process = await asyncio.create_subprocess_exec(
                *launcher, found, *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **task.environment()},
                start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # too long, too many processes or open files; a zero in the prompt
            raise AgentFailed(f"it could not be started: {_too_long(task) or error}") from error
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise AgentFailed(f"it ran for longer than {timeout_s:g} s (--agent-timeout-secs)") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # of its own session, which nobody else can have joined
        if code:
            output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN_BYTES))
            said = output.read().decode(errors="replace").strip()
            raise AgentFailed(f"it ended with code {code}: {said or 'it wrote nothing'}")


async def begin_function(
    function: Callable[..., object], task: AgentTask, *, patience_s: float
) -> asyncio.Future[object]:
    """Return the call of an agent's function, which has begun. A plain `def` has a thread, an `async def` runs on a
    loop that generation does not share.

    Waits for: one of MOST_THREADS threads, which end with their agents; AgentFailed after `patience_s`.
    """
    if inspect.iscoroutinefunction(function):
        coroutine = cast("Coroutine[object, object, object]", function(task))
        return asyncio.wrap_future(_loop().submit(coroutine))
    loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

    def call() -> object:
        loop.call_soon_threadsafe(has_begun.set)
        return function(task)

    work = loop.run_in_executor(agent_threads(), call)
    try:
        with waiting("a thread for an agent", AGENT, deadline_s=patience_s):
            async with asyncio.timeout(patience_s):
                await has_begun.wait()
    except BaseException as error:
        work.cancel()  # if no thread has begun it, none does
        if isinstance(error, TimeoutError):
            what = f"no thread was free for it within {patience_s:g} s: {MOST_THREADS} agents at a time are run"
            raise AgentFailed(what) from None
        raise
    return work


async def run_function(call: asyncio.Future[object], *, timeout_s: float) -> float | None:
    """Return the reward of a function that has begun. AgentFailed when it raises, is late, or returns something else. A
    thread cannot be ended: its next request is refused, because its session has failed."""
    try:
        async with asyncio.timeout(timeout_s):
            value = await call
    except TimeoutError:
        raise AgentFailed(f"it ran for longer than {timeout_s:g} s (--agent-timeout-secs)") from None
    except Exception as error:  # boundary: an agent is a program of others and raises anything; its sample has failed
        raise AgentFailed(f"it raised {type(error).__name__}: {error}"[: 2 * SHOWN_BYTES]) from error
    if value is None:
        return None
    if isinstance(value, int | float) and abs(value) <= LARGEST_REWARD:
        return float(value)
    raise AgentFailed(f"it returned {value!r:.60}; expected a finite number of at most {LARGEST_REWARD:.2g}, or None")


def _too_long(task: AgentTask) -> str:
    """Return what is said of a variable that Linux does not take; empty when it takes them all."""
    for name, value in task.environment().items():
        num_bytes = len(f"{name}={value}".encode(errors="replace")) + 1
        if num_bytes > LONGEST_VARIABLE:
            return (
                f"{name} is too long for an environment variable: {num_bytes:,} bytes, at most {LONGEST_VARIABLE:,}. "
                "Shorten the prompt or label, or use --agent-function, which has no such bound"
            )
    return ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


@lru_cache(maxsize=1)
def _loop() -> LoopThread:
    return LoopThread("vime-agent-loop")


@lru_cache(maxsize=1)
def agent_threads() -> ThreadPoolExecutor:
    """Return the threads of agents and environments that are no coroutines."""
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="vime-agent")
