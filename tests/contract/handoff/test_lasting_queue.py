"""Calls of a queue that dies go on in the queue that takes its place, and readers find there what was put before."""

import concurrent.futures
import os
import time

import psutil
import pytest

from vime.config.training import QueueConfig
from vime.types import HandoffError, HandoffLostError

CONFIG = QueueConfig()
DEADLINE_S = 60.0


@pytest.fixture
def start(ray_cluster):
    """Start a real TransferQueue; all are ended behind the test."""
    import ray

    from vime.handoff.queue_client import start_queue, stop_queue

    made = []

    def started():
        made.append(start_queue(CONFIG, remote=ray.remote))
        return made[-1]

    yield started
    for address in made:
        stop_queue(address)


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(max_workers=4, thread_name_prefix="caller") as pool:
        yield pool


def kill(actor) -> None:
    """SIGKILL, and wait until the process is gone."""
    import ray

    process = psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))
    process.kill()
    process.wait(timeout=30)


def joined(address):
    from vime.handoff.lasting_queue import LastingQueue

    return LastingQueue(address, DEADLINE_S)


@pytest.mark.parametrize("victim", ["controller", "storage unit"])
def test_calls_wait_for_the_next_queue_and_reads_until_it_is_filled(start, threads, victim):
    first = start()
    writer, reader = joined(first), joined(first)
    writer.put("groups", ["a"], [b"before"])
    kill(first.controller if victim == "controller" else first.storage_units[0])
    put = threads.submit(writer.put, "groups", ["b"], [b"after"])
    got = threads.submit(reader.get, "groups", ["a"])
    done, _ = concurrent.futures.wait([put, got], timeout=4)
    assert not done  # they do not fail, and they do not respond
    second = start()
    writer.replace(second, is_filled=False)
    assert put.result(DEADLINE_S) == ["b"]
    early = threads.submit(writer.get, "groups", ["a"])  # what was put before is not there yet
    time.sleep(1)
    assert not early.done()
    writer.put("groups", ["a"], [b"before"])  # as `GroupStore.put_again`
    writer.filled(first)  # said too late, of a queue that is not used any more
    time.sleep(0.2)
    assert not early.done()
    writer.filled(second)
    assert early.result(DEADLINE_S) == [b"before"]
    reader.replace(second, is_filled=True)
    assert got.result(DEADLINE_S) == [b"before"]
    assert reader.get("groups", ["b"]) == [b"after"]
    for store in (writer, reader):
        store.close()


def test_without_another_queue_the_part_that_died_is_named_at_the_deadline(start):
    address = start()
    store = joined(address)
    store._timeout_s = 3.0  # from now on: a queue may take longer to start
    kill(address.storage_units[0])
    with pytest.raises(HandoffLostError, match="TransferQueue storage unit 0 is dead"):
        store.put("groups", ["a"], [b"1"])
    store.close()


def test_a_call_that_waits_ends_with_its_store(start, threads):
    address = start()
    store = joined(address)
    kill(address.controller)
    put = threads.submit(store.put, "groups", ["a"], [b"1"])
    concurrent.futures.wait([put], timeout=3)
    store.close()
    with pytest.raises(HandoffLostError, match="TransferQueue controller is dead"):
        put.result(DEADLINE_S)


def test_a_row_that_a_live_queue_does_not_have_is_an_error_at_once(start):
    store = joined(start())
    began = time.monotonic()
    with pytest.raises(HandoffError, match="0 of 1 rows are in the queue"):
        store.get("groups", ["a"])
    assert time.monotonic() - began < DEADLINE_S / 2
    store.close()
