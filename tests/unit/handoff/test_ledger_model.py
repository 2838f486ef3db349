"""Random producers, trainers, deaths, expiries, duplicates and restarts: after every call the ledger's file says what
the model says, and at the end the audit, which knows neither, finds nothing."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.helpers.ledger_cases import RULES, TIMEOUT_S, Clock, checked, payload
from tests.helpers.ledger_model import Model
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_store import count_usage
from vime.handoff.ledger_types import RoundOrder, StalePolicy
from vime.types import VimeError

PRODUCERS, HOLDERS = st.sampled_from(["p", "q", "r"]), st.sampled_from(["t", "u"])
PARTITIONS = st.sampled_from(["train", "train", "train", "eval/x"])
PICK = st.integers(min_value=0, max_value=10**6)


def outcome(call):
    try:
        return call(), None
    except VimeError as error:
        return None, error


class LedgerMachine(RuleBasedStateMachine):
    @initialize(order=st.sampled_from(RoundOrder), policy=st.sampled_from(StalePolicy), staleness=st.integers(0, 2),
                max_tokens=st.sampled_from([15, 40, 10**6]))  # fmt: skip
    def begin(self, order, policy, staleness, max_tokens):
        self.directory = Path(tempfile.mkdtemp(prefix="ledger-model-"))
        self.rules = replace(
            RULES,
            max_slots=2 * (staleness + 1),
            max_staleness=staleness,
            round_order=order,
            stale_policy=policy,
            max_tokens=50,
        )
        self.clock, self.model = Clock(), Model(self.rules)
        self.tasks, self.fences, self.requests = [], [], 0
        self.saved = -1  # round of the newest checkpoint
        self.open()

    def open(self):
        self.ledger = Ledger(self.directory / "ledger.db", self.rules, clock=self.clock)

    def both(self, real, model):
        """Call both; answers what they answered, or None when both refused with the same error."""
        (got, refusal), (expected, expected_refusal) = outcome(real), outcome(model)
        assert type(refusal) is type(expected_refusal), f"{got} {refusal!r}; expected {expected} {expected_refusal!r}"
        return (got, expected) if refusal is None else None

    @rule(producer=PRODUCERS, count=st.integers(1, 4), partition=PARTITIONS)
    def issue(self, producer, count, partition):
        self.take(producer, count, partition)

    def take(self, producer, count, partition):
        self.requests += 1
        request = str(self.requests)
        got, expected = self.both(
            lambda: self.ledger.prompts.issue(producer, count, request=request, partition=partition),
            lambda: self.model.issue(producer, count, partition, str(self.requests)),
        )
        tasks = [(prompt.task, prompt.partial and prompt.partial[0].attempt) for prompt in got.prompts]
        assert tasks == expected
        assert bool(got.prompts) != bool(got.waits_for)
        self.tasks += [task for task, _ in tasks]
        return [task for task, _ in tasks]

    @rule(producer=PRODUCERS, count=st.integers(1, 4), tokens=st.sampled_from([5, 10]), backwards=st.booleans())
    def work(self, producer, count, tokens, backwards):
        """A producer that does all of its work at once."""
        for task in self.take(producer, count, "train")[:: -1 if backwards else 1]:
            self.commit_one(task, self.model.serving, tokens)

    def pick(self, pick):
        """Often one of the newest tasks, sometimes an old one."""
        return self.tasks[-1 - pick % min(len(self.tasks), 6)] if pick % 5 else self.tasks[pick % len(self.tasks)]

    @rule(pick=PICK, tokens=st.sampled_from([5, 10, 20]))
    def admit(self, pick, tokens):
        if self.tasks:
            task = self.pick(pick)
            self.model.expire()
            answer = self.both(
                lambda: self.ledger.prompts.admit(task, num_tokens=tokens, num_bytes=4 * tokens),
                lambda: self.model.admit(task, tokens),
            )
            assert answer is None or answer[0].granted == answer[1]

    @rule(picks=st.lists(PICK, min_size=1, max_size=3), age=st.integers(0, 1), tokens=st.sampled_from([5, 10, 20]))
    def commit(self, picks, age, tokens):
        for pick in picks if self.tasks else []:
            self.commit_one(self.pick(pick), max(0, self.model.serving - age), tokens)

    def commit_one(self, task, version, tokens):
        answer = self.both(
            lambda: self.ledger.prompts.commit(task, payload(task.group, version=version, tokens=tokens)),
            lambda: self.model.commit(task, version, tokens),
        )
        assert answer is None or answer[0] == answer[1]

    @rule(pick=PICK)
    def drop(self, pick):
        if self.tasks:
            task = self.pick(pick)
            answer = self.both(lambda: self.ledger.prompts.drop(task, "filter"), lambda: self.model.drop(task))
            assert answer is None or answer[0] == answer[1]

    @rule(pick=PICK, partial=st.booleans())
    def retry(self, pick, partial):
        if self.tasks:
            task, checksum = self.pick(pick), 7 if partial else None
            answer = self.both(
                lambda: self.ledger.prompts.retry(task, "aborted", partial=checksum),
                lambda: self.model.retry(task, partial),
            )
            assert answer is None or answer[0] == answer[1]

    @rule(producer=PRODUCERS, is_dead=st.booleans())
    def hear(self, producer, is_dead):
        got, expected = self.both(
            lambda: self.ledger.prompts.heartbeat(producer), lambda: self.model.heartbeat(producer)
        )
        assert got == expected
        if is_dead:
            self.ledger.prompts.abandon(producer)
            self.model.abandon(producer)

    @rule(seconds=st.sampled_from([1.0, TIMEOUT_S / 2]))
    def wait(self, seconds):
        self.clock.time += seconds
        self.model.now += seconds
        self.ledger.expire()
        self.model.expire()

    @rule(skip=st.sampled_from([0, 0, 0, 0, 1, -1]), ahead=st.sampled_from([0, 0, 0, 1]), holder=HOLDERS,
          minimum=st.integers(1, 2), drain=st.booleans())  # fmt: skip
    def lease(self, skip, ahead, holder, minimum, drain):
        rounds = self.model.rounds
        untrained = [round_id for round_id, found in rounds.items() if found.state in ("leased", "replay")]
        round_id = max(0, (min(untrained) if untrained else max(rounds, default=-1) + 1) + skip)
        ask = {"version": round_id + ahead, "holder": holder, "count": 2, "minimum": minimum, "drain": drain}
        answer = self.both(lambda: self.ledger.rounds.lease(round_id, **ask), lambda: self.model.lease(round_id, **ask))
        if answer is not None:
            lease = answer[0].lease
            assert (lease and [group.task.group for group in lease.groups]) == answer[1]
            assert bool(lease) != bool(answer[0].waits_for or answer[0].is_drained)
            if lease:
                self.fences.append((round_id, lease.fence))

    @rule(pick=PICK, then_serve=st.booleans())
    def trained(self, pick, then_serve):
        if self.fences:
            round_id, fence = self.fences[-1 - pick % min(3, len(self.fences))]
            answer = self.both(
                lambda: self.ledger.rounds.trained(round_id, fence), lambda: self.model.trained(round_id, fence)
            )
            assert answer is None or answer[0] == answer[1]
            if answer is not None and then_serve:
                self.serve(self.model.rounds[round_id].version + 1)

    @rule(count=st.integers(1, 3))
    def train_some(self, count):
        """Rounds as a trainer makes them; a work step between, so that there is something to lease."""
        for number in range(count):
            self.work("p", 4, 5, bool(number % 2))
            before = len(self.fences)
            self.lease(0, 0, "t", 1, False)
            if len(self.fences) > before:
                self.trained(0, True)

    @rule(more=st.sampled_from([0, 1, 2]))
    def serve_next(self, more):
        self.serve(self.model.serving + more)

    def serve(self, version):
        trained = [r.version for r in self.model.rounds.values() if r.state in ("trained", "durable")]
        if trained and version <= max(trained) + 1:  # a publisher can only serve weights that exist
            self.both(lambda: self.ledger.rounds.release(version), lambda: self.model.release(version))

    @rule(behind=st.integers(0, 1))
    def save(self, behind):
        last = max((r for r, found in self.model.rounds.items() if found.state == "trained"), default=-1) - behind
        if last > self.saved:
            answer = self.both(lambda: self.ledger.rounds.durable(last), lambda: self.model.durable(last))
            self.saved = last if answer is not None else self.saved

    @rule(restore=st.booleans(), lost=st.sets(st.integers(0, 12), max_size=1), loses=st.booleans())
    def restart(self, restore, lost, loses):
        self.model.expire()
        self.ledger.expire()
        self.ledger.close()
        self.open()
        self.model.reopen()
        if restore:
            lost = lost if loses else set()
            self.ledger.rounds.restore(
                None if self.saved < 0 else self.saved,
                lambda task, checksum: task.partition != "train" or task.group not in lost or checksum == 7,
            )
            self.model.restore(self.saved, lost)
            self.model.reopen()

    @invariant()
    def file_and_model_agree(self):
        if not hasattr(self, "ledger"):
            return
        store = self.ledger._store
        rows = store.query(
            "select p.name, grp, state, attempt, round, position from prompt_group join partition p on p.id = partition"
        )
        assert {(name, group): tuple(rest) for name, group, *rest in rows} == self.model.table()
        states = {round_id: found.state for round_id, found in self.model.rounds.items()}
        assert dict(store.query("select id, state from round")) == states
        assert store.memory.usage == count_usage(store.connection, store.train_id)
        usage = store.memory.usage
        assert (usage.active, usage.tokens) == (self.model.active(), self.model.held())

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            try:
                checked(self.directory, checkpoint_round=None if self.saved < 0 else self.saved)
            finally:
                shutil.rmtree(self.directory)


LedgerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_ledger_does_what_the_model_does = LedgerMachine.TestCase


def test_who_was_served_waits_behind_those_that_wait_already():
    """Found by chance: the model kept the place in the line of a producer that waited for nothing any more."""
    machine = LedgerMachine()
    try:
        machine.begin(order=RoundOrder.INDEX, policy=StalePolicy.DROP, staleness=1, max_tokens=15)
        machine.train_some(count=1)
        for producer, count in (("p", 1), ("q", 1), ("r", 2)):
            machine.work(backwards=False, count=count, producer=producer, tokens=5)
        machine.train_some(count=2)
    finally:
        machine.teardown()
