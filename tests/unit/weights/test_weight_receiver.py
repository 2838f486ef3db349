"""The engine's end accepts whole updates in order, and nothing else."""

from dataclasses import replace

import pytest
import torch

from vime.types import PublishError
from vime.weights.plan import Slot, TensorMeta, cut_buckets
from vime.weights.transports import make_receiver, make_sender
from vime.weights.wire import BucketReceiver, BucketSender, bucket_to_wire, buckets_from_wire, update_to_wire

METAS = [TensorMeta("a", "float32", (4,)), TensorMeta("b", "bfloat16", (2, 2))]
FIRST, SECOND = cut_buckets(METAS, 16)


class ZeroReceiver(BucketReceiver):
    """Receives zeros."""

    def _read(self, buckets, update_info):
        for bucket in buckets:
            yield [slot.view(torch.zeros(bucket.nbytes, dtype=torch.uint8)) for slot in bucket.slots]


def take(receiver, bucket):
    return [pair for pairs in receiver.receive(bucket_to_wire(bucket)) for pair in pairs]


@pytest.fixture
def receiver() -> ZeroReceiver:
    started = ZeroReceiver(torch.device("cpu"))
    started.start()
    return started


def test_the_wire_form_rebuilds_the_same_bucket():
    told = buckets_from_wire(bucket_to_wire(SECOND))
    assert (told.index, told.count, told.buckets) == (1, 2, [SECOND])


def test_one_call_tells_of_all_buckets_as_the_sender_cut_them(receiver):
    told = update_to_wire(METAS, 16)
    assert buckets_from_wire(told).buckets == [FIRST, SECOND]
    assert [[name for name, _ in pairs] for pairs in receiver.receive(told)] == [["a"], ["b"]]
    receiver.finish()


def test_an_update_of_which_a_bucket_was_not_taken_is_not_whole(receiver):
    next(receiver.receive(update_to_wire(METAS, 16)))  # loading it failed
    with pytest.raises(PublishError, match="after 0 of an unknown number of buckets"):
        receiver.finish()


def test_a_whole_update_in_order_is_accepted(receiver):
    names = [name for bucket in (FIRST, SECOND) for name, _ in take(receiver, bucket)]
    receiver.finish()
    assert names == ["a", "b"]
    assert receiver.num_tensors == 2


def test_a_bucket_out_of_order_is_refused(receiver):
    with pytest.raises(PublishError, match="got bucket 1 of 2, expected bucket 0"):
        take(receiver, SECOND)


def test_a_repeated_bucket_is_refused(receiver):
    take(receiver, FIRST)
    with pytest.raises(PublishError, match="got bucket 0 of 2, expected bucket 1"):
        take(receiver, FIRST)


def test_finishing_early_is_refused(receiver):
    take(receiver, FIRST)
    with pytest.raises(PublishError, match="after 1 of 2 buckets"):
        receiver.finish()


def test_a_new_start_forgets_the_update_before(receiver):
    take(receiver, FIRST)
    before = receiver.content_hash
    receiver.start()
    assert receiver.num_tensors == 0
    take(receiver, FIRST)
    assert receiver.content_hash == before


def test_an_unknown_transport_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="'carrier pigeon'"):
        make_sender("carrier pigeon", bucket_bytes=1, directory=tmp_path, timeout_s=1)
    with pytest.raises(ValueError, match="'carrier pigeon'"):
        make_receiver("carrier pigeon", torch.device("cpu"))


class LoopBack(BucketSender, BucketReceiver):
    """Both ends of a transfer, cut by the same code: what is wrong with the cut is wrong at both."""

    def __init__(self) -> None:
        BucketSender.__init__(self, bucket_bytes=1 << 20, timeout_s=1.0)
        BucketReceiver.__init__(self, torch.device("cpu"))

    def connect(self, fleet): ...
    def close(self): ...

    def _send(self, filled, metadata, deliver):
        self.start()
        for bucket, self.buffer in filled:
            list(self.receive(bucket_to_wire(bucket)))

    def _read(self, buckets, update_info):
        for bucket in buckets:
            yield [slot.view(self.buffer) for slot in bucket.slots]

    def received_hash(self):
        return self._content.hexdigest()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tensor_that_overwrites_another_in_its_bucket_is_noticed(overlap, monkeypatch):
    view = Slot.view
    if overlap:
        monkeypatch.setattr(Slot, "view", lambda slot, buffer: view(replace(slot, offset=slot.offset // 4), buffer))
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    metas = [TensorMeta.of(name, tensor) for name, tensor in weights.items()]
    ends = LoopBack()
    sent = ends.send_update(iter(weights.items()), metas, lambda told: None)
    assert (ends.received_hash() == sent.hexdigest()) is not overlap
