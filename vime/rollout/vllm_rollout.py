"""The default rollout function: one round of scored groups, or one evaluation.

A round asks for `over_sampling_batch_size` groups at a time, keeps those that pass the dynamic filter, and stops when
`rollout_batch_size` groups are kept. Surplus requests are aborted (closing the connection aborts them in the engine).
Their prompts, and those of surplus groups that had finished, go back to the data source as fresh prompts, because a
completion kept for a later round would be of an older version. With --partial-rollout they go back as they are, each
completion with its tokens and their versions, and are continued first in the next round (`partial.py` decides which of
them).

The groups that finish first are kept. Under --reference-mode time does not matter: groups are looked at in the order in
which they were asked for, and a slow one is waited for.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Coroutine, Sequence

from vime.config.deadlines import rollout_deadline_s
from vime.config.parse import Args
from vime.handoff.ledger_types import Task
from vime.protocols import DataSource, calling_plugin
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.evaluate import evaluate_all
from vime.rollout.generation import close_clients, take_prompt_tokens
from vime.rollout.group_worker import Assignment, GroupWorker, mark_samples, unusable_reason
from vime.rollout.loops import rollout_loop
from vime.rollout.metrics import completion_metrics, drop_metrics, num_removed, row_facts, version_metrics
from vime.rollout.partial import (
    is_unfinished,
    num_response_tokens,
    oldest_allowed,
    resume,
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
    Version,
    WaitTimeoutError,
)
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""How much later than the round's own deadline the waiting thread gives up: happens only when a plug-in blocks the
loop."""

CLOSE_S = 10.0
BUFFER_FILTER = "buffer_filter"


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run one round, or one evaluation, on the rollout loop; waits for it with --rollout-timeout-secs."""
    work: Coroutine[object, object, RolloutFnTrainOutput | RolloutFnEvalOutput] = (
        evaluate_all(args, rollout_id) if evaluation else RoundWorker(args, rollout_id, data_source).round()
    )
    return rollout_loop().run(
        work,
        name=f"{'evaluation before' if evaluation else 'generation of'} round {rollout_id}",
        timeout_s=rollout_deadline_s(args.config) + GRACE_S,
        advice=f"The rollout loop is blocked; does a plug-in make a blocking call? Last seen: {generation_progress()}",
    )


def generation_progress() -> str:
    """Return one line about the work in progress; empty before the first round. Any thread."""
    return "" if BOARD.latest is None else str(BOARD.latest)


def close_generation() -> None:
    """Close the connections to the router and end the reward workers. A later round opens and starts them again."""
    close_clients()
    rollout_loop().run(close_rewards(), name="math reward workers and connections to end", timeout_s=CLOSE_S)


class RoundWorker(GroupWorker):
    """The worker of modes off and buffer: takes prompts from the data source until one round is complete. Used once.

    `kept` has the groups of the round when `round` returns. Under --reference-mode the worker decides about groups in
    the order in which they were asked for: what is kept, and when more are asked for, must not depend on time.
    """

    def __init__(self, args: Args, rollout_id: int, source: DataSource) -> None:
        super().__init__(args, error_share(args, source))
        self._rollout_id, self._source = rollout_id, source
        self._wanted: int = args.rollout_batch_size
        self.kept: list[list[Sample]] = []
        self._surplus: list[list[Sample]] = []  # groups that go back to the data source
        self._num_finished_surplus, self._num_asked = 0, 0
        self._pending: dict[Task, Assignment] = {}  # in the order in which they were asked for
        self._asked: list[Assignment] = []  # the last of `_pending`, until `take` gives them out
        self._decided = asyncio.Condition()
        self._generated: set[Task] = set()  # of `_pending`
        self._oldest = oldest_allowed(args, rollout_id)
        self._started = time.monotonic()

    @property
    def is_whole(self) -> bool:
        return len(self.kept) == self._wanted

    async def round(self) -> RolloutFnTrainOutput:
        """Run the round. Waits for: generation and rewards, --rollout-timeout-secs in all, then WaitTimeoutError."""
        args, limit_s = self._args, rollout_deadline_s(self._args.config)
        try:
            with waiting(f"the groups of round {self._rollout_id}", "engine", deadline_s=limit_s):
                async with asyncio.timeout(limit_s) as deadline:
                    await self.run()
        except TimeoutError as error:
            if not deadline.expired():
                raise  # of somebody's code
            raise WaitTimeoutError(
                f"round {self._rollout_id}: {len(self.kept)} of {self._wanted} groups ready, {len(self._pending)} in "
                f"flight, dropped {dict(self.stats.dropped)}",
                limit_s,
                "vLLM engines and reward function",
                "Raise --rollout-timeout-secs, shorten completions, or relax the filter.",
            ) from error
        if self._surplus:
            self._source.add_samples(sorted(self._surplus, key=lambda group: group[0].group_index))
        self.kept.sort(key=lambda group: group[0].group_index)
        mark_samples(args, self.kept)
        return RolloutFnTrainOutput(samples=self.kept, metrics=self._metrics())

    async def take(self) -> list[Assignment]:
        """Waits for: a group to be kept or dropped. Returns nothing once the round is complete."""
        if not self._num_asked:
            self._ask()
        self._post_progress()
        async with self._decided:
            await self._decided.wait_for(lambda: self.is_whole or self._asked)
        asked, self._asked = self._asked, []
        return asked

    def _ask(self) -> None:
        """Ask for prompts until as many groups as are missing are in progress. A source that has none for the moment is
        asked again when the next group is decided."""
        while len(self.kept) + len(self._pending) < self._wanted:
            groups = self._drawn()
            if not groups and self._pending:
                return
            if not groups:
                raise DataError(
                    f"round {self._rollout_id}: the data source is exhausted with {len(self.kept)} of {self._wanted} "
                    f"groups kept, dropped {dict(self.stats.dropped)}. Give more prompts or relax the filter."
                )
            for group in groups:
                if not group:
                    raise DataError(f"round {self._rollout_id}: the data source returned an empty group.")
                task = Task(partition="", group=group[0].group_index, attempt=self._num_asked)
                self._num_asked += 1
                self._pending[task] = Assignment(task=task, prompts=group, serving=self._rollout_id)
                self._asked.append(self._pending[task])

    def _drawn(self) -> list[list[Sample]]:
        wanted = self._args.over_sampling_batch_size or self._wanted
        with calling_plugin(f"--data-source-path {self._args.data_source_path}", self._source.get_samples):
            groups = self._source.get_samples(wanted)
        if isinstance(self._source, RolloutDataSourceWithBuffer):
            for left_out in self._source.take_dropped():
                self.stats.dropped[BUFFER_FILTER] += 1
                RECORDER.note_dropped(left_out[0].group_index, BUFFER_FILTER, left_out)
        return groups

    async def resume(self, assignment: Assignment) -> list[Sample]:
        """Return an aborted group as it is to be continued; a copy of its prompts, which may have to go back."""
        args, group = self._args, copy.deepcopy(assignment.prompts)
        if num_response_tokens(group):
            group_at = getattr(self._source, "group_at", None)
            group_index = group[0].group_index
            fresh = group_at(group_index) if group_at else [without_completion(sample) for sample in group]
            is_kept = args.partial_rollout
            group = resume(args, group, fresh, self.stats.partial, oldest=self._oldest) if is_kept else fresh
        for sample in group:
            sample.rollout_id = self._rollout_id
        return group

    async def finish(self, assignment: Assignment, samples: list[Sample]) -> None:
        """Decide about the group, in reference mode after those before it; give it back if the round is complete."""
        self._generated.add(assignment.task)
        async with self._decided:
            if self._args.reference_mode:
                await self._decided.wait_for(lambda: self.is_whole or next(iter(self._pending)) == assignment.task)
            for sample in samples:
                sample.rollout_id = self._rollout_id
            if self.is_whole:
                await self.give_back(assignment, samples, "surplus")
            else:
                await super().finish(assignment, samples)
            del self._pending[assignment.task]
            self._ask()  # before another group is decided: a filter and a data source may share state
            self._post_progress()
            self._decided.notify_all()

    async def keep(self, assignment: Assignment, samples: list[Sample]) -> bool:  # noqa: ARG002
        self.kept.append(samples)
        return True

    async def give_back(self, assignment: Assignment, samples: list[Sample], reason: str) -> None:
        """Give it to the data source: as it is with --partial-rollout, otherwise as prompts. Without the flag a group
        that a generate function left unfinished is dropped: it would be unfinished again."""
        args = self._args
        if not self.is_whole and not args.partial_rollout:
            await self.drop(assignment, samples, unusable_reason(samples) or reason)
            return
        self._num_finished_surplus += not is_unfinished(samples)
        is_usable = all(sample.status is not SampleStatus.FAILED for sample in samples)
        if not (args.partial_rollout and is_usable and num_response_tokens(samples)):
            self._surplus.append(assignment.prompts)
            return
        for sample in samples:
            sample.rollout_id = -1
        self.stats.partial.partial_groups += 1
        self.stats.partial.partial_tokens += num_response_tokens(samples)
        self._surplus.append(samples)

    def oldest(self, samples: Sequence[Sample]) -> Version:  # noqa: ARG002
        return self._oldest

    async def end(self) -> None:
        """End a complete round: give back what is in progress, with --partial-rollout with its tokens."""
        if self._args.partial_rollout:
            await self._abort_scope.end(list(self._running.values()))
        left = list(self._running.values())
        for work in left:
            work.cancel()
        if left:
            await asyncio.wait(left)
        self._num_finished_surplus += len(self._generated & self._pending.keys())
        self._surplus += [assignment.prompts for assignment in self._pending.values()]

    def _metrics(self) -> dict[str, float]:
        kept = [facts for group in self.kept for facts in row_facts(self._args, group)]
        everyone = self.stats.rewards
        return {
            **completion_metrics(kept, "rollout"),
            **version_metrics(kept, "rollout"),
            **drop_metrics(self.stats.dropped),
            **take_prompt_tokens().metrics(),
            "rollout/reward_mean_before_filter": sum(everyone) / len(everyone),
            "rollout/num_groups": float(len(self.kept)),
            "rollout/surplus_groups": float(self._num_finished_surplus),
            "rollout/aborted_groups": float(len(self._surplus) - self._num_finished_surplus),
            "rollout/removed_samples": float(num_removed(kept)),
            **(self.stats.partial.metrics() if self._args.partial_rollout else {}),
        }

    def _post_progress(self) -> None:
        BOARD.post(
            RoundProgress(
                name=f"round {self._rollout_id}",
                kept_groups=len(self.kept),
                wanted_groups=self._wanted,
                in_flight_groups=len(self._pending),
                dropped_groups=sum(self.stats.dropped.values()),
                response_tokens=self.stats.response_tokens,
                elapsed_s=time.monotonic() - self._started,
            )
        )
