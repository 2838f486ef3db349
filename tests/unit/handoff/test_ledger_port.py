"""The ledger in this process: who waits for news is woken by them, and holds nothing up when it gives up."""

import asyncio
import threading

import pytest

from tests.helpers.ledger_cases import issue
from vime.handoff.ledger import CALLS, Ledger, LocalLedgerPort, call_ledger
from vime.handoff.ledger_types import TransitionError
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger


def test_a_coroutine_that_waits_is_woken_by_a_change_from_another_thread(ledger):
    port = LocalLedgerPort(ledger)
    seen = ledger.sequence

    async def run():
        waiting = asyncio.create_task(port.wait_for_news_async(seen, 60.0))
        await asyncio.sleep(0)  # it waits from here on
        await asyncio.to_thread(port.call, PromptLedger.issue, "p", 1, request="r")
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
    port.call(Ledger.sync)  # wakes nobody who is gone


@pytest.mark.parametrize(
    "method", [Ledger.close, Ledger.expire, RoundLedger.restore, RoundLedger.expire, Ledger.__init__]
)
def test_a_call_that_is_not_on_the_list_is_refused(ledger, method):
    with pytest.raises(TransitionError, match=r"the ledger has no call .* expected one of Ledger\.commit_each, "):
        LocalLedgerPort(ledger).call(method)


@pytest.mark.parametrize(
    "name",
    [
        "close",
        "RoundLedger._store",
        "PromptLedger.__class__",
        "Ledger._store.connection.execute",
        "Elsewhere.issue",
        "",
    ],
)
def test_a_name_that_is_not_on_the_list_is_refused_whoever_sends_it(ledger, name):
    with pytest.raises(TransitionError, match=r"the ledger has no call .* expected one of Ledger\.commit_each, "):
        call_ledger(ledger, name, (), {})


def test_every_call_on_the_list_is_called_on_its_own_part_of_the_ledger(ledger):
    for name in CALLS:
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'no_such_option'"):
            call_ledger(ledger, name, (), {"no_such_option": 1})
    assert call_ledger(ledger, "PromptLedger.heartbeat", ("p",), {}) == frozenset()
    assert call_ledger(ledger, "RoundLedger.ready", (), {"version": 0, "count": 1}) == ()
    assert call_ledger(ledger, "Ledger.needed_payloads", (), {}) == {}
