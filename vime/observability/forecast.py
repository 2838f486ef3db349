"""How fast a command line would run, and how stale, from what runs on the same machine recorded: `vime plan --like`.

It plays the schedule event by event, with the costs of `unit_costs.py`: groups of completions on engines, rounds,
slots, updates. It knows what waits for what, so the long tail of a round, the overlap that a staleness bound allows and
the engines that a trainer can feed come out of it. docs/scale.md says how far it was off.

Not in it: start, evaluation, checkpoints, losses, and that training and generation slow each other down where they
share processors. Tokens that --partial-rollout keeps count as sampled again, --train-early-groups as not given.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass

from vime.config.parse import Config
from vime.observability.unit_costs import UnitCosts
from vime.types import ConfigError

SIMULATED_ROUNDS = 240
MOST_GROUPS = 200
"""Groups that may be generated for each of a round before it counts as one that would never be whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Means over rounds after the first ones."""

    tokens_per_sec: float  # response tokens, as perf/tokens_per_sec
    round_s: float
    staleness: float  # versions, as transferqueue/sample_staleness/mean
    trainers_busy: float  # share of the time
    engines_busy: float  # share of the time, mean over engines


def forecast(
    config: Config,
    costs: UnitCosts,
    *,
    overlaps: bool = False,
    num_engines: int | None = None,
    rounds: int = SIMULATED_ROUNDS,
) -> Forecast:
    """Play `rounds` rounds. `overlaps`: train_async.py drives them. The same arguments give the same result.

    `num_engines` other than those of `config` have the same requests in flight each.
    """
    play = _Schedule(config, costs, overlaps=overlaps, num_engines=num_engines or config.cluster.num_engines)
    play.run(rounds)
    warm_up = min(rounds - 1, 2 * (config.queue.transferqueue_max_staleness + 1))
    counted = play.done[warm_up:]
    took = play.done[-1].ended - play.done[warm_up - 1].ended
    return Forecast(
        tokens_per_sec=sum(one.tokens for one in counted) / took,
        round_s=took / len(counted),
        staleness=statistics.fmean(one.staleness for one in counted),
        trainers_busy=sum(one.trained_s for one in counted) / took,
        engines_busy=statistics.fmean(engine.busy_s for engine in play.engines) / play.now,
    )


class _Engine:
    """Completions that share one engine: all of them get the next token at the same time.

    `_position`: tokens that a completion would have now which was there from the beginning.
    """

    def __init__(self, costs: UnitCosts) -> None:
        self._costs = costs
        self._position = 0.0
        self._at = 0.0
        self._open: list[tuple[float, int, _Group]] = []  # position of its end, a number, its group
        self._numbers = itertools.count()
        self.busy_s = 0.0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def _token_s(self) -> float:
        return self._costs.token_s + self._costs.crowded_token_s * (len(self._open) - 1)

    def next_end(self) -> float:
        """Return when the next completion ends; never, without one."""
        if not self._open:
            return math.inf
        return self._at + (self._open[0][0] - self._position) * self._token_s

    def go_to(self, at: float) -> None:
        if self._open and at > self._at:
            self._position += (at - self._at) / self._token_s
            self.busy_s += at - self._at
        self._at = max(self._at, at)

    def add(self, group: _Group, at: float) -> None:
        self.go_to(at)
        self.pause(self._costs.prompt_s)
        for length in group.lengths:
            heapq.heappush(self._open, (self._position + length, next(self._numbers), group))

    def end_one(self) -> _Group:
        self._position, _, group = heapq.heappop(self._open)
        return group

    def pause(self, seconds: float) -> None:
        """Let nothing happen for so long from now."""
        self._at += seconds

    def drop_all(self) -> None:
        self._open.clear()


@dataclass(slots=True)
class _Group:
    """A prompt's completions."""

    number: int
    lengths: tuple[int, ...]
    left: int
    version: int = 0  # served when its request was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leased:
    at: float
    groups: tuple[_Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    tokens: int
    staleness: float
    trained_s: float
    ended: float


class _Schedule:
    """One run. `now` only grows; generation happens in `_go_to`, which the driver's steps call."""

    def __init__(self, config: Config, costs: UnitCosts, *, overlaps: bool, num_engines: int) -> None:
        self._config, self._costs, self._overlaps = config, costs, overlaps
        self._chance = random.Random(0)
        self.engines = [_Engine(costs) for _ in range(num_engines)]
        self._places = config.engine.vllm_server_concurrency * len(self.engines)  # one request for a group
        self._waiting: deque[_Group] = deque()  # for a place
        self._again: deque[tuple[int, ...]] = deque()  # lengths of groups whose prompts are generated again
        self._under_way: dict[int, _Group] = {}  # issued, and neither ready nor dropped
        self._in_flight = 0
        self._rewarded: list[tuple[float, int, _Group]] = []  # when its completions are scored and stored, its number
        self._ready: dict[int, _Group] = {}  # in the order in which they became it
        self._num_issued = 0
        self._next_open = 0  # in order `index`: the lowest number that no round took and that was not dropped
        self._dropped: set[int] = set()
        self._next_round = 0
        self._is_wanted = False  # the next round
        self._leased: _Leased | None = None
        self._served = 0
        self.now = 0.0
        self.done: list[_Round] = []

    def run(self, rounds: int) -> None:
        config, costs = self._config, self._costs
        flows, batch = config.queue.has_ledger, config.rollout.rollout_batch_size
        if flows:
            self._issue((config.queue.transferqueue_max_staleness + 1) * batch)
        self._begin_lease()
        unreleased = 0
        for number in range(rounds):
            leased = self._wait_leased()
            self._leased = None
            self._go_to(max(self.now, leased.at + costs.hand_over_s))
            if self._overlaps:
                self._begin_lease()
            tokens = sum(sum(group.lengths) for group in leased.groups)
            samples = sum(len(group.lengths) for group in leased.groups)
            trained_s = costs.round_s + costs.trained_token_s * (tokens + costs.prompt_tokens * samples)
            self._go_to(self.now + trained_s)
            if self._overlaps and not flows:  # weights do not change before the next round is generated
                self._go_to(max(self.now, self._wait_leased().at + costs.hand_over_s))
            unreleased += batch
            if (number + 1) % config.weights.update_weights_interval == 0:
                self._update(number + 1)
                if flows:
                    self._issue(unreleased)
                unreleased = 0
            staleness = statistics.fmean(number - group.version for group in leased.groups)
            self._go_to(self.now + costs.rest_s + (costs.agreement_s if staleness else 0.0))
            if not self._overlaps:
                self._begin_lease()
            self.done.append(
                _Round(
                    tokens=tokens,
                    staleness=staleness,
                    trained_s=trained_s,
                    ended=self.now,
                )
            )

    def _update(self, version: int) -> None:
        """Engines go on after the pause, and send with the new weights only when the update is over."""
        for engine in self.engines:
            engine.pause(self._costs.pause_s)
        self._go_to(self.now + self._costs.update_s)
        self._served = version

    # groups

    def _issue(self, count: int) -> None:
        for _ in range(count):
            lengths = self._again.popleft() if self._again else self._draw()
            group = _Group(self._num_issued, lengths, left=len(lengths))
            self._num_issued += 1
            self._under_way[group.number] = group
            self._waiting.append(group)
        self._send()

    def _draw(self) -> tuple[int, ...]:
        """Draw the lengths of a group: completions of one recorded group, of several where that has too few."""
        count, lengths = self._config.rollout.n_samples_per_prompt, list[int]()
        while len(lengths) < count:
            recorded = self._chance.choice(self._costs.lengths)
            lengths += self._chance.sample(recorded, min(len(recorded), count - len(lengths)))
        return tuple(lengths)

    def _send(self) -> None:
        while self._waiting and self._in_flight < self._places:
            group = self._waiting.popleft()
            group.version = self._served
            self._in_flight += 1
            min(self.engines, key=lambda engine: engine.num_open).add(group, self.now)

    def _complete(self, group: _Group) -> None:
        """One of its completions has ended."""
        group.left -= 1
        if not group.left:
            self._in_flight -= 1
            heapq.heappush(self._rewarded, (self.now + self._costs.group_s, group.number, group))
            self._send()

    def _finish(self, group: _Group) -> None:
        del self._under_way[group.number]
        if self._chance.random() < self._costs.dropped_share:
            self._dropped.add(group.number)
            if self._config.queue.has_ledger:
                self._issue(1)  # its slot is free
            else:
                self._refill()
        else:
            self._ready[group.number] = group
        self._lease_if_whole()

    # rounds

    def _begin_lease(self) -> None:
        self._is_wanted = True
        if not self._config.queue.has_ledger:
            self._refill()
        self._lease_if_whole()

    def _refill(self) -> None:
        """Off, buffer: have enough groups under way for the round."""
        if len(self._ready) + len(self._under_way) < self._config.rollout.rollout_batch_size:
            self._issue(self._config.rollout.over_sampling_batch_size or self._config.rollout.rollout_batch_size)

    def _lease_if_whole(self) -> None:
        if not self._is_wanted:
            return
        batch, flows = self._config.rollout.rollout_batch_size, self._config.queue.has_ledger
        if flows and self._config.queue.transferqueue_round_order != "commit":
            numbers = self._lowest(batch)
        else:
            self._drop_stale()
            numbers = list(itertools.islice(self._ready, batch)) if len(self._ready) >= batch else None
        if numbers is None:
            return
        self._is_wanted = False
        self._next_round += 1
        self._leased = _Leased(at=self.now, groups=tuple(self._ready.pop(number) for number in numbers))
        if not flows:
            self._abort()

    def _drop_stale(self) -> None:
        """Drop what is ready and too old for the next round; its slots are free."""
        bound = self._config.queue.transferqueue_max_staleness
        stale = [number for number, group in self._ready.items() if self._next_round - group.version > bound]
        for number in stale:
            group = self._ready.pop(number)
            if self._config.queue.stale_policy == "retry":
                self._again.append(group.lengths)
        if stale:
            self._issue(len(stale))

    def _lowest(self, count: int) -> list[int] | None:
        """Return the lowest open numbers, None while one of them is under way."""
        found, number = list[int](), self._next_open
        while len(found) < count:
            if number in self._ready:
                found.append(number)
            elif number not in self._dropped:
                return None
            number += 1
        self._next_open = number
        return found

    def _abort(self) -> None:
        """Off, buffer: what was asked for beyond the round is generated again, and is as long as it was."""
        surplus = self._ready | self._under_way
        self._again.extend(surplus[number].lengths for number in sorted(surplus))
        self._under_way.clear()
        for engine in self.engines:
            engine.drop_all()
        self._waiting.clear()
        self._rewarded.clear()
        self._ready.clear()
        self._in_flight = 0

    def _wait_leased(self) -> _Leased:
        first = self._num_issued
        while self._leased is None:
            self._step(math.inf)
            if self._num_issued - first > MOST_GROUPS * self._config.rollout.rollout_batch_size:
                raise ConfigError(
                    f"--like: no round would be whole: {self._num_issued - first:,} groups for one round were dropped "
                    f"(share in the recorded runs: {self._costs.dropped_share:.2f}) or too old. Name runs that drop "
                    "fewer, or raise --transferqueue-max-staleness."
                )
        return self._leased

    # time

    def _go_to(self, at: float) -> None:
        while self._next_event() <= at:
            self._step(at)
        for engine in self.engines:
            engine.go_to(at)
        self.now = max(self.now, at)

    def _next_event(self) -> float:
        rewarded = self._rewarded[0][0] if self._rewarded else math.inf
        return min(rewarded, *(engine.next_end() for engine in self.engines))

    def _step(self, limit: float) -> None:
        """Let the next thing happen: a completion ends, or a group becomes ready."""
        at = self._next_event()
        assert at <= limit, "it is asked for what happens until then"
        assert at < math.inf, "something is under way while a round is waited for"
        self.now = max(self.now, at)
        for engine in self.engines:
            is_next = engine.next_end() <= at
            engine.go_to(at)
            if is_next:
                self._complete(engine.end_one())
                return
        _, _, group = heapq.heappop(self._rewarded)
        self._finish(group)
