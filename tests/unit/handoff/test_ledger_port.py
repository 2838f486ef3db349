"""The ledger in this process: who waits for news is woken by them, and holds nothing up when it gives up."""

import asyncio
import threading

from tests.helpers.ledger_cases import issue
from vime.handoff.ledger_port import LocalLedgerPort


def test_a_coroutine_that_waits_is_woken_by_a_change_from_another_thread(ledger):
    port = LocalLedgerPort(ledger)
    seen = ledger.sequence

    async def run():
        waiting = asyncio.create_task(port.wait_for_news_async(seen, 60.0))
        await asyncio.sleep(0)  # it waits from here on
        await asyncio.to_thread(port.call, "prompts", "issue", "p", 1, request="r")
        return await waiting

    assert asyncio.run(run()) == ledger.sequence > seen


def test_no_news_is_answered_at_the_deadline_and_news_at_once(ledger):
    port = LocalLedgerPort(ledger)
    assert asyncio.run(port.wait_for_news_async(ledger.sequence, 0.01)) == ledger.sequence
    issue(ledger, 1)
    assert asyncio.run(port.wait_for_news_async(-1, 0.0)) == ledger.sequence


def test_a_wait_that_is_cancelled_leaves_no_thread_that_would_hold_the_process_up(ledger):
    port = LocalLedgerPort(ledger)

    async def run():
        waiting = asyncio.create_task(port.wait_for_news_async(ledger.sequence, 3600.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return set(threading.enumerate())

    before = set(threading.enumerate())
    assert asyncio.run(run()) <= before
    port.call("", "sync")  # wakes nobody who is gone
