"""How the state of an optimizer is cut into buckets, and what a step of one does without megatron around it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from vime.backends.megatron_utils import host_adam
from vime.backends.megatron_utils.host_adam import HostAdam, Piece, Shelf, Slots, cut

FP32 = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def test_buckets_end_at_whole_grains_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adam, "GRAIN", 4)
    # 5 fit beside 3 more of the second, but 3 is no whole grain; of the second 8 fit at a time, of the rest of 3 and 2
    # both
    assert cut([5, 19, 2], 8) == [[(0, 0, 5)], [(1, 0, 8)], [(1, 8, 16)], [(1, 16, 19), (2, 0, 2)]]
    # 2 and 4 of the next 7 make 6; the other 3 go on in a bucket of their own
    assert cut([2, 7], 8) == [[(0, 0, 2), (1, 0, 4)], [(1, 4, 7)]]
    assert cut([8, 0, 8], 8) == [[(0, 0, 8)], [(2, 0, 8)]]
    assert cut([], 8) == []


def groups_of(parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Two groups, of which the second has no decay; the settings are torch's own."""
    plain = torch.optim.AdamW([torch.zeros(1)], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    [settings] = plain.param_groups
    return [
        {**settings, "params": parameters[:1]},
        {**settings, "params": parameters[1:], "weight_decay": 0.0},
    ]


def drawn(*sizes: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draw) for size in sizes]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_steps_are_those_of_torch_and_the_weights_follow(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(host_adam, "GRAIN", 32)
    monkeypatch.setattr(host_adam, "BUCKET", 64)
    theirs = drawn(200, 33, 70, seed=0)
    plain = torch.optim.AdamW(groups_of(theirs), fused=True)
    for group in plain.param_groups:
        group["fused"] = True
    mine = drawn(200, 33, 70, seed=0)
    weights = {main: main.bfloat16() for main in mine}
    host = HostAdam(groups_of(mine), weights=weights, share_on_host=share, moments=FP32, counts_in_groups=False)
    # of 303 elements the first parameter is more than half
    assert (
        sum(tensor.nbytes for tensor in host.host_tensors()) == {1.0: 12 * 303 + 12, 0.5: 12 * 200 + 4, 0.0: 0}[share]
    )
    for seed in range(1, 4):
        gradients = drawn(200, 33, 70, seed=seed)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        plain.step()
        with host.on_device():
            for parameter, gradient in zip(mine, gradients, strict=True):
                parameter.grad = gradient.clone()
            host.step()
    for parameter, other in zip(mine, theirs, strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(weights[parameter], other.bfloat16())
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(host.state[parameter][name], plain.state[other][name])


def test_a_parameter_without_a_gradient_stays_and_is_not_counted() -> None:
    mine = drawn(8, 8, seed=0)
    before = [tensor.clone() for tensor in mine]
    host = HostAdam(groups_of(mine), weights={}, share_on_host=1.0, moments=FP32, counts_in_groups=False)
    with host.on_device():
        mine[1].grad = torch.ones(8)
        host.step()
    assert torch.equal(mine[0], before[0])
    assert not torch.equal(mine[1], before[1])
    assert [float(host.state[parameter]["step"]) for parameter in mine] == [0.0, 1.0]
    assert mine[1].grad is not None, "only main weights lose theirs: megatron sets those of others to none"


def test_after_a_step_that_raised_main_weights_are_whole() -> None:
    [main] = drawn(8, seed=0)
    before = main.clone()
    host = HostAdam(
        groups_of([main]), weights={main: main.bfloat16()}, share_on_host=1.0, moments=FP32, counts_in_groups=False
    )

    def interrupted() -> None:
        with host.on_device():
            assert main.untyped_storage().nbytes() == 4  # one element stands for all
            main.grad = torch.ones(8)
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        interrupted()
    assert main.grad is None
    assert torch.equal(main, before)
    assert main.data_ptr() == host.host_tensors()[0].data_ptr()


@pytest.mark.parametrize(("decay", "falls"), [(1 - 2**-8, True), (0.999, False)])
def test_a_moment_in_bf16_falls_under_the_decays_that_are_accepted(decay: float, falls: bool) -> None:
    """Every number from 1 to 2, which stands for all others: those of another power of two are twice or half of it."""
    numbers = 1 + torch.arange(128) / 128
    assert torch.equal(numbers, numbers.bfloat16().float())
    fallen = (numbers * decay).bfloat16() < numbers
    assert fallen.all() if falls else not fallen.any()


@dataclass(eq=False)
class Lane:
    """A stream of a GPU whose work is done later, in any order that its waits allow."""

    world: list[Lane]
    draw: random.Random
    work: list[Callable[[], bool]] = field(default_factory=list)  # each says whether it could be done
    num_done: int = 0

    def do(self, call: Callable[[], object]) -> None:
        self.work.append(lambda: (call(), True)[1])

    def wait_event(self, event: tuple[Lane, int]) -> None:
        other, count = event
        self.work.append(lambda: other.num_done >= count)

    def wait_stream(self, other: Lane) -> None:
        self.wait_event((other, len(other.work)))

    def record_event(self) -> tuple[Lane, int]:
        return self, len(self.work)

    def synchronize(self) -> None:
        """Work of any lane is done until mine is."""
        while self.num_done < len(self.work):
            lane = self.draw.choice([lane for lane in self.world if lane.num_done < len(lane.work)])
            lane.num_done += lane.work[lane.num_done]()


@pytest.mark.parametrize("seed", range(20))
def test_streams_wait_for_each_other_where_they_share_memory(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Ten buckets in three slots; each is doubled, and its number added. What a lane does too early or too late would
    leave numbers of another bucket."""
    world: list[Lane] = []
    draw = random.Random(seed)
    world += [Lane(world, draw) for _ in range(3)]
    coming, computing, going = world
    current = [computing]

    @contextlib.contextmanager
    def inside(lane: Lane) -> Iterator[None]:
        current.append(lane)
        yield
        current.pop()

    copy = host_adam._copy
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current[-1])
    monkeypatch.setattr(host_adam, "_copy", lambda source, target: current[-1].do(lambda: copy(source, target)))
    state = torch.arange(40.0)
    parameter = torch.zeros(40)
    buckets = [(Piece(parameter, begin, begin + 4, begin),) for begin in range(0, 40, 4)]
    slots = Slots([Shelf({"main": state}, buckets, is_host=True)], torch.device("cpu"), (coming, going))
    for number, [piece] in enumerate(buckets):
        with slots.visit({"main": state[piece.begin : piece.end]}) as here:
            computing.do(lambda here=here["main"], number=number: here.mul_(2).add_(number))
    assert state.tolist() == list(range(40)), "nothing was done yet"
    slots.wait()
    assert state.tolist() == [2 * value + value // 4 for value in range(40)]
