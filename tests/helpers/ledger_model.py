"""The ledger's rules once more, as plainly as a dict allows: what the real one is compared with, call by call."""

from __future__ import annotations

from dataclasses import dataclass, field

from vime.handoff.ledger_types import (
    CapacityError,
    LateAttemptError,
    LeaseLostError,
    LedgerRules,
    RoundOrder,
    StalePolicy,
    Task,
    TransitionError,
)
from vime.handoff.slot_line import WAIT_S
from vime.types import StaleError

OPEN = ("issued", "retry", "ready")


@dataclass
class Group:
    state: str = "issued"
    attempt: int = 1
    producer: str = ""
    deadline: float = 0.0
    version: int = 0
    tokens: int = 0
    is_held: bool = False
    committed: int = 0  # when, in the order of commits
    round_id: int | None = None
    partial: int | None = None  # attempt that left tokens


@dataclass
class Round:
    version: int
    holder: str
    groups: list[int]
    deadline: float
    fence: int
    state: str = "leased"
    is_final: bool = False


@dataclass
class Model:
    rules: LedgerRules
    now: float = 0.0
    groups: dict[tuple[str, int], Group] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    line: list[Task] = field(default_factory=list)
    waiting: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)  # for slots, longest first
    serving: int = 0
    num_commits: int = 0
    fence: int = 0

    def train(self, *states):
        return {
            index: group for (name, index), group in self.groups.items() if name == "train" and group.state in states
        }

    def active(self):
        unserved = sum(
            len(r.groups)
            for r in self.rounds.values()
            if r.state in ("trained", "durable") and r.version >= self.serving
        )
        return len(self.train("issued", "ready", "leased")) + unserved

    def held(self):
        return sum(group.tokens for group in self.groups.values() if group.is_held)

    def issue(self, producer, count, partition, request=""):
        self.expire()
        is_train = partition == "train"
        room = max(0, self.rules.max_slots - self.active()) if is_train else count
        retries = sorted(
            index for (name, index), group in self.groups.items() if (name, group.state) == (partition, "retry")
        )
        first = sum(name == partition for name, _ in self.groups)
        chosen = retries[: min(room, count)]
        num_new = count - len(chosen)
        if is_train:
            num_new = min(num_new, self.share(producer, request, num_new, room - len(retries)))
            mine = self.waiting.setdefault(producer, {})
            if chosen or num_new:
                mine.pop(request, None)
                self.waiting[producer] = self.waiting.pop(producer)
            else:
                mine[request] = (self.now + WAIT_S, count)
        tasks = []
        for index in [*chosen, *range(first, first + num_new)]:
            group = self.groups.setdefault((partition, index), Group(attempt=0))
            group.state, group.attempt, group.producer = "issued", group.attempt + 1, producer
            group.deadline = self.now + self.rules.lease_timeout_s
            tasks.append((Task(partition, index, group.attempt), group.partial))
        return tasks

    def share(self, producer, request, count, free):
        """One slot after the other goes to the producer that has the fewest; of equals, to the first in the line."""
        self.waiting = {  # who waits for nothing any more has no place: the next wish is behind those of others
            name: left
            for name, wishes in self.waiting.items()
            if (left := {each: wish for each, wish in wishes.items() if wish[0] > self.now})
        }
        wants = {name: sum(wish[1] for wish in wishes.values()) for name, wishes in self.waiting.items() if wishes}
        has_now = [group.producer for group in self.train("issued", "ready").values()]
        wants[producer] = wants.get(producer, 0) + count - self.waiting.get(producer, {}).get(request, (0, 0))[1]
        given = dict.fromkeys(wants, 0)
        for _ in range(free):
            hungry = [name for name in wants if given[name] < wants[name]]
            if hungry:
                given[min(hungry, key=lambda name: has_now.count(name) + given[name])] += 1
        return given[producer]

    def admit(self, task, tokens):
        group = self.flying(task)
        if task.partition != "train" or group.is_held:
            return True
        if task not in self.line:
            self.line.append(task)
        if self.line[0] != task or self.held() + tokens > self.rules.max_tokens:
            return False
        self.line.remove(task)
        group.is_held, group.tokens = True, tokens
        return True

    def commit(self, task, version, tokens):
        self.expire()
        group = self.groups[task.partition, task.group]
        if group.attempt == task.attempt and group.state in ("ready", "leased", "trained", "durable"):
            return "duplicate"
        self.flying(task)
        if task.partition == "train":
            if group.is_held and tokens > group.tokens:
                raise CapacityError
            if not group.is_held and (self.line or self.held() + tokens > self.rules.max_tokens):
                raise CapacityError
        self.num_commits += 1
        group.state, group.version, group.tokens, group.committed = "ready", version, tokens, self.num_commits
        group.is_held, group.partial = task.partition == "train", None
        return "committed"

    def drop(self, task):
        self.expire()
        group = self.groups[task.partition, task.group]
        if (group.attempt, group.state) == (task.attempt, "dropped"):
            return False
        if not (task.partition != "train" and (group.attempt, group.state) == (task.attempt, "ready")):
            self.flying(task)
        group.state, group.is_held = "dropped", False
        self.leave_line(task)
        return True

    def retry(self, task, partial):
        self.expire()
        group = self.groups[task.partition, task.group]
        if (group.attempt, group.state) == (task.attempt, "retry"):
            return False
        self.flying(task)
        self.give_back(task.partition, task.group)
        if partial:
            group.partial = task.attempt
        return True

    def heartbeat(self, producer):
        self.expire()
        held = {
            key: group for key, group in self.groups.items() if (group.state, group.producer) == ("issued", producer)
        }
        for group in held.values():
            group.deadline = self.now + self.rules.lease_timeout_s
        return {Task(*key, group.attempt) for key, group in held.items()}

    def abandon(self, producer):
        self.waiting.pop(producer, None)
        for task in self.heartbeat(producer):
            self.give_back(task.partition, task.group)

    def lease(self, round_id, version, holder, count, minimum, drain):
        self.expire()
        found = self.rounds.get(round_id)
        if found is None:
            before = [other for other in self.rounds if other < round_id]
            later = [r for other, r in self.rounds.items() if other > round_id and r.state in ("trained", "durable")]
            if later or (before and max(before) != round_id - 1):
                raise TransitionError
        elif found.state in ("trained", "durable"):
            raise TransitionError
        elif found.state == "leased" and found.holder != holder:
            raise LeaseLostError
        elif found.version != version:
            raise TransitionError
        have = found.groups if found else []
        fresh = [] if found and (found.is_final or len(have) >= count) else self.choose(version, count - len(have))
        in_flight = self.train("issued", "retry")
        if not have and not (len(fresh) >= minimum or (drain and fresh and not in_flight)):
            return None
        for index in fresh:
            group = self.groups["train", index]
            group.state, group.round_id = "leased", round_id
        for index in have:
            self.groups["train", index].state = "leased"
        self.fence += 1
        deadline = self.now + self.rules.lease_timeout_s
        is_final = bool(found and found.is_final)
        self.rounds[round_id] = Round(version, holder, have + fresh, deadline, self.fence, is_final=is_final)
        return have + fresh

    def choose(self, version, want):
        loose = {index: group for index, group in self.train(*OPEN).items() if group.round_id is None}
        while True:
            if self.rules.round_order is RoundOrder.COMMIT:
                ready = [(group.committed, index) for index, group in loose.items() if group.state == "ready"]
                chosen = [index for _, index in sorted(ready)[:want]]
            else:
                chosen = []
                for index in sorted(loose)[:want]:
                    if loose[index].state != "ready":
                        break
                    chosen.append(index)
            if any(loose[index].version > version for index in chosen):
                raise StaleError
            stale = [index for index in chosen if loose[index].version < version - self.rules.max_staleness]
            if not stale:
                return chosen
            for index in stale:
                group = self.groups["train", index]
                group.state = "dropped" if self.rules.stale_policy is StalePolicy.DROP else "retry"
                group.is_held = False
                if group.state == "dropped":
                    del loose[index]

    def trained(self, round_id, fence):
        self.expire()
        found = self.rounds.get(round_id)
        if found and found.fence == fence and found.state in ("trained", "durable"):
            return False
        if found is None or found.fence != fence or found.state != "leased":
            raise LeaseLostError
        if any(r.state in ("leased", "replay") for other, r in self.rounds.items() if other < round_id):
            raise TransitionError
        found.state, found.is_final = "trained", True
        for index in found.groups:
            self.groups["train", index].state, self.groups["train", index].is_held = "trained", False
        return True

    def release(self, version):
        self.expire()
        if version < self.serving or any(
            r.state in ("leased", "replay") and r.version < version for r in self.rounds.values()
        ):
            raise TransitionError
        self.serving = version

    def durable(self, last):
        self.expire()
        if (
            not self.rounds
            or max(self.rounds) < last
            or any(r.state in ("leased", "replay") for other, r in self.rounds.items() if other <= last)
        ):
            raise TransitionError
        self.settle(last)

    def settle(self, last):
        for round_id, found in self.rounds.items():
            if round_id <= last:
                found.state = "durable"
                for index in found.groups:
                    self.groups["train", index].state = "durable"

    def restore(self, last, lost):
        """`lost`: indices of training groups whose payload is gone."""
        start = self.rounds[last].version + 1 if last in self.rounds else None
        if start is None and last + 1 in self.rounds:
            start = self.rounds[last + 1].version
        self.settle(last)
        reached, is_exact, in_flight = (
            start,
            True,
            [key for key, group in self.groups.items() if group.state == "issued"],
        )
        for round_id in sorted(other for other in self.rounds if other > last):
            found = self.rounds[round_id]
            is_exact = is_exact and not lost & set(found.groups)
            for index in found.groups:
                group = self.groups["train", index]
                group.state, group.is_held = "ready", True
                if not is_exact:
                    group.round_id = None
            if is_exact:
                found.state, reached = "replay", found.version + 1
            else:
                del self.rounds[round_id]
        for key in in_flight:
            self.give_back(*key)
        for index, group in self.train("ready").items():
            if group.round_id is None and (index in lost or (reached is not None and group.version > reached)):
                group.state, group.is_held = "retry", False
        for group in self.groups.values():
            if group.state == "retry" and not is_exact:
                group.partial = None
        if start is not None:
            self.serving = min(self.serving, start)
        self.line.clear()

    def reopen(self):
        """Every holder gets a full timeout; the waiting line is asked for again."""
        for group in self.groups.values():
            group.deadline = self.now + self.rules.lease_timeout_s
        for found in self.rounds.values():
            found.deadline = self.now + self.rules.lease_timeout_s
        self.line.clear()
        self.waiting.clear()

    def expire(self):
        for key, group in self.groups.items():
            if group.state == "issued" and group.deadline <= self.now:
                self.give_back(*key)
        for round_id, found in list(self.rounds.items()):
            if found.state == "leased" and found.deadline <= self.now:
                for index in found.groups:
                    self.groups["train", index].state = "ready"
                    if not found.is_final:
                        self.groups["train", index].round_id = None
                if found.is_final:
                    found.state = "replay"
                else:
                    del self.rounds[round_id]

    def give_back(self, partition, index):
        group = self.groups[partition, index]
        group.state, group.is_held = "retry", False
        self.leave_line(Task(partition, index, group.attempt))

    def leave_line(self, task):
        if task in self.line:
            self.line.remove(task)

    def flying(self, task):
        group = self.groups[task.partition, task.group]
        if group.state == "issued" and group.attempt == task.attempt:
            return group
        is_late = group.attempt > task.attempt or (group.attempt == task.attempt and group.state == "retry")
        raise LateAttemptError if is_late else TransitionError

    def table(self):
        """(state, attempt, round, place in it, tokens while they count) by group."""
        rows = {}
        for key, group in self.groups.items():
            place = self.rounds[group.round_id].groups.index(key[1]) if group.round_id is not None else None
            rows[key] = (group.state, group.attempt, group.round_id, place)
        return rows
