"""Evaluations whose prompts go to jobs outside (docs/decisions/0038-evaluation-by-jobs.md).

Nothing of them is in the ledger: an evaluation changes no weights, so it need not outlive the gateway. A gateway that
takes the place of a dead one begins the evaluation again, and takes what a job still brings for a prompt that the dead
one leased.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vime.data.payload import IN_ROWS
from vime.gateway import messages as m
from vime.gateway.refusal import lease_lost
from vime.gateway.samples import Limits, by_index, check_samples, fill, invalid
from vime.gateway.weights import Weights
from vime.handoff.ledger_types import EVAL_PREFIX, Task
from vime.types import Sample, Version

Place = tuple[str, int]
"""Name of the set and number of the prompt in it."""
Result = list[Sample] | str
"""The completions of a prompt, or why they have no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPart:
    """One set: its prompts as groups of new samples, how they are sampled, and what a completion may be."""

    name: str
    groups: Sequence[list[Sample]]
    sampling: m.EvalSampling
    limits: Limits


@dataclass(slots=True)
class Evaluation:
    """One evaluation, of the weights of `version`. Other threads may read `results`, which only grows."""

    before_round: int
    version: Version
    parts: Mapping[str, EvalPart]
    lease_timeout_s: float
    clock: Callable[[], float] = time.monotonic
    results: dict[Place, Result] = field(default_factory=dict)
    by: dict[Place, str] = field(default_factory=dict)  # who brought it
    _todo: deque[Place] = field(default_factory=deque)
    _leased: dict[Place, tuple[str, str, float]] = field(default_factory=dict)  # producer, request, until when

    def __post_init__(self) -> None:
        self._todo.extend((part.name, number) for part in self.parts.values() for number in range(len(part.groups)))

    @property
    def total(self) -> int:
        return sum(len(part.groups) for part in self.parts.values())

    @property
    def parts_by_partition(self) -> dict[str, EvalPart]:
        return {self.partition_of(name): part for name, part in self.parts.items()}

    def partition_of(self, name: str) -> str:
        """Return what stands in a lease in place of a partition of the ledger."""
        return f"{EVAL_PREFIX}{self.before_round}/{name}"

    def take(self, producer: str, request: str, count: int) -> list[Place]:
        """Return prompts for a producer: the same for the same request, as long as it has any of them."""
        self.renew(producer)
        self._give_back([place for place, (_, _, until) in self._leased.items() if until <= self.clock()])
        given = [place for place, lease in self._leased.items() if lease[:2] == (producer, request)]
        if given:
            return given
        while self._todo and len(given) < count:
            place = self._todo.popleft()
            if place not in self.results:  # its lease was over, and then its result came
                self._leased[place] = (producer, request, self.clock() + self.lease_timeout_s)
                given.append(place)
        return given

    def renew(self, producer: str) -> None:
        until = self.clock() + self.lease_timeout_s
        for place, (who, request, _) in self._leased.items():
            if who == producer:
                self._leased[place] = (who, request, until)

    def abandon(self, producer: str) -> int:
        """Give the prompts of a producer to others. Return how many."""
        return self._give_back([place for place, lease in self._leased.items() if lease[0] == producer])

    def keep(self, producer: str, place: Place, result: Result) -> None:
        self._leased.pop(place, None)
        self.by[place] = producer
        self.results[place] = result

    def _give_back(self, places: list[Place]) -> int:
        for place in places:
            del self._leased[place]
            self._todo.append(place)
        return len(places)


class Evaluations:
    """What the calls of the protocol do with the evaluation of the moment. `sign`: (producer, task) -> lease."""

    def __init__(self, weights: Weights, sign: Callable[[str, Task], str]) -> None:
        self._weights, self._sign = weights, sign
        self.current: Evaluation | None = None  # set from any thread; so is the next
        self.is_over = False  # no evaluation will come any more

    def renew(self, producer: str) -> None:
        if self.current is not None:
            self.current.renew(producer)

    def abandon(self, producer: str) -> int:
        return 0 if self.current is None else self.current.abandon(producer)

    def lease(self, producer: str, call: m.LeaseEvaluation) -> m.EvalPrompts:
        serving, current = self._weights.serving, self.current
        if self.is_over or current is None:
            waits_for = "" if self.is_over else "an evaluation"
            return m.EvalPrompts(prompts=[], serving=serving, waits_for=waits_for, is_over=self.is_over)
        lag = self._weights.lag(producer)
        places = [] if lag else current.take(producer, call.request, call.count)
        waits_for = "" if places else lag or "another evaluation: all prompts of this one are with jobs"
        return m.EvalPrompts(
            prompts=[self._prompt(producer, current, *place) for place in places],
            serving=serving,
            before_round=current.before_round,
            waits_for=waits_for,
            lags=lag,
        )

    def put(self, producer: str, task: Task, call: m.PutEvaluated) -> m.Evaluated:
        """Keep the first result of a prompt."""
        current = self.current
        part = None if current is None else current.parts_by_partition.get(task.partition)
        if current is None or part is None or task.group >= len(part.groups):
            raise lease_lost("a lease of an evaluation that is over")
        place = (part.name, task.group)
        if place not in current.results:
            current.keep(producer, place, self._result(producer, current, part, part.groups[task.group], call))
            return m.Evaluated(repeated=False)
        if current.by[place] != producer:
            raise lease_lost("a lease whose time is over: another job has brought the result")
        return m.Evaluated(repeated=True)

    def _prompt(self, producer: str, current: Evaluation, name: str, number: int) -> m.EvalPrompt:
        part = current.parts[name]
        samples = part.groups[number]
        return m.EvalPrompt(
            lease=self._sign(producer, Task(current.partition_of(name), number, 1)),
            set=name,
            group=number,
            prompt=samples[0].prompt,
            tokens=samples[0].tokens,
            label=samples[0].label,
            samples=[m.PromptSample(index=sample.index, metadata=sample.metadata) for sample in samples],
            sampling=part.sampling,
        )

    def _result(
        self, producer: str, current: Evaluation, part: EvalPart, prompts: list[Sample], call: m.PutEvaluated
    ) -> Result:
        if bool(call.error) == bool(call.samples):
            raise invalid("a result is samples, or an error.", "both, or neither", "one of them")
        if call.error:
            return call.error
        given = by_index(call.samples)
        confirmed = self._weights.has_confirmed(producer, current.version)
        checked = check_samples(
            given,
            [prompt.index for prompt in prompts],
            part.limits,
            has_confirmed=lambda version: confirmed and version == current.version,
            newest=self._weights.newest(producer),
            is_whole=True,
        )
        for prompt in prompts:
            for row in checked[prompt.index]:
                if row.tokens[: len(prompt.tokens)].tolist() != prompt.tokens:
                    raise invalid(
                        f"sample {prompt.index}: it does not begin with the tokens of its prompt.",
                        f"{row.tokens[:8].tolist()}",
                        f"{prompt.tokens[:8]} and so on: {len(prompt.tokens)} tokens, then the completion",
                    )
        # Copies, because a prompt may be asked for again; with lists, because plug-ins and files see these samples.
        samples = fill([(copy.deepcopy(prompt), checked[prompt.index]) for prompt in prompts], attempt=0)
        for sample in samples:
            for name in IN_ROWS:
                setattr(sample, name, getattr(sample, name).tolist())
        return samples
