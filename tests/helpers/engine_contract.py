"""What any `TrainEngine` must do, as cases for `megatron_worker.run`: each answers numbers for the tests to judge.

The loss is not one of the package's: it weighs every token by a column of its own, so that a column that lies one token
off, or a denominator that depends on the layout, shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import reference_policy as reference
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import TOTAL_STEPS, Bench, Case
from tests.helpers.reference_ppo import Critic
from vime.batching.pack import PackedBatch
from vime.data.rows import TrainRow
from vime.protocols import TrainBackend, TrainEngine
from vime.training.export import weights_hash
from vime.types import EngineSpec, Role, RoundPlan, SamplingRule, StepPlan, VimeError

ENTROPY, CRITIC_LR = 0.05, 2e-4
RULE = SamplingRule(temperature=0.7, top_k=40, top_p=0.9)  # another than the run's
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "megatron": (1, {}),
    "megatron-dp2-distributed": (2, {"use_distributed_optimizer": True}),
    "megatron-pp2": (2, {"pipeline_model_parallel_size": 2}),
    "fsdp": (1, {"train_backend": "fsdp"}),
    "fsdp-dp2": (2, {"train_backend": "fsdp"}),
}
"""Name -> (processes, flags). A backend joins the contract by a line here."""
REPLICAS = {"megatron": 1, "megatron-dp2-distributed": 2, "megatron-pp2": 1, "fsdp": 1, "fsdp-dp2": 2}
PACKINGS: dict[str, dict[str, Any]] = {
    "two": {},
    "one": {"num_micro_batches": 1},
    "with-empty": {"num_micro_batches": 6},
}


def weights_of(rows: Sequence[TrainRow]) -> list[Tensor]:
    """[R] of each row: the further column of the contract's loss."""
    draw = torch.Generator().manual_seed(3)
    return [torch.rand(row.response_length, generator=draw) + 0.5 for row in rows]


@dataclass(frozen=True, slots=True)
class WeighedLikelihood:
    """`- sum(weight * reward * logp + ENTROPY * entropy) / trainable tokens of the step`."""

    num_tokens: int

    def __call__(self, logp_T: Tensor, entropy_T: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        gain_T = batch.extra_T["weight"] * batch.advantage_T * logp_T + ENTROPY * entropy_T
        loss = -torch.where(batch.mask_T > 0, gain_T, 0.0).sum() / self.num_tokens
        return loss, torch.stack([loss.detach().double(), batch.mask_T.double().sum()])


@dataclass(frozen=True, slots=True)
class SquaredError:
    """`sum((value - weight)^2) / trainable tokens of the step`, for a model with a value head."""

    num_tokens: int

    def __call__(self, value_T: Tensor, entropy_T: Tensor, batch: PackedBatch, /) -> tuple[Tensor, Tensor]:
        assert not bool(entropy_T.any())
        error_T = (value_T - batch.extra_T["weight"]).square()
        loss = torch.where(batch.mask_T > 0, error_T, 0.0).sum() / self.num_tokens
        return loss, torch.stack([loss.detach().double(), batch.mask_T.double().sum()])


def plain_critic_steps(
    directory: Path, rows: Sequence[TrainRow], plan: RoundPlan
) -> tuple[list[dict[str, float]], Critic]:
    """The same as `plain_steps` of a critic and `SquaredError`."""
    critic, weights = Critic(directory), weights_of(rows)

    def step_loss(numbers: list[int]) -> Tensor:
        errors = [(critic(rows[row]) - weights[row]) ** 2 * torch.tensor(rows[row].loss_mask) for row in numbers]
        return sum(error_R.sum() for error_R in errors) / sum(rows[row].num_trainable for row in numbers)

    return reference.run_steps(critic, plan, step_loss, peak=CRITIC_LR), critic


def plain_steps(directory: Path, rows: Sequence[TrainRow], plan: RoundPlan) -> tuple[list[dict[str, float]], Any]:
    """(loss, grad_norm and lr of each step; the model after them) of plain torch, one sequence at a time."""
    model, weights = reference.load(directory), weights_of(rows)

    def step_loss(numbers: list[int]) -> Tensor:
        total = torch.zeros(())
        for row in numbers:
            logp_R, entropy_R = reference.response_values(model, rows[row], reference.TEMPERATURE)
            gain_R = weights[row] * rows[row].reward * logp_R + ENTROPY * entropy_R
            total = total - (gain_R * torch.tensor(rows[row].loss_mask)).sum()
        return total / sum(rows[row].num_trainable for row in numbers)

    return reference.run_steps(model, plan, step_loss), model


def take_step(
    engine: TrainEngine,
    backend: TrainBackend,
    step: StepPlan,
    rows: Sequence[TrainRow],
    loss: type[WeighedLikelihood | SquaredError] = WeighedLikelihood,
) -> dict[str, Any]:
    """One optimizer step; statistics summed over all replicas."""
    place, weights = backend.place, weights_of(rows)
    numbers = step.micro_batches[place.dp_rank]
    columns = [{"weight": [weights[row] for row in batch]} if place.holds_tokens else {} for batch in numbers]
    shares = engine.accumulate([[rows[row] for row in batch] for batch in numbers], columns, loss(step.num_tokens))
    total = torch.stack(shares).sum(0) if shares and place.speaks else torch.zeros(2, dtype=torch.float64)
    total = total.to(backend.device)
    dist.all_reduce(total)
    rate = engine.learning_rate
    loss, num_tokens = total.tolist()
    return {
        "loss": loss,
        "num_tokens": num_tokens,
        "lr": rate,
        "grad_norm": engine.apply_gradients(),
        "num_shares": len(shares),
        "num_batches": len(numbers),
    }


def build(bench: Bench, backend: TrainBackend, role: Role = Role.ACTOR, checkpoint: str | None = None) -> TrainEngine:
    directory = checkpoint or bench.case.flags["hf_checkpoint"]
    total_steps, lr = {Role.ACTOR: (TOTAL_STEPS, reference.PEAK_LR), Role.CRITIC: (TOTAL_STEPS, CRITIC_LR)}.get(
        role, (0, 0.0)
    )
    return backend.build(
        EngineSpec(role=role, checkpoint=directory, flag="--test", total_steps=total_steps, lr=lr, lr_warmup_iters=0)
    )


def exported(engine: TrainEngine) -> dict[str, Tensor]:
    if not engine.takes_part_in_export:
        return {}
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.export_weights()}


def forward(bench: Bench, anchor: str) -> dict[str, Any]:
    """Log-probabilities of this replica's rows by an actor and by a frozen model, in several packings."""
    _, backend = bench.backend()
    rows = make_rows()
    engines = {"actor": build(bench, backend), "frozen": build(bench, backend, Role.REFERENCE, anchor)}
    answer: dict[str, Any] = {"place": backend.place}
    for packing, arguments in PACKINGS.items():
        [step] = make_plan(rows, dp_size=backend.place.dp_size, **arguments).steps
        numbers = step.micro_batches[backend.place.dp_rank]
        for name, engine in engines.items():
            answers = engine.forward([[rows[row] for row in batch] for batch in numbers])
            answer[f"{name}-{packing}"] = {
                row: logp_R
                for batch, logps in zip(numbers, answers, strict=bool(answers))
                for row, logp_R in zip(batch, logps, strict=True)
            }
    under = engines["actor"].forward([[rows[row] for row in batch] for batch in numbers], RULE)
    answer["under"] = {
        row: logp_R
        for batch, logps in zip(numbers, under, strict=bool(under))
        for row, logp_R in zip(batch, logps, strict=True)
    }
    answer["accepted"] = _accepted_learning(engines["frozen"], backend, rows)
    backend.close()
    return answer


def _accepted_learning(engine: TrainEngine, backend: TrainBackend, rows: list[TrainRow]) -> list[str]:
    """What the engine, which must not learn now, does not refuse."""
    [step] = make_plan(rows, dp_size=backend.place.dp_size).steps
    calls: dict[str, Callable[[], Any]] = {
        "accumulate": lambda: take_step(engine, backend, step, rows),
        "apply_gradients": engine.apply_gradients,
        "finish_round": engine.finish_round,
        "learning_rate": lambda: engine.learning_rate,
        "save": lambda: engine.save(Path("never")),
        "load": lambda: engine.load(Path("never")),
    }
    return [name for name, call in calls.items() if not refuses(call)]


def _accepted_asleep(engine: TrainEngine, backend: TrainBackend, rows: list[TrainRow]) -> list[str]:
    """What the sleeping engine does not refuse."""
    calls = {"forward": lambda: engine.forward([rows[:1]]), "export_weights": lambda: list(engine.export_weights())}
    return _accepted_learning(engine, backend, rows) + [name for name, call in calls.items() if not refuses(call)]


def refuses(call: Callable[[], Any]) -> bool:
    """Because of the engine's state, not because the arguments are no good."""
    try:
        call()
    except VimeError as error:
        return "is frozen" in str(error) or "sleeps" in str(error)
    return False


def learned(bench: Bench, **plan: Any) -> dict[str, Any]:
    """Two optimizer steps, and the weights after them."""
    _, backend = bench.backend()
    engine, rows = build(bench, backend), make_rows()
    before = {
        "weights": exported(engine),
        "metadata": engine.weight_metadata(),
        "hash": weights_hash(engine) if engine.takes_part_in_export else None,
    }
    steps = make_plan(rows, dp_size=backend.place.dp_size, num_steps=2, **plan).steps
    answer = {"before": before, "steps": [take_step(engine, backend, step, rows) for step in steps]}
    engine.finish_round()
    answer["weights"] = exported(engine)
    backend.close()
    return answer


def critic(bench: Bench, headed: str) -> dict[str, Any]:
    """Values of a critic with its file's head and of one that begins as a language model; two steps of the former."""
    _, backend = bench.backend()
    rows = make_rows()
    plan = make_plan(rows, dp_size=backend.place.dp_size, num_steps=2)
    numbers = [batch for step in plan.steps for batch in step.micro_batches[backend.place.dp_rank]]
    answer: dict[str, Any] = {"values": {}}
    for name, checkpoint in (("headless", None), ("headed", headed)):
        engine = build(bench, backend, Role.CRITIC, checkpoint)
        values = engine.forward([[rows[row] for row in batch] for batch in numbers])
        answer["values"][name] = {
            row: value_R
            for batch, found in zip(numbers, values, strict=bool(values))
            for row, value_R in zip(batch, found, strict=True)
        }
    answer["steps"] = [take_step(engine, backend, step, rows, SquaredError) for step in plan.steps]
    engine.finish_round()
    answer["weights"] = exported(engine)
    backend.close()
    return answer


def not_finite(bench: Bench) -> dict[str, Any]:
    """The gradient norm of a step whose gradient overflows, and the weights before and after."""
    _, backend = bench.backend()
    engine, rows = build(bench, backend), make_rows()
    before = exported(engine)
    [step] = make_plan(rows, dp_size=backend.place.dp_size).steps
    huge = StepPlan(micro_batches=step.micro_batches, num_samples=step.num_samples, num_tokens=1e-38)  # type: ignore[arg-type]
    answer = {"grad_norm": take_step(engine, backend, huge, rows)["grad_norm"], "before": before}
    engine.finish_round()
    answer["after"] = exported(engine)
    backend.close()
    return answer


def interrupted(bench: Bench, directory: Path) -> dict[str, Any]:
    """Three steps: without a break, with sleep and wake between them, and with save and load into another engine."""
    _, backend = bench.backend()
    rows = make_rows()
    steps = make_plan(rows, dp_size=backend.place.dp_size, num_steps=4).steps
    anchor = build(bench, backend, Role.REFERENCE)

    def run(pause: Callable[[TrainEngine], TrainEngine]) -> dict[str, Any]:
        torch.manual_seed(11)
        random.seed(11)
        engine = build(bench, backend)
        taken = [take_step(engine, backend, steps[0], rows)]
        engine.finish_round()
        torch.rand(1)
        engine = pause(engine)
        taken += [take_step(engine, backend, step, rows) for step in steps[1:3]]
        engine.finish_round()
        return {"steps": taken, "draws": (random.random(), float(torch.rand(1))), "weights": exported(engine)}

    def sleep(engine: TrainEngine) -> TrainEngine:
        awake = exported(engine)
        for sleeper in (engine, anchor):
            sleeper.rest()
            sleeper.rest()  # a second call does nothing
            answer[f"resting-{sleeper is anchor}"] = _accepted_learning(sleeper, backend, rows)
        resting = exported(engine)
        answer["exports_alike_at_rest"] = [torch.equal(resting[name], awake[name]) for name in awake]
        engine.wake_up()  # the anchor goes on to sleep from its rest
        for sleeper in (engine, anchor):
            sleeper.rest()
            sleeper.sleep()
            sleeper.sleep()
            sleeper.rest()  # nothing is left to free
            answer[f"asleep-{sleeper is anchor}"] = _accepted_asleep(sleeper, backend, rows)
            sleeper.wake_up()
        return engine

    def save(engine: TrainEngine) -> TrainEngine:
        engine.save(directory)
        torch.rand(3)
        random.random()
        other = build(bench, backend)
        other.load(directory)
        return other

    answer: dict[str, Any] = {}
    before = anchor.forward([rows[:2]])
    answer |= {"straight": run(lambda engine: engine), "slept": run(sleep), "loaded": run(save)}
    after = anchor.forward([rows[:2]])
    answer["frozen"] = [
        torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True)
    ]
    backend.close()
    return answer


def contract_cases(models: Path, work: Path) -> list[Case]:
    """Every case of every setting; `models` holds `qwen2`, `reference` and `critic`."""
    common = {
        "hf_checkpoint": str(models / "qwen2"),
        "rollout_temperature": reference.TEMPERATURE,
        "lr_decay_style": "cosine",
        "min_lr": reference.FINAL_LR,
        "weight_decay": reference.WEIGHT_DECAY,
    }
    cases = []
    for setting, (world, flags) in SETTINGS.items():

        def case(name: str, do: str, **arguments: Any) -> Case:
            return Case(
                name=f"{setting}-{name}",  # noqa: B023  called in this turn of the loop
                do=f"tests.helpers.engine_contract:{do}",
                world=world,  # noqa: B023
                flags={**common, **flags},  # noqa: B023
                arguments=arguments,
            )

        cases += [
            case("forward", "forward", anchor=str(models / "reference")),
            *(case(f"learned-{packing}", "learned", **arguments) for packing, arguments in PACKINGS.items()),
            case("critic", "critic", headed=str(models / "critic")),
            case("not-finite", "not_finite"),
            case("interrupted", "interrupted", directory=work / f"contract-{setting}"),
        ]
        if REPLICAS[setting] > 1:
            cases.append(case("learned-empty-rank", "learned", empty_rank=1))
    return cases
