"""Whatever a plug-in raises ends the call by name, with the plug-in's own line, also what Python takes for an exit."""

import asyncio
import contextlib
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.config.parse import Args, Config
from vime.protocols import calling_plugin
from vime.rollout.generation import close_clients, engine_client
from vime.rollout.group_worker import filter_verdict, generate_and_rm_group
from vime.rollout.loops import rollout_loop
from vime.rollout.rm_hub import batched_async_rm
from vime.types import ConfigError, PluginError, RewardError, Sample, SampleStatus, VimeError

PLUGINS = """
import asyncio, json, sys

async def exits(args, sample, *rest, **kwargs):
    sys.exit(7)

async def cancels(args, sample, *rest, **kwargs):
    raise asyncio.CancelledError("not by Vime")

def exits_in_a_thread(args, sample, **kwargs):
    sys.exit(7)

def stops_in_a_thread(args, sample, **kwargs):
    raise StopIteration("nothing left")

def cancels_in_a_thread(args, sample, **kwargs):
    raise asyncio.CancelledError("not by Vime")

async def misreads(args, sample, **kwargs):
    return json.loads("{")  # raised by a library

def exits_as_filter(args, samples, **kwargs):
    sys.exit(7)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plugins.py"
    path.write_text(PLUGINS)
    return path


def arguments(**more: Any) -> Any:
    values = {
        "custom_rm_path": None,
        "rm_type": None,
        "group_rm": False,
        "reward_key": None,
        "rm_timeout_secs": 60.0,
        "on_reward_error": "stop",
        "config": Config(),
        "custom_generate_function_path": None,
        "dynamic_sampling_filter_path": None,
    }
    return SimpleNamespace(**values | more)


def samples(num: int = 2) -> list[Sample]:
    return [Sample(index=index, group_index=0, status=SampleStatus.COMPLETED) for index in range(num)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exits", "raised SystemExit: 7 (at "),
        ("cancels", "raised CancelledError: not by Vime (at "),
        ("exits_in_a_thread", "raised SystemExit: 7 (at "),
        ("stops_in_a_thread", "raised StopIteration: nothing left (at "),
        ("cancels_in_a_thread", "raised CancelledError: not by Vime (at "),
        ("misreads", "plugins.py:20)"),
    ],
)
def test_what_a_reward_raises_ends_the_round_in_seconds_and_names_it(
    file: Path, name: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(custom_rm_path=f"{file}:{name}")
    with pytest.raises(RewardError) as raised:
        rollout_loop().run(batched_async_rm(args, samples()), name="rewards", timeout_s=10)
    assert says in str(raised.value)
    assert f"{file}:" in str(raised.value)
    assert f"{file}:{name}, sample " in str(raised.value)
    assert any(record.exc_info for record in caplog.records)
    # the loops live: the next call is answered
    assert rollout_loop().run(asyncio.sleep(0, "alive"), name="the loop", timeout_s=10) == "alive"


@pytest.mark.parametrize("name", ["exits", "cancels"])
def test_what_a_generate_function_raises_ends_the_round(file: Path, name: str) -> None:
    args = arguments(custom_generate_function_path=f"{file}:{name}")
    group = [Sample(index=index, group_index=0) for index in range(2)]
    with pytest.raises(PluginError, match=rf"{name}, sample 0: raised (SystemExit|CancelledError).*plugins.py:"):
        rollout_loop().run(generate_and_rm_group(args, group, {}), name="a group", timeout_s=10)


def test_a_generate_function_has_the_time_of_the_longest_answer(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []

    def recorded(name: str, *owners: str, deadline_s: float) -> contextlib.nullcontext[None]:
        assert (name, owners) == ("--custom-generate-function-path", ())
        deadlines.append(deadline_s)
        return contextlib.nullcontext()

    monkeypatch.setattr("vime.rollout.group_worker.waiting", recorded)
    for length in (8192, 32_768):
        config = Config().replace(rollout_max_response_len=length)
        args = arguments(custom_generate_function_path=f"{file}:exits", config=config)
        call = generate_and_rm_group(args, [Sample(index=0, group_index=0)], {})
        with pytest.raises(PluginError):
            rollout_loop().run(call, name="a group", timeout_s=10)
    assert deadlines == [600, 1828]


async def test_a_request_to_the_engines_has_the_time_of_the_longest_answer() -> None:
    given = {"vllm_router_ip": "127.0.0.1", "rollout_max_response_len": 32_768}
    try:
        client = engine_client(Args(Config().replace(vllm_router_port=1, **given)))
        assert client._timeout_s == 1828
    finally:
        close_clients()


def test_what_a_filter_raises_ends_the_round(file: Path) -> None:
    args = arguments(dynamic_sampling_filter_path=f"{file}:exits_as_filter")
    with pytest.raises(PluginError, match=r"exits_as_filter: raised SystemExit: 7 \(at .*plugins.py:23\)"):
        filter_verdict(args, samples())


async def test_a_cancellation_by_vime_is_none_of_the_plug_in() -> None:
    async def sleeps() -> None:
        with calling_plugin("--custom-rm-path", sleeps):
            await asyncio.sleep(600)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sleeps(), 0.05)


def test_an_error_of_vime_passes_through_a_plug_in_as_itself() -> None:
    with pytest.raises(ConfigError, match="no router"), calling_plugin("--custom-rm-path", len):
        raise ConfigError("no router")


def test_a_fault_of_the_device_is_not_the_losses() -> None:
    ecc = "CUDA error: uncorrectable ECC error encountered"
    with pytest.raises(RuntimeError, match="ECC"), calling_plugin("--custom-loss-path", len, on_device=True):
        raise RuntimeError(ecc)
    with pytest.raises(PluginError, match="illegal"), calling_plugin("--custom-loss-path", len, on_device=True):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(VimeError, match="connection refused"), calling_plugin("--custom-rm-path", json.loads):
        raise RuntimeError("the judge: connection refused")


def test_the_log_has_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(PluginError), calling_plugin("--custom-loss-path", len):
        raise KeyError("no such column")
    assert "KeyError: 'no such column'" in caplog.text
    assert "Traceback" in caplog.text
