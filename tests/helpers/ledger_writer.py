"""A whole small run over ledger and spool in a process that is killed again and again, and what is left of it.

    python -m tests.helpers.ledger_writer DIR SEED NUM_KILLS

forks a child that resumes the run in DIR, kills it (SIGKILL) after a random number of its steps, audits what is left,
and at the end prints one JSON line: the findings, the effects in the last checkpoint, and how often it restarted.

The "model" is the list of groups it was trained on, so a checkpoint carries the optimizer's effects literally: a group
that was lost is missing in the list, one that was trained twice is there twice.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.helpers.ledger_cases import RULES
from vime.data.payload import record_size, samples_to_bytes
from vime.handoff.audit import audit
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import Payload, RoundOrder
from vime.handoff.spool import Fsync, Spool
from vime.types import Sample

ROUND_GROUPS, MAX_STALENESS, SAVE_INTERVAL = 2, 1, 3
KILL_RULES = replace(RULES, max_slots=ROUND_GROUPS * (MAX_STALENESS + 1), round_order=RoundOrder.INDEX, max_tokens=100)
DEADLINE_S = 60.0


def is_dropped(group: int) -> bool:
    """What the filter of this run says."""
    return group % 7 == 3


def run(directory: Path, steps: int) -> None:
    """Resume and train for ever, one byte into the pipe `steps` after each step."""
    ledger = Ledger(directory / "ledger.db", KILL_RULES, clock=time.monotonic)
    spool = Spool(directory / "spool", fsync=Fsync.NEVER, segment_bytes=2000)
    saved = load(directory)
    ledger.rounds.restore(saved["round"], spool.has)
    effects, round_id = list(saved["effects"]), (-1 if saved["round"] is None else saved["round"]) + 1
    ledger.rounds.release(round_id)
    request = 0
    while True:
        request += 1
        for prompt in ledger.prompts.issue("p", 3, request=f"{os.getpid()}-{request}").prompts:
            os.write(steps, b".")
            produce(ledger, spool, prompt.task, round_id, steps)
        lease = ledger.rounds.lease(round_id, version=round_id, holder="t", count=ROUND_GROUPS).lease
        os.write(steps, b".")
        if lease is None:
            continue
        for group in lease.groups:
            spool.read(group.task, group.payload.checksum)
        effects += [group.task.group for group in lease.groups]
        ledger.rounds.trained(round_id, lease.fence)
        os.write(steps, b".")
        ledger.rounds.release(round_id + 1)
        if round_id % SAVE_INTERVAL == 0:
            save(directory, ledger, spool, round_id, effects, steps)
        round_id += 1


def produce(ledger, spool, task, version, steps) -> None:
    if is_dropped(task.group):
        ledger.prompts.drop(task, "filter")
        return
    data = samples_to_bytes([Sample(group_index=task.group, tokens=[1] * (task.group % 5 + 1))])
    size = {"num_tokens": record_size(data)[1], "num_bytes": len(data)}
    assert ledger.prompts.admit(task, **size).granted
    [checksum] = spool.append([(task, data)])
    os.write(steps, b".")
    ledger.prompts.commit(
        task, Payload(checksum=checksum, num_rows=1, min_version=version, max_version=version, **size)
    )


def save(directory, ledger, spool, round_id, effects, steps) -> None:
    """Synced ledger, then the checkpoint, then `durable`, then the spool may forget."""
    ledger.sync()
    partial = directory / ".partial"
    partial.write_text(json.dumps({"round": round_id, "effects": effects}))
    partial.rename(directory / "checkpoint.json")
    os.write(steps, b".")
    ledger.rounds.durable(round_id)
    os.write(steps, b".")
    needed = ledger.needed_payloads()
    spool.compact(lambda task, checksum: needed.get(task, -1) in (None, checksum))


def load(directory):
    path = directory / "checkpoint.json"
    return json.loads(path.read_text()) if path.exists() else {"round": None, "effects": []}


def kill_loop(directory: Path, seed: int, num_kills: int) -> dict:
    chance, findings = random.Random(seed), []
    ends = time.monotonic() + DEADLINE_S
    for _ in range(num_kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run(directory, writing)
            finally:
                os._exit(1)
        os.close(writing)
        wanted = chance.randrange(1, 60)
        while wanted > 0 and time.monotonic() < ends and (seen := os.read(reading, wanted)):
            wanted -= len(seen)
        for _ in range(chance.randrange(2000)):
            pass  # somewhere inside the next step
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(reading)
        if not os.WIFSIGNALED(status):
            findings.append(f"the child ended by itself: {status}")
            break
        report = audit(
            directory / "ledger.db",
            checkpoint_round=load(directory)["round"],
            spool=directory / "spool",
        )
        findings += map(str, report.findings)
    return {"findings": findings, **load(directory)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(kill_loop(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))) + "\n")
