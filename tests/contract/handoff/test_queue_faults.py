"""What TransferQueue's users get when its actors die or never come."""

import concurrent.futures
import os
import time

import psutil
import pytest

from tests.helpers.rows import hand_over, make_groups, plan_for
from vime.config.training import QueueConfig
from vime.handoff.ticket import read_rows
from vime.types import HandoffError, WaitTimeoutError

CONFIG = QueueConfig(transferqueue_timeout_secs=60.0)


def _kill(actor) -> None:
    """Kill an actor and wait until its process is gone: Ray calls it dead while it still answers."""
    import ray

    process = psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))
    ray.kill(actor)
    process.wait(timeout=30)


@pytest.mark.parametrize("victim", ["controller", "storage unit 0"])
def test_a_dead_part_of_the_queue_is_named_long_before_the_deadline(ray_cluster, victim):
    import ray

    from vime.handoff.queue_client import QueueClient, start_queue, stop_queue

    address = start_queue(CONFIG, remote=ray.remote)
    client = QueueClient(address, CONFIG.transferqueue_timeout_secs)
    groups = make_groups(2, 2)
    ticket = hand_over(client, plan_for(groups), groups)
    _kill(address.controller if victim == "controller" else address.storage_units[0])
    began = time.monotonic()
    with pytest.raises(HandoffError, match=f"TransferQueue {victim} is dead.*--load"):
        read_rows(client, ticket, 0)
    assert time.monotonic() - began < 30
    client.close()
    stop_queue(address)


def test_a_queue_that_ray_cannot_place_is_a_named_wait_with_a_deadline(ray_cluster):
    import ray

    from vime.handoff.queue_client import QueueClient, start_queue

    address = start_queue(CONFIG, remote=ray.remote, num_cpus=64)
    with pytest.raises(WaitTimeoutError, match=r"start of the TransferQueue controller \(owner: Ray\).*Free CPUs"):
        QueueClient(address, 1.0)


def test_a_client_can_be_closed_twice_and_the_queue_goes_on(queue_address):
    from vime.handoff.queue_client import QueueClient

    first = QueueClient(queue_address, 60.0)
    first.close()
    first.close()
    second = QueueClient(queue_address, 60.0)
    second.put("closing", ["key"], [b"1"])
    assert second.get("closing", ["key"]) == [b"1"]
    second.clear_partition("closing")
    second.close()


def test_two_readers_at_once_get_their_own_rows(queue_address):
    from vime.handoff.queue_client import QueueClient

    client = QueueClient(queue_address, 30.0)
    groups = make_groups(6, 4)
    plan = plan_for(groups)
    ticket = hand_over(client, plan, groups, partition="readers")
    with concurrent.futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader") as readers:
        answers = list(readers.map(lambda dp_rank: read_rows(client, ticket, dp_rank), (0, 1), timeout=60))
    assert [tuple(sorted(rows)) for _, rows in answers] == [plan.rows_of(0), plan.rows_of(1)]
    client.clear_partition("readers")
    client.close()


def test_bytes_come_back_as_they_are_and_only_under_their_own_key(queue_address):
    from vime.handoff.queue_client import QueueClient

    client = QueueClient(queue_address, 30.0)
    payloads = {"empty": b"", "zero": bytes(1), "again": bytes(1), "all": bytes(range(256)) * 5}
    client.put("bytes", list(payloads), list(payloads.values()))
    for keys in (list(payloads), ["all", "empty"], ["again"]):
        assert client.get("bytes", keys) == [payloads[key] for key in keys]
    client.clear("bytes", ["zero", "was never there"])
    with pytest.raises(HandoffError, match="1 of 2 rows are in the queue"):
        client.get("bytes", ["all", "zero"])
    client.clear_partition("bytes")
    client.close()


def test_a_row_that_was_put_under_another_key_is_an_error_and_never_an_answer(queue_address, monkeypatch):
    # TransferQueue recycles row numbers: an answer may be of a row that was put since the question
    from vime.handoff import queue_client

    client = queue_client.QueueClient(queue_address, 30.0)
    frame = queue_client._frame
    monkeypatch.setattr(queue_client, "_frame", lambda key, payload: frame(key[::-1], payload))
    client.put("swapped", ["ab"], [b"1"])
    with pytest.raises(HandoffError, match="asked for row ab, got row ba"):
        client.get("swapped", ["ab"])
    client.clear_partition("swapped")
    client.close()


@pytest.mark.parametrize("before", [[], ["a"]], ids=["first put", "later put"])
def test_a_put_whose_notification_is_lost_is_refused(queue_address, monkeypatch, before):
    # TransferQueue only logs that the controller never acknowledged a put
    from vime.handoff.queue_client import QueueClient

    async def lost(message):
        return None

    partition = f"lost-{len(before)}"
    client = QueueClient(queue_address, 30.0)
    if before:
        client.put(partition, before, [b"1"])
    monkeypatch.setattr(client._client.storage_manager, "_notify_and_wait", lost)
    with pytest.raises(HandoffError, match=f"{partition}: not all of the 2 rows .* missed the notif"):
        client.put(partition, ["b", "c"], [b"2", b"3"])
    client.clear_partition(partition)
    client.close()
