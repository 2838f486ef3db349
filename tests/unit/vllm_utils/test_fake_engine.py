"""The scripted engine: deterministic answers, pauses and aborts as vLLM does them. No sleep: tests wait for states."""

import concurrent.futures
from collections.abc import Callable, Iterator

import httpx
import pytest
import torch

from vime.backends.vllm_utils.fake import FakeEngine
from vime.backends.vllm_utils.routes import UPDATE_ROUTE


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(
        complete=lambda asked: ([10 * asked.sample + token for token in asked.prompt] * 3, [-0.5] * 9)
    ) as made:
        yield made


@pytest.fixture
def generate(engine) -> Iterator[Callable[..., concurrent.futures.Future]]:
    """Send a request of three prompt tokens (an answer of nine) from a thread; answers a future of its JSON."""
    with concurrent.futures.ThreadPoolExecutor(4, "client") as pool:

        def send(request_id: str = "x", **params: object) -> concurrent.futures.Future:
            body = {"request_id": request_id, "token_ids": [1, 2, 3], "sampling_params": params}
            url = f"{engine.address.url}/inference/v1/generate"
            return pool.submit(lambda: httpx.post(url, json=body, timeout=30).json())

        yield send
        engine.clear_stall()
        control(engine, "/resume")


def control(engine: FakeEngine, route: str, body: object = None) -> httpx.Response:
    return httpx.post(engine.address.url + route, json=body, timeout=30)


def test_answers_come_from_the_function_one_for_each_sample(generate):
    answer = generate(n=2, max_tokens=9, logprobs=0).result(30)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[1, 2, 3] * 3, [11, 12, 13] * 3]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    assert answer["choices"][1]["weight_versions"] == [{"version": "default", "start": 0, "end": 9}]


def test_max_tokens_cuts_the_answer(generate):
    [choice] = generate(max_tokens=4).result(30)["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([1, 2, 3, 1], "length")


def test_an_abort_returns_the_tokens_so_far(engine, generate):
    engine.faults.stall_tokens_after = 2
    pending = generate(n=2, max_tokens=9, logprobs=0)
    engine.wait_until_running(1)
    control(engine, "/abort_requests")
    choices = pending.result(30)["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    assert [len(choice["token_ids"]) for choice in choices] == [2, 2]


def test_an_abort_by_id_ends_that_request_alone_and_unknown_ids_are_passed_over(engine, generate):
    engine.faults.stall_tokens_after = 2
    mine, other = (generate(request_id=name, max_tokens=9, logprobs=0) for name in ("mine", "other"))
    engine.wait_until_running(2)
    control(engine, "/abort_requests", {"request_ids": ["generate-tokens-mine", "generate-tokens-gone"]})
    [cut] = mine.result(30)["choices"]
    assert (cut["finish_reason"], len(cut["token_ids"])) == ("abort", 2)
    engine.clear_stall()
    [whole] = other.result(30)["choices"]
    assert (whole["finish_reason"], len(whole["token_ids"])) == ("stop", 9)


def test_pause_keep_holds_a_running_request_until_resume(engine, generate):
    engine.faults.stall_tokens_after = 2
    pending = generate(max_tokens=9)
    engine.wait_until_running(1)
    control(engine, "/pause?mode=keep")
    engine.clear_stall()
    assert not pending.done()
    control(engine, "/resume")
    assert len(pending.result(30)["choices"][0]["token_ids"]) == 9


def test_a_request_during_a_pause_waits_for_resume(engine, generate):
    control(engine, "/pause?mode=wait")
    pending = generate(max_tokens=9)
    with pytest.raises(concurrent.futures.TimeoutError):
        pending.result(0.1)
    control(engine, "/resume")
    assert len(pending.result(30)["choices"][0]["token_ids"]) == 9


def test_a_route_told_to_fail_fails_and_others_work(engine):
    engine.faults.status["/pause"] = 503
    assert control(engine, "/pause").status_code == 503
    assert control(engine, "/resume").status_code == 200


def test_an_unknown_route_or_mode_is_an_error(engine):
    assert control(engine, "/no_such_route").status_code == 404
    assert control(engine, "/pause?mode=nonsense").status_code == 500


def test_buckets_out_of_order_are_errors_as_in_vllm(engine, tmp_path):
    weights = torch.arange(64, dtype=torch.uint8)
    weights.numpy().tofile(tmp_path / "weights")

    def bucket(index: int) -> int:
        info = {"index": index, "count": 3, "names": ["w"], "dtypes": ["uint8"], "shapes": [[64]]}
        body = {"update_info": info | {"path": str(tmp_path / "weights")}, "version": 1, "pause_mode": "keep"}
        return control(engine, UPDATE_ROUTE, body).status_code

    assert bucket(0) == 500  # nobody has connected
    assert control(engine, "/init_weight_transfer_engine", {"init_info": {"transport": "shm"}}).status_code == 200
    assert bucket(1) == 500  # no update is open
    assert bucket(0) == 200
    assert bucket(0) == 500  # one is open
    assert bucket(2) == 500  # the second is missing, and that ends it
    assert bucket(1) == 500


def test_a_stopped_engine_refuses_connections(engine):
    engine.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(engine.address.url + "/health")
