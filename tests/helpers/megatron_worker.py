"""What each process of the megatron tests does: one case after another, each with a trainer of its own.

A case names its world size; ranks beyond it sit it out. Answers are plain numbers and tensors by case name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import reference_policy
from tests.helpers.dist_launch import Ranks, launch
from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.routing import perturbed, with_foreign_experts, with_own_experts
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.protocols import TrainBackend
from vime.ray.backends import make_backend
from vime.training.export import save_hf, weights_hash
from vime.training.worker import TrainWorker
from vime.types import RankInfo, Role, VimeError, may_pass

TOTAL_STEPS = 8
TENSORS = (torch.Tensor, torch.nn.Parameter)
OVERLAPPING = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`do` is a function below, or `package.module:function`; `flags` are changes to the configuration."""

    name: str
    do: str
    world: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


Answers = Callable[[str], list[Any]]
"""Case name -> the answer of each rank that took part."""


def answers_of(cases: Sequence[Case], *, directory: Path, deadline_s: float = 600) -> Answers:
    """Run `cases` in one launch of as many processes as the largest of them needs."""
    by_rank = launch(
        "tests.helpers.megatron_worker:run",
        world_size=max(case.world for case in cases),
        directory=directory,
        arguments={"cases": list(cases)},
        deadline_s=deadline_s,
        preload="tests.helpers.megatron_worker:import_backends",
    )
    return lambda name: [rank[name] for rank in by_rank if name in rank]


def import_backends() -> None:
    """Both backends on the CPU, as a process that has closed a trainer of each has them."""
    from vime.backends.megatron_utils import cpu_device, initialize

    initialize.prepare_process("cpu")
    cpu_device.uninstall()
    import vime.backends.fsdp_utils.engine
    import vime.backends.megatron_utils.engine  # noqa: F401


def run(ranks: Ranks, cases: list[Case]) -> dict[str, Any]:
    """Answers by case name. Cases of one process are dealt out to the ranks, which work on them side by side."""
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(1)
    answers, dealer = {}, itertools.cycle(range(ranks.world_size))
    for case in cases:
        if case.world == 1:
            mine, role = next(dealer) == ranks.rank, dataclasses.replace(ranks, rank=0)
        else:
            mine, role = ranks.rank < case.world, ranks
        if mine:
            try:
                answers[case.name] = _function(case.do)(Bench(role, case), **case.arguments)
            except BaseException as error:
                error.add_note(f"in case {case.name}")
                raise
    return answers


def _function(name: str) -> Callable[..., dict[str, Any]]:
    module, separator, function = name.rpartition(":")
    return getattr(importlib.import_module(module), function) if separator else globals()[function]


class Bench:
    """Makes trainers for one case."""

    def __init__(self, ranks: Ranks, case: Case) -> None:
        self.ranks, self.case = ranks, case

    def trainer(self, **flags: Any) -> TrainWorker:
        config, backend = self.backend(**flags)
        return TrainWorker(config, backend, total_steps=TOTAL_STEPS)

    def backend(self, **flags: Any) -> tuple[Config, TrainBackend]:
        """A trainer rank without engines, and the configuration it was made of."""
        defaults = {
            "device": "cpu",
            "distributed_backend": "gloo",
            "distributed_timeout_minutes": 1.0,
            "lr": 1e-3,
            # far above the gradients' rounding noise, so that Adam does not turn noise into full steps
            "adam_eps": 1e-3,
            "micro_batch_size": 3,
        }
        config = Config().replace(**{**defaults, **self.case.flags, **flags})
        rank = RankInfo(
            rank=self.ranks.rank,
            world_size=self.case.world,
            local_rank=self.ranks.rank,
            master_address="127.0.0.1",
            master_port=self.ranks.rendezvous(f"{self.case.name}-{self.case.world}", self.case.world),
        )
        return config, make_backend(config, rank)


def imported(bench: Bench) -> dict[str, Any]:
    """Log-probabilities of the weights as loaded, and what is exported of them."""
    trainer = bench.trainer()
    answer = {
        "log_probs": trainer.log_probs(make_rows()),
        "weights": exported(trainer),
        "metadata": trainer.actor.weight_metadata(),
        "hash": weights_hash(trainer.actor),
    }
    trainer.backend.close()
    return answer


def shown(bench: Bench) -> dict[str, Any]:
    """Log-probabilities of the weights as loaded, what is exported of them, and a round of two steps."""
    trainer, rows = bench.trainer(), make_rows()
    answer = {"log_probs": trainer.log_probs(rows), "before": exported(trainer)}
    plan = make_plan(rows, dp_size=trainer.place.dp_size, num_steps=2)
    answer |= {"metrics": trainer.train_round(plan, dict(enumerate(rows))), "weights": exported(trainer)}
    trainer.backend.close()
    return answer


def trained_by_onednn(bench: Bench, **plan: Any) -> dict[str, Any]:
    """`trained`, with each product of a linear layer by oneDNN, however small."""
    from vime.backends.megatron_utils import cpu_linear

    usual, cpu_linear.MIN_FLOPS = cpu_linear.MIN_FLOPS, 1
    try:
        return trained(bench, **plan)
    finally:
        cpu_linear.MIN_FLOPS = usual


def trained_in_chunks(bench: Bench, **plan: Any) -> dict[str, Any]:
    """`trained`, with logits of 5 rows at a time, and gradients of a few rows of a weight at a time, by oneDNN too."""
    from vime.backends.megatron_utils import cpu_linear, model

    usual = model.LOGIT_ENTRIES, cpu_linear.BLOCK_ENTRIES
    # of 99 tokens (100 with a padded one, over two tensor-parallel ranks, each of which then holds 10 rows)
    model.LOGIT_ENTRIES, cpu_linear.BLOCK_ENTRIES = {"cpu": 5 * 100}, 300
    try:
        return trained_by_onednn(bench, **plan)
    finally:
        model.LOGIT_ENTRIES, cpu_linear.BLOCK_ENTRIES = usual


def trained_in_groups(bench: Bench, is_shared: bool, **plan: Any) -> dict[str, Any]:
    """`trained`, on rows of which those of a group have one prompt. `is_shared`: it is computed once, however many
    calls of attention that takes; else for each row."""
    from vime.backends.megatron_utils import step

    rows = make_rows()
    for number, row in enumerate(rows):
        first = rows[number - number % 4]
        prompt = first.tokens[: len(first.tokens) - first.response_length]
        answer = row.tokens[len(row.tokens) - row.response_length :]
        rows[number] = dataclasses.replace(row, tokens=[*prompt, *answer])
    usual, step._tokens_per_call = step._tokens_per_call, lambda _chunks: 0.0 if is_shared else None
    try:
        return trained(bench, rows=rows, **plan)
    finally:
        step._tokens_per_call = usual


def trained(
    bench: Bench, rounds: int = 1, experts: str | None = None, rows: list[TrainRow] | None = None, **plan: Any
) -> dict[str, Any]:
    """Metrics of each round, and the weights after the last. `experts`: what the rows say of routing, see `routed`."""
    rows = rows or (make_rows() if experts is None else routed(experts, bench.case.flags["hf_checkpoint"]))
    trainer = bench.trainer()
    metrics = [
        trainer.train_round(make_plan(rows, dp_size=trainer.place.dp_size, **plan), dict(enumerate(rows)))
        for _ in range(rounds)
    ]
    answer = {
        "metrics": metrics,
        "weights": exported(trainer),
        "hash": weights_hash(trainer.actor),
        "place": (trainer.place.dp_rank, trainer.place.dp_size, trainer.place.is_source, trainer.place.source_rank),
    }
    trainer.backend.close()
    return answer


def routed(experts: str, model: str) -> list[TrainRow]:
    """Rows with foreign experts, with those of the model itself, or of the model with other routers; the latter two
    with the log-probabilities that belong to them."""
    if experts == "foreign":
        return with_foreign_experts(make_rows())
    engine = reference_policy.load(Path(model))
    return with_own_experts(engine if experts == "own" else perturbed(engine, scale=0.1), make_rows())


def resumed(
    bench: Bench, directory: Path, then: dict[str, Any] | None = None, in_background: bool = False
) -> dict[str, Any]:
    """Train two rounds with a checkpoint between them; load it in a new trainer (flags `then`) and train the second.

    `in_background`: the first byte is written when the second round is over.
    """
    rows = dict(enumerate(make_rows()))

    def second_round(trainer: TrainWorker, before_close: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        plan = make_plan(list(rows.values()), dp_size=trainer.place.dp_size, num_steps=2)
        draws = (random.random(), float(torch.rand(1)))
        metrics = trainer.train_round(plan, rows)
        answer = {"draws": draws, "metrics": metrics, "hash": weights_hash(trainer.actor), "weights": exported(trainer)}
        if Role.CRITIC in trainer.engines:
            answer["critic"] = exported(trainer, Role.CRITIC)
        before_close()
        trainer.backend.close()
        return answer

    trainer = bench.trainer()
    trainer.train_round(make_plan(list(rows.values()), dp_size=trainer.place.dp_size, num_steps=2), rows)
    random.random(), torch.rand(1)  # the random states are not those of the seed
    saved = weights_hash(trainer.actor)
    if in_background:
        with held_writing() as release:
            written = trainer.save(directory, in_background=True)
            never_stopped = second_round(trainer, before_close=lambda: (release(), [one.wait(60) for one in written]))
    else:
        trainer.save(directory)
        never_stopped = second_round(trainer)
    trainer = bench.trainer(**(then or {}))
    trainer.load(directory)
    loaded = weights_hash(trainer.actor)
    return {"saved": saved, "loaded": loaded, "never_stopped": never_stopped, "resumed": second_round(trainer)}


def resumed_with_buckets(bench: Bench, bucket_size: int, **arguments: Any) -> dict[str, Any]:
    """`resumed` with buckets of so many parameters, as a model of over 40 million has with --overlap-grad-reduce."""
    from vime.backends.megatron_utils import optimizer

    config = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = lambda **flags: config(bucket_size=bucket_size, **flags)
    try:
        return resumed(bench, **arguments)
    finally:
        optimizer.DistributedDataParallelConfig = config


@contextlib.contextmanager
def held_writing() -> Iterator[Callable[[], None]]:
    """No checkpoint file is begun on this rank until the yielded function is called."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    opened, original = threading.Event(), FileSystemWriterAsync.write_preloaded_data

    def held(*args: Any, **kwargs: Any) -> None:
        assert opened.wait(60)
        original(*args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(held)
    try:
        yield opened.set
    finally:
        opened.set()
        FileSystemWriterAsync.write_preloaded_data = staticmethod(original)


def failed_in_background(bench: Bench, directory: Path) -> dict[str, Any]:
    """The disk of rank 1 is full while a round is trained; the round's metrics, the error of every rank, and that the
    next save works."""
    trainer = bench.trainer()
    rows = dict(enumerate(make_rows()))
    plan = make_plan(list(rows.values()), dp_size=trainer.place.dp_size)
    trainer.train_round(plan, rows)
    trainer.save(directory / "before")
    with held_writing() as release:
        [pending] = trainer.save(directory / "full", in_background=True)
        metrics = trainer.train_round(plan, rows)
        if trainer.place.rank == 1:
            shutil.rmtree(directory / "full")  # stands for any OSError of one rank: its file cannot be made
        dist.barrier()
        release()
        error = _error_of(lambda: pending.wait(60))
    trainer.save(directory / "after", in_background=True)[0].wait(60)
    trainer.load(directory / "before")
    trainer.load(directory / "after")
    trainer.backend.close()
    return {"metrics": metrics, "error": error}


def killed_while_writing(ranks: Ranks, model: Path, directory: Path) -> dict[str, Any]:
    """Rank 1 is killed before it wrote a byte of the second checkpoint; rank 0 hears it, and the first still loads."""
    rows = dict(enumerate(make_rows()))
    case = Case(name="killed", do="", world=ranks.world_size, flags={"hf_checkpoint": str(model), **OVERLAPPING})
    trainer = Bench(ranks, case).trainer()
    plan = make_plan(list(rows.values()), dp_size=trainer.place.dp_size)
    trainer.train_round(plan, rows)
    trainer.save(directory / "first")
    saved = weights_hash(trainer.actor)
    with held_writing() as release:
        [pending] = trainer.save(directory / "second", in_background=True)
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        release()
        started = time.monotonic()
        try:
            pending.wait(60)
            may_restart = None
        except Exception as error:
            may_restart = may_pass(error)
    answer = {"may_restart": may_restart, "heard_after_s": time.monotonic() - started}
    trainer.backend.close()
    alone = Bench(dataclasses.replace(ranks, world_size=1), dataclasses.replace(case, world=1)).trainer()
    alone.load(directory / "first")
    second = _error_of(lambda: alone.load(directory / "second"))
    answer |= {"saved": saved, "loaded": weights_hash(alone.actor), "second": second}
    alone.backend.close()
    return answer


def saved_hf(bench: Bench, directory: Path) -> dict[str, Any]:
    trainer = bench.trainer()
    rows = make_rows()
    trainer.train_round(make_plan(rows, dp_size=trainer.place.dp_size), dict(enumerate(rows)))
    save_hf(trainer.actor, directory, source=Path(trainer._config.model.hf_checkpoint))
    in_buckets = dict(trainer.actor._hf.export(bucket_bytes=5_000))  # less than the larger tensors
    answer = {"weights": exported(trainer), "log_probs": trainer.log_probs(rows), "in_buckets": in_buckets}
    trainer.backend.close()
    return answer


def asleep(bench: Bench) -> dict[str, float]:
    """Bytes of device memory, per parameter of this rank, that sleep gives back and waking takes again."""
    trainer, rows = bench.trainer(), make_rows()
    plan, numbered = make_plan(rows, dp_size=trainer.place.dp_size), dict(enumerate(rows))
    trainer.train_round(plan, numbered)
    engine = trainer.actor
    num_parameters = sum(parameter.numel() for chunk in engine._core for parameter in chunk.parameters())
    device = trainer.backend.device
    awake = _allocated_bytes(device)
    trainer.sleep()
    # on the CPU the copies are tensors like the others
    host = sum(copy.nbytes for _, copy in engine._offload._kept) if device.type == "cpu" else 0
    sleeping = _allocated_bytes(device) - host
    trainer.wake_up()
    again = _allocated_bytes(device)
    trainer.backend.close()
    return {"freed": (awake - sleeping) / num_parameters, "taken": (again - sleeping) / num_parameters}


def _allocated_bytes(device: torch.device) -> int:
    """On the CPU: of every storage that some tensor of this process holds."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = [found.untyped_storage() for found in gc.get_objects() if type(found) in TENSORS]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def trained_exports(ranks: Ranks, models: dict[str, Path], directory: Path) -> dict[str, list[torch.Tensor]]:
    """Each model trained for a round and exported to DIRECTORY/<name>; its log-probabilities of the rows."""
    answers, rows = {}, make_rows()
    for name, model in models.items():
        case = Case(name=name, do="", world=ranks.world_size, flags={"hf_checkpoint": str(model)})
        trainer = Bench(ranks, case).trainer()
        trainer.train_round(make_plan(rows, dp_size=trainer.place.dp_size), dict(enumerate(rows)))
        save_hf(trainer.actor, directory / name, source=model)
        answers[name] = trainer.log_probs(rows)
        trainer.backend.close()
    return answers


def failed(bench: Bench, method: str, argument: Path) -> dict[str, Any]:
    """The error of `load` or `save` on this rank."""
    trainer = bench.trainer()
    answer = {"error": _error_of(lambda: getattr(trainer, method)(argument))}
    trainer.backend.close()
    return answer


def failed_on_a_full_disk(bench: Bench, directory: Path) -> dict[str, Any]:
    """The error of `save` where the device of its first file has no room."""
    directory.mkdir()
    (directory / "common.pt").symlink_to("/dev/full")
    return failed(bench, "save", directory)


def failed_round(bench: Bench, reward: float) -> dict[str, Any]:
    """The error of a round whose row 5 has this reward, and the weights before and after."""
    trainer = bench.trainer()
    before = weights_hash(trainer.actor)
    rows = [dataclasses.replace(row, reward=reward) if i == 5 else row for i, row in enumerate(make_rows())]
    plan = make_plan(rows, dp_size=trainer.place.dp_size)
    error = _error_of(lambda: trainer.train_round(plan, dict(enumerate(rows))))
    answer = {"error": error, "before": before, "after": weights_hash(trainer.actor)}
    trainer.backend.close()
    return answer


def failed_handoff(bench: Bench) -> dict[str, Any]:
    """The error of a round whose row 3 was not delivered; each rank gets its own rows only."""
    trainer = bench.trainer()
    rows = make_rows()
    plan = make_plan(rows, dp_size=trainer.place.dp_size)
    mine = {number: rows[number] for number in plan.rows_of(trainer.place.dp_rank)}
    works = trainer.train_round(plan, mine)["train/num_samples"] == len(rows)
    answer = {"works": works, "error": None}
    if 3 in mine:
        del mine[3]
        answer["error"] = _error_of(lambda: trainer.train_round(plan, mine))
    trainer.backend.close()
    return answer


def loaded_from_cuda(bench: Bench, directory: Path) -> dict[str, Any]:
    """What a checkpoint restores whose random states are those of another kind of device."""
    trainer = bench.trainer()
    rows = make_rows()
    trainer.train_round(make_plan(rows, dp_size=trainer.place.dp_size), dict(enumerate(rows)))
    torch.rand(1)
    trainer.save(directory)
    saved = weights_hash(trainer.actor)
    trainer.backend.close()
    common = torch.load(directory / "common.pt", weights_only=False)
    common["layout"]["device"] = "cuda"
    torch.save(common, directory / "common.pt")
    trainer = bench.trainer()
    seeded = torch.get_rng_state()
    trainer.load(directory)
    answer = {
        "is_seeded": torch.equal(torch.get_rng_state(), seeded),
        "saved": saved,
        "loaded": weights_hash(trainer.actor),
    }
    trainer.backend.close()
    return answer


def failed_load(bench: Bench, directory: Path, truncate: str | None = None, **flags: Any) -> dict[str, Any]:
    """The error of loading a checkpoint after its files that match `truncate` were cut in half, or with other flags."""
    trainer = bench.trainer()
    trainer.save(directory)
    trainer.backend.close()
    trainer = bench.trainer(**flags)
    if truncate is not None and trainer.place.rank == 0:
        for file in directory.glob(truncate):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    dist.barrier()
    answer = {"error": _error_of(lambda: trainer.load(directory))}
    trainer.backend.close()
    return answer


def _error_of(call: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        call()
    except VimeError as caught:
        return type(caught).__name__, str(caught)
    return None


def unbuildable(bench: Bench) -> str:
    """Why a trainer cannot be built."""
    from vime.backends.megatron_utils import initialize

    try:
        bench.trainer()
    except VimeError as caught:
        return str(caught)
    finally:
        initialize.shut_down()
    return ""


def vocabulary_cut(bench: Bench, vocab_size: int, temperature: float) -> dict[str, float]:
    """Largest differences of value and gradient between cut logits and one float64 softmax over the true vocabulary."""
    from megatron.core import parallel_state

    from vime.backends.logprobs import logprobs_and_entropy

    trainer = bench.trainer()
    group = parallel_state.get_tensor_model_parallel_group()
    columns = -(-vocab_size // group.size())
    draw = torch.Generator().manual_seed(1)
    logits_TV = 3 * torch.randn(37, columns * group.size(), generator=draw)
    target_T = torch.randint(0, vocab_size, (37,), generator=draw)
    weight_T = torch.randn(37, generator=draw)
    mine = slice(group.rank() * columns, (group.rank() + 1) * columns)
    here = logits_TV[:, mine].clone().requires_grad_()
    logp_T, entropy_T = logprobs_and_entropy(
        here * 1, target_T, temperature=temperature, vocab_size=vocab_size, group=group
    )
    (logp_T * weight_T + entropy_T * weight_T.flip(0)).sum().backward()
    whole = logits_TV[:, :vocab_size].double().requires_grad_()
    log_p = (whole / temperature).log_softmax(-1)
    true_logp_T = log_p.gather(-1, target_T.unsqueeze(-1)).squeeze(-1)
    true_entropy_T = -(log_p.exp() * log_p).sum(-1)
    (true_logp_T * weight_T + true_entropy_T * weight_T.flip(0)).sum().backward()
    padded = torch.nn.functional.pad(whole.grad, (0, columns * group.size() - vocab_size))
    trainer.backend.close()
    return {
        "logp": float((logp_T - true_logp_T).abs().max()),
        "entropy": float((entropy_T - true_entropy_T).abs().max()),
        "gradient": float((here.grad - padded[:, mine]).abs().max()),
        "gradient_size": float(padded.abs().max()),
    }


def device_layer(bench: Bench) -> dict[str, Any]:
    """What is redirected after importing the package, while a trainer lives, and after it closed."""
    from vime.backends.megatron_utils import cpu_device

    def state() -> list[Any]:
        found = [cpu_device._resolve(entry.name) for entry in cpu_device.REDIRECTIONS]
        return [getattr(owner, attribute, None) for owner, attribute in found]

    import vime.backends.megatron_utils.engine  # noqa: F401  every module of the package, before any trainer

    imported_state, factory = state(), torch.tensor
    trainer = bench.trainer()
    living_state = state()
    answer = {
        "redirected_while_living": [
            entry.name
            for entry, old, new in zip(cpu_device.REDIRECTIONS, imported_state, living_state, strict=True)
            if old is not new
        ],
        "factories_untouched": torch.tensor is factory,
        "meta_device": str(_made_on_meta()),
        "second_install": cpu_device.install(),
        "event_loops": sum(
            task.joinpath("comm").read_text().startswith("gloo") for task in Path("/proc/self/task").iterdir()
        ),
    }
    trainer.backend.close()
    answer["restored"] = state() == imported_state
    return answer


def _made_on_meta() -> torch.device:
    with torch.device("meta"):
        return torch.tensor([1.0]).device


def exported(trainer: TrainWorker, role: Role = Role.ACTOR) -> dict[str, torch.Tensor]:
    """The export stream; an order or name that differs from the metadata shows in the test of `imported`."""
    return {name: tensor.cpu().clone() for name, tensor in trainer.engines[role].export_weights()}
