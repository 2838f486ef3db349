"""Adam whose state lies in host memory, or whose moments are kept in bf16; a step is computed on the device, in fp32.

Between two steps the main weights (fp32, of a model in bf16) and both moments lie in host memory, page-locked, one
after the other in a few large tensors. A step takes them bucket by bucket: a bucket comes to the device, torch's fused
AdamW computes it there with the gradients where they are, the model's weights are written, and the bucket goes back.
Three buckets are on the way at a time, so copies in both directions and arithmetic overlap. The kernel is that of a run
without this, so the numbers are the same, bit for bit.

megatron-core's own HybridDeviceOptimizer is not used, see docs/decisions/0050.

A main weight is a tensor of the host, which torch gives no gradient of the device: during a step it stands for one
element of the device (`on_device`), so that megatron's code for gradients and norms is the same with and without.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import StateDict

from vime.backends.offload import lock_pages

BUCKET = 2**23
"""Elements that come to the device at once: 32 MiB of each tensor in fp32, enough for the full rate of a bus."""
IN_FLIGHT = 3  # one comes, one is computed, one goes
GRAIN = 2**12  # a bucket ends at a multiple of this inside a parameter: far above any vector of a processor
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Settings(TypedDict):
    """Of a group, as torch and megatron's schedule write them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `begin` to `end` of a parameter, from `at` on in the tensors of its shelf."""

    parameter: Tensor
    begin: int
    end: int
    at: int


Bucket = tuple[Piece, ...]


def cut(sizes: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Cut tensors of `sizes` elements, which lie one behind the other, into buckets of at most `most` (a multiple of
    GRAIN): (number of the tensor, begin, end)."""
    buckets: list[list[tuple[int, int, int]]] = [[]]
    room = most
    for number, size in enumerate(sizes):
        begin = 0
        while begin < size:
            fits = min(size - begin, room if size - begin <= room else room // GRAIN * GRAIN)
            if fits:
                buckets[-1].append((number, begin, begin + fits))
                begin, room = begin + fits, room - fits
            if begin < size:
                buckets.append([])
                room = most
    return [bucket for bucket in buckets if bucket]


@dataclass(frozen=True, slots=True)
class Shelf:
    """State of parameters of one group, in one place. `main` holds those that are copies of weights in 16 bits; it is
    there on the host only."""

    tensors: dict[str, Tensor]
    buckets: list[Bucket]
    is_host: bool

    @property
    def pieces(self) -> list[Piece]:
        return [piece for bucket in self.buckets for piece in bucket]

    @property
    def longest(self) -> int:
        """Elements of the longest bucket."""
        return max(sum(piece.end - piece.begin for piece in bucket) for bucket in self.buckets)


class HostAdam(torch.optim.AdamW):
    """Takes the place of the Adam inside of a megatron optimizer, whose groups and parameters it keeps."""

    def __init__(
        self,
        groups: Sequence[dict[str, object]],
        *,
        weights: Mapping[Tensor, Tensor],
        share_on_host: float,
        moments: Mapping[str, torch.dtype],
        counts_in_groups: bool,
    ) -> None:
        """`weights`: of each main weight the part of the model that follows it; it is written in each step.
        `share_on_host`: of all elements; whole parameters, the first ones. `moments`: in what each is kept.
        `counts_in_groups`: megatron looks for the number of steps in the groups, as where Transformer Engine is."""
        super().__init__([torch.zeros(1)])
        self.param_groups = [{**self.defaults, **group, "fused": None} for group in groups]
        self._weights, self._moments, self._counts_in_groups = dict(weights), dict(moments), counts_in_groups
        self._mains: list[Tensor] = []  # those on the host
        self._shelves: list[list[Shelf]] = []  # of each group
        self._device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        total = sum(parameter.numel() for group in self.param_groups for parameter in group["params"])
        placed = 0
        for group in self.param_groups:
            on_host: list[Tensor] = []
            for parameter in group["params"]:
                if placed >= share_on_host * total:
                    break
                on_host.append(parameter)
                placed += parameter.numel()
            followed = [parameter for parameter in on_host if parameter in self._weights]
            others = [parameter for parameter in on_host if parameter not in self._weights]
            parts = ((followed, True), (others, True), (group["params"][len(on_host) :], False))
            self._shelves.append([self._shelf(part, is_host=is_host) for part, is_host in parts if part])

    def _shelf(self, parameters: Sequence[Tensor], *, is_host: bool) -> Shelf:
        place = torch.device("cpu") if is_host and self._device.type != "meta" else self._device
        sizes = [parameter.numel() for parameter in parameters]
        has_main = is_host and parameters[0] in self._weights
        dtypes = {**({"main": torch.float32} if has_main else {}), **self._moments}
        tensors = {name: torch.zeros(sum(sizes), dtype=dtype, device=place) for name, dtype in dtypes.items()}
        if is_host and self._device.type == "cuda":
            for tensor in tensors.values():
                lock_pages(tensor, "the optimizer's state")
        starts, at = [], 0
        for parameter, size in zip(parameters, sizes, strict=True):
            views = {name: tensor[at : at + size].view(parameter.shape) for name, tensor in tensors.items()}
            self.state[parameter] = {"step": torch.tensor(0.0), **{name: views[name] for name in MOMENTS}}
            if has_main:
                views["main"].copy_(parameter.data)
                parameter.data = views["main"]
                self._mains.append(parameter)
            starts.append(at)
            at += size
        buckets = [
            tuple(Piece(parameters[number], begin, end, starts[number] + begin) for number, begin, end in bucket)
            for bucket in cut(sizes, BUCKET)
        ]
        return Shelf(tensors, buckets, is_host)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, every parameter takes a gradient of the device. Afterwards none has one."""
        whole = [(parameter, parameter.data) for parameter in self._mains]
        element = torch.zeros(1, device=self._device)
        for parameter in self._mains:
            parameter.data = element.expand(parameter.shape)
        try:
            yield
        finally:
            for parameter, main in whole:
                parameter.grad = None
                parameter.data = main

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make a step of every parameter that has a gradient, and write the model's weights. Call it `on_device`. When
        it returns, the host's tensors are those after the step."""
        assert closure is None, "nobody evaluates the model again inside of a step"
        is_cuda = self._device.type == "cuda"
        streams = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)) if is_cuda else None
        slots = Slots(self._every_shelf(on_host=True), self._device, streams)
        pieces = [piece for shelf in self._every_shelf() for piece in shelf.pieces]
        # copied to the device at once, because that waits for the device; one each, because the kernel counts them up
        counts = torch.tensor([float(self.state[piece.parameter]["step"]) for piece in pieces], device=self._device)
        steps = iter(counts.unbind())
        for group, shelves in zip(self.param_groups, self._shelves, strict=True):
            for shelf in shelves:
                for bucket in shelf.buckets:
                    home = _part(shelf, bucket)
                    with slots.visit(home) if shelf.is_host else contextlib.nullcontext(home) as here:
                        self._move(cast("Settings", group), bucket, here, list(itertools.islice(steps, len(bucket))))
        slots.wait()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1
                    if self._counts_in_groups:
                        group["step"] = int(self.state[parameter]["step"])

    def _move(self, group: Settings, bucket: Bucket, here: Mapping[str, Tensor], steps: Sequence[Tensor]) -> None:
        """`here`: the bucket's state on the device; it is changed in place."""
        work = {name: here[name].float() for name in MOMENTS}  # fp32: the tensor itself
        rows: list[tuple[Piece, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        for piece, step in zip(bucket, steps, strict=True):
            parameter, at = piece.parameter, piece.at - bucket[0].at
            if parameter.grad is None:
                continue
            inside, mine = slice(at, at + piece.end - piece.begin), slice(piece.begin, piece.end)
            main = here["main"][inside] if "main" in here else parameter.view(-1)[mine]
            moments = work["exp_avg"][inside], work["exp_avg_sq"][inside]
            rows.append((piece, main, parameter.grad.view(-1)[mine], *moments, step))
        adamw(
            [row[1] for row in rows],
            [row[2] for row in rows],
            [row[3] for row in rows],
            [row[4] for row in rows],
            [],
            [row[5] for row in rows],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name in MOMENTS:
            if work[name] is not here[name]:
                here[name].copy_(work[name])
        for piece, main, *_ in rows:
            if piece.parameter in self._weights:
                self._weights[piece.parameter].view(-1)[piece.begin : piece.end].copy_(main)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """In place: torch's own would put new moments on the parameter's device, in its type."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name not in ("params", "fused")})
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                mine, found = self.state[parameter], state_dict["state"][number]
                for name in MOMENTS:
                    mine[name].copy_(found[name])
                step = saved["step"] if self._counts_in_groups and "step" in saved else found["step"]
                mine["step"] = torch.tensor(float(step))

    def host_tensors(self) -> list[Tensor]:
        """Return what lies in host memory of those parameters whose state does."""
        shelves = self._every_shelf(on_host=True)
        parameters = dict.fromkeys(piece.parameter for shelf in shelves for piece in shelf.pieces)
        steps = [self.state[parameter]["step"] for parameter in parameters]
        return [*(tensor for shelf in shelves for tensor in shelf.tensors.values()), *steps]

    def _every_shelf(self, *, on_host: bool = False) -> list[Shelf]:
        return [shelf for shelves in self._shelves for shelf in shelves if shelf.is_host or not on_host]

    @property
    def step_bytes(self) -> int:
        """The most that a step holds on the device beside what is there between two steps."""
        narrow = sum(dtype != torch.float32 for dtype in self._moments.values())
        longest = max((shelf.longest for shelf in self._every_shelf()), default=0)
        return Slots.num_bytes(self._every_shelf(on_host=True)) + 4 * narrow * longest


def _part(shelf: Shelf, bucket: Bucket) -> dict[str, Tensor]:
    begin, last = bucket[0].at, bucket[-1]
    return {name: tensor[begin : last.at + last.end - last.begin] for name, tensor in shelf.tensors.items()}


class Slots:
    """Device memory for a few buckets, used in turn. On a GPU what comes, what is computed and what goes back are on
    three streams; elsewhere the same is done one after the other."""

    def __init__(
        self,
        shelves: Sequence[Shelf],
        device: torch.device,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None,
    ) -> None:
        """`streams`: for what comes and for what goes."""
        self._buffers = [
            {
                name: torch.empty(length, dtype=dtype, device=device)
                for name, (length, dtype) in self._lengths(shelves).items()
            }
            for _ in range(self._count(shelves))
        ]
        self._turn = 0
        self._device, self._streams = device, streams
        self._gone: dict[int, torch.cuda.Event] = {}  # by slot: its last bucket went home
        if streams is not None:
            streams[0].wait_stream(torch.cuda.current_stream(device))  # memory of the buffers was others' before

    @staticmethod
    def _lengths(shelves: Sequence[Shelf]) -> dict[str, tuple[int, torch.dtype]]:
        found: dict[str, tuple[int, torch.dtype]] = {}
        for shelf in shelves:
            for name, tensor in shelf.tensors.items():
                found[name] = max(shelf.longest, found.get(name, (0, tensor.dtype))[0]), tensor.dtype
        return found

    @staticmethod
    def _count(shelves: Sequence[Shelf]) -> int:
        return min(IN_FLIGHT, sum(len(shelf.buckets) for shelf in shelves))

    @classmethod
    def num_bytes(cls, shelves: Sequence[Shelf]) -> int:
        return cls._count(shelves) * sum(length * dtype.itemsize for length, dtype in cls._lengths(shelves).values())

    @contextlib.contextmanager
    def visit(self, home: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield a bucket's state on the device; what was done to it goes home."""
        slot = self._turn % len(self._buffers)
        self._turn += 1
        here = {name: self._buffers[slot][name][: tensor.numel()] for name, tensor in home.items()}
        if self._streams is None:
            _copy(home, here)
            yield here
            _copy(here, home)
            return
        coming, going = self._streams
        computing, gone = torch.cuda.current_stream(self._device), self._gone.get(slot)
        if gone is not None:
            coming.wait_event(gone)
        with torch.cuda.stream(coming):
            _copy(home, here)
        computing.wait_stream(coming)
        yield here
        going.wait_stream(computing)
        with torch.cuda.stream(going):
            _copy(here, home)
            self._gone[slot] = going.record_event()

    def wait(self) -> None:
        """Wait until the host's tensors are written: what reads them next asks no stream. The buffers are free then."""
        if self._streams is not None:
            self._streams[1].synchronize()


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name], non_blocking=True)
