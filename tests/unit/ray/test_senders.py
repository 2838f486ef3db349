"""Several trainer ranks that send one version (--colocate): what each does, and what the driver makes of it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from vime.config.parse import Config, parse
from vime.ray import publisher
from vime.ray.publisher import Publishing
from vime.types import EngineAddress, EngineReport, PublishError, PublishLostError
from vime.weights.publish import PublishReport, joined

ENGINES = [EngineAddress(name=f"engine-{number}", url=f"http://{number}") for number in range(3)]


def report(*engines: int, content_hash: str = "a", pause_s: float = 1.0) -> PublishReport:
    reports = tuple(
        EngineReport(engine=f"engine-{engine}", version=7, content_hash=content_hash, num_tensors=2)
        for engine in engines
    )
    return PublishReport(
        version=7, content_hash=content_hash, engine_reports=reports, num_tensors=2, num_bytes=8, pause_s=pause_s,
        confirm_s=0.1,
    )  # fmt: skip


def test_the_reports_of_all_senders_are_one() -> None:
    whole = joined([report(0), None, report(1, pause_s=3.0), None])
    assert [each.engine for each in whole.engine_reports] == ["engine-0", "engine-1"]
    assert (whole.pause_s, whole.num_bytes, whole.content_hash) == (3.0, 8, "a")


def test_an_engine_that_was_lost_is_left_out_while_another_has_the_version() -> None:
    lost = PublishLostError("engine-0 does not respond")
    assert [each.engine for each in joined([lost, report(1)]).engine_reports] == ["engine-1"]
    with pytest.raises(PublishLostError, match="engine-0 does not respond"):
        joined([lost, None])


def test_ranks_that_hold_different_weights_are_named() -> None:
    with pytest.raises(PublishError, match=r"rank 0: a, rank 2: b\), expected the same of all") as refused:
        joined([report(0), None, report(1, content_hash="b")])
    assert not isinstance(refused.value, PublishLostError), "sending again would not help"


class Sender:
    """Stands in for a `Publisher`: notes whom it sends to."""

    sent: ClassVar[list[tuple[list[str], list[str]]]] = []
    fails: PublishError | None = None

    def __init__(self, config: Config, run_dir: Path, engines: Sequence[EngineAddress], *, may_lose: bool) -> None:
        self._names = [engine.name for engine in engines]

    def reaches(self, engines: Sequence[EngineAddress]) -> bool:
        return self._names == [engine.name for engine in engines]

    def publish(
        self, stream: Iterator[tuple[str, Any]], metadata: Any, version: int, **of_adapter: Any
    ) -> PublishReport:
        if self.fails:
            raise self.fails
        Sender.sent.append((self._names, [name for name, _ in stream]))
        return report(0)

    def close(self) -> None: ...


class Exporting:
    """Stands in for an engine of training whose export counts what was taken of it."""

    def __init__(self) -> None:
        self.taken = 0

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        for name in ("w0", "w1"):
            self.taken += 1
            yield name, None

    def export_base(self) -> Iterator[tuple[str, Any]]:
        return self.export_weights()

    def export_adapter(self) -> Iterator[tuple[str, Any]]:
        self.taken += 10
        yield "a0", None

    def weight_metadata(self) -> list[Any]:
        return []

    adapter_metadata = weight_metadata


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(publisher, "Publisher", Sender)
    monkeypatch.setattr(Sender, "sent", [])
    monkeypatch.setattr(Sender, "fails", None)
    plain = parse(["--device", "cpu"])
    cluster = replace(plain.cluster, colocate=True, actor_num_gpus_per_node=3)
    return replace(plain, cluster=cluster, weights=replace(plain.weights, update_weight_transport="shm"))


def publish(config: Config, rank: int, engines: list[EngineAddress], trained: Exporting) -> Any:
    return Publishing(config, Path("unused"), rank).publish(cast("Any", trained), 7, engines)


def test_each_rank_sends_to_the_engine_on_its_gpus_and_the_others_gather(config: Config) -> None:
    for rank in range(3):
        trained = Exporting()
        found = publish(config, rank, [ENGINES[0], ENGINES[2]], trained)
        assert trained.taken == 2, "its part of the gathering"
        assert (found is None) == (rank == 1)
    assert Sender.sent == [(["engine-0"], ["w0", "w1"]), (["engine-2"], ["w0", "w1"])]


def test_every_rank_gathers_the_base_again_when_one_engine_has_come_back(config: Config) -> None:
    """Else ranks would be in different collectives: that of the base, and that of the adapter."""
    lora = replace(config, lora=replace(config.lora, lora_rank=4))
    ranks = [Publishing(lora, Path("unused"), rank) for rank in range(3)]
    back = [ENGINES[0], replace(ENGINES[1], url="http://new"), ENGINES[2]]
    again = [back[0], replace(back[1], start="by its owner, at the same URL"), back[2]]
    for engines, taken in ((ENGINES, 12), (ENGINES, 10), (back, 12), (ENGINES[:1], 10), (back, 12), (again, 12)):
        exports = [Exporting() for _ in ranks]
        for rank, trained in zip(ranks, exports, strict=True):
            rank.publish(cast("Any", trained), 7, engines)
        assert [trained.taken for trained in exports] == [taken] * 3


def test_a_sender_whose_engine_was_lost_says_so_and_gathers_to_the_end(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost = PublishLostError("gone")
    monkeypatch.setattr(Sender, "fails", lost)
    trained = Exporting()
    assert publish(config, 2, ENGINES, trained) is lost
    assert "version 7: ['engine-2'] was lost in the update: gone" in caplog.text
    assert trained.taken == 2
    alone = replace(config, weights=replace(config.weights, update_weight_transport="gloo"))
    with pytest.raises(PublishLostError, match="gone"):
        publish(alone, 0, ENGINES, Exporting())  # the driver sends again to those that are left


def test_an_update_that_failed_for_another_reason_fails_for_all(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sender, "fails", PublishError("another hash"))
    trained = Exporting()
    with pytest.raises(PublishError, match="another hash"):
        publish(config, 0, ENGINES, trained)
    assert trained.taken == 2
