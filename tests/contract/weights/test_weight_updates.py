"""The contract of a weight update, on the scripted engine and on vLLM, over every CPU transport."""

import builtins
import contextlib
import dataclasses
import faulthandler
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers import tiny_models
from tests.helpers.engine_updates import kill_one_of_two_in_a_broadcast
from tests.helpers.faulty_sender import OTHER_BYTES, Faulty
from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.fake import FakeEngine
from vime.backends.vllm_utils.routes import UPDATE_ROUTE
from vime.config.parse import parse
from vime.ray.publisher import Publisher
from vime.types import EngineError, PublishError, WaitTimeoutError
from vime.weights.hashing import content_hash
from vime.weights.plan import TensorMeta
from vime.weights.publish import publish
from vime.weights.transports import make_sender
from vime.weights.wire import update_to_wire

BUCKET_BYTES = 60_000  # the tiny model has about 379 kB in fp32: several buckets
TIMEOUT_S = 60.0
TRANSPORTS = ["shm", "gloo", "disk"]


@pytest.fixture(params=["fake", "vllm"])
def fleet(request: pytest.FixtureRequest) -> Iterator[FleetControl]:
    """Control of one engine, resumed again after the test."""
    if request.param == "fake":
        with FakeEngine() as engine:
            control = FleetControl([engine.address], timeout_s=TIMEOUT_S)
            yield control
            control.close()
        return
    control = FleetControl([request.getfixturevalue("vllm_engine").address], timeout_s=TIMEOUT_S)
    yield control
    control.resume()
    control.close()


@pytest.fixture
def model(qwen3_dir) -> torch.nn.Module:
    return tiny_models.load(qwen3_dir)


@pytest.fixture
def shm(tmp_path):
    sender = make_sender("shm", bucket_bytes=BUCKET_BYTES, directory=tmp_path, timeout_s=TIMEOUT_S)
    yield sender
    sender.close()


def send(model, fleet, sender, version, *, weights=None, pause_mode="keep"):
    metadata = [TensorMeta.of(name, tensor) for name, tensor in tiny_models.stream(model)]
    return publish(
        iter(weights or dict(tiny_models.stream(model)).items()),
        metadata,
        version=version,
        fleet=fleet,
        sender=sender,
        pause_mode=pause_mode,
        deadline_s=TIMEOUT_S,
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_and_hashes_of_successive_updates_are_confirmed(transport, fleet, model, tmp_path):
    sender = make_sender(transport, bucket_bytes=BUCKET_BYTES, directory=tmp_path, timeout_s=TIMEOUT_S)
    sender.connect(fleet)
    for version in (3, 4, 5):
        tiny_models.perturb(model, seed=version)
        report = send(model, fleet, sender, version)
        assert report.content_hash == content_hash(dict(tiny_models.stream(model)))
        [engine_report] = fleet.reports()
        assert (engine_report.version, engine_report.content_hash) == (version, report.content_hash)
        assert engine_report.num_tensors == report.num_tensors == len(list(tiny_models.stream(model)))
        assert fleet.is_paused() == [False]
        assert shared_files() == [], "memory of a bucket is held until the next update"
    sender.close()


def shared_files() -> list[str]:
    """Memory files of this process that hold weights."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(file))
    return [name for name in found if "vime-weights" in name]


@pytest.mark.parametrize("pause_mode", ["keep", "wait", "abort"])
def test_the_answer_after_an_update_carries_its_version(pause_mode, fleet, model, shm):
    shm.connect(fleet)
    send(model, fleet, shm, 8, pause_mode=pause_mode)
    body = {"token_ids": [5, 6, 7], "sampling_params": {"n": 2, "max_tokens": 3, "logprobs": 0, "ignore_eos": True}}
    address = fleet.addresses[0]
    url = address.url + "/inference/v1/generate"
    answer = httpx.post(url, json=body, headers=address.headers, timeout=60).json()
    for choice in answer["choices"]:
        assert choice["weight_versions"] == [{"version": "8", "start": 0, "end": 3}]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 3
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]


def make_faulty(fault: str, transport: str, directory: Path, *, timeout_s: float = TIMEOUT_S) -> Faulty:
    return Faulty(fault, make_sender(transport, bucket_bytes=BUCKET_BYTES, directory=directory, timeout_s=timeout_s))


def assert_other_bytes_are_refused(faulty: Faulty, fault: str, control: FleetControl, model) -> None:
    """The update before is sound, and so brings what is stale."""
    faulty.sender.connect(control)
    for version in (8, 9):
        tiny_models.perturb(model, seed=version)
        if version == 8:
            send(model, control, faulty.sender, version)
    faulty.fault = fault
    expected = content_hash(dict(tiny_models.stream(model)))
    with pytest.raises(PublishError, match=f"version 9 with hash {expected}") as refused:
        send(model, control, faulty.sender, 9)
    assert all(address.name in str(refused.value) for address in control.addresses)
    assert control.is_paused() == [True] * len(control.addresses)
    faulty.sender.close()


@pytest.mark.parametrize("fault", OTHER_BYTES)
def test_other_bytes_than_were_sent_stop_the_update_and_the_engine_stays_paused(fault, fleet, model, tmp_path):
    assert_other_bytes_are_refused(make_faulty("none", "shm", tmp_path), fault, fleet, model)


@pytest.mark.parametrize("transport", ["gloo", "disk"])
@pytest.mark.parametrize("fault", OTHER_BYTES)
def test_other_bytes_are_noticed_by_every_engine_whatever_they_came_by(fault, transport, two_fakes, model, tmp_path):
    _, _, control = two_fakes
    assert_other_bytes_are_refused(make_faulty("none", transport, tmp_path), fault, control, model)


@pytest.mark.parametrize(
    ("fault", "transport", "message"),
    [
        ("lost", "shm", "got bucket 2 of [0-9]+, expected bucket 1"),
        ("last lost", "shm", "version 9: no engine reported"),
        ("lost", "disk", "e0 .*model-00002-of-[0-9]+.safetensors"),
        ("last lost", "disk", "e0 .*model-0000([0-9])-of-0000\\1.safetensors"),
        ("last lost", "gloo", "the engines to take a bucket of weights"),  # which wait for it; no bucket has its place
    ],
)
def test_a_lost_bucket_stops_the_update_and_the_engines_stay_paused(
    fault, transport, message, two_fakes, model, tmp_path
):
    _, _, control = two_fakes
    faulty = make_faulty(fault, transport, tmp_path, timeout_s=3)
    faulty.sender.connect(control)
    with pytest.raises((PublishError, WaitTimeoutError), match=message):
        send(model, control, faulty.sender, 9)
    assert control.is_paused() == [True, True]
    faulty.sender.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publish_names_an_engine_that_took_nothing_of_it(transport, two_fakes, tmp_path):
    """It takes every call and keeps what it has: over `gloo` it joins the broadcast and drops the bytes."""
    first, second, both = two_fakes
    send_small(both, transport, tmp_path)
    second.faults.is_passed_over = True
    newer = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    with pytest.raises(PublishError, match=f"version 2 with hash {content_hash(newer)}, but e1 serves version 1 "):
        send_small(both, transport, tmp_path, version=2, weights=newer)
    assert torch.equal(first.weights["a"], newer["a"])
    assert torch.equal(second.weights["a"], WEIGHTS["a"])
    assert both.is_paused() == [True, True]


class Forgetful(FleetControl):
    """Calls the first of its engines alone when it brings weights, and the other ones otherwise."""

    def update(self, update_info, **of_version):
        one = FleetControl(self.addresses[:1], timeout_s=10)
        try:
            return one.update(update_info, **of_version)
        finally:
            one.close()


@pytest.mark.parametrize("transport", ["shm", "disk"])  # a broadcast waits for whoever has joined it
def test_a_publish_names_whose_report_is_missing(transport, two_fakes, tmp_path):
    first, second, both = two_fakes
    forgetful = Forgetful(both.addresses, timeout_s=10)
    with pytest.raises(PublishError, match=r"reports came from \['e0'\], expected one from each of \['e0', 'e1'\]"):
        send_small(forgetful, transport, tmp_path)
    assert UPDATE_ROUTE not in second.calls
    assert "/resume" not in first.calls + second.calls
    forgetful.close()


def test_engine_that_never_got_weights_has_no_version_to_report():
    with FakeEngine(name="fresh") as engine:
        control = FleetControl([engine.address], timeout_s=TIMEOUT_S)
        with pytest.raises(EngineError, match="fresh serves version 'default'"):
            control.reports()
        control.close()


@pytest.fixture
def two_fakes():
    with FakeEngine(name="e0") as first, FakeEngine(name="e1") as second:
        control = FleetControl([first.address, second.address], timeout_s=10)
        yield first, second, control
        control.close()


WEIGHTS = {"a": torch.arange(50.0), "b": torch.ones(7, 3, dtype=torch.bfloat16), "c": torch.tensor(3.0)}


def send_small(control, transport, tmp_path, version=1, weights=WEIGHTS):
    sender = make_sender(transport, bucket_bytes=128, directory=tmp_path, timeout_s=10)
    try:
        sender.connect(control)
        return publish(
            iter(weights.items()),
            [TensorMeta.of(name, tensor) for name, tensor in weights.items()],
            version=version,
            fleet=control,
            sender=sender,
            pause_mode="keep",
            deadline_s=30,
        )
    finally:
        sender.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_engine_of_a_fleet_gets_every_byte(transport, two_fakes, tmp_path):
    first, second, control = two_fakes
    report = send_small(control, transport, tmp_path)
    assert [entry.engine for entry in report.engine_reports] == ["e0", "e1"]
    for engine in (first, second):
        assert engine.weights.keys() == WEIGHTS.keys()
        assert all(torch.equal(engine.weights[name], WEIGHTS[name]) for name in WEIGHTS)


def test_an_engine_that_does_not_resume_has_not_confirmed(two_fakes, tmp_path):
    """It would get prompts, and be paused."""
    first, second, _ = two_fakes
    second.faults.status["/resume"] = 500
    control = FleetControl([first.address, second.address], timeout_s=10, lose_after_s=10)
    try:
        report = send_small(control, "shm", tmp_path)
    finally:
        control.close()
    assert [entry.engine for entry in report.engine_reports] == ["e0"]


@pytest.mark.parametrize("transport", ["shm", "disk"])
@pytest.mark.parametrize("route", [UPDATE_ROUTE, "/init_weight_transfer_engine", "/resume"])
def test_an_engine_that_hangs_in_an_update_is_left_out_while_there_is_time_for_the_others(
    transport, route, two_fakes, qwen3_dir, tmp_path
):
    first, second, _ = two_fakes
    second.faults.stall[route] = threading.Event()
    flags = ["--device", "cpu", "--update-weight-transport", transport, "--update-weight-buffer-size", "1024"]
    config = parse([*flags, "--update-weight-timeout-secs", "4", "--hf-checkpoint", str(qwen3_dir)])
    publisher = Publisher(config, tmp_path, [first.address, second.address], may_lose=True)
    try:
        metadata = [TensorMeta.of(name, tensor) for name, tensor in WEIGHTS.items()]
        report = publisher.publish(iter(WEIGHTS.items()), metadata, 1)
    finally:
        second.faults.stall[route].set()
        publisher.close()
    assert [entry.engine for entry in report.engine_reports] == ["e0"]


def test_control_calls_arrive_in_the_sacred_order(two_fakes, tmp_path):
    first, _, control = two_fakes
    send_small(control, "shm", tmp_path)
    # 128-byte buckets: a alone (200 bytes), then b (42 bytes) with c (4 bytes)
    assert first.calls[1:] == [UPDATE_ROUTE, UPDATE_ROUTE, "/resume"]  # after /init_weight_transfer_engine


def test_an_update_of_one_bucket_is_two_calls_over_one_connection(two_fakes, tmp_path):
    first, second, control = two_fakes
    control.is_paused()  # opens the connection
    send_small(control, "shm", tmp_path, weights={"a": WEIGHTS["a"]})
    for engine in (first, second):
        assert engine.calls == ["/init_weight_transfer_engine", UPDATE_ROUTE, "/resume"]
        assert engine.num_connections == 1


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"wrong_hash": True}, "e1 serves version 1 with hash 0000"),
        ({"wrong_version": "0"}, "e1 serves version 0"),
        ({"status": {UPDATE_ROUTE: 503}}, f"e1 .*{UPDATE_ROUTE}: HTTP 503"),
    ],
)
def test_one_bad_engine_stops_the_whole_fleet(transport, fault, message, two_fakes, tmp_path):
    first, second, control = two_fakes
    second.faults = dataclasses.replace(second.faults, **fault)
    with pytest.raises(PublishError, match=message):
        send_small(control, transport, tmp_path)
    assert "/resume" not in first.calls + second.calls


def test_a_dead_engine_is_named_with_route_and_cause(two_fakes):
    _, second, control = two_fakes
    second.stop()
    with pytest.raises(EngineError, match=r"e1 \(http://127.*\) /resume: ConnectionRefusedError") as dead:
        control.resume()
    assert "e0" not in str(dead.value)


def test_an_engine_that_does_not_answer_ends_at_the_timeout(two_fakes):
    first, second, _ = two_fakes
    second.faults.stall["/resume"] = threading.Event()
    control = FleetControl([first.address, second.address], timeout_s=1.0)
    with pytest.raises(EngineError, match=r"e1 /resume: no response within 1 s"):
        control.resume()
    control.close()


def test_rows_are_scored_at_once_by_every_engine_and_answered_in_their_order(two_fakes):
    first, second, control = two_fakes
    for engine in (first, second):
        engine.faults.stall_tokens_after = 0
    rows = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(control.prompt_log_probs, rows)
        for engine in (first, second):
            engine.wait_until_running(3)
            engine.clear_stall()
        assert asked.result(timeout=30) == [[[-1.0] * (len(row) - 1) for row in rows]] * 2
    assert control.prompt_log_probs([]) == [[], []]


def test_a_tensor_that_the_metadata_does_not_name_never_reaches_an_engine(two_fakes, tmp_path):
    first, _, control = two_fakes
    sender = make_sender("shm", bucket_bytes=128, directory=tmp_path, timeout_s=10)
    sender.connect(control)
    with pytest.raises(PublishError, match="ended after 1 of 3"):
        publish(
            iter([("a", WEIGHTS["a"])]),
            [TensorMeta.of(name, tensor) for name, tensor in WEIGHTS.items()],
            version=1,
            fleet=control,
            sender=sender,
            pause_mode="keep",
            deadline_s=30,
        )
    sender.close()
    assert first.calls[1:] == [UPDATE_ROUTE]  # the first bucket's


def test_disk_keeps_the_two_newest_updates(two_fakes, tmp_path):
    _, _, control = two_fakes
    sender = make_sender("disk", bucket_bytes=1 << 20, directory=tmp_path, timeout_s=10)
    sender.connect(control)
    for version in range(4):
        deliver = partial(control.update, version=version, pause_mode="keep")
        sender.send_update(
            iter(WEIGHTS.items()), [TensorMeta.of(name, tensor) for name, tensor in WEIGHTS.items()], deliver
        )
    kept = sorted(path.name for path in tmp_path.glob("update_*"))
    assert kept == ["update_0000003", "update_0000004"]
    assert [path.name for path in (tmp_path / kept[-1]).iterdir()] == ["model-00001-of-00001.safetensors"]


def test_anybody_can_load_the_newest_update_on_disk(two_fakes, qwen3_dir, tmp_path):
    """Transformers reads it by itself: the model, with the bits that were sent, and the tokenizer."""
    _, _, control = two_fakes
    sent = {name: tensor + 1.0 for name, tensor in tiny_models.load(qwen3_dir).state_dict().items()}
    sender = make_sender("disk", bucket_bytes=BUCKET_BYTES, directory=tmp_path, timeout_s=10, source=qwen3_dir)
    sender.connect(control)
    deliver = partial(control.update, version=1, pause_mode="keep")
    sender.send_update(iter(sent.items()), [TensorMeta.of(name, tensor) for name, tensor in sent.items()], deliver)
    [update] = tmp_path.glob("update_*")
    assert len(list(update.glob("*.safetensors"))) > 1, "an index is needed"
    assert len({file.stat().st_mode for file in update.iterdir()}) == 1, "who may read config.json may read the weights"
    loaded = tiny_models.load(update).state_dict()
    assert content_hash(loaded) == content_hash(sent)
    tokenizer = AutoTokenizer.from_pretrained(update)
    assert tokenizer.encode("12+3") == AutoTokenizer.from_pretrained(qwen3_dir).encode("12+3")


@pytest.mark.parametrize(("flags", "is_model"), [((), True), (("--lora-rank", "4"), False)])
def test_a_run_writes_model_directories_where_it_trains_a_model(flags, is_model, qwen3_dir, tmp_path):
    """With an adapter its updates are the adapter's tensors, which are no model."""
    given = ["--device", "cpu", "--hf-checkpoint", str(qwen3_dir), "--update-weight-transport", "disk", *flags]
    backend = ["--train-backend", "fsdp"] if flags else []
    with FakeEngine() as engine:
        publisher = Publisher(parse([*given, *backend]), tmp_path, [engine.address])
        publisher.publish(iter(WEIGHTS.items()), [TensorMeta.of(*pair) for pair in WEIGHTS.items()], 1)
        publisher.close()
    [update] = (tmp_path / "weights").glob("update_*")
    assert (update / "config.json").is_file() == (update / "tokenizer.json").is_file() == is_model


def test_a_sender_on_disk_goes_on_behind_the_updates_of_the_one_before(two_fakes, tmp_path):
    """Another fleet, and a restart of the run, make another sender. Who looks for the newest update finds its own, and
    none that was cut off."""
    _, _, control = two_fakes
    (tmp_path / ".update_0000009").mkdir()
    metas = [TensorMeta.of(name, tensor) for name, tensor in WEIGHTS.items()]
    for number in range(1, 6):
        if number in (1, 3):
            sender = make_sender("disk", bucket_bytes=1 << 20, directory=tmp_path, timeout_s=10)
            sender.connect(control)
        deliver = partial(control.update, version=number, pause_mode="keep")
        sender.send_update(iter(WEIGHTS.items()), metas, deliver)
        assert max(path.name for path in tmp_path.iterdir()) == f"update_{number:07d}"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_engine_that_cannot_join_the_broadcast_is_reported_at_once(two_fakes, tmp_path):
    _, second, control = two_fakes
    second.faults.status["/init_weight_transfer_engine"] = 500
    sender = make_sender("gloo", bucket_bytes=128, directory=tmp_path, timeout_s=20)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"e1 .*/init_weight_transfer_engine: HTTP 500"):
        sender.connect(control)
    assert time.monotonic() - started < 15
    sender.close()


def test_a_failed_broadcast_is_reported_at_once_though_another_engine_still_waits(tmp_path):
    # Only e2 refuses. In a broadcast over a tree e0 or e1 may then wait for bytes that never come, up to timeout_s.
    with FakeEngine(name="e0") as first, FakeEngine(name="e1") as second, FakeEngine(name="e2") as third:
        control = FleetControl([engine.address for engine in (first, second, third)], timeout_s=20)
        sender = make_sender("gloo", bucket_bytes=128, directory=tmp_path, timeout_s=20)
        sender.connect(control)
        third.faults.status[UPDATE_ROUTE] = 500
        started = time.monotonic()
        with pytest.raises(PublishError, match=f"e2 .*{UPDATE_ROUTE}: HTTP 500"):
            publish(
                iter(WEIGHTS.items()),
                [TensorMeta.of(name, tensor) for name, tensor in WEIGHTS.items()],
                version=1,
                fleet=control,
                sender=sender,
                pause_mode="keep",
                deadline_s=30,
            )
        sender.close()
        assert time.monotonic() - started < 15
        control.close()


def loops_of_gloo() -> int:
    """The event loops of gloo's groups in this process: threads that gloo names so. Python's collector runs first, as
    it does between two rounds: an error keeps what the frames of its traceback have."""
    gc.collect()
    names = []
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended since
            names.append(name.read_text().strip())
    return names.count("gloo_tcp_loop")


def assert_soon(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    ends = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() >= ends:
            faulthandler.dump_traceback(file=sys.__stderr__)  # who waits for what
        assert time.monotonic() < ends, f"not within {deadline_s} s"
        time.sleep(0.05)


@pytest.mark.parametrize("rank", [1, 2])
def test_an_engine_that_is_left_of_a_broadcast_in_which_another_was_killed_takes_the_version_from_the_next_group(
    rank, model, tmp_path
):
    """At once, where gloo would wait for the group's deadline of 60 s."""
    with FakeEngine(name="left") as engine:
        control = FleetControl([engine.address], timeout_s=TIMEOUT_S)
        tiny_models.perturb(model, seed=rank)
        before = loops_of_gloo()
        kill_one_of_two_in_a_broadcast(engine.address, model, tmp_path, rank=rank)
        began = time.monotonic()
        # Of the sender and of the receiver, which is in this process too: some turn for ever, with a core of their own.
        assert_soon(lambda: loops_of_gloo() <= before)
        again = make_sender("gloo", bucket_bytes=BUCKET_BYTES, directory=tmp_path, timeout_s=TIMEOUT_S)
        again.connect(control)
        send(model, control, again, 100)
        assert time.monotonic() - began < 30
        assert all(torch.equal(engine.weights[name], tensor) for name, tensor in tiny_models.stream(model))
        again.close()
        control.close()


def test_a_call_of_a_broadcast_group_that_was_given_up_is_refused_before_it_loads_anything(two_fakes, tmp_path):
    first, _, control = two_fakes
    send_small(control, "gloo", tmp_path)
    late = update_to_wire([TensorMeta.of(*pair) for pair in WEIGHTS.items()], 128)
    with pytest.raises(EngineError, match="another broadcast group than this engine has joined last"):
        control.update({**late, "group": "an earlier one"}, version=2, pause_mode="keep")
    assert first.weights.keys() == WEIGHTS.keys()


@pytest.mark.parametrize("ended", ["given up", "gone"])
def test_a_late_call_to_join_an_earlier_group_leaves_the_newer_one(ended, fleet, model, tmp_path, monkeypatch):
    told, join = [], fleet.init_transfer

    def note(infos):
        told.append(infos)
        join(infos)

    monkeypatch.setattr(fleet, "init_transfer", note)
    earlier, newer = (
        make_sender("gloo", bucket_bytes=BUCKET_BYTES, directory=tmp_path, timeout_s=TIMEOUT_S) for _ in range(2)
    )
    earlier.connect(fleet)
    if ended == "gone":
        earlier.close()
    else:
        earlier._say_given_up()
    newer.connect(fleet)
    began = time.monotonic()
    with pytest.raises(EngineError, match="does not listen" if ended == "gone" else "has given up the broadcast group"):
        join(told[0])
    assert time.monotonic() - began < TIMEOUT_S / 2, "the call waited for the group's deadline"
    assert fleet.is_paused() == [False]  # by GET: vLLM's server closes the connection behind a response with status 500
    tiny_models.perturb(model, seed=6)
    assert send(model, fleet, newer, 6).content_hash == content_hash(dict(tiny_models.stream(model)))
    newer.close()
    earlier.close()


def test_a_call_of_the_scripted_engine_holds_its_worker_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes seconds to import. A call that waited for it before it had the worker was overtaken by the next one:
    it came last, and took the engine out of the group that the next one had joined."""
    held, imported = [], builtins.__import__
    with FakeEngine() as engine:

        def look(name: str, *of: object) -> object:
            if name == "vime.weights.transports":
                held.append(engine._worker.locked())
            return imported(name, *of)

        control = FleetControl([engine.address], timeout_s=10)
        monkeypatch.setattr(builtins, "__import__", look)
        control.init_transfer([{"transport": "disk"}])
        monkeypatch.undo()
        control.close()
    assert held == [True]


@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_an_update_of_many_buckets_is_one_call_where_the_engine_gets_them_by_another_way(
    transport, two_fakes, tmp_path
):
    first, second, control = two_fakes
    send_small(control, transport, tmp_path)  # two buckets
    for engine in (first, second):
        assert [call for call in engine.calls if call not in SETTING_UP] == [UPDATE_ROUTE, "/resume"]


SETTING_UP = ("/get_world_size", "/init_weight_transfer_engine")

SAVES_AFTERWARDS = """
import sys
from pathlib import Path
import torch
from vime.backends.vllm_utils.control import FleetControl
from vime.types import EngineAddress, PublishError
from vime.weights.plan import TensorMeta
from vime.weights.publish import publish
from vime.weights.transports import make_sender

control = FleetControl([EngineAddress(name=f"e{n}", url=url) for n, url in enumerate(sys.argv[2:])], timeout_s=600)
sender = make_sender("gloo", bucket_bytes=1 << 20, directory=Path("unused"), timeout_s=600)
sender.connect(control)
weights = {str(n): torch.ones(1 << 18) for n in range(40)}
metadata = [TensorMeta.of(*pair) for pair in weights.items()]
try:
    publish(iter(weights.items()), metadata, version=1, fleet=control, sender=sender, pause_mode="keep", deadline_s=600)
except PublishError as error:
    Path(sys.argv[1]).write_text(f"saved after {error}")
sender.close()
control.close()
"""


def test_a_process_whose_broadcast_was_given_up_saves_and_ends(tmp_path):
    """Its engines refuse in the middle and stay, so nobody ever takes the bytes: the group's own deadline is 600 s."""
    with FakeEngine(name="e0") as first, FakeEngine(name="e1") as second:
        for engine in (first, second):
            engine.faults.status[UPDATE_ROUTE] = 500
        saved = tmp_path / "saved"
        command = [sys.executable, "-c", SAVES_AFTERWARDS, str(saved), first.address.url, second.address.url]
        subprocess.run(command, check=True, timeout=120)
        assert "e0" in saved.read_text()
        assert f"{UPDATE_ROUTE}: HTTP 500" in saved.read_text()
