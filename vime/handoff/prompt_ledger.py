"""The producers' side of the ledger: which prompts to generate, whether a payload may be stored, how attempts ended.

    issue -> (admit, store the payload) -> commit          the group is ready: visible from here, and only now
                                        -> drop            a filter refused it; its slot is free at once
                                        -> retry           aborted; issued again first, with its tokens if kept

An attempt that misses its deadline is issued again under the next number; its later result is refused. A group whose
prompt a producer brought itself (`issue_own`) takes the next number too, and is dropped instead: nobody else has the
prompt.
"""

from __future__ import annotations

import json
from dataclasses import replace

from vime.handoff.ledger_restore import give_up
from vime.handoff.ledger_store import Flight, GroupRow, LedgerStore, find_group, lack_of_room
from vime.handoff.ledger_types import (
    EVAL_PREFIX,
    Admission,
    CapacityError,
    CommitOutcome,
    IssuedPrompt,
    LateAttemptError,
    OwnGrant,
    OwnOutcome,
    PartitionError,
    Payload,
    PromptGrant,
    State,
    Task,
    TransitionError,
)
from vime.types import HandoffError

_RETRIES = """select grp, attempt from prompt_group indexed by retry_group
    where partition = ? and state = 'retry' order by grp limit ?"""
_UNDER_WAY = """select 1 from prompt_group indexed by open_group
    where partition = ? and state in ('issued', 'retry', 'ready') and state != 'ready' limit 1"""
_ISSUE_NEW = """insert into prompt_group(partition, grp, attempt, state, producer, request)
    values (?, ?, 1, 'issued', ?, ?)"""
_ISSUE_AGAIN = """update prompt_group set state = 'issued', attempt = attempt + 1, producer = ?, request = ?,
    reason = null where partition = ? and grp = ?"""
_COMMIT = """update prompt_group set state = 'ready', ready_sequence = ?, checksum = ?, num_bytes = ?, num_tokens = ?,
    num_rows = ?, min_version = ?, max_version = ?, facts = ?, admitted = 1, partial_attempt = null,
    partial_checksum = null
    where partition = ? and grp = ?"""
_ISSUE_OWN = """insert into prompt_group(partition, grp, attempt, state, producer, request, own_key, own_content)
    values (?, ?, 1, 'issued', ?, ?, ?, ?)"""
_OWN = """select grp, attempt, state, checksum, own_content from prompt_group indexed by own_group
    where producer = ? and own_key = ? order by grp desc limit 1"""
OF_OWN = ""  # the request of an own group in flight: `issue` refuses it, so no lease has it
_HELD = """select producer, count(*) from prompt_group indexed by open_group
    where partition = ? and state in ('issued', 'retry', 'ready') and state != 'retry' group by producer"""
_BACK = """update prompt_group set state = 'retry', admitted = 0, num_tokens = 0, num_bytes = 0, facts = null,
    reason = ?,
    partial_attempt = coalesce(?, partial_attempt), partial_checksum = coalesce(?, partial_checksum)
    where partition = ? and grp = ?"""


class PromptLedger:
    """Issue and commit. Pure: no thread, no clock of its own, one call is one transaction."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store

    def issue(
        self, producer: str, count: int, *, request: str, partition: str | None = None, end: int | None = None
    ) -> PromptGrant:
        """Return up to `count` prompts for `producer`: groups to be retried first, then new ones; none at or beyond
        `end`.

        A call that is repeated with the same `request` (its response was lost) gets the same prompts. In the train
        partition at most `max_slots` groups hold a slot. While others wait for one too, new prompts go to who holds the
        fewest groups (slot_line.py); groups to be retried go to whoever asks, because a round waits for them. After a
        restore even a retry waits until the replayed rounds before it are served, or its tokens would be too old when
        it is trained. No partition: the train one.
        """
        if count < 1 or not producer or not request:
            raise HandoffError(f"issue of {count} prompts to {producer!r}, request {request!r}; expected 1 and names.")
        store, memory = self._store, self._store.memory
        partition = partition or store.rules.partition
        if partition != store.rules.partition and not partition.startswith(EVAL_PREFIX):
            raise PartitionError(
                f"partition {partition!r}: expected {store.rules.partition!r} (--transferqueue-partition) or a name "
                f"that begins with {EVAL_PREFIX!r}."
            )
        repeated = memory.requests.get((producer, request))
        if repeated:
            return self._grant(repeated)
        with store.transaction():
            number = store.partition_id(partition)
            tasks, is_at_end = self._take(producer, count, request, partition, number, end)
            for task in tasks:
                store.write("issued", number, task.group, task.attempt, note=producer)
        deadline = store.deadline()
        for task in tasks:
            memory.fly(Flight(task, producer, request, deadline))
        if tasks:
            return self._grant(tasks)
        return self._no_prompt(producer, number, is_at_end=is_at_end)

    def issue_own(self, producer: str, key: str, content: str) -> OwnGrant:
        """Take the next number of the train partition for a group whose prompt `producer` brings itself, under a key of
        its choice; `content`: hash of what it will store.

        Once a group was committed under a key, the same key means that group for the whole life of the run, and other
        content is refused. A group that was dropped before it was ever committed frees its key. Asking again renews the
        deadline of a group in flight, or the place in the line for a slot, which is that of prompts too.
        """
        if not producer or not key or not content:
            raise HandoffError(f"own group {key!r} of {producer!r}, content {content!r}: expected none to be empty.")
        store, memory, partition = self._store, self._store.memory, self._store.rules.partition
        known = self.known_own(producer, key, content)
        if known is not None:
            if known.outcome is OwnOutcome.ISSUED and known.task is not None:
                memory.flights[partition, known.task.group].deadline = store.deadline()
            return known
        if store.is_over():
            return OwnGrant(outcome=OwnOutcome.OVER)
        if not self._share(producer, 1):
            memory.line.wait(producer, key, 1, store.clock.now())
            return OwnGrant(outcome=OwnOutcome.WAITS, waits_for=self._no_slot(producer))
        with store.transaction():
            [group] = store.one("select next_group from partition where id = ?", store.train_id)
            task = Task(partition, group, 1)
            store.change(_ISSUE_OWN, store.train_id, group, producer, OF_OWN, key, content)
            store.change("update partition set next_group = ? where id = ?", group + 1, store.train_id)
            store.write("issued", store.train_id, group, 1, note=producer)
            store.write("own", store.train_id, group, 1, note=json.dumps({"key": key, "content": content}))
            memory.usage.active += 1
        memory.line.serve(producer, key)
        memory.fly(Flight(task, producer, OF_OWN, store.deadline()))
        return OwnGrant(outcome=OwnOutcome.ISSUED, task=task)

    def known_own(self, producer: str, key: str, content: str) -> OwnGrant | None:
        """Return what the key names already; None when it is free. Does not renew a deadline: what is put under the key
        may yet be refused, and a job that repeats a refused call must not keep the slot for ever."""
        store, partition = self._store, self._store.rules.partition
        row = store.one(_OWN, producer, key)
        if row is None:
            return None
        group, attempt, state, checksum, stored = row
        task, was_committed = Task(partition, group, attempt), checksum is not None
        if not was_committed and state != State.ISSUED:
            return None
        if stored != content:
            return OwnGrant(outcome=OwnOutcome.OTHER_CONTENT, task=task)
        if was_committed:
            return OwnGrant(outcome=OwnOutcome.COMMITTED, task=task)
        return OwnGrant(outcome=OwnOutcome.ISSUED, task=task)

    def _share(self, producer: str, count: int) -> int:
        """Return how many slots a call may take now for new groups of the train partition."""
        store, usage = self._store, self._store.memory.usage
        free = store.num_slots() - usage.active - usage.retry
        return store.memory.line.share(producer, count, free=free, held=self._held, now=store.clock.now())

    def _held(self) -> dict[str, int]:
        """Return by producer the groups that are being made or are ready."""
        return dict(self._store.query(_HELD, self._store.train_id))

    def issued(self, producer: str, request: str) -> PromptGrant:
        """Return what this request of `issue` was given and the producer still has; nothing new."""
        return self._grant(self._store.memory.requests.get((producer, request), []))

    def _take(
        self, producer: str, count: int, request: str, partition: str, number: int, end: int | None
    ) -> tuple[list[Task], bool]:
        """Give groups to a producer; return also whether the prompts are exhausted."""
        store, usage = self._store, self._store.memory.usage
        is_train = partition == store.rules.partition
        room = max(0, store.num_slots() - usage.active) if is_train else count
        retries = store.query(_RETRIES, number, min(count, room))
        [first] = store.one("select next_group from partition where id = ?", number)
        num_new = count - len(retries)
        if is_train:
            num_new = self._share(producer, num_new)
        new = range(first, first + max(0, num_new if end is None else min(num_new, end - first)))
        for group, _ in retries:
            store.change(_ISSUE_AGAIN, producer, request, number, group)
        for group in new:
            store.change(_ISSUE_NEW, number, group, producer, request)
        if new:
            store.change("update partition set next_group = ? where id = ?", new.stop, number)
        if is_train:
            if retries or num_new:  # also where no prompt is left: a slot would be of no use
                store.memory.line.serve(producer, request)
            else:
                store.memory.line.wait(producer, request, count, store.clock.now())
            usage.retry -= len(retries)
            usage.active += len(retries) + len(new)
        tasks = [Task(partition, group, attempt + 1) for group, attempt in retries]
        return tasks + [Task(partition, group, 1) for group in new], end is not None and first >= end

    def admit(self, task: Task, *, num_tokens: int, num_bytes: int) -> Admission:
        """Return whether a payload of this size may be stored now; producers are served in the order in which they
        asked.

        Ask again until it is granted, within a deadline of your own; heartbeats keep the place in the queue.
        """
        store, rules, row = self._store, self._store.rules, find_group(self._store, task)
        if row.state != State.ISSUED or row.attempt != task.attempt:
            raise refuse_late(task, row)
        if not rules.has_capacity or task.partition != rules.partition or row.admitted:
            return Admission(granted=True)
        for what, size, most in (("tokens", num_tokens, rules.max_tokens), ("bytes", num_bytes, rules.max_bytes)):
            if most is not None and size > most:
                raise CapacityError(
                    f"group {task}: {size} {what}, the queue may hold {most} (--transferqueue-max-{what}). It would "
                    "wait for ever; raise the bound above the largest group."
                )
        line = store.memory.waiting
        line.setdefault(task)
        if next(iter(line)) != task:
            ahead = list(line).index(task)
            return Admission(granted=False, waits_for=f"its turn for room in the queue, behind {ahead} others")
        lack = lack_of_room(store.memory.usage, rules, num_tokens, num_bytes)
        if lack:
            return Admission(granted=False, waits_for=f"room in the queue: {lack}; a trained round makes some")
        with store.transaction():
            sql = "update prompt_group set admitted = 1, num_tokens = ?, num_bytes = ? where partition = ? and grp = ?"
            store.change(sql, num_tokens, num_bytes, row.partition, task.group)
            self._note("admitted", row, task, num_tokens, num_bytes)
            store.memory.usage.hold(num_tokens, num_bytes)
        del line[task]
        return Admission(granted=True)

    def commit(self, task: Task, payload: Payload) -> CommitOutcome:
        """Make the group ready: the payload of `task` is stored. A second delivery of one attempt changes nothing."""
        store, row = self._store, find_group(self._store, task)
        if row.state != State.ISSUED or row.attempt != task.attempt:
            if row.attempt == task.attempt and row.state in (State.READY, State.LEASED, State.TRAINED, State.DURABLE):
                return CommitOutcome.DUPLICATE
            raise refuse_late(task, row)
        if not 0 <= payload.min_version <= payload.max_version or payload.num_rows < 1:
            raise HandoffError(f"group {task}: {payload}; expected rows, and versions in order.")
        is_train = task.partition == store.rules.partition
        if is_train and store.rules.has_capacity:
            check_room(store, task, row, payload)
        with store.transaction():
            sequence = self._note("ready", row, task, payload.num_tokens, payload.num_bytes, payload.content or None)
            size = (payload.checksum, payload.num_bytes, payload.num_tokens, payload.num_rows)
            known = (payload.min_version, payload.max_version, payload.facts)
            store.change(_COMMIT, sequence, *size, *known, row.partition, task.group)
            if is_train:
                more = (payload.num_tokens - row.num_tokens, payload.num_bytes - row.num_bytes)
                store.memory.usage.hold(*more, groups=1 - row.admitted)
        store.memory.land(task)
        return CommitOutcome.COMMITTED

    def drop(self, task: Task, reason: str) -> bool:
        """Drop the group: it will never be trained. Groups of an eval partition end like this after their evaluation.

        Returns False when the same attempt was dropped before.
        """
        row = find_group(self._store, task)
        if row.attempt == task.attempt and row.state == State.DROPPED:
            return False
        is_evaluated = row.state == State.READY and task.partition.startswith(EVAL_PREFIX)
        if row.attempt != task.attempt or not (row.state == State.ISSUED or is_evaluated):
            raise refuse_late(task, row)
        if not reason:
            raise HandoffError(f"group {task}: dropped without a reason; a dropped group is counted under one.")
        with self._store.transaction():
            self._drop(row, task, reason)
        self._store.memory.land(task)
        return True

    def _drop(self, row: GroupRow, task: Task, reason: str) -> None:
        give_up(self._store, task, reason)
        self._leave(row, task)

    def retry(self, task: Task, reason: str, *, partial: int | None = None) -> bool:
        """Give back an aborted attempt; `partial` is the checksum of its tokens, stored under `task`, to be continued.

        Returns False when the same attempt was given back before.
        """
        row = find_group(self._store, task)
        if row.attempt == task.attempt and row.state == State.RETRY:
            return False
        if row.attempt != task.attempt or row.state != State.ISSUED:
            raise refuse_late(task, row)
        self._give_back([task], reason, partial=partial)
        return True

    def heartbeat(self, producer: str) -> frozenset[Task]:
        """Note that `producer` is alive: its attempts get a full timeout from now. Return the attempts that it still
        has. Groups with prompts of its own are not among them: only a repeated `issue_own` shows that it still has
        the group."""
        held, deadline = [], self._store.deadline()
        for flight in self._store.memory.flights.values():
            if flight.producer == producer and flight.request != OF_OWN:
                flight.deadline = deadline
                held.append(flight.task)
        return frozenset(held)

    def abandon(self, producer: str) -> int:
        """Note that `producer` is dead: its prompts go to others at once. Return how many."""
        self._store.memory.line.leave(producer)
        tasks = [flight.task for flight in self._store.memory.flights.values() if flight.producer == producer]
        if tasks:
            self._give_back(tasks, f"producer {producer} lost")
        return len(tasks)

    def abandon_own(self) -> int:
        """Note that the gateway is dead: it was storing the own groups that are in flight. Nobody goes on with them, so
        their slots go to others at once. Their keys are free again: jobs repeat their calls. Return how many."""
        tasks = [flight.task for flight in self._store.memory.flights.values() if flight.request == OF_OWN]
        if tasks:
            self._give_back(tasks, "gateway lost")
        return len(tasks)

    def expire(self, now: float) -> None:
        """Take back attempts that missed their deadline."""
        late = [flight.task for flight in self._store.memory.flights.values() if flight.deadline <= now]
        if late:
            self._give_back(late, "lease expired")

    def _give_back(self, tasks: list[Task], reason: str, *, partial: int | None = None) -> None:
        with self._store.transaction():
            for task in tasks:
                row = find_group(self._store, task)
                if row.own_key is not None:
                    self._drop(row, task, reason)
                    continue
                attempt = task.attempt if partial is not None else None
                self._store.change(_BACK, reason, attempt, partial, row.partition, task.group)
                self._note("retry", row, task, note=reason)
                if self._leave(row, task):
                    self._store.memory.usage.retry += 1
        for task in tasks:
            self._store.memory.land(task)

    def _leave(self, row: GroupRow, task: Task) -> bool:
        """Free a group's slot and capacity. Return whether it held a slot at all."""
        is_train = task.partition == self._store.rules.partition
        if is_train:
            self._store.memory.usage.active -= 1
            if row.admitted:
                self._store.memory.usage.hold(-row.num_tokens, -row.num_bytes, groups=-1)
        return is_train

    def _note(
        self,
        event: str,
        row: GroupRow,
        task: Task,
        tokens: int | None = None,
        num_bytes: int | None = None,
        note: str | None = None,
    ) -> int:
        place = (row.partition, task.group, task.attempt)
        return self._store.write(event, *place, tokens=tokens, num_bytes=num_bytes, note=note)

    def _grant(self, tasks: list[Task]) -> PromptGrant:
        prompts = tuple(issued_prompt(self._store, task) for task in tasks)
        return PromptGrant(prompts=prompts, serving=self._store.meta("serving", 0))

    def _no_prompt(self, producer: str, number: int, *, is_at_end: bool) -> PromptGrant:
        if number == self._store.train_id and self._store.is_over():
            return PromptGrant(prompts=(), is_exhausted=True)
        if is_at_end:
            is_done = self._store.one(_UNDER_WAY, number) is None
            why = "" if is_done else "the groups in flight: there is no new prompt, but one of them may come back"
            return PromptGrant(prompts=(), waits_for=why, is_exhausted=is_done)
        return PromptGrant(prompts=(), waits_for=self._no_slot(producer))

    def _no_slot(self, producer: str) -> str:
        usage, others = self._store.memory.usage, self._store.memory.line.others(producer, self._store.clock.now())
        waiting = f", {others} other producers wait too and who holds the fewest groups is first" if others else ""
        return (
            f"a slot: {usage.active} groups hold one and {usage.retry} to be retried, of {self._store.num_slots()}"
            f"{waiting}; a served round or a dropped group frees one"
        )


def issued_prompt(store: LedgerStore, task: Task) -> IssuedPrompt:
    """Return the prompt with the tokens that an earlier attempt left."""
    row = find_group(store, task) if task.attempt > 1 else None
    if row is None or row.partial_attempt is None or row.partial_checksum is None:
        return IssuedPrompt(task=task)
    return IssuedPrompt(task=task, partial=(replace(task, attempt=row.partial_attempt), row.partial_checksum))


def refuse_late(task: Task, row: GroupRow) -> TransitionError:
    found = f"group {task}: it is {row.state} at attempt {row.attempt}"
    if row.attempt > task.attempt or (row.attempt == task.attempt and row.state == State.RETRY):
        reason = f" ({row.reason})" if row.reason else ""
        return LateAttemptError(f"{found}{reason}; attempt {task.attempt} came too late. Discard its result.")
    return TransitionError(f"{found}, expected issued at attempt {task.attempt}. Discard its result.")


def check_room(store: LedgerStore, task: Task, row: GroupRow, payload: Payload) -> None:
    """Refuse a payload larger than admitted, or one never admitted while there is no capacity or others wait."""
    if row.admitted:
        if payload.num_tokens > row.num_tokens or payload.num_bytes > row.num_bytes:
            raise CapacityError(
                f"group {task}: {payload.num_tokens} tokens, {payload.num_bytes} bytes; admitted were "
                f"{row.num_tokens} and {row.num_bytes}. Ask `admit` with the size that is stored."
            )
        return
    usage, rules = store.memory.usage, store.rules
    lack = lack_of_room(usage, rules, payload.num_tokens, payload.num_bytes)
    if lack or store.memory.waiting:
        raise CapacityError(f"group {task}: not admitted; {lack or 'others wait for room'}. Ask `admit` first.")
