"""A generate function that answers as a table says, each group when the test lets it: `--custom-generate-function-path
tests.helpers.known_history.generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.rollout.loops import rollout_loop
from vime.types import Sample, SampleStatus, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of every sample of a group: as many tokens as `versions`, each by its version; one reward for each sample."""

    versions: Sequence[int]
    rewards: Sequence[float]
    status: SampleStatus = SampleStatus.COMPLETED


@dataclass(slots=True)
class History:
    """`answers`: by group, then by attempt. A group waits until it is let go."""

    answers: dict[int, list[Answer]] = field(default_factory=dict)
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)  # by sample: how often

    def gate(self, group: int) -> asyncio.Event:
        return self.gates.setdefault(group, asyncio.Event())

    def let_go(self, *groups: int) -> None:
        async def open_gates() -> None:
            for group in groups:
                self.gate(group).set()

        rollout_loop().run(open_gates(), name="gates to open", timeout_s=5)


HISTORY = History()


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    group, place = divmod(sample.index, args.n_samples_per_prompt)
    await HISTORY.gate(group).wait()
    attempt = HISTORY.asked[sample.index] = HISTORY.asked.get(sample.index, 0) + 1
    answer = HISTORY.answers[group][attempt - 1]
    sample.status = answer.status
    if answer.status is not SampleStatus.ABORTED:
        length = len(answer.versions)
        spans = [VersionSpan(version, at, at + 1) for at, version in enumerate(answer.versions)]
        sample.append_response_tokens([5] * length, [-0.5] * length, versions=spans)
        sample.reward = answer.rewards[place]
    return sample
