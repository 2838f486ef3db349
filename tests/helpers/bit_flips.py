"""Single flipped bits in the ledger and the spool of a run, and whether a resume or an audit takes them in silence.

    python -m tests.helpers.bit_flips [--ledger 120] [--spool 60] [--seed 0]

prints how many flips were refused or found by name, how many were harmless, and every other one. A flip is harmless
when nothing that is read differs: every row of every table, the definitions, and every record of the spool.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

from tests.helpers.ledger_cases import issue, lease, open_ledger
from vime.data.payload import record_size, samples_to_bytes
from vime.handoff.audit import SavedFacts, audit_run
from vime.handoff.ledger_types import LedgerMark, Payload
from vime.handoff.spool import Fsync, Spool, SpoolReader
from vime.handoff.spool_check import check_spool
from vime.ray.checkpoint import LEDGER_RUN, RunState, find_latest, read_run_state, save_checkpoint
from vime.ray.ledger_choice import choose_ledger
from vime.types import Sample, VimeError

NUM_ROUNDS, SAVED = 60, 55


def write_run(run: Path) -> LedgerMark:
    """60 rounds of 2 groups, a checkpoint of the 56th; groups dropped, sent back, in flight and ready; a clean end."""
    ledger, spool = open_ledger(run), Spool(run / "spool", fsync=Fsync.NEVER)
    mark = None
    for round_id in range(NUM_ROUNDS + 1):
        *kept, dropped, retried = issue(ledger, 5)
        for task in kept[: 2 if round_id < NUM_ROUNDS else 3]:
            data = samples_to_bytes([Sample(group_index=task.group, tokens=list(range(task.group % 7 + 3)))])
            [checksum] = spool.append([(task, data)])
            size = {"num_bytes": len(data), "num_tokens": record_size(data)[1], "num_rows": 1}
            versions = {"min_version": round_id, "max_version": round_id}
            facts = bytes([task.group % 251] * 60)
            ledger.prompts.commit(task, Payload(checksum=checksum, facts=facts, **size, **versions))
        ledger.prompts.drop(dropped, "all rewards equal")
        ledger.prompts.retry(retried, "aborted")
        if round_id == NUM_ROUNDS:
            break
        for task in kept[2:]:
            ledger.prompts.drop(task, "too long")
        ledger.rounds.trained(round_id, lease(ledger, round_id).fence)
        ledger.rounds.release(round_id + 1)
        if round_id == SAVED:
            mark = ledger.sync()
            state = RunState(rollout_id=round_id, version=round_id + 1, data_source={LEDGER_RUN: str(run)}, ledger=mark)
            save_checkpoint(run / "checkpoints", state, lambda _: None)
            ledger.rounds.durable(round_id)
    ledger.close()
    spool.close()
    assert mark is not None
    return mark


def resume(run: Path) -> None:
    """What a run does with ledger and spool before it answers a prompt, in preflight and in its first life."""
    checkpoint = find_latest(run / "checkpoints")
    assert checkpoint is not None
    choice, state = choose_ledger(run, checkpoint), read_run_state(checkpoint)
    check_spool(run, run / "ledger.db", train="train", may_be_torn=False)
    ledger = open_ledger(run)
    try:
        ledger.rounds.restore(state.rollout_id, SpoolReader(run / "spool").has, choice.mark)
    finally:
        ledger.close()


def look(run: Path, mark: LedgerMark) -> None:
    report = audit_run(run, saved=SavedFacts(round_id=SAVED, mark=mark, receipt=None))
    if report.findings:
        raise VimeError(report.summary(run))


def content(run: Path) -> object:
    """Everything that is read of a run's ledger and spool."""
    with closing(sqlite3.connect(f"{(run / 'ledger.db').as_uri()}?mode=ro", uri=True)) as connection:
        names = [
            name for [name] in connection.execute("select name from sqlite_master where type = 'table' order by name")
        ]
        tables = [
            connection.execute(f"select * from {name} order by 1, 2").fetchall() for name in names if name != "identity"
        ]
        tables.append(connection.execute("select * from identity").fetchall())
        tables.append(connection.execute("select type, name, sql from sqlite_master order by name").fetchall())
        tables.append([connection.execute(f"pragma {name}").fetchone() for name in ("user_version", "application_id")])
    reader = SpoolReader(run / "spool")
    records = [(task, checksum, reader.read(task, checksum)) for task, checksum, _ in reader.entries()]
    return tables, records


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def outcome(action: object, *arguments: object) -> str:
    """`named`, `silent`, or the traceback's type and text."""
    try:
        action(*arguments)  # type: ignore[operator]
    except VimeError:
        return "named"
    except Exception as error:  # boundary: this is what is counted
        return f"bare {type(error).__name__}: {error}"
    return "silent"


def try_flips(whole: Path, mark: LedgerMark, name: str, bits: list[int], place: Path) -> tuple[Counter[str], list[str]]:
    """Each bit of the file `name` alone. Answers counts, and the flips that were neither named nor harmless."""
    before, counts, bad = content(whole), Counter[str](), []
    for bit in bits:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        flip(place / name, bit)
        found = {"audit": outcome(look, place, mark)}
        is_same = found["audit"] == "silent" and content_or_none(place) == before
        found["resume"] = outcome(resume, place)
        for what, how in found.items():
            kind = "harmless" if how == "silent" and is_same else how.split(":")[0]
            counts[f"{what} {kind}"] += 1
            if kind not in ("harmless", "named"):
                bad.append(f"{name}, bit {bit}: {what}: {how}")
    return counts, bad


def content_or_none(run: Path) -> object:
    try:
        return content(run)
    except (sqlite3.Error, VimeError):
        return None


def run_trial(directory: Path, *, num_ledger: int, num_spool: int, seed: int) -> tuple[Counter[str], list[str]]:
    """So many random flips in the ledger and in the spool of one run."""
    whole, chance = directory / "run", random.Random(seed)
    mark = write_run(whole)
    [segment] = (whole / "spool").glob("*.vsp")
    total, bad = Counter[str](), []
    for name, num in (("ledger.db", num_ledger), (f"spool/{segment.name}", num_spool)):
        bits = [chance.randrange(8 * (whole / name).stat().st_size) for _ in range(num)]
        counts, found = try_flips(whole, mark, name, bits, directory / "flipped")
        total.update({f"{name.split('/')[0]} {what}": count for what, count in counts.items()})
        bad += found
    return total, bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ledger", type=int, default=120)
    parser.add_argument("--spool", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vime-flips-") as name:
        counts, bad = run_trial(Path(name), num_ledger=options.ledger, num_spool=options.spool, seed=options.seed)
    sys.stdout.write("\n".join([*(f"{what}: {count}" for what, count in sorted(counts.items())), *bad]) + "\n")
