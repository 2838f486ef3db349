"""What no adapter can be is refused with its flag, before anything starts."""

from pathlib import Path

import pytest

from tests.unit.config import test_checks
from vime.types import ConfigError

resolved, model_dir = test_checks.resolved, test_checks.model_dir  # the second is a fixture


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora-rank", "-1"], "--lora-rank: got -1, expected at least 0"),
        (["--lora-rank", "513"], "--lora-rank 513: vLLM has room for at most 512"),
        (["--lora-rank", "4", "--lora-alpha", "0"], "--lora-alpha 0: the adapter's output would be 0 for ever"),
        (["--lora-rank", "4", "--lora-alpha", "-8"], "--lora-alpha: got -8.0, expected at least 0"),
        (["--lora-rank", "4", "--lora-alpha", "nan"], "--lora-alpha: got nan, expected a number"),
        (["--lora-rank", "4", "--lora-alpha", "inf"], "--lora-alpha: got inf, expected a number"),
        (["--lora-rank", "4", "--lora-dropout", "0.1"], "--lora-dropout 0.1: expected 0"),
        (["--lora-rank", "4", "--lora-target-modules", "q_proj", "qproj"], "--lora-target-modules qproj: unknown"),
        (
            ["--lora-rank", "4", "--lora-target-modules", "q_proj", "v_proj", "q_proj"],
            "--lora-target-modules q_proj: named twice. Name each layer once.",
        ),
    ],
)
def test_what_no_adapter_can_be_is_refused_by_its_flag(model_dir: Path, flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolved(model_dir, *flags)
    assert said in str(refusal.value)


@pytest.mark.parametrize("rank", ["1", "7", "512"])
def test_any_rank_that_an_engine_has_room_for_passes(model_dir: Path, rank: str) -> None:
    assert resolved(model_dir, "--lora-rank", rank, "--lora-alpha", "0.5").lora.lora_rank == int(rank)
