"""Seeds of --reference-mode: fixed for ever, and different wherever two answers must differ."""

import itertools

import pytest

from vime.rollout.seeds import request_seed
from vime.types import PluginError, Sample


def sample(group: int, index: int) -> Sample:
    return Sample(group_index=group, index=index)


def test_a_seed_never_changes_between_versions_of_vime() -> None:
    # printf '42:3:13:0:0' | sha256sum and '42:3:13:1:7': the first eight hexadecimal digits
    assert request_seed(42, sample(3, 13), num_tokens=0) == 0x30D80B5A
    assert request_seed(42, sample(3, 13), num_tokens=7, copy=1) == 0xFB1924A3


def test_answers_turns_copies_and_runs_draw_apart() -> None:
    keys = itertools.product((1, 2), (0, 1, 12), (0, 1, 2), (0, 1), (0, 5))
    seeds = [request_seed(run, sample(g, i), num_tokens=n, copy=b) for run, g, i, b, n in keys]
    assert len(set(seeds)) == len(seeds) == 2 * 3 * 3 * 2 * 2
    assert max(seeds) < 2**32


@pytest.mark.parametrize(("group", "index"), [(-1, 0), (0, -1)])
def test_a_sample_without_identity_has_no_seed(group: int, index: int) -> None:
    with pytest.raises(PluginError, match=rf"group_index {group} and index {index}, expected both from 0 on"):
        request_seed(1, sample(group, index), num_tokens=0)
