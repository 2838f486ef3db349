"""The longest prompt + completion where no flag says it."""

from pathlib import Path

import pytest

from tests.helpers.rollout_setup import make_args, write_model_directory
from vime.rollout import prompts


def test_the_models_positions_are_read_once_however_many_samples_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read, asked = write_model_directory(tmp_path / "model", positions=96), prompts.read_model_shape, []
    monkeypatch.setattr(prompts, "read_model_shape", lambda directory: (asked.append(directory), read(directory))[1])
    args = make_args("--hf-checkpoint", model, "--rm-type", "exact_match")
    assert {prompts.context_limit(args) for _ in range(16)} == {96}
    assert asked == [str(model)]
