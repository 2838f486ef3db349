"""Real vLLM whose tied head keeps what the engine started with, although each hash is confirmed: it is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers import tiny_models
from tests.helpers.engine_updates import Pusher
from tests.helpers.engines import engine_config, started
from tests.helpers.stale_worker import STALE_WORKER
from tests.helpers.tied_engine import RanksOf
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.launch import awaiting_update
from vime.config.parse import Config
from vime.ray.probe import check_engines_agree
from vime.types import PublishError

pytestmark = pytest.mark.nightly
TRANSPORTS = ["shm", "gloo", "disk"]


@pytest.fixture(scope="module")
def stale_engine(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    config = awaiting_update(engine_config(llama_dir))
    config = dataclasses.replace(config, vllm_flags=(*config.vllm_flags, "--worker-extension-cls", STALE_WORKER))
    yield from started(config, tmp_path_factory.mktemp("stale"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_head_that_vllm_does_not_rebuild_is_named_though_no_training_has_moved_the_weights(
    transport: str, stale_engine: EngineProcess, llama_dir: Path, tmp_path: Path
) -> None:
    model, pusher = tiny_models.load(llama_dir), Pusher(stale_engine.address, transport, tmp_path)
    try:
        pusher.push(model)  # confirms version and hash
        for bf16 in (False, True):  # by both bounds
            with pytest.raises(PublishError, match=r"engine-0: log-probabilities differ .* bytes were confirmed"):
                check_engines_agree(
                    Config().replace(bf16=bf16), cast(Any, RanksOf(model)), pusher.fleet, pusher.version
                )
    finally:
        pusher.close()
