"""The scripted engine's answers: a function of what was asked and of the weights, of long-tailed length, at a pace."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from pathlib import Path

import httpx
import pytest

from vime.backends.vllm_utils.fake import CompletionRequest, FakeEngine
from vime.backends.vllm_utils.scripted_server import PACE, LongTailed, main, pace
from vime.types import ConfigError

ASKED = CompletionRequest(prompt=[5, 6, 7], sample=0, seed=None, version="3", content_hash="abc", max_tokens=4096)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 50, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_same_question_has_the_same_answer_and_any_other_another(model: Path) -> None:
    answer = LongTailed(str(model))(ASKED)
    assert LongTailed(str(model))(dataclasses.replace(ASKED, version="4")) == answer  # the same weights
    for change in ({"prompt": [5, 6, 8]}, {"sample": 1}, {"seed": 1}, {"content_hash": "abd"}):
        assert LongTailed(str(model))(dataclasses.replace(ASKED, **change)) != answer
    other_weights, _ = LongTailed(str(model))(dataclasses.replace(ASKED, content_hash="abd"))
    assert len(other_weights) == len(answer[0])  # as much work


def test_an_answer_ends_with_the_end_token_alone_and_is_nearly_uniform(model: Path) -> None:
    tokens, log_probs = LongTailed(str(model))(ASKED)
    assert tokens[-1] == 2
    assert 2 not in tokens[:-1]
    assert set(tokens) <= set(range(50))
    assert len(log_probs) == len(tokens)
    assert all(abs(log_prob + 3.892) <= 0.1 + 1e-3 for log_prob in log_probs)  # ln 49 = 3.8918


def test_the_last_tenth_of_the_answers_is_longer_than_half_of_the_limit(model: Path) -> None:
    answer = LongTailed(str(model))
    lengths = sorted(len(answer(dataclasses.replace(ASKED, sample=sample))[0]) for sample in range(2000))
    # standard errors at 2000 draws: 0.7 % of the ranks at the 90th percentile, 0.4 % of the share that is cut
    assert lengths[1740] < 4096 / 2 < lengths[1860]
    assert 4096 / 8 * 0.9 < lengths[1000] < 4096 / 8 * 1.1
    assert 0.015 < sum(length > 4096 for length in lengths) / 2000 < 0.04  # P(z > ln 8 / 1.082) = 2.7 %


def test_at_a_pace_an_abort_returns_what_has_come_so_far() -> None:
    with (
        FakeEngine(token_s=3600.0) as engine,
        concurrent.futures.ThreadPoolExecutor(1, "client") as pool,
    ):
        url = engine.address.url
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}
        asked = pool.submit(lambda: httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60).json())
        engine.wait_until_running(1)
        httpx.post(f"{url}/abort_requests", timeout=60)
        [choice] = asked.result(60)["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([], "abort")


def test_at_a_pace_an_undisturbed_answer_is_whole() -> None:
    with FakeEngine(token_s=1e-4) as engine:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}
        answer = httpx.post(f"{engine.address.url}/inference/v1/generate", json=body, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == [3, 2, 1]


@pytest.mark.parametrize(("text", "seconds"), [("", 0.0), ("50", 0.02)])
def test_the_pace_is_tokens_per_second(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PACE, text)
    assert pace() == seconds


@pytest.mark.parametrize("text", ["fast", "0", "-1", "inf", "nan"])
def test_a_pace_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PACE, text)
    with pytest.raises(ConfigError, match=PACE):
        pace()


def test_a_model_without_config_ends_the_process_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path), "--port", "0", "--served-model-name", "policy"]) == 2
    assert "no config.json" in capfd.readouterr().err
