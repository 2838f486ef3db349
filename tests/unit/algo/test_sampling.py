"""Log-probabilities under temperature, top-k and top-p, with vLLM's order and borders."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algo.sampling import CHUNK, log_probs_under
from vime.types import SamplingRule

P = (0.5, 0.3, 0.2)
LOGITS_TV = torch.tensor(P).log().expand(3, 3)
EVERY_T = torch.arange(3)
NONE = -math.inf


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SamplingRule(), P),
        (SamplingRule(temperature=0.5), (0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38)),  # p^2, renormalised
        (SamplingRule(top_k=2), (0.625, 0.375, 0)),
        (SamplingRule(top_k=9), P),
        (SamplingRule(top_p=0.7), (0.625, 0.375, 0)),  # .5 above the second, .8 above the third
        (SamplingRule(top_p=0.81), P),
        (SamplingRule(top_p=0.0), (1, 0, 0)),  # the likeliest always stays
        # of .625 and .375 the first alone holds .6; of all three it would take two to hold it
        (SamplingRule(top_k=2, top_p=0.6), (1, 0, 0)),
        (SamplingRule(top_p=0.6), (0.625, 0.375, 0)),
    ],
)
def test_of_half_three_and_two_tenths(rule: SamplingRule, expected: tuple[float, ...]) -> None:
    wanted = [math.log(p) if p else NONE for p in expected]
    assert log_probs_under(LOGITS_TV, EVERY_T, rule).tolist() == pytest.approx(wanted, abs=1e-6)


def test_ties_with_the_last_kept_token_stay() -> None:
    logits_TV = torch.tensor([[0.4, 0.3, 0.3]]).log()
    assert log_probs_under(logits_TV, torch.tensor([2]), SamplingRule(top_k=2)).exp().item() == pytest.approx(0.3)


def test_cutting_tokens_into_chunks_changes_nothing_and_none_is_an_answer() -> None:
    draw = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(CHUNK + 3, 7, generator=draw)
    target_T = torch.randint(7, (CHUNK + 3,), generator=draw)
    rule = SamplingRule(top_p=0.9)
    alone = [log_probs_under(logits_TV[i : i + 1], target_T[i : i + 1], rule) for i in range(CHUNK + 3)]
    assert torch.equal(log_probs_under(logits_TV, target_T, rule), torch.cat(alone))
    assert log_probs_under(logits_TV[:0], target_T[:0], rule).shape == (0,)
