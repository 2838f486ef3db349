"""Attention over a pack against its formula, one sequence at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.helpers.rows import make_row
from vime.backends.megatron_utils import layer_spec
from vime.backends.megatron_utils.fused import rotation
from vime.backends.megatron_utils.layer_spec import PackedAttention
from vime.batching.pack import pack, share_prompts

HEADS, GROUPS, WIDTH = 4, 2, 8
WINDOWS = [None, 1, 3, 4, 64]


SINKS = [None, (0.3, -2.0, 4.0, 1.0)]  # of each head


@pytest.fixture(autouse=True, params=["cpu", "gpu", "gpu, 16 bits"])
def _as_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU gets its triangles and shared keys in other forms; torch's CPU build computes them too."""
    if request.param != "cpu":
        monkeypatch.setattr(layer_spec, "masks_are_fused", lambda _query: False)
    if request.param == "gpu, 16 bits":
        monkeypatch.setattr(layer_spec, "_knows_groups", lambda _query, mask: mask is layer_spec.Triangle.END)


def attention_of(window: int | None, sinks_H: Sequence[float] | None) -> PackedAttention:
    """The second of two layers, which has the window."""
    size = None if window is None else (window - 1, 0)
    config = SimpleNamespace(kv_channels=WIDTH, window_size=size, window_attn_skip_freq=[0, 1])
    attention = PackedAttention(config, 2)
    if sinks_H is not None:
        attention.sinks = torch.nn.Parameter(torch.tensor(sinks_H))
    return attention


def learned(attention: PackedAttention) -> list[Tensor]:
    return [] if attention.sinks is None else [attention.sinks]


def turned(angle_LD: Tensor, window: int | None) -> dict[str, tuple[Tensor, Tensor]]:
    """The angles are those of the layer's kind; the other kind has none."""
    rotations = [rotation(angle_LD, torch.float32), rotation(torch.zeros_like(angle_LD), torch.float32)]
    mine, others = rotations
    return {
        "rotation": mine if window is None else others,
        "window_rotation": others if window is None else mine,
    }


def formula(
    query: Tensor, key: Tensor, value: Tensor, angle_LD: Tensor, window: int | None, sinks: list[Tensor]
) -> Tensor:
    """[L, H * D] of one sequence: rotated, causal, each pair of query heads with one head of keys and values. A sink is
    a score more in each softmax, whose weight is dropped (as GPT-OSS has it)."""

    def rotated(x_LND: Tensor) -> Tensor:
        first, second = x_LND.chunk(2, -1)
        return x_LND * angle_LD.cos()[:, None] + torch.cat([-second, first], -1) * angle_LD.sin()[:, None]

    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (rotated(key), value))
    score_HLL = torch.einsum("qhd,khd->hqk", rotated(query), key) / math.sqrt(WIDTH)
    place = torch.arange(len(query))
    sees = (place[None] <= place[:, None]) & (place[None] > place[:, None] - (window or len(query)))
    score_HLL = score_HLL.masked_fill(~sees, float("-inf"))
    columns = [sinks_H[:, None, None].expand(-1, len(query), 1) for sinks_H in sinks]
    weight_HLL = torch.cat([score_HLL, *columns], -1).softmax(-1)[..., : len(query)]
    return torch.einsum("hqk,khd->qhd", weight_HLL, value).flatten(1)


@pytest.mark.parametrize("sinks_H", SINKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [(4,), (3, 3, 3), (3, 3, 2, 5, 5, 3), (1, 1, 6), (17, 17)])
def test_neighbours_of_one_length_attend_as_if_each_were_alone(
    lengths: tuple[int, ...],
    window: int | None,
    sinks_H: Sequence[float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_spec, "WINDOW_BLOCK", 2)  # several blocks of queries in a sequence
    draw = torch.Generator().manual_seed(0)
    starts = [0, *itertools.accumulate(lengths)]
    total = starts[-1]
    inputs = [torch.randn(total, heads, WIDTH, generator=draw) for heads in (HEADS, GROUPS, GROUPS)]
    angle = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(1) / torch.tensor([1.0, 3.0, 9.0, 27.0])
    angle_LD = torch.cat([angle, angle], -1)
    direction = torch.randn(total, HEADS * WIDTH, generator=draw)

    leaves = [x.clone().requires_grad_() for x in inputs]
    parameters = SimpleNamespace(
        cu_seqlens_host=starts, context_cut=None, shared_prompts=None, **turned(angle_LD, window)
    )
    attention = attention_of(window, sinks_H)
    sinks = learned(attention)
    got = attention(*leaves, None, packed_seq_params=parameters)
    gradients = torch.autograd.grad(got, [*leaves, *sinks], direction.unsqueeze(1))

    true_sinks = [x.detach().double().requires_grad_() for x in sinks]
    true = [x.double().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lengths) for x in (*true, angle_LD.double())), strict=True)
    expected = torch.cat([formula(*part, window=window, sinks=true_sinks) for part in parts])
    true_gradients = torch.autograd.grad(expected, [*true, *true_sinks], direction.double())
    assert got.shape == (total, 1, HEADS * WIDTH)
    for mine, theirs in zip([got.squeeze(1), *gradients], [expected, *true_gradients], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sinks_H", SINKS)
@pytest.mark.parametrize("window", WINDOWS)
def test_answers_to_one_prompt_attend_as_if_each_had_a_copy_of_it(
    window: int | None, sinks_H: Sequence[float] | None
) -> None:
    """Two prompts of 3 tokens with answers of 2, 2 and 4 tokens to the first and 2, 1 to the second; a prompt of 3 by
    itself, with an answer of 1. Whoever shares a prompt gets its gradient as the sum over the copies."""
    prompts, answers = (0, 0, 0, 1, 1, 2), (2, 2, 4, 2, 1, 1)
    rows = [
        make_row(number, prompt=(prompt,) * 3, response=(9,) * answer)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    shared = share_prompts(pack(rows), tokens_per_call=0)
    assert shared is not None
    draw = torch.Generator().manual_seed(0)
    computed = [torch.randn(sum(shared.sizes), heads, WIDTH, generator=draw) for heads in (HEADS, GROUPS, GROUPS)]
    angle = torch.cat([torch.arange(3 + answer) for answer in answers]).unsqueeze(1) / torch.tensor([1.0, 3.0, 9.0, 27])
    angle_TD = torch.cat([angle, angle], -1)
    direction = torch.randn(len(angle), HEADS * WIDTH, generator=draw)

    leaves = [x.clone().requires_grad_() for x in computed]
    rotations = turned(angle_TD[shared.kept_U], window)
    parameters = SimpleNamespace(cu_seqlens_host=[], context_cut=None, shared_prompts=shared, **rotations)
    attention = attention_of(window, sinks_H)
    sinks = learned(attention)
    got = attention(*leaves, None, packed_seq_params=parameters).squeeze(1)[shared.place_T]
    gradients = torch.autograd.grad(got, [*leaves, *sinks], direction)

    true_sinks = [x.detach().double().requires_grad_() for x in sinks]
    true = [x.double().requires_grad_() for x in computed]
    copied = [x[shared.place_T] for x in true]  # every sequence whole
    parts = zip(*(x.split([3 + answer for answer in answers]) for x in (*copied, angle_TD.double())), strict=True)
    expected = torch.cat([formula(*part, window=window, sinks=true_sinks) for part in parts])
    true_gradients = torch.autograd.grad(expected, [*true, *true_sinks], direction.double())
    for mine, theirs in zip([got, *gradients], [expected, *true_gradients], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sinks_H", SINKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("first", [1, 5, 11])
def test_a_rank_that_has_the_end_of_a_sequence_attends_as_one_that_has_it_all(
    first: int, window: int | None, sinks_H: Sequence[float] | None
) -> None:
    """As a chunk of a context-parallel rank, whose first query stands at `first`."""
    torch.manual_seed(0)
    attention = attention_of(window, sinks_H)
    query = torch.randn(2, 12, HEADS, WIDTH, requires_grad=True)
    key, value = (torch.randn(2, 12, GROUPS, WIDTH, requires_grad=True) for _ in range(2))
    inputs = [query, key, value, *learned(attention)]
    weights = torch.randn(2, 12 - first, HEADS, WIDTH)
    whole = attention._attend(query, key, value, first=0)[:, first:]
    expected = torch.autograd.grad((whole * weights).sum(), inputs)
    end = attention._attend(query[:, first:], key, value, first=first)
    torch.testing.assert_close(end, whole)
    for got, want in zip(torch.autograd.grad((end * weights).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_kernel_of_a_gpu_gets_shared_keys_only_where_it_can_share_them(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what torch is asked for: a whole sequence, the end of one, a window."""
    asked: list[tuple[int, bool]] = []
    true = torch.nn.functional.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        asked.append((key.size(1), bool(options["enable_gqa"])))
        return true(query, key, value, **options)

    functions = {**vars(torch.nn.functional), "scaled_dot_product_attention": record}
    monkeypatch.setattr(layer_spec, "F", SimpleNamespace(**functions))
    query = torch.randn(1, 4, HEADS, WIDTH)
    key, value = torch.randn(2, 1, 8, GROUPS, WIDTH)
    attention_of(None, None)._attend(query, key[:, :4], value[:, :4], first=0)
    attention_of(None, None)._attend(query, key, value, first=4)
    attention_of(3, None)._attend(query, key, value, first=4)
    shared, repeated = (GROUPS, True), (HEADS, False)
    kernels = request.node.callspec.params["_as_on"]
    expected = {
        "cpu": [shared, shared, shared],
        "gpu": [shared, repeated, repeated],
        "gpu, 16 bits": [shared, shared, repeated],
    }
    assert asked[:3] == expected[kernels]
