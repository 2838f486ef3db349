"""Runs of train.py whose samples are played by programs elsewhere (--agent-listen), before a scripted engine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.training import TinyTask, Training

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ':' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def listening_flags(task: TinyTask, directory: Path, port: int, *, rounds: int, groups: int, samples: int) -> list[str]:
    """The flags of a run that listens at `port`, with its key in DIRECTORY/key and a chat template for its model."""
    shutil.copytree(task.model, directory / "model")
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return [
        *task.flags(), "--hf-checkpoint", str(directory / "model"), "--rollout-max-context-len", "200",
        "--debug-engine-module", "vime.backends.vllm_utils.scripted_server", "--transferqueue-mode", "streaming",
        "--num-rollout", str(rounds), "--rollout-batch-size", str(groups), "--n-samples-per-prompt", str(samples),
        "--global-batch-size", str(groups * samples),
        "--agent-listen", f"127.0.0.1:{port}", "--agent-key-file", str(directory / "key"),
    ]  # fmt: skip


def wait(training: Training, is_so: Callable[[], bool]) -> None:
    """Until it is so; the test fails when the run ends before."""
    ends = time.monotonic() + 240
    while not is_so():
        if training.process.poll() is not None:
            pytest.fail(f"the run ended early:\n{training.so_far().output}")
        assert time.monotonic() < ends, training.so_far().output
        time.sleep(0.1)
