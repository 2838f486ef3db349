"""Trainers whose optimizer lies in host memory beside those whose does not, as cases for `megatron_worker.run`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.megatron_cases import DISTRIBUTED, EP2, OVERLAP, PP2, TP2
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Bench, Case, _allocated_bytes
from vime.training.export import weights_hash
from vime.training.worker import TrainWorker

HOST = {"optimizer_cpu_offload": True}
BF16 = {"bf16": True}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "single": (1, "qwen2", {}),
    "single-bf16": (1, "qwen2", BF16),
    "tp2-bf16": (2, "qwen3", {**TP2, **BF16}),
    "dp2-distributed": (2, "qwen2", DISTRIBUTED),
    "dp2-distributed-bf16": (2, "qwen2", {**DISTRIBUTED, **BF16}),
    "pp2-bf16": (2, "qwen2_tied", {**PP2, **BF16}),
    "dp2-overlap-bf16": (2, "qwen2", {**OVERLAP, **BF16}),
    "moe-ep2": (2, "qwen3_moe", EP2),
    "moe-ep2-distributed-bf16": (2, "qwen3_moe", {**EP2, **DISTRIBUTED, **BF16}),
}
"""Name -> world size, model, flags."""
PARTIAL = {"half": 0.5, "little": 0.01}
"""Shares on the host, under `dp2-distributed-bf16`."""
USUAL = ("tp2-bf16", "dp2-distributed-bf16", "moe-ep2", "narrow-fp32")
"""The representatives; the others are nightly."""


def cases(models: Path, work: Path) -> list[Case]:
    def case(name: str, do: str, world: int, kind: str, flags: dict[str, Any], **arguments: Any) -> Case:
        shared = {"hf_checkpoint": str(models / kind), "clip_grad": 0.05, "lr_decay_style": "linear"}
        where = f"tests.helpers.offload_cases:{do}"
        return Case(name=name, do=where, world=world, flags={**shared, **flags}, arguments=arguments)

    whole = [
        case(name, "compared", world, kind, flags, directory=work / "host" / name)
        for name, (world, kind, flags) in LAYOUTS.items()
    ]
    world, kind, flags = LAYOUTS["dp2-distributed-bf16"]
    partial = [
        case(f"share-{name}", "compared", world, kind, flags, directory=work / "share" / name, share=share)
        for name, share in PARTIAL.items()
    ]
    narrow = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    return [
        *whole,
        *partial,
        case("narrow", "narrowed", world, kind, flags, directory=work / "narrow", narrow=narrow),
        case("narrow-fp32", "narrowed", 1, kind, {}, directory=work / "narrow-fp32", narrow=narrow),
        case(
            "weights-only", "compared", world, kind, {**flags, "no_save_optim": True}, directory=work / "weights-only"
        ),
        Case(
            name="background",
            do="resumed",
            world=2,
            flags={"hf_checkpoint": str(models / "qwen3"), **TP2, **BF16, **HOST},
            arguments={"directory": work / "background-host", "in_background": True},
        ),
        case("with-te", "compared", world, kind, flags, directory=work / "with-te", as_with_te=True),
    ]


def compared(bench: Bench, directory: Path, share: float = 1.0, as_with_te: bool = False) -> dict[str, Any]:
    """Two rounds without and with the state on the host; the second again from either's checkpoint in the other.

    `as_with_te`: megatron looks for the number of steps where Transformer Engine's Adam has it, where ours runs.
    """
    host = {**HOST, "optimizer_offload_fraction": share}
    answer: dict[str, Any] = {}
    for name, flags in (("plain", {}), ("host", host)):
        with _small_buckets(), _as_with_te(as_with_te and name == "host"), _gradients_while_built() as gradients:
            trainer = bench.trainer(**flags)
            first = _round(trainer)
            trainer.save(directory / name)
            answer[name] = {"first": first, "gradients_while_built": gradients}
            answer[name] |= {"dropped": _dropped_step(trainer), "slept": _slept(trainer)}
            answer[name] |= {"second": _round(trainer)}
            trainer.backend.close()
    pairs = [("plain", "host", host), ("host", "host", host)]
    if not as_with_te:
        pairs.append(("host", "plain", {}))
    for written, by, flags in pairs:
        with _small_buckets(), _as_with_te(as_with_te and by == "host"):
            trainer = bench.trainer(**flags)
            trainer.load(directory / written)
            answer[f"{written}-in-{by}"] = {"loaded": _state(trainer), "second": _round(trainer)}
            trainer.backend.close()
    return answer


def narrowed(bench: Bench, directory: Path, narrow: dict[str, str]) -> dict[str, Any]:
    """Rounds with moments in bf16, on the device and on the host, and from the checkpoint of either in the other, and
    in one with moments in fp32."""
    answer: dict[str, Any] = {}
    for name, flags in (("fp32", {}), ("device", narrow), ("host", {**narrow, **HOST})):
        with _small_buckets():
            trainer = bench.trainer(**flags)
            first = _round(trainer)
            trainer.save(directory / name)
            answer[name] = {"first": first, "second": _round(trainer)}
            trainer.backend.close()
    for written, flags in (("device", {**narrow, **HOST}), ("host", narrow), ("host", {}), ("fp32", narrow)):
        trainer = bench.trainer(**flags)
        trainer.load(directory / written)
        name = f"{written}-in-{'host' if 'optimizer_cpu_offload' in flags else 'device' if flags else 'fp32'}"
        answer[name] = {"loaded": _state(trainer), "second": _round(trainer)}
        trainer.backend.close()
    return answer


def measured(bench: Bench) -> dict[str, Any]:
    """Three rounds of two steps. Bytes for each parameter: on the device between steps, at most during the last round,
    and page-locked on the host."""
    with _small_buckets():
        trainer = bench.trainer()
        _round(trainer)
        _round(trainer)
        device, optimizer = trainer.backend.device, trainer.actor._optimizer
        count = sum(parameter.numel() for chunk in trainer.actor._core for parameter in chunk.parameters())
        held = _allocated_bytes(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        rows = make_rows()
        metrics = trainer.train_round(make_plan(rows, dp_size=1, num_steps=2), dict(enumerate(rows)))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        locked = [tensor for tensor in optimizer.host_tensors() if tensor.is_pinned()] if peak else []
        answer = {
            "metrics": metrics,
            "hash": weights_hash(trainer.actor),
            "held": held / count,
            "peak": peak / count,
            "locked": sum(tensor.nbytes for tensor in locked) / count,
        }
        trainer.backend.close()
    return answer


def _round(trainer: TrainWorker) -> dict[str, Any]:
    rows = make_rows()
    plan = make_plan(rows, dp_size=trainer.place.dp_size, num_steps=2)
    metrics = trainer.train_round(plan, dict(enumerate(rows)))
    return {"metrics": metrics, "hash": weights_hash(trainer.actor), **_state(trainer)}


def _state(trainer: TrainWorker) -> dict[str, Any]:
    """Of each parameter of this rank, in order: what the optimizer steps on, both moments and the number of steps.
    Before its first step torch's own has none: zeros."""
    found: dict[str, list[Tensor]] = {"main": [], "exp_avg": [], "exp_avg_sq": [], "step": []}
    for part in trainer.actor._optimizer.parts:
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            for parameter in group["params"]:
                found["main"].append(parameter.detach().clone())
                state = part.optimizer.state.get(parameter, {})
                for name in ("exp_avg", "exp_avg_sq"):
                    found[name].append(state[name].clone() if name in state else torch.zeros_like(parameter.detach()))
                found["step"].append(state.get("step", torch.tensor(0.0)).clone())
    return {"state": found}


def _dropped_step(trainer: TrainWorker) -> dict[str, Any]:
    """A gradient that is not finite: what the step returns, and whether it changed anything."""
    before, optimizer = _state(trainer), trainer.actor._optimizer
    optimizer.zero_grad()
    optimizer.chunks[0].buffers[0].grad_data[0] = math.inf  # on every rank, as after the sum over ranks
    norm = optimizer.step()
    return {"norm": norm, "is_unchanged": _equal(before["state"], _state(trainer)["state"])}


def _slept(trainer: TrainWorker) -> dict[str, Any]:
    """Bytes that a sleep moved, those of the optimizer and the weights, and whether all are what they were."""
    before, engine = _state(trainer), trainer.actor
    host = [tensor.data_ptr() for tensor in engine._optimizer.host_tensors()]
    trainer.sleep()
    moved = sum(copy.nbytes for _, copy in engine._offload._kept)
    on_host = sum(tensor.nbytes for tensor in engine._optimizer.host_tensors())
    trainer.wake_up()
    return {
        "moved": moved,
        "on_host": on_host,
        "parameters": sum(parameter.numel() for chunk in engine._core for parameter in chunk.parameters()),
        "is_unchanged": _equal(before["state"], _state(trainer)["state"]),
        "stayed": host == [tensor.data_ptr() for tensor in engine._optimizer.host_tensors()],
    }


def _equal(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> bool:
    return all(
        len(one[name]) == len(other[name])
        and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one[name], other[name], strict=True))
        for name in one
    )


@contextlib.contextmanager
def _small_buckets() -> Iterator[None]:
    """A step of a tiny model takes many buckets, which cut parameters."""
    from vime.backends.megatron_utils import host_adam

    usual = host_adam.BUCKET, host_adam.GRAIN
    host_adam.BUCKET, host_adam.GRAIN = 1024, 64
    try:
        yield
    finally:
        host_adam.BUCKET, host_adam.GRAIN = usual


@contextlib.contextmanager
def _gradients_while_built() -> Iterator[list[int]]:
    """Yield the bytes of the gradients while megatron makes an optimizer, one number for each."""
    from vime.backends.megatron_utils import optimizer as module

    usual, found = module.get_megatron_optimizer, list[int]()

    def watched(config: Any, chunks: Any, **more: Any) -> Any:
        found.append(sum(buffer.grad_data.untyped_storage().nbytes() for chunk in chunks for buffer in chunk.buffers))
        return usual(config, chunks, **more)

    module.get_megatron_optimizer = watched
    try:
        yield found
    finally:
        module.get_megatron_optimizer = usual


@contextlib.contextmanager
def _as_with_te(is_on: bool) -> Iterator[None]:
    from megatron.core.optimizer import distrib_optimizer as module

    usual = module.HAVE_APEX_OR_TE, module.USING_TE_OPTIMIZER
    if is_on:
        module.HAVE_APEX_OR_TE, module.USING_TE_OPTIMIZER = True, True
    try:
        yield
    finally:
        module.HAVE_APEX_OR_TE, module.USING_TE_OPTIMIZER = usual
