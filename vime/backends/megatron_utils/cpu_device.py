"""What megatron-core means by "CUDA" on a machine without CUDA: one explicit table of redirected names.

megatron-core 0.16.1 never asks for a device type. It calls `torch.cuda.current_device()` (60 call sites), writes
`device="cuda"` (25) and compares `tensor.type()` with `'torch.cuda.FloatTensor'`. `install()` gives those calls their
CPU meaning. Every redirected name is a row of `REDIRECTIONS` with its reason; nothing else is touched, and nothing at
all when a CUDA device is there.

Who calls it: `initialize.prepare_process`, in trainer processes only. A driver or an engine process never does.

Rejected: patching `torch.tensor` or `torch.zeros` globally. `torch.utils._device` compares the called factory with the
module attribute, so a global patch silently breaks `with torch.device("meta")`, and transformers' `from_pretrained`
then leaves rotary frequencies uninitialised. The factories are therefore redirected only inside the megatron modules
that write `device="cuda"`: such a module sees a `torch` proxy.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vime.backends.megatron_utils.cpu_linear import embedding, keep_few_kernels, with_onednn
from vime.weights.event_loop import one_event_loop

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "zeros_like", "empty_like", "arange")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Redirection:
    """`name` is replaced by `replacement(original)`, because of `reason`."""

    name: str
    reason: str
    replacement: Callable[..., object]  # of one argument, the original


def install(device: torch.device = CPU) -> list[str]:
    """Redirect every name of the table. Returns the names, none when CUDA is there. A second call changes nothing but
    the device: where "CUDA" allocates, the CPU or, for a dry run, `meta`."""
    if torch.cuda.is_available():
        return []
    global _place
    _place = device
    if not _originals:
        keep_few_kernels()
        for entry in REDIRECTIONS:
            owner, attribute = _resolve(entry.name)
            original = getattr(owner, attribute, _MISSING)
            _originals.append((owner, attribute, original))
            setattr(owner, attribute, entry.replacement(original))
    return [entry.name for entry in REDIRECTIONS]


def uninstall() -> None:
    """Put every original back (newest first)."""
    while _originals:
        owner, attribute, original = _originals.pop()
        if original is _MISSING:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)


_place = CPU
_originals: list[tuple[object, str, object]] = []  # (owner, attribute, original) of what is redirected now


def _resolve(path: str) -> tuple[object, str]:
    """`a.b.c.d` -> (object a.b.c, "d"): the longest importable module, then attributes."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            owner: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ImportError(f"cpu_device: no module on the path {path}")


def _constant(value: object) -> Callable[[object], object]:
    """A replacement that ignores the original."""
    return lambda _original: value


def _cpu_factory(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory with `device="cuda..."` read as the CPU, and no pinned memory."""

    @functools.wraps(original)
    def factory(*args: object, **kwargs: object) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _place
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return factory


class _ScopedFunctional(types.ModuleType):
    """`torch.nn.functional` as one megatron module sees it, with an embedding of ours."""

    embedding = staticmethod(embedding)

    def __getattr__(self, name: str) -> object:
        return getattr(torch.nn.functional, name)


class _ScopedTorch(types.ModuleType):
    """`torch` as one megatron module sees it: the factories above are redirected, all else passes through."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in FACTORIES:
            setattr(self, name, _cpu_factory(getattr(torch, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _cuda_type_name(original: Callable[..., str | torch.Tensor]) -> Callable[..., str | torch.Tensor]:
    """`tensor.type()` returns 'torch.cuda.FloatTensor' for a float tensor; `tensor.type(dtype)` is unchanged."""

    @functools.wraps(original)
    def type_of(self: torch.Tensor, *args: object, **kwargs: object) -> str | torch.Tensor:
        name = original(self, *args, **kwargs)
        if isinstance(name, str) and name.startswith("torch.") and not name.startswith("torch.cuda"):
            return "torch.cuda." + name.rpartition(".")[2]  # of a meta tensor 'torch.meta.FloatTensor'
        return name

    return type_of


def _gather_pieces(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """megatron's all-gather along the first dimension, also of pieces that differ in length: NCCL takes them, gloo does
    not, so they travel padded to the longest."""

    @functools.wraps(original)
    def gather(
        piece: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(piece, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = piece.new_zeros(max(sizes), *piece.shape[1:])
        padded[: piece.size(0)] = piece
        everyone = padded.new_empty(len(sizes) * padded.size(0), *padded.shape[1:])
        dist.all_gather_into_tensor(everyone, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(everyone.chunk(len(sizes)), sizes, strict=True)])

    return gather


def _scatter_pieces(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Its counterpart in the backward pass: sum over ranks, and each keeps its piece."""

    @functools.wraps(original)
    def scatter(
        whole: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(whole, group, input_split_sizes, use_global_buffer)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        pieces: tuple[torch.Tensor, ...] = total.split([int(size) for size in input_split_sizes])
        return pieces[group.rank()].clone()

    return scatter


# CPU versions of calls that name a device, a stream or a copy mode: those arguments have no meaning here.
def _do_nothing(*_device: object) -> None:
    return None


def _generator_state(*_device: object, **_options: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_generator_state(state: torch.Tensor, *_device: object, **_options: object) -> None:
    torch.set_rng_state(state)


def _seed_generator(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _itself(tensor: torch.Tensor, *_device: object, **_options: object) -> torch.Tensor:
    return tensor


def _counts_on_cpu(counts: object, as_numpy: bool = False, **_options: object) -> object:
    return counts.numpy() if as_numpy and isinstance(counts, torch.Tensor) else counts


class _NullStream:
    """CPU work is ordered by the program, so waiting for a stream, or for an event recorded on it, is done already."""

    def __init__(self, *_device: object, **_options: object) -> None: ...

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def record_event(self, _event: object = None) -> _NullStream:
        return self


_SCOPED = _constant(_ScopedTorch())

REDIRECTIONS: tuple[Redirection, ...] = (
    Redirection(
        "torch.cuda.current_device",
        "where parameters, gradient buffers, pipeline and tensor-parallel receive buffers are allocated",
        _constant(lambda: _place),
    ),
    Redirection(
        "torch.cuda.synchronize",
        "fence of pipeline messages, timers, checkpoint writer: CPU work is ordered by the program",
        _constant(_do_nothing),
    ),
    Redirection("torch.cuda.manual_seed", "RNG tracker: seed the CPU generator", _constant(_seed_generator)),
    Redirection(
        "torch.cuda.get_rng_state",
        "RNG tracker: state of the CPU generator",
        _constant(_generator_state),
    ),
    Redirection(
        "megatron.core.tensor_parallel.random._get_cuda_rng_state",
        "reads the CUDA generator through lazy initialisation",
        _constant(_generator_state),
    ),
    Redirection(
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        "writes the CUDA generator through a lazy call that never runs without CUDA",
        _constant(_set_generator_state),
    ),
    Redirection("megatron.core.pipeline_parallel.schedules.torch", 'device="cuda": token counter', _SCOPED),
    Redirection("megatron.core.optimizer.optimizer.torch", 'device="cuda": scale, found_inf, overflow buffer', _SCOPED),
    Redirection("megatron.core.optimizer.clip_grads.torch", 'device="cuda": gradient norm scalars', _SCOPED),
    Redirection("megatron.core.utils.torch", 'device="cuda": local L2 norm', _SCOPED),
    Redirection("torch.cuda.Stream", "MoE dispatcher: a stream that copies token counts", _constant(_NullStream)),
    Redirection(
        "torch.cuda.current_stream", "MoE dispatcher: waits for that stream", _constant(lambda *_device: _NullStream())
    ),
    Redirection("megatron.core.transformer.moe.moe_utils.torch", 'device="cuda": router counters', _SCOPED),
    Redirection(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "turns token counts into numpy for all_to_all_single only when they are on a GPU",
        _constant(_counts_on_cpu),
    ),
    Redirection(
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
        "tensor-parallel experts gather different numbers of tokens, which gloo cannot",
        _gather_pieces,
    ),
    Redirection(
        "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
        "the same, backward",
        _scatter_pieces,
    ),
    Redirection(
        "torch.distributed.distributed_c10d.ProcessGroupGloo",
        "a group's event loop costs the training 0.1 % of a core, and megatron makes two dozen groups",
        one_event_loop,
    ),
    Redirection(
        "megatron.core.tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce",
        "torch's fp32 products run at half the speed of the core on many CPUs",
        with_onednn,
    ),
    Redirection(
        "megatron.core.tensor_parallel.layers.linear_with_frozen_weight",
        "the same, for models that do not learn",
        with_onednn,
    ),
    Redirection(
        "megatron.core.tensor_parallel.layers.F",
        "the gradient of an embedding is as large as the vocabulary, however few tokens there are",
        _constant(_ScopedFunctional("torch.nn.functional")),
    ),
    Redirection(
        "torch.Tensor.cuda",
        "tied-embedding initialisation, optimizer checkpoint gather",
        _constant(_itself),
    ),
    Redirection(
        "torch.Tensor.type", "optimizers compare tensor.type() with 'torch.cuda.FloatTensor' and raise", _cuda_type_name
    ),
)
