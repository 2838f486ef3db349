"""Fixtures: real vLLM engines on tiny random models. Each engine starts once for the whole test session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import tiny_models
from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.engine import EngineProcess
from vime.config.parse import Config
from vime.types import KEY_HEADER

ENGINE_DEADLINE_S = 200.0
CONTEXT = 512
LONG = 12_000
"""Tokens that take a real engine far longer than a test is ever kept from its next line."""
KEYS = EngineKeys(control="control-key-of-the-tests", generate="generate-key-of-the-tests")
HEADERS = {KEY_HEADER: KEYS.control}


def engine_config(model_dir: Path, context: int = CONTEXT, **changes: object) -> Config:
    settings = {
        "hf_checkpoint": str(model_dir),
        "device": "cpu",
        "rollout_max_context_len": context,
        "vllm_kv_cache_memory_bytes": 32 << 20,
    }
    return Config().replace(**{**settings, **changes})


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with tied embeddings, head_dim 32 apart from hidden / heads."""
    return tiny_models.make_qwen3(tmp_path_factory.mktemp("qwen3"), positions=LONG + 100)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with tied embeddings."""
    return tiny_models.make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def vllm_engine(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A real engine on `qwen3_dir`, shared by all tests: publish to it what a test needs, and leave it resumed."""
    yield from started(engine_config(qwen3_dir, LONG + 100), tmp_path_factory.mktemp("engine_run"))


def started(config: Config, run_dir: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(config, index=0, run_dir=run_dir, keys=KEYS)
    engine.start()
    try:
        engine.wait_ready(ENGINE_DEADLINE_S)
        yield engine
    finally:
        engine.stop()
