"""Steps that move whole rounds back or complete them, and the restart from a checkpoint that is made of these steps.

Each function runs inside a transaction of the caller, which also updates the counts in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vime.handoff.ledger_identity import find_obstacle
from vime.handoff.ledger_schema import MOVING_ROUNDS
from vime.handoff.ledger_store import LedgerStore, find_group, known_partition
from vime.handoff.ledger_types import LeasedGroup, LedgerFileError, LedgerMark, Payload, RestoreReport, Task
from vime.handoff.ledger_undo import keep_before, note_going_back, undo_unless
from vime.types import Version

_READY = """select p.name, g.grp, g.attempt, g.checksum, g.max_version from prompt_group g indexed by ready_group
    join partition p on p.id = g.partition where g.state = 'ready' and g.round is null"""
_PARTIAL = """select p.id, p.name, g.grp, g.partial_attempt, g.partial_checksum from prompt_group g
    indexed by retry_group join partition p on p.id = g.partition
    where g.state = 'retry' and g.partial_attempt is not null"""
_SEND_BACK = """update prompt_group set state = 'retry', admitted = 0, num_tokens = 0, num_bytes = 0,
    facts = null, round = null, position = null, reason = ? where partition = ? and grp = ?"""
_GIVE_UP = "update prompt_group set state = 'dropped', admitted = 0, reason = ? where partition = ? and grp = ?"
_FORGET_PARTIAL = """update prompt_group set partial_attempt = null, partial_checksum = null
    where partition = ? and grp = ?"""

HasPayload = Callable[[Task, int], bool]
"""Tells whether the spool holds the payload with this checksum."""


class RoundRow(NamedTuple):
    id: int
    state: str
    fence: int
    holder: str
    version: int
    num_groups: int
    is_final: int  # it was trained: its groups may not change any more, whatever is restored


PAYLOAD = "grp, attempt, checksum, num_bytes, num_tokens, num_rows, min_version, max_version, facts"
PayloadLine = tuple[int, int, int, int, int, int, Version, Version, bytes | None]
OF_ROUND = f"select {PAYLOAD} from prompt_group indexed by round_group where round = ? order by position"


def find_round(store: LedgerStore, round_id: int) -> RoundRow | None:
    row = store.one(f"select {', '.join(RoundRow._fields)} from round where id = ?", round_id)
    return None if row is None else RoundRow(*row)


def leased_group(partition: str, line: PayloadLine) -> LeasedGroup:
    """Return the group from the columns of PAYLOAD."""
    group, attempt, checksum, num_bytes, num_tokens, num_rows, oldest, newest, facts = line
    payload = Payload(
        checksum=checksum,
        num_bytes=num_bytes,
        num_tokens=num_tokens,
        num_rows=num_rows,
        min_version=oldest,
        max_version=newest,
        facts=facts or b"",
    )
    return LeasedGroup(task=Task(partition, group, attempt), payload=payload)


def settle(store: LedgerStore, checkpoint_round: int) -> None:
    """Mark rounds up to the checkpoint's as durable."""
    rounds = store.query(f"select id from {MOVING_ROUNDS} and id <= ?", checkpoint_round)
    for [round_id] in rounds:
        store.change("update prompt_group set state = 'durable' where round = ?", round_id)
        store.change("update round set state = 'durable' where id = ?", round_id)
    store.write("durable", partition=store.train_id, round_id=checkpoint_round)


def pin(store: LedgerStore, round_id: int) -> None:
    """Mark the round to be leased again with the same groups in the same order."""
    store.change("update prompt_group set state = 'ready', admitted = 1 where round = ?", round_id)
    store.change("update round set state = 'replay' where id = ?", round_id)
    store.write("replay", partition=store.train_id, round_id=round_id)


def loosen(store: LedgerStore, round_id: int) -> None:
    """Undo the round: its groups are ready for any round, in their old order."""
    sql = "update prompt_group set state = 'ready', admitted = 1, round = null, position = null where round = ?"
    store.change(sql, round_id)
    store.change("delete from round where id = ?", round_id)
    store.write("loosened", partition=store.train_id, round_id=round_id)


def send_back(store: LedgerStore, task: Task, reason: str) -> bool:
    """Mark the group to be generated again. One whose prompt a job brought itself is given up instead, because nobody
    else has the prompt. Return whether it will be issued again."""
    row = find_group(store, task)
    if row.own_key is not None:
        give_up(store, task, reason)
        return False
    store.change(_SEND_BACK, reason, row.partition, task.group)
    store.write("retry", row.partition, task.group, task.attempt, note=reason)
    return True


def give_up(store: LedgerStore, task: Task, reason: str) -> None:
    """Mark the group as dropped; the counts in memory are the caller's."""
    partition = known_partition(store, task.partition)
    store.change(_GIVE_UP, reason, partition, task.group)
    store.write("dropped", partition, task.group, task.attempt, note=reason)


def restore(
    store: LedgerStore, checkpoint_round: int | None, has_payload: HasPayload, mark: LedgerMark | None
) -> RestoreReport:
    """Continue from the checkpoint of `checkpoint_round` (None: from the initial weights), whatever was in progress.

    Rounds after it are leased again with the same groups in the same order. The first round that lacks a payload ends
    this: the weights after it will differ from those that sampled later groups, so groups sampled by those weights are
    generated again, and so is every lost payload. Prompts in flight are issued again. Holders of earlier leases must
    have ended; their fences and attempts are not accepted any more. `mark`: what the checkpoint keeps of its ledger;
    None for one that was written before ledgers had ids. Until the first round is trained, a restore from another
    checkpoint finds the ledger as it was before this one (ledger_undo.py).
    """
    last = -1 if checkpoint_round is None else checkpoint_round
    undo_unless(store, last)
    obstacle = find_obstacle(store.connection, mark, last)
    if obstacle is not None:
        raise LedgerFileError(f"{store.path}: {obstacle}")
    in_flight = [flight.task for flight in store.memory.flights.values()]
    is_going_back = keep_before(store, last)
    with store.transaction():
        if is_going_back:
            note_going_back(store)
        start = _version_after(store, last)
        note = None if start is None else str(start)
        store.write("restored", partition=store.train_id, round_id=last, note=note)
        settle(store, last)
        replayed, reached, is_exact = _replay_rounds(store, last, start, has_payload)
        reissued = [task for task in in_flight if send_back(store, task, "in flight at a restart")]
        lost = _find_lost(store, reached, has_payload)
        regenerated = [task for task, reason in lost if send_back(store, task, reason)]
        for number, name, group, attempt, checksum in store.query(_PARTIAL):
            if not is_exact or not has_payload(Task(name, group, attempt), checksum):
                store.change(_FORGET_PARTIAL, number, group)
        if start is not None:
            store.set_meta("serving", min(store.meta("serving", 0), start))
    store.memory = store.recall()
    return RestoreReport(
        replayed_rounds=tuple(replayed), reissued=tuple(reissued), regenerated=tuple(regenerated), reached=reached
    )


def _replay_rounds(
    store: LedgerStore, last: int, start: Version | None, has_payload: HasPayload
) -> tuple[list[int], Version | None, bool]:
    """Pin the rounds after `last` until one lacks a payload, and undo the others.

    Returns the pinned rounds, the version that their replay reaches, and whether none had to be undone.
    """
    replayed, reached, is_exact = [], start, True
    for round_id, version in store.query("select id, version from round where id > ? order by id", last):
        groups = [leased_group(store.rules.partition, line) for line in store.query(OF_ROUND, round_id)]
        is_exact = is_exact and all(has_payload(group.task, group.payload.checksum) for group in groups)
        if is_exact:
            pin(store, round_id)
            replayed.append(round_id)
            reached = version + 1
        else:
            loosen(store, round_id)
    return replayed, reached, is_exact


def _find_lost(store: LedgerStore, reached: Version | None, has_payload: HasPayload) -> list[tuple[Task, str]]:
    """Return ready groups that cannot be trained in the continued run, with the reason."""
    lost = []
    for name, group, attempt, checksum, max_version in store.query(_READY):
        task, is_train = Task(name, group, attempt), name == store.rules.partition
        if not has_payload(task, checksum):
            lost.append((task, "payload lost"))
        elif is_train and reached is not None and max_version > reached:
            lost.append((task, "sampled by weights that will not come again"))
    return lost


def _version_after(store: LedgerStore, last: int) -> Version | None:
    """Return the version of the weights in the checkpoint of round `last`, if the ledger knows that round or the
    next."""
    row = store.one("select version + 1 from round where id = ?", last)
    row = row or store.one("select version from round where id = ?", last + 1)
    return None if row is None else int(row[0])
