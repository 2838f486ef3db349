"""Gradients to new weights: AdamW on this rank's shards, clipping by the global norm, learning-rate schedule.

The same rules as the other trainer's: what decays, when the rate moves, how the norm clips. AdamW works element by
element, so it runs on the plain local shards; only saving looks at them as parts of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from vime.config.cluster import OptimizerConfig
from vime.config.schedule import decay_steps, learning_rate_at

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardOptimizer:
    """Owns the optimizer state of the trained parameters of one model."""

    def __init__(self, parameters: Mapping[str, DTensor], settings: OptimizerConfig, *, total_steps: int) -> None:
        """`total_steps`: optimizer steps of this model in the whole run."""
        self._settings = settings
        self._decay_steps = decay_steps(settings, total_steps)
        self.parameters = dict(parameters)
        self.num_steps = 0  # taken since the run began, checkpoints included
        self._shards = {name: parameter.to_local().detach() for name, parameter in self.parameters.items()}
        decayed = [self._shards[name] for name, parameter in parameters.items() if _is_decayed(name, parameter)]
        others = [self._shards[name] for name, parameter in parameters.items() if not _is_decayed(name, parameter)]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
        )
        self._make_state()

    @property
    def learning_rate(self) -> float:
        """Return the rate that the next step uses."""
        return learning_rate_at(self._settings, self.num_steps, self._decay_steps)

    def zero_grad(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self._shards[name].grad = None

    def step(self, scale: float = 1.0) -> float:
        """Multiply by `scale`, clip and apply the reduced gradients, advance the schedule; return the global gradient
        norm before clipping.

        Collective over all ranks. A norm that is not finite is returned without changing the weights, on every rank.
        """
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            assert gradient is None or isinstance(gradient, DTensor)
            self._shards[name].grad = None if gradient is None else gradient.to_local()
        gradients = [shard.grad for shard in self._shards.values() if shard.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            return norm
        if 0 < self._settings.clip_grad < norm + 1e-6:
            torch._foreach_mul_(gradients, self._settings.clip_grad / (norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate
        self._adam.step()
        self.num_steps += 1
        self.zero_grad()
        return norm

    def _norm(self, gradients: list[Tensor]) -> float:
        shards = [gradient for gradient in gradients if gradient.numel()]
        device = next(iter(self._shards.values())).device
        square = torch.zeros((), dtype=torch.float64, device=device)
        if shards:
            norms = torch._foreach_norm(shards)  # noqa: SLF001  torch has no public name for one pass over all
            square += torch.stack(norms).double().square().sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state that has a parameter's shape: what `sleep` moves."""
        return [self._adam.state[shard][moment] for shard in self._shards.values() for moment in MOMENTS]

    def state_dict(self) -> dict[str, Tensor | int]:
        """Moments as cut tensors, which a load may cut anew, sharing the storage of the state itself."""
        moments: dict[str, Tensor | int] = {
            f"{moment}.{name}": DTensor.from_local(
                self._adam.state[self._shards[name]][moment],
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }
        return {**moments, "num_steps": self.num_steps}

    def adopt(self, num_steps: int) -> None:
        """Finish loading moments in place. Rates and decays stay those of this command's flags."""
        self.num_steps = num_steps
        for shard in self._shards.values():
            self._adam.state[shard]["step"].fill_(num_steps)

    def _make_state(self) -> None:
        """Zero moments at step 0 are what AdamW starts from; made now, so that they can be loaded into."""
        for shard in self._shards.values():
            self._adam.state[shard] = {
                "step": torch.tensor(0.0),
                **{moment: torch.zeros_like(shard) for moment in MOMENTS},
            }


def _is_decayed(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1 and not name.endswith(".bias")
