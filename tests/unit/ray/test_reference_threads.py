"""One thread a process: the user's number counts, but not in --reference-mode."""

import os

import pytest
import torch

from vime.config.parse import parse
from vime.ray.cluster import limit_threads
from vime.training.device import make_deterministic


@pytest.mark.parametrize(("flags", "expected"), [([], "4"), (["--reference-mode"], "1")])
def test_the_users_number_of_threads_counts_but_in_reference_mode(
    flags: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("MKL_NUM_THREADS", "4")
    limit_threads(parse(flags))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == (expected, expected)


def test_without_a_wish_of_the_user_it_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads(parse([]))
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_what_torch_cannot_repeat_raises_in_reference_mode() -> None:
    number = torch.get_num_threads()
    try:
        make_deterministic()
        assert torch.get_num_threads() == 1
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(number)
