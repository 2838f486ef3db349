"""Attention of queries that do not see a square of keys: the CPU's numbers, and a GPU holds no scores for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, GROUPS, WIDTH, LENGTH, FIRST = 8, 2, 64, 4096, 2048
SCORES = HEADS * (LENGTH - FIRST) * LENGTH  # of one sequence


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_the_end_of_a_sequence_attends_without_its_scores(
    dtype: torch.dtype, bound: float, window: int | None, has_sinks: bool
) -> None:
    """As the second chunk of a context-parallel rank of two. `bound`: of the largest difference."""
    from vime.backends.megatron_utils.layer_spec import PackedAttention

    torch.manual_seed(0)
    size = None if window is None else (window - 1, 0)
    config = SimpleNamespace(kv_channels=WIDTH, window_size=size, window_attn_skip_freq=[0, 1])
    attention = PackedAttention(config, 2)
    if has_sinks:
        attention.sinks = torch.nn.Parameter(torch.randn(HEADS))
    lengths, heads = (LENGTH - FIRST, LENGTH, LENGTH), (HEADS, GROUPS, GROUPS)
    drawn = [torch.randn(1, length, count, WIDTH) for length, count in zip(lengths, heads, strict=True)]
    direction = torch.randn(1, LENGTH - FIRST, HEADS, WIDTH)

    def run(device: str, kind: torch.dtype) -> list[torch.Tensor]:
        attention.to(device, kind)
        inputs = [x.to(device, kind).requires_grad_() for x in drawn]
        out = attention._attend(*inputs, first=FIRST)
        return [out, *torch.autograd.grad(out, inputs, direction.to(device, kind))]

    expected = run("cpu", torch.float32)
    run("cuda", dtype)  # what libraries allocate once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = run("cuda", dtype)
    held = torch.cuda.max_memory_allocated() - before
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.float().cpu() - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max()))
    assert held < SCORES, f"{held / 2**20:.0f} MiB; scores alone have {SCORES * dtype.itemsize / 2**20:.0f}"
