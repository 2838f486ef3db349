"""What a trainer rank holds in device memory and page-locked in host memory, as a dry run counts it. Bytes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """One model on one rank. A frozen model has parameters alone."""

    num_parameters: int  # on this rank; a shard's share
    parameters: int
    gradients: int = 0
    optimizer: int = 0  # main weights and moments
    activations: int = 0  # the most that a forward and backward pass holds beside the above; 0: not measured
    step: int = 0  # the most that a step of an optimizer in host memory brings to the device at a time
    host: int = 0  # in host memory, page-locked: main weights and moments with --optimizer-cpu-offload

    @property
    def static(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """One rank, and how many are equal to it by construction."""

    rank: int
    stages: tuple[int, ...]  # pipeline stages whose ranks are like this one
    count: int
    models: dict[str, ModelBytes] = field(default_factory=dict)  # by role

    @property
    def static(self) -> int:
        return sum(model.static for model in self.models.values())

    @property
    def activations(self) -> int:
        """Models that share a rank compute one after the other."""
        return max((model.activations for model in self.models.values()), default=0)

    @property
    def peak(self) -> int:
        """Passes and optimizer steps come one after the other."""
        return self.static + max(self.activations, *(model.step for model in self.models.values()), 0)

    @property
    def host(self) -> int:
        return sum(model.host for model in self.models.values())
