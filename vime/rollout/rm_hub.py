"""Rewards: built-in ones by --rm-type or by the record, the user's by --custom-rm-path, each call with a deadline.

`async_rm` scores one sample, `batched_async_rm` a list. Whatever a reward function does (raise, return NaN or a wrong
type, never return, block its thread) becomes a RewardError that names the function and the sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import numbers
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

from vime.config.graders import own_grader, own_grader_fault
from vime.config.parse import Args
from vime.config.rollout import BOXED
from vime.protocols import calling_plugin
from vime.rollout import reasoning_gym_tasks, rm_text
from vime.rollout.labels import label_fault
from vime.rollout.loops import raise_first, reward_loop
from vime.rollout.plugins import plugin, plugin_args
from vime.rollout.rm_math import MathJudge, UnreadableLabelError
from vime.rollout.slime_aliases import Scorers, set_scorers
from vime.types import LARGEST_REWARD, Reward, RewardError, Sample, SampleStatus
from vime.utils.http import HttpFailure, HttpSession
from vime.utils.waits import waiting

MAX_THREADS = 32
REMOTE_ATTEMPTS = 3


async def async_rm(args: Args, sample: Sample) -> Reward:
    """Return the reward of one sample."""
    custom = plugin(args, "custom_rm_path")
    if custom is not None:
        value = await _call(custom, args, sample, where=f"{args.custom_rm_path}, sample {sample.index}")
        return check_reward(args, value, where=f"{args.custom_rm_path}, sample {sample.index}")
    if fault := own_grader_fault(args.config.reward, sample.metadata):  # a generate function may have written it
        raise RewardError(f"sample {sample.index}: {fault}.")
    own = own_grader(args.config.reward, sample.metadata)
    name = args.rm_type if own is None else str(own)
    if name is None:
        raise RewardError(f"sample {sample.index}: no reward function. Give --rm-type or --custom-rm-path.")
    judged = sample
    if name.startswith(BOXED):
        judged = copy.copy(sample)
        judged.response = rm_text.boxed(sample.response) or ""
    value = await BUILT_IN[name.removeprefix(BOXED)](args, judged)
    return check_reward(args, value, where=f"--rm-type {name}, sample {sample.index}")


async def batched_async_rm(args: Args, samples: list[Sample]) -> list[Reward]:
    """Return the rewards of several samples, in order. With --group-rm one call gets them all."""
    if not args.group_rm:
        try:
            async with asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(async_rm(args, sample)) for sample in samples]
        except BaseExceptionGroup as group:
            raise_first(group)
        return [task.result() for task in pending]
    custom = plugin(args, "custom_rm_path")
    indexes = [sample.index for sample in samples]
    where = f"{args.custom_rm_path} (--group-rm), samples {indexes}"
    if custom is None:
        raise RewardError("--group-rm needs --custom-rm-path: built-in rewards score one sample at a time.")
    values = await _call(custom, args, samples, where=where)
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"{type(values).__name__} {values!r}"
        raise RewardError(f"{where}: got {got}, expected a list of {len(samples)} rewards.")
    return [
        check_reward(args, value, where=f"{args.custom_rm_path}, sample {index}")
        for value, index in zip(values, indexes, strict=True)
    ]


set_scorers(Scorers(one=async_rm, several=batched_async_rm))


def check_reward(args: Args, value: object, *, where: str) -> Reward:
    """Return a finite number, or a dict of them that holds --reward-key; anything else is refused."""
    if isinstance(value, Mapping):
        if args.reward_key is None or args.reward_key not in value:
            raise RewardError(
                f"{where}: got a dict with keys {sorted(map(str, value))}, expected one of them in --reward-key, which "
                f"is {args.reward_key!r}."
            )
        numbers_only = {key: entry for key, entry in value.items() if key == args.reward_key or not _is_remark(entry)}
        return {str(key): _number(entry, f"{where}, entry {key!r}") for key, entry in numbers_only.items()}
    return _number(value, where)


def _is_remark(entry: object) -> bool:
    """Return whether the entry is text beside the numbers, such as the extracted answer: it is neither trained nor
    measured."""
    return entry is None or isinstance(entry, str)


def _number(value: object, where: str) -> float:
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"{where}: got {type(value).__name__} {value!r:.200}, expected a number or a dict of numbers."
        )
    if not abs(value) <= LARGEST_REWARD:  # type: ignore[operator]  # numbers.Real declares no comparison
        raise RewardError(
            f"{where}: got {value!r:.60}, expected a finite number of at most {LARGEST_REWARD:.2g}. Guard the division "
            "or the logarithm, or scale it."
        )
    return float(value)


async def _call(function: Callable[..., object], args: Args, asked: Sample | list[Sample], *, where: str) -> object:
    """Run a user's function outside the rollout loop, with --rm-timeout-secs as deadline.

    A coroutine function runs on the reward loop, a plain one in a daemon thread, for which it may have to wait first.
    Neither can block generation, and a call that never returns stays in its daemon thread.
    """
    own_args = plugin_args(function, args)
    is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
    )
    try:
        async with contextlib.nullcontext() if is_coroutine else _threads().one(args.rm_timeout_secs):
            async with asyncio.timeout(args.rm_timeout_secs):
                with waiting(f"the reward function {_name(function)}", deadline_s=args.rm_timeout_secs):
                    # on the reward loop or in the thread, where a SystemExit would end the one or hang the other
                    calling = calling_plugin(where, function, RewardError, expected="Expected a number.")
                    if is_coroutine:
                        coroutine = cast("Awaitable[object]", function(own_args, asked))
                        return await asyncio.wrap_future(reward_loop().submit(_inside(calling, coroutine)))
                    return await asyncio.wrap_future(_in_thread(calling, partial(function, own_args, asked)))
    except TimeoutError as error:
        raise RewardError(
            f"{where}: did not return within {args.rm_timeout_secs:g} s (--rm-timeout-secs). Make it faster or raise "
            "the flag; blocking calls belong in a plain function, not in `async def`."
        ) from error


async def _inside(context: AbstractContextManager[None], coroutine: Awaitable[object]) -> object:
    with context:
        return await coroutine


def _name(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _in_thread(calling: AbstractContextManager[None], function: Callable[[], object]) -> Future[object]:
    """Call `function` in a daemon thread: unlike a pool's, it does not keep the process from ending."""
    future: Future[object] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with calling:
                result = function()
        except BaseException as error:  # boundary: carried to the waiting coroutine, which raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="vime-reward", daemon=True).start()
    return future


class _Threads:
    """Places for MAX_THREADS plain functions at once. A call has one for its own deadline at most, which bounds how
    long the others wait; their deadlines begin when they have one."""

    def __init__(self) -> None:
        self._free, self._num_waiting = asyncio.Semaphore(MAX_THREADS), 0

    @contextlib.asynccontextmanager
    async def one(self, timeout_s: float) -> AsyncIterator[None]:
        """Waits for: a place. Unblocked by: a call that returns, or its deadline of `timeout_s`."""
        deadline_s = (2 + self._num_waiting // MAX_THREADS) * timeout_s
        self._num_waiting += 1
        try:
            with waiting("a thread for a reward function", deadline_s=deadline_s):
                async with asyncio.timeout(deadline_s):
                    await self._free.acquire()
        except TimeoutError as error:
            raise RewardError(
                f"no thread for a plain reward function was free within {deadline_s:g} s: {MAX_THREADS} calls are at "
                f"work and {self._num_waiting} wait. Make the function faster, or an `async def` that waits in awaits."
            ) from error
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._free.release()


_THREADS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Threads] = WeakKeyDictionary()
_JUDGES: WeakKeyDictionary[asyncio.AbstractEventLoop, MathJudge] = WeakKeyDictionary()
_SESSIONS: WeakKeyDictionary[asyncio.AbstractEventLoop, HttpSession] = WeakKeyDictionary()


def _threads() -> _Threads:
    return _THREADS.setdefault(asyncio.get_running_loop(), _Threads())


async def close_rewards() -> None:
    """Close what the rewards of the running event loop keep, math workers and connections; a later call starts them
    again."""
    loop = asyncio.get_running_loop()
    if judge := _JUDGES.get(loop):
        await judge.close()
    if session := _SESSIONS.pop(loop, None):
        await session.close()


def answer_text(sample: Sample) -> str:
    """Return the policy's final answer: the text after its last `</think>`."""
    return sample.response.rpartition("</think>")[2].strip()


async def exact_match(args: Args, sample: Sample) -> float:  # noqa: ARG001 - the signature of a reward
    """Return 1.0 when the completion ended by itself (not cut at the length limit) and its text equals the label."""
    is_complete = sample.status is SampleStatus.COMPLETED
    return float(is_complete and answer_text(sample) == _label(sample).strip())


async def math_equal(args: Args, sample: Sample) -> float:
    """Return 1.0 when math-verify finds the answer's last expression (`\\boxed{}` first) equal to the label."""
    judge = _JUDGES.setdefault(asyncio.get_running_loop(), MathJudge())
    return await judge.score(_label(sample), answer_text(sample), timeout_s=args.rm_timeout_secs)


async def deepscaler(args: Args, sample: Sample) -> float:
    """Return 1.0 when the last box after the reasoning equals the label; 0.0 for a completion without `</think>` (or
    `###Response`) or without a box, as in DeepScaleR."""
    text = rm_text.after_thinking(sample.response)
    found = None if text is None else rm_text.boxed(text)
    if found is None:
        return 0.0
    judge = _JUDGES.setdefault(asyncio.get_running_loop(), MathJudge())
    labels = sample.label if isinstance(sample.label, list) else [_label(sample)]
    faults = []
    for label in labels:
        gold = rm_text.boxed(str(label)) or str(label)
        try:
            if await judge.score(gold, f"\\boxed{{{found}}}", timeout_s=args.rm_timeout_secs):
                return 1.0
        except UnreadableLabelError as fault:
            faults.append(fault)
    if faults and len(faults) == len(labels):
        raise faults[0]
    return 0.0


async def dapo(args: Args, sample: Sample) -> dict[str, float | str]:  # noqa: ARG001 - the signature of a reward
    """Return {score: 1 or -1, acc: 1 or 0} by the completion's last `Answer: ...` line; --reward-key chooses one."""
    return rm_text.dapo_score(sample.response, _label(sample))


async def f1(args: Args, sample: Sample) -> float:  # noqa: ARG001 - the signature of a reward
    """Return the F1 of the words that completion and label have in common."""
    return rm_text.token_f1(answer_text(sample), _label(sample))[0]


async def gpqa(args: Args, sample: Sample) -> float:  # noqa: ARG001 - the signature of a reward
    """Return 1.0 when the completion chooses the right letter."""
    return rm_text.choice_score(sample.response, sample.label, sample.metadata)


async def remote_rm(args: Args, sample: Sample) -> object:
    """POST the sample to --rm-url; the JSON response is the reward, or an object with the key "reward"."""
    body = {
        "index": sample.index,
        "group_index": sample.group_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "metadata": sample.metadata,
        "status": str(sample.status),
    }
    if args.rm_url is None:
        raise RewardError("--rm-type remote_rm needs --rm-url, the address of the service. Add it.")
    where, content = f"--rm-url {args.rm_url}, sample {sample.index}", json.dumps(body).encode()
    trouble = ""
    loop = asyncio.get_running_loop()
    session = _SESSIONS.get(loop) or _SESSIONS.setdefault(loop, HttpSession(is_outside=True))
    try:
        async with asyncio.timeout(args.rm_timeout_secs):
            with waiting("a remote reward", args.rm_url, deadline_s=args.rm_timeout_secs):
                for attempt in range(REMOTE_ATTEMPTS):
                    await asyncio.sleep(0.2 * attempt)
                    try:
                        response = await session.call("POST", args.rm_url, content)
                    except HttpFailure as error:
                        trouble = str(error)
                        continue
                    if response.status == 200:
                        told = json.loads(response.content)
                        return told["reward"] if isinstance(told, dict) and "reward" in told else told
                    trouble = response.described()
    except TimeoutError as error:
        late = f"no response within {args.rm_timeout_secs:g} s (--rm-timeout-secs)"
        raise RewardError(f"{where}: {late}. {trouble}") from error
    except ValueError as error:
        raise RewardError(f"{where}: the response is not JSON: {error}. Expected a number or an object.") from error
    raise RewardError(f"{where}: {REMOTE_ATTEMPTS} attempts failed, the last: {trouble}. Is the service up?")


async def reasoning_gym(args: Args, sample: Sample) -> object:
    """Return the score by the generator that made the prompt."""
    return await _call(_score_reasoning_gym, args, sample, where=f"--rm-type reasoning_gym, sample {sample.index}")


def _score_reasoning_gym(args: Args, sample: Sample) -> float:  # noqa: ARG001 - the signature of a reward
    return reasoning_gym_tasks.score(sample)


def _label(sample: Sample) -> str:
    if sample.label is None:
        raise RewardError(f"sample {sample.index}: has no label to compare with. Name the record's key in --label-key.")
    if fault := label_fault(sample.label):
        raise RewardError(f"sample {sample.index}: {fault}. No completion would ever be right; correct the data.")
    return str(sample.label)


BUILT_IN: dict[str, Callable[[Args, Sample], Awaitable[object]]] = {
    "exact_match": exact_match,
    "math": math_equal,
    "remote_rm": remote_rm,
    "reasoning_gym": reasoning_gym,
    "deepscaler": deepscaler,
    "dapo": dapo,
    "f1": f1,
    "gpqa": gpqa,
}
