"""The date of a machine jumps while the ledger's own process holds leases: none ends by it and none outlives it."""

import subprocess
import sys
import threading

import pytest

from tests.helpers.jumping_clock import HAS_COMPILER, JumpingClock

LEDGER = """
import asyncio, dataclasses, sys, time
from tests.helpers.ledger_cases import RULES, payload
from vime.handoff.ledger_types import LateAttemptError
from vime.ray.ledger_actor import LedgerActor

LEASE_S = 3.0  # heartbeats of a busy machine come in time

async def main():
    ledger = LedgerActor(sys.argv[1], dataclasses.replace(RULES, lease_timeout_s=LEASE_S), "NORMAL")

    async def ask(name, *arguments, **options):
        return await ledger.call(name, arguments, options)

    def jump(seconds):
        before = time.time()
        print(f"jump {seconds}", flush=True)
        sys.stdin.readline()
        print(f"jumped {round((time.time() - before) / 3600)}", flush=True)

    grant = await ask("PromptLedger.issue", "p", 2, request="x")
    early, late = (prompt.task for prompt in grant.prompts)
    jump(+3600)
    await ask("Ledger.status")  # which takes back what is overdue
    print("after +1 h:", len(await ask("PromptLedger.heartbeat", "p")), flush=True)
    await ask("PromptLedger.commit", early, payload(early.group))
    jump(-3600)
    print("after -1 h:", len(await ask("PromptLedger.heartbeat", "p")), flush=True)
    ends = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < ends:  # the ledger looks at its clock: one step counts half a lease at most
        await asyncio.sleep(LEASE_S / 8)
        await ask("Ledger.status")  # which takes back what is overdue
    try:
        await ask("PromptLedger.commit", late, payload(late.group))
    except LateAttemptError:
        print("the silent one is too late", flush=True)

asyncio.run(main())
"""


@pytest.mark.skipif(not HAS_COMPILER, reason="a library that moves the date needs a C compiler (cc)")
def test_a_jump_of_the_date_by_an_hour_neither_ends_a_lease_nor_keeps_one(tmp_path) -> None:
    clock = JumpingClock(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", LEDGER, str(tmp_path)],
        env=clock.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    guard = threading.Timer(120, process.kill)
    guard.start()
    heard = []
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("jump "):
            clock.jump(int(line.split()[1]))
            process.stdin.write("\n")
            process.stdin.flush()
        else:
            heard.append(line.strip())
    guard.cancel()
    assert process.wait() == 0
    # the first jump is seen as an hour ahead; the second, from there to an hour before the true date, as two hours back
    assert heard == ["jumped 1", "after +1 h: 2", "jumped -2", "after -1 h: 1", "the silent one is too late"]
