"""Deadlines that grow with the model and its answers: known before a wait begins, to everybody who waits."""

from __future__ import annotations

import math
from pathlib import Path

from vime.config.eval_sets import eval_sets
from vime.config.model_files import read_headers
from vime.config.parse import Config

STEP_TOKENS = 2048
"""Most tokens of one step of vLLM's CPU engine, as its default has it."""
SLOW_FLOPS = 5e9
"""Operations a second of a core that other programs use too: a tenth of what a free one does."""
REQUEST_S, ROUND_S = 600.0, 3600.0
"""Least defaults of --generate-timeout-secs and --rollout-timeout-secs."""
SHORT_TOKENS = 8192
"""Tokens of answers, one after the other, that these two are for."""
TOKENS_PER_S = 20
"""Of one sequence in a full batch of an engine on a GPU, low on purpose."""
READ_BYTES_PER_S = 10**8
"""Of a checkpoint on a slow network disk, compiling included."""


def update_deadline_s(config: Config, num_bytes: int | None = None) -> float:
    """--update-weight-timeout-secs, and a second for each whole GB that travels. That is taken as twice the files of
    the checkpoint: bf16 may be trained and sent in fp32. `num_bytes`: of the files, where they are not here."""
    return config.weights.update_weight_timeout_secs + 2 * (num_bytes or checkpoint_bytes(config)) // 10**9


def start_deadline_s(config: Config, num_bytes: int | None = None) -> float:
    """--start-timeout-secs, and a second for each 100 MB of the checkpoint's files, for a part that reads them.
    `num_bytes`: of the files, where they are not here."""
    return config.cluster.start_timeout_secs + (num_bytes or checkpoint_bytes(config)) // READ_BYTES_PER_S


def generate_deadline_s(config: Config) -> float:
    """Return --generate-timeout-secs; where it is not given, 600 s and a second for each 20 tokens of the longest
    answer beyond 8,192: those of 32k take half an hour in a full batch."""
    given = config.rollout.generate_timeout_secs
    return REQUEST_S + _seconds_beyond(_longest_answer(config)) if given is None else given


def generate_function_deadline_s(config: Config) -> float:
    """Of a custom generate function: `generate_deadline_s`. With --agent-listen also the time in which its sample may
    wait for an agent, which depends on how many agents there are and not on the engines."""
    claim_s = rollout_deadline_s(config) if config.agents.agent_listen else 0.0
    return claim_s + generate_deadline_s(config)


def request_deadline_s(config: Config) -> float:
    """Return the deadline of whatever any part of the run asks the engines: the longest of `generate_deadline_s`, with
    those of the sets of --eval-config."""
    return max(generate_deadline_s(each) for each in _with_sets(config))


def rollout_deadline_s(config: Config) -> float:
    """Return --rollout-timeout-secs; where it is not given, an hour and a second for each 20 tokens beyond 8,192 of the
    answers that follow one another in a round: prompts wait where engines take fewer at once
    (--vllm-server-concurrency). At least the deadline of one request. How many prompts an evaluation has is not known
    here: it gets the same."""
    rollout = config.rollout
    if rollout.rollout_timeout_secs is not None:
        return rollout.rollout_timeout_secs
    requests = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    if rollout.custom_generate_function_path:  # it asks for each sample by itself; without it a group is one request
        requests *= rollout.n_samples_per_prompt
    per_engine = 1 if config.debug.reference_mode else config.engine.vllm_server_concurrency
    turns = -(-requests // (per_engine * (config.cluster.rollout_num_engines or 1)))
    longest = max(_longest_answer(each) for each in _with_sets(config))
    return max(ROUND_S + _seconds_beyond(turns * longest), request_deadline_s(config))


def _with_sets(config: Config) -> list[Config]:
    return [config, *(one.config for one in eval_sets(config))]


def _longest_answer(config: Config) -> int:
    return max(config.rollout.rollout_max_response_len, config.eval.eval_max_response_len or 0)


def _seconds_beyond(num_tokens: int) -> int:
    return max(0, num_tokens - SHORT_TOKENS) // TOKENS_PER_S


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of the checkpoint's weight files; 0 where they are not here."""
    directory = Path(config.model.hf_checkpoint).expanduser()
    files = [*directory.glob("*.safetensors")] or [*directory.glob("*.bin")]
    return sum(file.stat().st_size for file in files)


def health_deadline_s(config: Config) -> float:
    """--engine-health-timeout-secs, and on a CPU a step of prompts: an engine responds between two steps, and one of
    SmolLM2-135M took over a minute beside other programs."""
    deadline_s = config.engine.engine_health_timeout_secs
    if config.cluster.device != "cpu":
        return deadline_s
    headers = read_headers(config.model.hf_checkpoint, flag="--hf-checkpoint")
    num_parameters = sum(math.prod(header.shape) for header in headers.values())
    return deadline_s + 2 * num_parameters * STEP_TOKENS // SLOW_FLOPS
