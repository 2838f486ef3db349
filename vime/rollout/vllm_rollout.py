"""The default rollout function: one round of scored groups, or one evaluation.

A round asks for `over_sampling_batch_size` groups at a time, keeps what the dynamic filter keeps, and stops when
`rollout_batch_size` groups are kept. Surplus requests are aborted (closing the connection aborts them in the engine);
their prompts, and those of surplus groups that had finished, go back to the data source as fresh prompts, because an
answer kept for a later round would be of an older version. With --partial-rollout they go back as they are, each answer
with its tokens and their versions, and are gone on with first in the next round (`partial.py` says which of them).

Who finishes first decides what is kept. Under --reference-mode it does not matter: groups are looked at in the order in
which they were asked for, and a slow one is waited for.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from vime.protocols import DataSource, calling_plugin
from vime.rollout.abort_scope import AbortScope
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.drop_limit import DropStreak
from vime.rollout.evaluate import evaluate_all
from vime.rollout.generation import close_clients, train_sampling_params
from vime.rollout.groups import filter_verdict, generate_and_rm_group, mark_samples, unusable_reason
from vime.rollout.loops import raise_first, rollout_loop
from vime.rollout.metrics import answer_of, completion_metrics, drop_metrics, version_metrics
from vime.rollout.partial import (
    PartialStats,
    is_unfinished,
    num_response_tokens,
    oldest_allowed,
    resume,
    settle_versions,
    without_completion,
)
from vime.rollout.progress import BOARD, RoundProgress
from vime.rollout.reward_errors import error_share
from vime.rollout.rm_hub import close_rewards
from vime.rollout.sample_recorder import RECORDER
from vime.types import (
    DataError,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    Sample,
    SampleStatus,
    WaitTimeoutError,
)
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""How much later than the round's own deadline the waiting thread gives up: only when a plug-in blocks the loop."""

CLOSE_S = 10.0
BUFFER_FILTER = "buffer_filter"


def generate_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One round, or one evaluation, on the rollout loop; waits for it with --rollout-timeout-secs."""
    work: Coroutine[Any, Any, RolloutFnTrainOutput | RolloutFnEvalOutput] = (
        evaluate_all(args, rollout_id) if evaluation else TrainingRound(args, rollout_id, data_source).run()
    )
    return rollout_loop().run(
        work,
        name=f"{'evaluation before' if evaluation else 'generation of'} round {rollout_id}",
        timeout_s=args.rollout_timeout_secs + GRACE_S,
        advice=f"The rollout loop is blocked; does a plug-in make a blocking call? Last seen: {generation_progress()}",
    )


def generation_progress() -> str:
    """One line about the work in hand; empty before the first round. Any thread."""
    return "" if BOARD.latest is None else str(BOARD.latest)


def close_generation() -> None:
    """Close the connections to the router and end the reward workers. A later round opens and starts them again."""
    close_clients()
    rollout_loop().run(close_rewards(), name="math reward workers and connections to end", timeout_s=CLOSE_S)


class TrainingRound:
    """State of one round. Lives on the rollout loop, used once.

    Consumes prompts of the data source; waits for generation and reward tasks; unblocked by the first of them that
    ends, or by the deadline, which cancels them all.
    """

    def __init__(self, args: Any, rollout_id: int, source: DataSource) -> None:
        self._args, self._rollout_id, self._source = args, rollout_id, source
        self._wanted: int = args.rollout_batch_size
        self._running: dict[asyncio.Task[list[Sample]], list[Sample]] = {}  # task -> its prompts, untouched
        self._kept: list[list[Sample]] = []
        self._surplus: list[list[Sample]] = []  # untouched prompts that go back
        self._num_finished_surplus = 0
        self._dropped: Counter[str] = Counter()
        self._streak, self._errors = DropStreak(args), error_share(args, source)
        self._finished_samples: list[Sample] = []  # of every finished group, also of dropped ones
        self._num_tokens = 0
        self._abort_scope, self._partial = AbortScope(), PartialStats()
        self._oldest = oldest_allowed(args, rollout_id)
        self._started = time.monotonic()

    async def run(self) -> RolloutFnTrainOutput:
        args = self._args
        self._abort_scope.govern()
        try:
            with waiting(f"the groups of round {self._rollout_id}", deadline_s=args.rollout_timeout_secs):
                async with asyncio.timeout(args.rollout_timeout_secs), asyncio.TaskGroup() as tasks:
                    await self._collect(tasks)
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"round {self._rollout_id}: {len(self._kept)} of {self._wanted} groups ready, {len(self._running)} in "
                f"flight, dropped {dict(self._dropped)}",
                args.rollout_timeout_secs,
                "vLLM engines and reward function",
                "Raise --rollout-timeout-secs, shorten answers, or relax the filter.",
            ) from error
        except BaseExceptionGroup as failures:
            raise_first(failures)
        if self._surplus:
            self._source.add_samples(sorted(self._surplus, key=lambda group: group[0].group_index))
        self._kept.sort(key=lambda group: group[0].group_index)
        mark_samples(args, self._kept)
        return RolloutFnTrainOutput(samples=self._kept, metrics=self._metrics())

    async def _collect(self, tasks: asyncio.TaskGroup) -> None:
        while len(self._kept) < self._wanted:
            if len(self._kept) + len(self._running) < self._wanted:
                self._issue(tasks)
            self._post_progress()
            # in reference mode the oldest alone: what is kept, and when more are asked for, must not depend on time
            awaited = [next(iter(self._running))] if self._args.reference_mode else self._running
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: self._running[task][0].group_index):
                prompts = self._running.pop(task)
                if not task.cancelled() and task.exception() is None:  # a failure is raised by the TaskGroup
                    self._take(prompts, task.result())
        self._post_progress()
        if self._args.partial_rollout:
            await self._abort_scope.end(self._running)
        for task, prompts in self._running.items():
            if self._args.partial_rollout and task.done():  # a failure is raised by the TaskGroup
                self._give_back(prompts, task.result())
                continue
            self._num_finished_surplus += task.done()
            task.cancel()
            self._surplus.append(prompts)

    def _give_back(self, prompts: list[Sample], samples: list[Sample]) -> None:
        """A group that this round does not need goes back: as it is with --partial-rollout, else as prompts."""
        self._num_finished_surplus += not is_unfinished(samples)
        is_usable = all(sample.status is not SampleStatus.FAILED for sample in samples)
        if not (self._args.partial_rollout and is_usable and num_response_tokens(samples)):
            self._surplus.append(prompts)
            return
        for sample in samples:
            sample.rollout_id = -1
        self._partial.partial_groups += 1
        self._partial.partial_tokens += num_response_tokens(samples)
        self._surplus.append(samples)

    def _issue(self, tasks: asyncio.TaskGroup) -> None:
        wanted = self._args.over_sampling_batch_size or self._wanted
        with calling_plugin(f"--data-source-path {self._args.data_source_path}", self._source.get_samples):
            groups = self._source.get_samples(wanted)
        if isinstance(self._source, RolloutDataSourceWithBuffer):
            for left_out in self._source.take_dropped():
                self._dropped[BUFFER_FILTER] += 1
                RECORDER.note_dropped(left_out[0].group_index, BUFFER_FILTER, left_out)
        if not groups and not self._running:
            raise DataError(
                f"round {self._rollout_id}: the data source is exhausted with {len(self._kept)} of {self._wanted} "
                f"groups kept, dropped {dict(self._dropped)}. Give more prompts or relax the filter."
            )
        sampling_params = train_sampling_params(self._args)
        for group in groups:
            if not group:
                raise DataError(f"round {self._rollout_id}: the data source answered an empty group.")
            prompts = copy.deepcopy(group)
            if num_response_tokens(group):
                group = self._resumed(group)
            for sample in group:
                sample.rollout_id = self._rollout_id
            task = tasks.create_task(generate_and_rm_group(self._args, group, sampling_params))
            self._running[task] = prompts

    def _resumed(self, group: list[Sample]) -> list[Sample]:
        """What is gone on with of a group that was cut; its prompts alone in a run without --partial-rollout."""
        group_at = getattr(self._source, "group_at", None)
        fresh = group_at(group[0].group_index) if group_at else [without_completion(sample) for sample in group]
        if not self._args.partial_rollout:
            return fresh
        return resume(self._args, group, fresh, self._partial, oldest=self._oldest)

    def _take(self, prompts: list[Sample], samples: list[Sample]) -> None:
        """Keep a finished group, drop it with a reason, or send it back when the round is full."""
        if len(self._kept) == self._wanted:
            self._give_back(prompts, samples)
            return
        self._num_tokens += num_response_tokens(samples)
        if self._args.partial_rollout and is_unfinished(samples):
            self._give_back(prompts, samples)
            return
        self._errors.note(samples)
        unusable = unusable_reason(samples)
        if unusable is not None:
            self._drop(samples, unusable)
            return
        for sample in samples:
            sample.rollout_id = self._rollout_id
        self._finished_samples.extend(samples)
        settle_versions(self._args, samples, self._partial, oldest=self._oldest)
        verdict = filter_verdict(self._args, samples)
        if verdict.keep:
            self._kept.append(samples)
            self._streak.kept()
        else:
            self._drop(samples, verdict.reason or "filter")

    def _drop(self, samples: list[Sample], reason: str) -> None:
        self._dropped[reason] += 1
        RECORDER.note_dropped(samples[0].group_index, reason, samples)
        self._streak.dropped(reason)

    def _metrics(self) -> dict[str, float]:
        kept = [answer_of(self._args, sample) for group in self._kept for sample in group]
        everyone = [sample.scalar_reward(self._args.reward_key) for sample in self._finished_samples]
        return {
            **completion_metrics(kept, "rollout"),
            **version_metrics(kept, "rollout"),
            **drop_metrics(self._dropped),
            "rollout/reward_mean_before_filter": sum(everyone) / len(everyone),
            "rollout/num_groups": float(len(self._kept)),
            "rollout/surplus_groups": float(self._num_finished_surplus),
            "rollout/aborted_groups": float(len(self._surplus) - self._num_finished_surplus),
            "rollout/removed_samples": float(sum(answer.is_removed for answer in kept)),
            **(self._partial.metrics() if self._args.partial_rollout else {}),
        }

    def _post_progress(self) -> None:
        BOARD.post(
            RoundProgress(
                name=f"round {self._rollout_id}",
                kept_groups=len(self._kept),
                wanted_groups=self._wanted,
                in_flight_groups=len(self._running),
                dropped_groups=sum(self._dropped.values()),
                response_tokens=self._num_tokens,
                elapsed_s=time.monotonic() - self._started,
            )
        )
