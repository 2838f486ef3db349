"""publish: the order of its steps, what stops it, and that the stream is always consumed to its end."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from vime.config.lora import AdapterInfo
from vime.protocols import UpdateResponse
from vime.types import EngineAddress, EngineError, EngineReport, PublishError
from vime.weights.hashing import ContentHash, content_hash
from vime.weights.plan import TensorMeta
from vime.weights.publish import publish
from vime.weights.wire import checked_stream

WEIGHTS = {"a": torch.zeros(2), "b": torch.ones(3)}
METADATA = [TensorMeta.of(name, tensor) for name, tensor in WEIGHTS.items()]


class ScriptedFleet:
    """Writes down the calls; `fail_at` raises there; reports what it was made with, after the tensor `last`."""

    def __init__(self, content_hash: str, *, fail_at: str = "", last: str = "b") -> None:
        self.calls: list[str] = []
        self._fail_at, self._hash, self._last = fail_at, content_hash, last

    @property
    def addresses(self) -> Sequence[EngineAddress]:
        return [EngineAddress(name="e0", url="http://127.0.0.1:1")]

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fail_at:
            raise EngineError(f"e0 {call}: status 500")

    def update(
        self, update_info: dict[str, Any], *, version: int, pause_mode: str, adapter: AdapterInfo | None
    ) -> UpdateResponse:
        assert adapter is None
        [name] = update_info["names"]
        self._note(f"{pause_mode} {name} as {version}")
        report = EngineReport(engine="e0", version=version, content_hash=self._hash, num_tensors=2)
        return UpdateResponse(pause_s=0.0, confirm_s=0.0, reports=[report] if name == self._last else [])

    def resume(self) -> None:
        self._note("resume")


class HashingSender:
    """Sends nothing, but consumes and hashes as every sender does."""

    def send_update(self, stream, metadata, deliver) -> ContentHash:
        content = ContentHash()
        for meta, tensor in zip(metadata, checked_stream(stream, metadata), strict=True):
            content.add(meta, tensor)
            deliver({"names": [meta.name]})
        return content


class CountedStream:
    """An iterator that knows how far it was read: each step stands for a collective."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._pairs = iter(weights.items())
        self.is_exhausted = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._pairs)
        except StopIteration:
            self.is_exhausted = True
            raise


def run(fleet: ScriptedFleet, stream, *, metadata=METADATA, deadline_s: float = 60.0):
    return publish(
        stream,
        metadata,
        version=4,
        fleet=fleet,
        sender=HashingSender(),
        pause_mode="keep",
        deadline_s=deadline_s,
    )


def test_engines_resume_only_after_every_report_was_compared():
    fleet = ScriptedFleet(content_hash(WEIGHTS))
    report = run(fleet, iter(WEIGHTS.items()))
    assert fleet.calls == ["keep a as 4", "keep b as 4", "resume"]
    assert (report.version, report.content_hash, report.num_tensors) == (4, content_hash(WEIGHTS), 2)
    assert report.num_bytes == 2 * 4 + 3 * 4
    assert report.engine_reports[0].engine == "e0"
    assert report.confirm_s <= report.pause_s


def test_another_hash_stops_before_resume():
    fleet = ScriptedFleet("0" * 32)
    with pytest.raises(PublishError, match="not confirmed"):
        run(fleet, iter(WEIGHTS.items()))
    assert fleet.calls[-1] == "keep b as 4"


def test_engines_that_never_got_the_last_bucket_stop_before_resume():
    fleet = ScriptedFleet(content_hash(WEIGHTS), last="c")
    with pytest.raises(PublishError, match="no engine reported"):
        run(fleet, iter(WEIGHTS.items()))
    assert "resume" not in fleet.calls


@pytest.mark.parametrize("step", ["keep a as 4", "keep b as 4", "resume"])
def test_a_failure_at_any_step_drains_the_stream_and_goes_no_further(step):
    fleet, stream = ScriptedFleet(content_hash(WEIGHTS), fail_at=step), CountedStream(WEIGHTS)
    with pytest.raises(PublishError, match=r"version 4 failed: EngineError.*status 500.*must be restarted"):
        run(fleet, stream)
    assert fleet.calls[-1] == step
    assert stream.is_exhausted


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"a": WEIGHTS["a"]}, "ended after 1 of 2.*next was b"),
        ({**WEIGHTS, "c": torch.zeros(1)}, "more than the 2 tensors.*next is c"),
        ({"b": WEIGHTS["b"], "a": WEIGHTS["a"]}, "weight 0 of 2: got b .*expected a"),
        ({"a": WEIGHTS["a"], "b": WEIGHTS["b"].double()}, r"got b float64 \(3,\), expected b float32 \(3,\)"),
        ({"a": WEIGHTS["a"], "b": torch.ones(4)}, r"got b float32 \(4,\), expected b float32 \(3,\)"),
    ],
)
def test_a_stream_that_differs_from_its_metadata_is_refused(sent, message):
    fleet, stream = ScriptedFleet(content_hash(WEIGHTS)), CountedStream(sent)
    with pytest.raises(PublishError, match=message):
        run(fleet, stream)
    assert "resume" not in fleet.calls
    assert stream.is_exhausted


def test_a_stream_that_raises_is_reported_as_the_cause():
    def broken():
        yield "a", WEIGHTS["a"]
        raise RuntimeError("rank 3 left")

    with pytest.raises(PublishError, match="RuntimeError: rank 3 left"):
        run(ScriptedFleet(""), broken())


def test_an_update_past_its_deadline_is_not_confirmed():
    fleet = ScriptedFleet(content_hash(WEIGHTS))
    with pytest.raises(PublishError, match="deadline"):
        run(fleet, iter(WEIGHTS.items()), deadline_s=0.0)
    assert "resume" not in fleet.calls


def test_no_tensor_is_no_update():
    fleet = ScriptedFleet("")
    with pytest.raises(PublishError, match="names no tensor"):
        run(fleet, iter(()), metadata=[])
    assert fleet.calls == []
