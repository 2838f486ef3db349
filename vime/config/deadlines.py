"""Deadlines that grow with the model: known before a wait begins, to everybody who waits."""

from __future__ import annotations

import math
from pathlib import Path

from vime.config.model_files import read_headers
from vime.config.parse import Config

STEP_TOKENS = 2048
"""Most tokens of one step of vLLM's CPU engine, as its default has it."""
SLOW_FLOPS = 5e9
"""Operations a second of a core that other programs use too: a tenth of what a free one does."""


def update_deadline_s(config: Config) -> float:
    """--update-weight-timeout-secs, and a second for each whole GB that travels. That is taken as twice the files of
    the checkpoint: bf16 may be trained and sent in fp32."""
    files = Path(config.model.hf_checkpoint).expanduser().glob("*.safetensors")
    sent = 2 * sum(file.stat().st_size for file in files)
    return config.weights.update_weight_timeout_secs + sent // 10**9


def health_deadline_s(config: Config) -> float:
    """--engine-health-timeout-secs, and on a CPU a step of prompts: an engine responds between two steps, and one of
    SmolLM2-135M took over a minute beside other programs."""
    deadline_s = config.engine.engine_health_timeout_secs
    if config.cluster.device != "cpu":
        return deadline_s
    headers = read_headers(config.model.hf_checkpoint, flag="--hf-checkpoint")
    num_parameters = sum(math.prod(header.shape) for header in headers.values())
    return deadline_s + 2 * num_parameters * STEP_TOKENS // SLOW_FLOPS
