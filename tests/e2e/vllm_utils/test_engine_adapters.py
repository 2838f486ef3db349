"""Real vLLM with adapters: do the model's new weights compute there, and does each request compute with its version?

What the engine says is compared with transformers on the merged weights: W + alpha / rank * B A.
"""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import torch

from tests.helpers import tiny_models
from tests.helpers.adapters import make_adapter, merged
from tests.helpers.engine_updates import BOUND, PROMPT, Pusher, difference, prompt_difference, sample
from tests.helpers.engines import HEADERS, engine_config, started
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.routes import MAX_ADAPTERS
from vime.config.lora import LINEAR_LAYERS, AdapterInfo
from vime.types import PublishError

RANK = 5  # none of vLLM's sizes
INFO = AdapterInfo(rank=RANK, alpha=8.0, target_modules=list(LINEAR_LAYERS))
LONG_ANSWER = 2_000


@pytest.fixture(scope="module")
def engine(qwen3_dir, tmp_path_factory) -> Iterator[EngineProcess]:
    config = engine_config(qwen3_dir, LONG_ANSWER + 400, lora_rank=RANK)
    yield from started(config, tmp_path_factory.mktemp("adapter_engine"))


@pytest.fixture(scope="module")
def model(qwen3_dir) -> torch.nn.Module:
    return tiny_models.load(qwen3_dir)


@pytest.fixture(scope="module")
def pusher(engine, model, tmp_path_factory) -> Iterator[Pusher]:
    pusher = Pusher(engine.address, "shm", tmp_path_factory.mktemp("adapters"))
    pusher.push(model)
    yield pusher
    pusher.close()


def push_adapter(pusher: Pusher, adapter: dict[str, torch.Tensor], info: AdapterInfo = INFO) -> int:
    pusher.push_tensors(adapter, info)
    return pusher.version


def loaded(engine: EngineProcess) -> set[int]:
    """Ids of the adapters that the engine holds: version + 1."""
    answer = httpx.post(f"{engine.url}/collective_rpc", json={"method": "list_loras"}, headers=HEADERS, timeout=60)
    return set(answer.json()["results"][0])


def versions(answer: dict[str, object]) -> list[int]:
    return [int(span["version"]) for span in answer["weight_versions"]]


def test_an_adapter_before_its_model_is_refused(engine, model, tmp_path) -> None:
    """First: the engine has been brought nothing yet, as one that was started again."""
    pusher = Pusher(engine.address, "shm", tmp_path)
    with pytest.raises(PublishError, match="before the model that it belongs to"):
        push_adapter(pusher, make_adapter(model, 0, INFO))
    pusher._sender.close()
    pusher.fleet.close()


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_new_weights_of_the_model_compute_in_an_engine_with_room_for_adapters(
    transport, engine, qwen3_dir, tmp_path
) -> None:
    changed = tiny_models.load(qwen3_dir)
    pusher = Pusher(engine.address, transport, tmp_path)
    for seed in (1, 2):  # tied embeddings, all seven linear layers of every decoder layer
        tiny_models.perturb(changed, seed=seed)
        pusher.push(changed)
        assert difference(sample(engine.url, PROMPT, 20), changed, PROMPT) < BOUND
        assert prompt_difference(pusher.fleet, changed) < BOUND
    pusher._sender.close()
    pusher.fleet.close()


def test_each_version_of_an_adapter_computes_as_merged_weights_also_behind_a_cached_prompt(
    engine, model, pusher
) -> None:
    for seed in range(MAX_ADAPTERS + 1):
        adapter = make_adapter(model, seed, INFO)
        version, whole = push_adapter(pusher, adapter), merged(model, adapter, INFO)
        for _ in range(2):  # the second has its prompt from the prefix cache
            answer = sample(engine.url, PROMPT, 20)
            assert difference(answer, whole, PROMPT) < BOUND
            assert versions(answer) == [version]
    assert loaded(engine) == {version, version + 1}  # this one, and that which it replaced


def test_a_request_in_progress_keeps_the_adapter_that_it_began_with(engine, model, pusher) -> None:
    first = make_adapter(model, 100, INFO)
    old = push_adapter(pusher, first)
    answers: list[dict[str, object]] = []
    asked = threading.Thread(target=lambda: answers.append(sample(engine.url, PROMPT, LONG_ANSWER)))
    before = num_generated(engine)
    asked.start()
    wait_until(lambda: num_generated(engine) > before + 5)
    second = make_adapter(model, 101, INFO)
    new = push_adapter(pusher, second)
    assert asked.is_alive(), "it was answered before the update"
    answer = sample(engine.url, PROMPT, 20)
    assert (versions(answer), asked.is_alive()) == ([new], True)
    assert difference(answer, merged(model, second, INFO), PROMPT) < BOUND
    asked.join(300)
    assert versions(answers[0]) == [old]
    assert difference(answers[0], merged(model, first, INFO), PROMPT) < BOUND


def test_an_adapter_that_lacks_a_tensor_is_refused_and_one_is_never_put_in_anothers_place(
    engine, model, pusher
) -> None:
    adapter = make_adapter(model, 200, INFO)
    name = next(name for name in adapter if "down_proj.lora_B" in name)
    with pytest.raises(PublishError, match=rf"adapter lacks 1 of \d+ tensors, first \['{name}'\]"):
        push_adapter(pusher, {other: tensor for other, tensor in adapter.items() if other != name})
    version = push_adapter(pusher, adapter)
    pusher.version -= 1
    with pytest.raises(PublishError, match=f"adapter of version {version} is there already"):
        push_adapter(pusher, make_adapter(model, 201, INFO))
    assert push_adapter(pusher, adapter) == version + 1
    assert difference(sample(engine.url, PROMPT, 20), merged(model, adapter, INFO), PROMPT) < BOUND


def test_a_run_that_begins_anew_at_lower_versions_is_not_answered_by_the_adapters_of_before(
    engine, model, pusher
) -> None:
    """Its base comes first. As a run that is resumed on engines of others, which hold what they held."""
    held = {push_adapter(pusher, make_adapter(model, seed, INFO)) + 1 for seed in (300, 301)}
    assert held <= loaded(engine)
    pusher.version -= 2  # the base is the first of those two, its adapter comes as the second, which is the newest
    pusher.push(model)
    for seed in (302, 303, 304):
        adapter = make_adapter(model, seed, INFO)
        version, whole = push_adapter(pusher, adapter), merged(model, adapter, INFO)
        for _ in range(2):
            answer = sample(engine.url, PROMPT, 20)
            assert difference(answer, whole, PROMPT) < BOUND
            assert versions(answer) == [version]
    pusher.version -= 20  # all that it holds has higher numbers
    pusher.push(model)
    for seed in (305, 306, 307):
        adapter = make_adapter(model, seed, INFO)
        version = push_adapter(pusher, adapter)
        assert version + 1 in loaded(engine)
        assert difference(sample(engine.url, PROMPT, 20), merged(model, adapter, INFO), PROMPT) < BOUND
    assert loaded(engine) == {version, version + 1}


def num_generated(engine: EngineProcess) -> float:
    lines = httpx.get(f"{engine.url}/metrics", headers=HEADERS).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


def wait_until(is_so) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)
