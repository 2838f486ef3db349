"""The trainer's side of the ledger: which groups a round takes, that they were trained, and what a restart repeats.

    lease(r) -> trained(r) -> release(version) -> durable(checkpoint >= r)

`lease` fixes the round's groups and their order; `trained` follows the optimizer step; `release` follows the engines'
confirmation of the new weights and frees the slots (publish -> confirm -> release); `durable` follows a complete
checkpoint. A restart calls `restore`: rounds after the checkpoint are leased again as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime.handoff.ledger_restore import (
    OF_ROUND,
    PAYLOAD,
    HasPayload,
    RoundRow,
    find_round,
    give_up,
    leased_group,
    loosen,
    pin,
    restore,
    send_back,
    settle,
)
from vime.handoff.ledger_schema import MOVING_ROUNDS
from vime.handoff.ledger_store import Holding, LedgerStore
from vime.handoff.ledger_types import (
    EVAL_PREFIX,
    CapacityError,
    LeasedGroup,
    LeaseLostError,
    LeaseResult,
    LedgerMark,
    PartitionError,
    RestoreReport,
    RoundLease,
    RoundOrder,
    RoundState,
    StalePolicy,
    State,
    Task,
    TransitionError,
)
from vime.handoff.ledger_undo import forget_before, is_going_back, note_gone_on
from vime.types import HandoffError, StaleError, Version

_CANDIDATES = {
    RoundOrder.COMMIT: f"select state, {PAYLOAD} from prompt_group indexed by ready_group where partition = ? "
    "and state = 'ready' and round is null order by ready_sequence limit ?",
    RoundOrder.INDEX: f"select state, {PAYLOAD} from prompt_group indexed by open_group where partition = ? "
    "and state in ('issued', 'retry', 'ready') and round is null order by grp limit ?",
}
_READY = {
    RoundOrder.COMMIT: _CANDIDATES[RoundOrder.COMMIT],
    RoundOrder.INDEX: f"select state, {PAYLOAD} from prompt_group indexed by open_group where partition = ? "
    "and state in ('issued', 'retry', 'ready') and state = 'ready' and round is null order by grp limit ?",
}
_TAKE = "update prompt_group set state = 'leased', round = ?, position = ? where partition = ? and grp = ?"
_PUT_ROUND = """insert into round(id, state, fence, holder, version, num_groups) values (?, 'leased', ?, ?, ?, ?)
    on conflict(id) do update set state = 'leased', fence = excluded.fence, holder = excluded.holder,
    num_groups = excluded.num_groups"""
_UNDER_WAY = """select count(*) from prompt_group indexed by open_group
    where partition = ? and state in ('issued', 'retry', 'ready') and state != 'ready'"""
_UNTRAINED = f"select min(id) from {MOVING_ROUNDS} and state != 'trained'"
_STALE = "too old at lease"


class RoundLedger:
    """Lease, training and durability. Pure: no thread, no clock of its own, one call is one transaction."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store

    def lease(
        self,
        round_id: int,
        *,
        version: Version,
        holder: str,
        count: int,
        minimum: int | None = None,
        drain: bool = False,
        partition: str | None = None,
    ) -> LeaseResult:
        """Lease the groups of round `round_id`, which trains the weights `version`.

        Granted when `count` groups are ready; or `minimum` of them (then asking again adds the groups that became ready
        since, up to `count`); or, with `drain`, all that are left once none is in flight. Asking again returns the same
        groups in the same order under a new fence, and older fences of the round end. Groups older than the staleness
        bound are dropped or retried, by policy, and never leased.
        """
        store = self._store
        partition = partition or store.rules.partition
        self._check_partition(partition)
        least = count if minimum is None else minimum
        if not 1 <= least <= count or not holder:
            raise HandoffError(f"round {round_id}: count {count}, minimum {least}, holder {holder!r}; 1 <= minimum.")
        most = min(store.rules.max_slots, store.rules.max_groups or count)
        if count > most:
            raise CapacityError(
                f"round {round_id}: {count} groups, but at most {most} may be in progress or held: it would wait "
                "for ever. Raise --transferqueue-max-groups, or make rounds smaller."
            )
        row = find_round(store, round_id)
        self._check_lease(round_id, row, holder, version)
        have = row.num_groups if row else 0
        with store.transaction():
            fresh: list[LeasedGroup] = []
            too_old: list[Task] = []
            if have < count and not (row and row.is_final):
                fresh, too_old = self._choose(version, count - have)
            is_drained = drain and fresh and count_in_flight(store) == 0
            if not have and len(fresh) < least and not is_drained:
                return self._no_groups(len(fresh), least, drain, too_old)
            fence = store.meta("fence", 0) + 1
            store.set_meta("fence", fence)
            for position, group in enumerate(fresh, start=have):
                task = group.task
                store.change(_TAKE, round_id, position, store.train_id, task.group)
                place = (store.train_id, task.group, task.attempt)
                store.write("leased", *place, round_id=round_id, note=str(version))
            store.change(_PUT_ROUND, round_id, fence, holder, version, have + len(fresh))
            if row is not None and row.state == RoundState.REPLAY:
                store.change("update prompt_group set state = 'leased' where round = ? and state = 'ready'", round_id)
                store.write("leased_again", partition=store.train_id, round_id=round_id)
        is_replay = row is not None and (bool(row.is_final) or row.state == RoundState.REPLAY)
        store.memory.hold(round_id, Holding(holder, fence, store.deadline()))
        groups = tuple(leased_group(partition, line) for line in store.query(OF_ROUND, round_id))
        return LeaseResult(
            lease=RoundLease(round_id=round_id, fence=fence, version=version, groups=groups, is_replay=is_replay),
            too_old=tuple(too_old),
        )

    def ready(self, *, version: Version, count: int, of_round: bool = False) -> tuple[LeasedGroup, ...]:
        """Return up to `count` ready groups that a round on `version` may train, in the order of the run but with gaps.
        With `of_round` only those among the next `count` of the run: a lease of so many has them, unless one gets too
        old. It is no promise: a caller that reads ahead must compare with the lease."""
        store = self._store
        lines = store.query((_CANDIDATES if of_round else _READY)[store.rules.round_order], store.train_id, count)
        groups = [leased_group(store.rules.partition, line[1:]) for line in lines if line[0] == State.READY]
        oldest = version - store.rules.max_staleness
        return tuple(group for group in groups if oldest <= group.payload.min_version)

    def heartbeat(self, round_id: int, fence: int) -> None:
        """Note that the holder is alive: its lease gets a full timeout from now. After `trained` it is no error."""
        holding = self._store.memory.holdings.get(round_id)
        if holding is not None and holding.fence == fence:
            self._store.memory.hold(round_id, Holding(holding.holder, fence, self._store.deadline()))
        elif not _was_trained(find_round(self._store, round_id), fence):
            raise self._lost(round_id, fence)

    def trained(self, round_id: int, fence: int, receipt: str | None = None) -> bool:
        """Note that the optimizer has stepped on the round; `receipt`: the link of its receipt (receipts.py). Return
        False when the same lease was noted as trained before."""
        store, row = self._store, find_round(self._store, round_id)
        if _was_trained(row, fence):
            return False
        if row is None or row.fence != fence or row.state != RoundState.LEASED:
            raise self._lost(round_id, fence)
        [earlier] = store.one(_UNTRAINED)
        if earlier < round_id:
            raise TransitionError(f"round {round_id}: round {earlier} is not trained yet; rounds are trained in order.")
        with store.transaction():
            tokens, num_bytes = store.one(
                "select sum(num_tokens), sum(num_bytes) from prompt_group where round = ?", round_id
            )
            store.change("update prompt_group set state = 'trained', admitted = 0 where round = ?", round_id)
            store.change("update round set state = 'trained', is_final = 1 where id = ?", round_id)
            size = {"tokens": tokens, "num_bytes": num_bytes}
            store.write("trained", partition=store.train_id, round_id=round_id, **size, note=receipt)
            is_first = is_going_back(store)
            if is_first:
                note_gone_on(store)
            store.memory.usage.hold(-tokens, -num_bytes, groups=-row.num_groups)
            if row.version < store.meta("serving", 0):
                store.memory.usage.active -= row.num_groups
        del store.memory.holdings[round_id]
        if is_first:
            forget_before(store)
        return True

    def release(self, version: Version) -> None:
        """Free the slots of the rounds before `version`, which every engine has confirmed."""
        store = self._store
        serving = store.meta("serving", 0)
        [untrained] = store.one(f"select min(version) from {MOVING_ROUNDS} and state != 'trained'")
        if version < serving or (untrained is not None and untrained < version):
            raise TransitionError(
                f"release of version {version}: {serving} is served and the round on version {untrained} is not "
                "trained. Publish, confirm, then release, version by version."
            )
        with store.transaction():
            [freed] = store.one(
                "select coalesce(sum(num_groups), 0) from round indexed by round_version "
                "where version >= ? and version < ? and state in ('trained', 'durable')", serving, version)  # fmt: skip
            store.set_meta("serving", version)
            store.write("released", partition=store.train_id, round_id=version)
            store.memory.usage.active -= freed

    def durable(self, checkpoint_round: int) -> None:
        """Note that a complete checkpoint contains every round up to this one: their payloads are not needed any
        more."""
        store = self._store
        [untrained], [newest] = store.one(_UNTRAINED), store.one("select max(id) from round")
        if newest is None or newest < checkpoint_round or (untrained is not None and untrained <= checkpoint_round):
            raise TransitionError(
                f"checkpoint of round {checkpoint_round}: the newest round is {newest}, the first untrained one "
                f"{untrained}. Mark rounds as trained before a checkpoint of them is written."
            )
        with store.transaction():
            settle(store, checkpoint_round)

    def restore(
        self, checkpoint_round: int | None, has_payload: HasPayload, mark: LedgerMark | None = None
    ) -> RestoreReport:
        """Called first by a restart; see `ledger_restore.restore`."""
        return restore(self._store, checkpoint_round, has_payload, mark)

    def expire(self, now: float) -> None:
        """Take back rounds whose holder missed its deadline. A round trained before a restore keeps its groups."""
        store = self._store
        for round_id in [key for key, holding in store.memory.holdings.items() if holding.deadline <= now]:
            row = find_round(store, round_id)
            with store.transaction():
                if row is not None and row.is_final:
                    pin(store, round_id)
                else:
                    loosen(store, round_id)
            del store.memory.holdings[round_id]

    def _check_partition(self, partition: str) -> None:
        name = self._store.rules.partition
        if partition.startswith(EVAL_PREFIX) or partition != name:
            raise PartitionError(f"lease of partition {partition!r}: a trainer may lease {name!r} only.")

    def _check_lease(self, round_id: int, row: RoundRow | None, holder: str, version: Version) -> None:
        if row is None:
            later = self._store.one(
                "select id from round where id > ? and state in ('trained', 'durable') limit 1", round_id
            )
            [newest] = self._store.one("select max(id) from round where id < ?", round_id)
            if later is not None or (newest is not None and newest != round_id - 1):
                raise TransitionError(
                    f"round {round_id}: the round before it is {newest}, {'a later one was trained' if later else ''}; "
                    "rounds are leased one after the other."
                )
        elif row.state in (RoundState.TRAINED, RoundState.DURABLE):
            raise TransitionError(f"round {round_id}: was {row.state} already, and is never trained twice.")
        elif row.state == RoundState.LEASED and row.holder != holder:
            raise LeaseLostError(f"round {round_id}: {row.holder} holds it. Wait until it is trained or expires.")
        elif row.version != version:
            raise TransitionError(f"round {round_id}: it trains version {row.version}, not {version}.")

    def _choose(self, version: Version, want: int) -> tuple[list[LeasedGroup], list[Task]]:
        """Return the next `want` groups in the order of the run, fewer when fewer are ready; and those that were too
        old, which are dropped or retried."""
        store, rules = self._store, self._store.rules
        too_old: list[Task] = []
        while True:
            lines = store.query(_CANDIDATES[rules.round_order], store.train_id, want)
            ready = [line for line in lines if line[0] == State.READY]
            if rules.round_order is RoundOrder.INDEX:  # a group in flight blocks those after it
                ready = ready[: next((at for at, line in enumerate(lines) if line[0] != State.READY), len(lines))]
            groups = [leased_group(rules.partition, line[1:]) for line in ready]
            stale = [group for group in groups if group.payload.min_version < version - rules.max_staleness]
            for group in groups:
                if group.payload.max_version > version:
                    raise StaleError(
                        f"group {group.task}: sampled by version {group.payload.max_version}, newer than the weights "
                        f"{version} that are to train on it. Lease with the version that the trainer has."
                    )
            if not stale:
                return groups, too_old
            for group in stale:
                self._refuse_stale(group)
                too_old.append(group.task)

    def _refuse_stale(self, group: LeasedGroup) -> None:
        store, task, usage = self._store, group.task, self._store.memory.usage
        if store.rules.stale_policy is StalePolicy.RETRY:
            usage.retry += send_back(store, task, _STALE)
        else:
            give_up(store, task, _STALE)
        store.memory.too_old += 1
        usage.active -= 1
        usage.hold(-group.payload.num_tokens, -group.payload.num_bytes, groups=-1)

    def _no_groups(self, num_ready: int, least: int, drain: bool, too_old: Sequence[Task]) -> LeaseResult:
        if drain and not num_ready and not count_in_flight(self._store):
            return LeaseResult(lease=None, is_drained=True, too_old=tuple(too_old))
        names = sorted({flight.producer for flight in self._store.memory.flights.values()})
        line = f"; {len(self._store.memory.waiting)} payloads wait for room" if self._store.memory.waiting else ""
        return LeaseResult(
            lease=None,
            waits_for=f"ready groups: {num_ready} of {least}; {count_in_flight(self._store)} in flight at "
            f"{', '.join(names) or 'no producer'}{line}",
            too_old=tuple(too_old),
        )

    def _lost(self, round_id: int, fence: int) -> LeaseLostError:
        row = find_round(self._store, round_id)
        now = f"it is {row.state} under fence {row.fence}" if row else "its groups went back"
        return LeaseLostError(f"round {round_id}, fence {fence}: the lease ended; {now}. Do not train it.")


def _was_trained(row: RoundRow | None, fence: int) -> bool:
    """Return whether the round was trained under this very lease."""
    return row is not None and row.fence == fence and row.state in (RoundState.TRAINED, RoundState.DURABLE)


def num_ready_of_round(store: LedgerStore, count: int) -> int:
    """Return how many of the next `count` groups in the order of the run are ready; some may be too old."""
    lines = store.query(_CANDIDATES[store.rules.round_order], store.train_id, count)
    return sum(line[0] == State.READY for line in lines)


def count_in_flight(store: LedgerStore) -> int:
    return int(store.one(_UNDER_WAY, store.train_id)[0])
