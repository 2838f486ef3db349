"""A real vLLM engine of two workers on two "nodes", which are both this machine: the head with the server, and a
follower without one, each a tree of processes under a guard of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers import tiny_models
from tests.helpers.engine_updates import BOUND, Pusher, difference, prompt_difference, sample
from tests.helpers.engines import ENGINE_DEADLINE_S, HEADERS, KEYS, engine_config
from vime.backends.vllm_utils.engine import EngineProcess, FollowerProcess
from vime.backends.vllm_utils.guard import session_members
from vime.backends.vllm_utils.routes import WEIGHTS_ROUTE
from vime.types import EngineLostError

pytestmark = pytest.mark.nightly
PROMPT = [9, 8, 7]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[EngineProcess, FollowerProcess]]:
    config = engine_config(tiny_models.make_qwen3(tmp_path / "model"), rollout_num_gpus_per_engine=2)
    engine = EngineProcess(config, index=0, run_dir=tmp_path, keys=KEYS, num_nodes=2)
    follower = FollowerProcess(config, index=0, part=engine.part(1), run_dir=tmp_path, keys=KEYS)
    try:
        follower.start()
        engine.start()
        engine.wait_ready(ENGINE_DEADLINE_S, on_poll=follower.check)
        yield engine, follower
    finally:
        follower.stop()
        engine.stop()


def test_an_engine_of_two_nodes_takes_weights_on_both_and_a_lost_node_is_noticed(
    parts: tuple[EngineProcess, FollowerProcess], tmp_path: Path
) -> None:
    """One start for all claims: it takes two imports of vLLM."""
    engine, follower = parts
    model = tiny_models.load(tmp_path / "model")
    for seed, transport in enumerate(("gloo", "disk"), start=1):
        pusher = Pusher(engine.address, transport, tmp_path)
        assert pusher.fleet.world_sizes() == [2]
        tiny_models.perturb(model, seed=seed)
        pusher.push(model)
        held = httpx.get(engine.url + WEIGHTS_ROUTE, headers=HEADERS, timeout=60).json()
        assert len(held["workers"]) == 2
        assert held["workers"][0] == held["workers"][1] != {"content_hash": "", "num_tensors": 0}
        assert held["weight_version"] == str(pusher.version)
        assert difference(sample(engine.url, PROMPT, 20), model, PROMPT) < BOUND
        assert prompt_difference(pusher.fleet, model) < BOUND
        pusher.close()
    assert engine.check_health(60, is_updating=False) == "101"
    [worker] = [
        pid for pid in session_members(follower.pid) if "VLLM::Worker" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    sessions = engine.pid, follower.pid
    os.kill(worker, signal.SIGSTOP)  # it hangs: the follower does not notice, the engine's server does
    follower.check()
    with pytest.raises(EngineLostError, match=r"engine-0 lives .* but does not work"):
        engine.check_health(5, is_updating=False)
    os.kill(worker, signal.SIGKILL)
    follower._child.wait(60)
    with pytest.raises(EngineLostError, match="engine-0, part 2 of 2 ended with exit code"):
        follower.check()
    with pytest.raises(EngineLostError):
        engine.check_health(5, is_updating=False)
    follower.stop()
    engine.stop()
    assert [session_members(session) for session in sessions] == [[], []]
