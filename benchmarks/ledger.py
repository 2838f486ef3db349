"""How fast the ledger is, and whether it stays so: transitions per second with 1,000 to 1,000,000 groups behind it.

    .venv/bin/python benchmarks/ledger.py [--groups 1000 10000 100000 1000000] [--rounds 200] [--synchronous FULL]

Each size gets a ledger of its own with that many durable groups, as a run leaves them (written in bulk; the audit
accepts it up to 10,000). Then real rounds of 32 groups: producers take 8 prompts a call and commit one group a call.
A transition is one state of one group: issued, ready, leased, trained, durable. CPU seconds, because a machine is
rarely quiet; the wall seconds beside them include the writes to the disk.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vime.handoff.audit import audit
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_identity import LINE, link_history
from vime.handoff.ledger_types import LedgerRules, Payload

ROUND_GROUPS, ISSUE_GROUPS, SAVE_INTERVAL, NUM_TRANSITIONS = 32, 8, 10, 5
RULES = LedgerRules(max_slots=2 * ROUND_GROUPS, max_staleness=1, lease_timeout_s=600.0, max_tokens=10**9)
AUDIT_UP_TO = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=200, help="rounds that are measured (default: 200)")
    parser.add_argument("--synchronous", default="NORMAL", choices=["NORMAL", "FULL"])
    options = parser.parse_args()
    print("| groups before | per CPU s | per wall s | issue 8 | commit p50, p99 | lease 32 | trained | open | file |")
    print("|---|---|---|---|---|---|---|---|---|")
    for num_groups in options.groups:
        with tempfile.TemporaryDirectory(prefix="vime-ledger-") as directory:
            print(measure(Path(directory) / "ledger.db", num_groups, options.rounds, options.synchronous), flush=True)


def measure(path: Path, num_groups: int, num_rounds: int, synchronous: str) -> str:
    """One line of the table."""
    first_round = num_groups // ROUND_GROUPS
    fill(path, first_round)
    if num_groups <= AUDIT_UP_TO:
        findings = audit(path, checkpoint_round=first_round - 1, spool=None).findings
        assert not findings, findings[:3]
    started = time.perf_counter()
    ledger = Ledger(path, RULES, clock=time.monotonic, synchronous=synchronous)
    reopen_ms = 1e3 * (time.perf_counter() - started)
    times: dict[str, list[float]] = {"issue": [], "commit": [], "lease": [], "trained": []}

    def timed(name: str, call: Callable[[], object]) -> object:
        begun = time.perf_counter()
        answer = call()
        times[name].append(1e3 * (time.perf_counter() - begun))
        return answer

    cpu, wall = time.process_time(), time.perf_counter()
    for round_id in range(first_round, first_round + num_rounds):
        one_round(ledger, round_id, timed)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    ledger.close()
    count = NUM_TRANSITIONS * ROUND_GROUPS * num_rounds
    p50 = {name: statistics.median(found) for name, found in times.items()}
    p99 = statistics.quantiles(times["commit"], n=100)[98]
    return (
        f"| {first_round * ROUND_GROUPS:,} | {count / cpu:,.0f} | {count / wall:,.0f} | {p50['issue']:.2f} ms "
        f"| {p50['commit']:.3f} / {p99:.3f} ms | {p50['lease']:.2f} ms | {p50['trained']:.2f} ms | {reopen_ms:.0f} ms "
        f"| {path.stat().st_size / 1e6:.0f} MB |"
    )


def one_round(ledger: Ledger, round_id: int, timed: Callable[[str, Callable[[], object]], object]) -> None:
    for part in range(ROUND_GROUPS // ISSUE_GROUPS):
        request = f"{round_id}-{part}"
        grant = timed("issue", lambda request=request: ledger.prompts.issue("p", ISSUE_GROUPS, request=request))
        for prompt in grant.prompts:
            size = {"checksum": prompt.task.group, "num_bytes": 40_000, "num_tokens": 10_000, "num_rows": 8}
            payload = Payload(**size, min_version=round_id, max_version=round_id)
            timed("commit", lambda task=prompt.task, payload=payload: ledger.prompts.commit(task, payload))
    ask = {"version": round_id, "holder": "trainer", "count": ROUND_GROUPS}
    lease = timed("lease", lambda: ledger.rounds.lease(round_id, **ask)).lease
    timed("trained", lambda: ledger.rounds.trained(round_id, lease.fence))
    ledger.rounds.release(round_id + 1)
    if round_id % SAVE_INTERVAL == 0:
        ledger.sync()
        ledger.rounds.durable(round_id)


def fill(path: Path, num_rounds: int) -> None:
    """A ledger with `num_rounds` durable rounds, line by line what the calls would have written."""
    ledger = Ledger(path, RULES, clock=time.monotonic)
    connection, start = ledger._book.connection, ledger._book.one("select max(sequence) from history")[0] + 1
    groups = range(num_rounds * ROUND_GROUPS)
    per_round = 3 * ROUND_GROUPS + 2  # lines of history
    connection.execute("begin immediate")
    connection.executemany(
        "insert into prompt_group(partition, grp, attempt, state, producer, request, admitted, round, position, "
        "ready_sequence, checksum, num_bytes, num_tokens, num_rows, min_version, max_version) values "
        "(1, ?1, 1, 'durable', 'p', 'x', 0, ?2, ?3, ?4, ?1, 40000, 10000, 8, ?2, ?2)",
        ((g, g // ROUND_GROUPS, g % ROUND_GROUPS, start + g // ROUND_GROUPS * per_round + 32 + g % 32) for g in groups),
    )
    connection.executemany(
        "insert into round(id, state, fence, holder, version, num_groups, is_final) "
        "values (?1, 'durable', ?1 + 1, 'trainer', ?1, ?2, 1)",
        ((round_id, ROUND_GROUPS) for round_id in range(num_rounds)),
    )
    connection.executemany(f"insert into history({LINE}) values (?, ?, 1, ?, ?, ?, ?, ?, ?)", lines(num_rounds, start))
    link_history(connection)
    connection.execute("update partition set next_group = ?", (len(groups),))
    connection.executemany(
        "insert or replace into meta(name, value) values (?, ?)", [("serving", num_rounds), ("fence", num_rounds)]
    )
    connection.execute("commit")
    connection.execute("pragma wal_checkpoint(truncate)")
    ledger.close()


def lines(num_rounds: int, sequence: int):
    for round_id in range(num_rounds):
        groups = range(round_id * ROUND_GROUPS, (round_id + 1) * ROUND_GROUPS)
        for event, number, size, note in (
            ("issued", None, (None, None), "p"),
            ("ready", None, (10000, 40000), None),
            ("leased", round_id, (None, None), str(round_id)),
        ):
            for group in groups:
                yield (sequence, event, group, 1, number, *size, note)
                sequence += 1
        yield (sequence, "trained", None, None, round_id, 10000 * ROUND_GROUPS, 40000 * ROUND_GROUPS, None)
        yield (sequence + 1, "released", None, None, round_id + 1, None, None, None)
        sequence += 2
    yield (sequence, "durable", None, None, num_rounds - 1, None, None, None)


if __name__ == "__main__":
    main()
