"""Real vLLM after real updates: does it compute with the new weights, and with nothing else?

The content hash proves that the bytes arrived. These tests compare what an engine says about tokens with transformers
on the same weights, which also sees copies inside the engine that were not rebuilt.
"""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers import tiny_models
from tests.helpers.engine_updates import (
    BOUND,
    PROMPT,
    Pusher,
    difference,
    kill_one_of_two_in_a_broadcast,
    prompt_difference,
    sample,
)
from tests.helpers.engines import ENGINE_DEADLINE_S, HEADERS, KEYS, LONG, engine_config
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.guard import session_members
from vime.backends.vllm_utils.launch import validate_vllm_flags
from vime.backends.vllm_utils.router import RouterProcess
from vime.rollout.abort_scope import AbortScope
from vime.rollout.engine_client import EngineClient
from vime.rollout.exchanges import Completion
from vime.types import ConfigError, EngineAddress, EngineError, PublishError
from vime.weights.plan import TensorMeta


@pytest.fixture
def pusher(vllm_engine, tmp_path):
    made = Pusher(vllm_engine.address, "shm", tmp_path)
    yield made
    made.close()


@pytest.fixture
def model(qwen3_dir):
    return tiny_models.load(qwen3_dir)


@pytest.mark.parametrize("transport", ["shm", "gloo", "disk"])
def test_after_an_update_engine_log_probs_equal_transformers_on_the_new_weights(
    transport, vllm_engine, model, tmp_path
):
    pusher = Pusher(vllm_engine.address, transport, tmp_path)
    for seed in (1, 2):
        tiny_models.perturb(model, seed=seed)
        pusher.push(model)
        assert difference(sample(vllm_engine.url, [9, 8, 7], 20), model, [9, 8, 7]) < BOUND
        assert prompt_difference(pusher.fleet, model) < BOUND
    pusher.close()


@pytest.mark.parametrize("rank", [1, 2])
def test_an_engine_that_was_left_with_half_of_a_broadcast_computes_with_all_of_the_next_one(
    rank, vllm_engine, model, tmp_path
):
    """Also where the half ended inside of a layer: vLLM would count tensors of it twice."""
    tiny_models.perturb(model, seed=20 + rank)
    kill_one_of_two_in_a_broadcast(vllm_engine.address, model, tmp_path, rank=rank)
    pusher = Pusher(vllm_engine.address, "gloo", tmp_path)
    pusher.push(model)
    assert difference(sample(vllm_engine.url, [9, 8, 7], 20), model, [9, 8, 7]) < BOUND
    assert prompt_difference(pusher.fleet, model) < BOUND
    pusher.close()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_an_engine_whose_trainer_went_between_two_buckets_takes_the_next_update(share, vllm_engine, model, pusher):
    """vLLM holds the update open; an engine of others outlives the run that began it."""
    tiny_models.perturb(model, seed=30)
    weights = dict(tiny_models.stream(model))

    def ending():
        for number, pair in enumerate(weights.items()):
            if number == int(share * len(weights)):
                raise OSError("the trainer went")
            yield pair

    metadata = [TensorMeta.of(*pair) for pair in weights.items()]
    with pytest.raises(PublishError, match="the trainer went"):
        pusher.push_stream(ending(), metadata)
    tiny_models.perturb(model, seed=31)
    pusher.push(model)
    assert difference(sample(vllm_engine.url, [9, 8, 7], 20), model, [9, 8, 7]) < BOUND
    assert prompt_difference(pusher.fleet, model) < BOUND


def test_a_repeated_prompt_is_not_answered_from_the_cache_of_the_old_weights(vllm_engine, model, pusher):
    pusher.push(model)
    sample(vllm_engine.url, PROMPT, 2)  # leaves 18 full cache blocks of 16 tokens behind
    tiny_models.perturb(model, seed=5)
    pusher.push(model)
    assert difference(sample(vllm_engine.url, PROMPT, 8), model, PROMPT) < BOUND


def test_an_update_in_the_middle_of_an_answer_shows_in_its_version_spans(vllm_engine, model, pusher):
    pusher.push(model)
    old = pusher.version
    body = {
        "token_ids": PROMPT[:10],
        "stream": True,
        # The spans come with the last token, so every one is waited for; the update takes as long as some 50 of them.
        "sampling_params": {"max_tokens": 1_500, "logprobs": 0, "ignore_eos": True, "detokenize": False},
    }
    spans: list[dict] = []
    num_tokens = 0
    url = f"{vllm_engine.url}/inference/v1/generate"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=60) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        for line in lines:
            if num_tokens == 0:  # the first tokens have come: it is running
                pusher.push(model)
            [choice] = json.loads(line)["choices"]
            num_tokens += len(choice["token_ids"])
            spans = choice.get("weight_versions") or spans
    assert [int(span["version"]) for span in spans] == [old, pusher.version]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], num_tokens)


def test_nothing_of_the_trainer_is_in_an_engine_process(vllm_engine, pusher):
    url = f"{vllm_engine.url}/collective_rpc"
    answer = httpx.post(url, json={"method": "vime_process_report"}, headers=HEADERS, timeout=60).json()
    [report] = answer["results"]
    assert report == {"current_device_module": "torch.cuda", "trainer_imported": False, "megatron_imported": False}


async def cut_short(router_url: str, engine_url: str) -> list[Completion]:
    """Two long answers, halted when the engine has sampled some of them."""

    def num_sampled() -> float:
        lines = httpx.get(f"{engine_url}/metrics", headers=HEADERS).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))

    client = EngineClient(router_url, max_in_flight=1, timeout_s=280, key=KEYS.generate)
    halt, before = AbortScope(), num_sampled()
    halt.activate()
    asked = asyncio.create_task(client.generate([5, 6], {"max_tokens": LONG, "ignore_eos": True}, n=2))
    while num_sampled() < before + 20:
        await asyncio.sleep(0.01)
    await halt.end([asked])
    await client.aclose()
    return asked.result()


def test_the_router_passes_generation_on_lets_it_be_cut_short_and_stops_without_a_trace(vllm_engine, tmp_path):
    router = RouterProcess(engine_config(Path("unused")), [vllm_engine.address], run_dir=tmp_path)
    router.start()
    router.wait_ready(60)
    session = router.pid
    assert len(sample(router.url, [5, 6], 4)["token_ids"]) == 4
    answers = asyncio.run(cut_short(router.url, vllm_engine.url))
    assert [answer.finish_reason for answer in answers] == ["abort", "abort"]
    for answer in answers:
        assert 0 < len(answer.token_ids) == len(answer.log_probs) == answer.versions[-1].end < LONG
    router.stop()
    assert session_members(session) == []


def test_a_missing_model_is_reported_with_log_lines_before_the_deadline(tmp_path):
    engine = EngineProcess(engine_config(tmp_path / "no_such_model"), index=3, run_dir=tmp_path)
    engine.start()
    session = engine.pid
    with pytest.raises(EngineError, match=r"engine-3 ended with exit code 1.*last log lines") as failed:
        engine.wait_ready(ENGINE_DEADLINE_S)
    assert "no_such_model" in str(failed.value)
    assert not engine.is_alive()
    engine.stop()
    assert session_members(session) == []


def test_the_installed_vllm_is_asked_for_its_flags_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    validate_vllm_flags(dataclasses.replace(engine_config(Path("m")), vllm_flags=("--max-num-seqs", "8")))
    [cache] = (tmp_path / "vime").iterdir()
    written = cache.stat().st_mtime_ns
    with pytest.raises(ConfigError, match=r"Did you mean --vllm-max-num-seqs\?"):
        validate_vllm_flags(dataclasses.replace(engine_config(Path("m")), vllm_flags=("--max-num-seq", "8")))
    assert cache.stat().st_mtime_ns == written


OWNER = """
import sys
from pathlib import Path
from tests.helpers.engine_updates import BOUND, PROMPT, Pusher, difference, prompt_difference, sample
from tests.helpers.engines import KEYS, engine_config
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.launch import awaiting_update
config = awaiting_update(engine_config(Path(sys.argv[1]), rollout_temperature=0.7))
engine = EngineProcess(config, index=1, run_dir=Path(sys.argv[2]), keys=KEYS)
engine.start()
engine.wait_ready(200)
print(engine.url, engine.pid, flush=True)
sys.stdin.read()
"""


@dataclasses.dataclass
class Owned:
    """An engine that another process owns."""

    owner: subprocess.Popen
    address: EngineAddress
    session: int


@pytest.fixture(scope="module")
def llama_engine(llama_dir, tmp_path_factory):
    """Tied Llama at temperature 0.7 that waits for an update, owned by another process, which the last test kills."""
    root = Path(__file__).parents[3]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(llama_dir), str(tmp_path_factory.mktemp("llama_run"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    url, session = owner.stdout.readline().split()
    yield Owned(owner, EngineAddress(name="llama", url=url, key=KEYS.control), int(session))
    owner.kill()
    owner.wait(60)


def test_a_tied_llama_head_follows_the_update(llama_engine, llama_dir, tmp_path):
    # Without refresh_packed_copies the logits stay those of the old head: of random weights at first.
    model = tiny_models.load(llama_dir)
    pusher = Pusher(llama_engine.address, "gloo", tmp_path)
    pusher.push(model)
    assert prompt_difference(pusher.fleet, model) < BOUND
    tiny_models.perturb(model, seed=11, scale=0.1)
    pusher.push(model)
    assert prompt_difference(pusher.fleet, model) < BOUND
    pusher.close()


def test_at_a_temperature_the_engine_reports_what_it_sampled_from(llama_engine, llama_dir, tmp_path):
    model = tiny_models.load(llama_dir)
    pusher = Pusher(llama_engine.address, "shm", tmp_path)
    pusher.push(model)
    choice = sample(llama_engine.address.url, [9, 8, 7], 20, temperature=0.7)
    assert difference(choice, model, [9, 8, 7], temperature=0.7) < BOUND
    assert difference(choice, model, [9, 8, 7]) > 0.01
    pusher.close()


def test_an_update_that_lacks_a_tensor_of_the_checkpoint_is_refused_by_the_engine(llama_engine, llama_dir, tmp_path):
    # Last use of this engine's weights: a failed update cannot be repaired.
    model = tiny_models.load(llama_dir)
    pusher = Pusher(llama_engine.address, "shm", tmp_path)
    names = {name for name, _ in tiny_models.stream(model)} - {"model.norm.weight"}
    with pytest.raises(PublishError, match=r"lacks 1 tensors.*model\.norm\.weight"):
        pusher.push(model, names=names)
    assert pusher.fleet.is_paused() == [True]
    pusher.close()


def test_when_its_owner_is_killed_no_process_of_the_engine_survives(llama_engine):
    members = [psutil.Process(pid) for pid in session_members(llama_engine.session)]
    assert len(members) >= 3  # guard, API server, EngineCore
    llama_engine.owner.send_signal(signal.SIGKILL)
    llama_engine.owner.wait(60)
    _, alive = psutil.wait_procs(members, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
