"""What one thing takes on a machine, from what runs there recorded: `forecast.py` plays a schedule with it."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from vime.config.parse import Config
from vime.observability.events import EventKind, read_events
from vime.observability.metrics import read_metrics
from vime.observability.run_dir import read_config
from vime.observability.samples import KeptGroup, RoundFates, kept_rounds, read_fates, read_round
from vime.types import DataError

WARM_UP_ROUNDS = 2
"""The first rounds of a run, which compile, open connections and have no tail of a round before them."""
MOST_ROUNDS, MOST_BYTES = 100, 64 << 20
"""Of a long run the newest are read: rounds of samples, bytes of each file of events."""
AT_ONCE_S = 0.05
"""Prompts that were sent so shortly before are read together with it."""
STEP, WAIT, TRAIN, UPDATE = (f"perf/{name}_time" for name in ("step", "wait", "train", "update_weights"))
AGREEMENT, STALENESS = "perf/agreement_time", "transferqueue/sample_staleness/mean"
TOKENS, SAMPLES, PAUSE = "rollout/num_tokens", "rollout/num_samples", "perf/pause_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """What one thing takes, seconds."""

    group_s: float  # of a group beside its tokens: request, reward, storing
    prompt_s: float  # of a group's prompt on its engine, which generates nothing meanwhile
    token_s: float  # of a token of a completion that has an engine for itself
    crowded_token_s: float  # more of it, for each other completion on the engine
    round_s: float  # of training a round, whatever its size
    trained_token_s: float  # of a token of it, prompts included
    hand_over_s: float  # of a round, from the last completion of its last group to the trainers
    update_s: float  # of a weight update
    pause_s: float  # of it, in which engines do not generate
    agreement_s: float  # of a stale round: trainer and engines score its rows again
    rest_s: float  # of a round: what the driver does besides
    prompt_tokens: float  # of a sample
    dropped_share: float  # of the groups that were finished, those that a filter or a failure dropped
    lengths: tuple[tuple[int, ...], ...]  # response tokens of the completions of each recorded group


def recorded_config(run_dir: Path) -> Config:
    """Return the flags that a run had. Raises DataError when its config.json is not there or of another kind."""
    try:
        return Config.from_dict(read_config(run_dir))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{run_dir / 'config.json'}: is no configuration that this version of Vime reads ({type(error).__name__}: "
            f"{error}). Expected what a run writes when it starts: name a run of this version."
        ) from error


def measure(run_dirs: Sequence[Path], config: Config) -> UnitCosts:
    """Read unit costs for `config` from the records of runs.

    What depends on a flag is taken from those with the same value, if there is one among them: lengths (else those of
    all, cut) and the way of a round. Raises DataError when they hold too few rounds.
    """
    runs = [_Recorded.read(Path(path)) for path in run_dirs]
    rounds = [metrics for run in runs for metrics in run.rounds]
    groups = [group for run in runs for group in run.groups]
    if len(rounds) < 3 or not any(group.is_counted for group in groups):
        raise DataError(
            f"{', '.join(map(str, run_dirs))}: {len(rounds)} rounds after the first {WARM_UP_ROUNDS} of each run, "
            f"{len(groups)} groups in samples/ whose generation is in events/. Expected 3 rounds or more that were "
            "generated and trained, and their groups: name longer runs, with --keep-samples-mib above 0."
        )
    max_response_len = config.rollout.rollout_max_response_len
    as_long = [
        run for run in runs if run.config.rollout.rollout_max_response_len == max_response_len and run.groups
    ] or runs
    prompt = statistics.fmean(group.prompt_length for group in groups)
    group_s, prompt_s, token_s, crowded_token_s = _engine_costs(runs)
    round_s, trained_token_s = _training_costs(rounds, prompt)
    hand_over_s, rest_s = _driver_costs(runs, has_ledger=config.queue.has_ledger)
    return UnitCosts(
        group_s=group_s,
        prompt_s=prompt_s,
        token_s=token_s,
        crowded_token_s=crowded_token_s,
        round_s=round_s,
        trained_token_s=trained_token_s,
        hand_over_s=hand_over_s,
        update_s=_mean(rounds, UPDATE),
        pause_s=_mean(rounds, PAUSE),
        agreement_s=_mean([metrics for metrics in rounds if metrics.get(STALENESS, 0) > 0], AGREEMENT),
        rest_s=rest_s,
        prompt_tokens=prompt,
        dropped_share=_dropped_share(rounds),
        lengths=tuple(group.cut(max_response_len) for run in as_long for group in run.groups),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A finished piece of work, unix time; `of`: the number of its group or round, -1 without one."""

    name: str
    began: float
    ended: float
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedGroup:
    """A group as it was generated, unix time. Lengths are in tokens: of its prompt, and of its completions."""

    began: float
    ended: float
    prompt_length: int
    lengths: tuple[int, ...]
    is_counted: bool  # not of the first rounds

    def cut(self, most: int) -> tuple[int, ...]:
        return tuple(min(length, most) for length in self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """What is read of one run, without its first rounds."""

    rounds: list[dict[str, float]]
    groups: list[_RecordedGroup]  # of which the completions were kept
    crowd: _Crowd  # of all groups
    hand_overs: list[float]
    config: Config

    @classmethod
    def read(cls, run_dir: Path) -> _Recorded:
        config, metrics = recorded_config(run_dir), read_metrics(run_dir)
        rounds = {number: each for number, each in metrics.items() if {STEP, TRAIN, TOKENS} <= each.keys()}
        counted = list(rounds)[WARM_UP_ROUNDS:]
        kept = {
            group.group_index: group
            for number in kept_rounds(run_dir)[-MOST_ROUNDS:]
            if number in rounds
            for group in read_round(run_dir, number)
        }
        spans, fates = _spans(run_dir), read_fates(run_dir)
        groups = list(_generated(spans, kept, set(counted)))
        return cls(
            rounds=[rounds[number] for number in counted],
            groups=groups,
            crowd=_Crowd(groups, [span for span in spans if span.name == "generate_group" and span.of not in kept]),
            hand_overs=list(_hand_overs(run_dir, spans, fates, counted)),
            config=config,
        )


def _spans(run_dir: Path) -> list[_Span]:
    """Return finished pieces of work of the processes that generate."""
    return [
        _Span(
            name=str(event.fields["name"]),
            began=event.time_s - float(str(event.fields.get("duration_s", 0.0))),
            ended=event.time_s,
            of=int(str(event.fields.get("group", event.fields.get("rollout_id", -1)))),
        )
        for process in ("rollout-manager", "rollout-worker*")
        for event in read_events(run_dir, process, newest_bytes=MOST_BYTES)
        if event.kind == EventKind.SPAN_ENDED and event.fields.get("error") is None
    ]


def _generated(
    spans: Sequence[_Span], kept: Mapping[int, KeptGroup], counted: Container[int]
) -> Iterator[_RecordedGroup]:
    newest = {span.of: span for span in spans if span.name == "generate_group" and span.of in kept}
    for number, span in newest.items():
        group = kept[number]
        lengths = tuple(len(answer.tokens) for answer in group.answers)
        if any(lengths):
            yield _RecordedGroup(
                began=span.began,
                ended=span.ended,
                prompt_length=len(group.answers[0].prompt_tokens),
                lengths=lengths,
                is_counted=group.round_id in counted,
            )


def _hand_overs(
    run_dir: Path, spans: Sequence[_Span], fates: Mapping[int, RoundFates], rounds: Sequence[int]
) -> Iterator[float]:
    """Yield from a round's last completion to the driver's ticket, for rounds that were waited for. How long the ticket
    is on its way is the shortest time of all rounds, since the driver may be training when it comes."""
    generated, asked, planned = (
        {span.of: span for span in spans if span.name == name}
        for name in ("generate_group", "generate_round", "plan_round")
    )
    handed = {
        int(str(event.fields["rollout_id"])): event.time_s
        for event in read_events(run_dir, "driver", with_spans=False)
        if event.kind == EventKind.ROUND_GENERATED
    }
    known = [number for number in rounds if number in fates.keys() & asked.keys() & planned.keys() & handed.keys()]
    on_its_way = min((handed[number] - planned[number].ended for number in known), default=0.0)
    for number in known:
        last = max((generated[group].ended for group in fates[number].kept if group in generated), default=0.0)
        if last > asked[number].began:
            yield planned[number].ended - last + on_its_way


def _engine_costs(runs: Sequence[_Recorded]) -> tuple[float, float, float, float]:
    """Fit seconds of a group = a + b x (prompts that came to its engine meanwhile, with its own) + (tokens of its
    longest completion) x (c + d x (others on its engine, mean)).

    Groups are taken to be spread evenly over the engines. d, c, b are 0 where the fit would make them negative.
    """
    rows, seconds = [], []
    for run in runs:
        crowd, engines = run.crowd, run.config.cluster.num_engines or 1
        for group in filter(attrgetter("is_counted"), run.groups):
            longest = max(group.lengths)
            others = max(0.0, crowd.mean(group.began, group.ended) / engines - 1)
            came = crowd.came(group.began - AT_ONCE_S, group.ended)
            rows.append([1.0, came / engines, longest, longest * others])
            seconds.append(group.ended - group.began)
    group_s, prompt_s, token_s, crowded_token_s = _not_negative(rows, seconds)
    return group_s, prompt_s, token_s, crowded_token_s


def _training_costs(rounds: Sequence[Mapping[str, float]], prompt: float) -> tuple[float, float]:
    """Fit seconds of training = a + b x tokens, prompts among them."""
    rows = [[1.0, metrics[TOKENS] + prompt * metrics[SAMPLES]] for metrics in rounds]
    round_s, trained_token_s = _not_negative(rows, [metrics[TRAIN] for metrics in rounds])
    return round_s, trained_token_s


def _driver_costs(runs: Sequence[_Recorded], *, has_ledger: bool) -> tuple[float, float]:
    """Return the seconds of a hand-over and what the driver does besides, of runs of that mode if there is one."""
    alike = [run for run in runs if run.config.queue.has_ledger == has_ledger and run.rounds] or runs
    hand_overs = [seconds for run in alike for seconds in run.hand_overs]
    rest_s = statistics.fmean(_rest(metrics) for run in alike for metrics in run.rounds)
    return statistics.median(hand_overs or [0.0]), rest_s


class _Crowd:
    """How many completions were under way at a time, from when each group began, ended, and how long each was. `others`
    are groups whose lengths nobody knows: as many completions, as long beside the longest of them, as on average."""

    def __init__(self, groups: Sequence[_RecordedGroup], others: Sequence[_Span]) -> None:
        shares = [[length / max(group.lengths) for length in group.lengths] for group in groups]
        lasting = [(group.began, group.ended, share) for group, share in zip(groups, shares, strict=True)]
        if groups:
            usual = [statistics.fmean(map(statistics.fmean, shares))] * round(statistics.fmean(map(len, shares)))
            lasting += [(span.began, span.ended, usual) for span in others]
        self._began = sorted(began for began, _, _ in lasting)
        changes = [(began, len(share)) for began, _, share in lasting]
        changes += [(began + (ended - began) * each, -1) for began, ended, share in lasting for each in share]
        changes.sort()
        self._times = [at for at, _ in changes]
        self._counts = list(itertools.accumulate(change for _, change in changes))
        steps = zip(self._counts, itertools.pairwise(self._times), strict=False)
        self._areas = [0.0, *itertools.accumulate(count * (until - since) for count, (since, until) in steps)]

    def _area(self, at: float) -> float:
        """Return completion-seconds from the beginning to `at`."""
        index = bisect.bisect_right(self._times, at) - 1
        return self._areas[index] + self._counts[index] * (at - self._times[index]) if index >= 0 else 0.0

    def came(self, since: float, until: float) -> int:
        """Return how many groups began then."""
        return bisect.bisect(self._began, until) - bisect.bisect_left(self._began, since)

    def mean(self, since: float, until: float) -> float:
        return (self._area(until) - self._area(since)) / (until - since)


def _not_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Return the least squares solution whose entries are at least 0 (by leaving columns out, the last first)."""
    matrix, target = np.array(rows), np.array(values)
    columns = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        negative = [column for column, value in zip(columns, found, strict=True) if value < 0]
        if not negative:
            by_column = dict(zip(columns, found.tolist(), strict=True))
            return tuple(by_column.get(column, 0.0) for column in range(matrix.shape[1]))
        columns.remove(negative[-1])


def _dropped_share(rounds: Sequence[Mapping[str, float]]) -> float:
    kept, dropped = _mean(rounds, "rollout/num_groups"), _mean(rounds, "rollout/dropped_groups")
    return dropped / (kept + dropped) if dropped else 0.0


def _mean(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.fmean([metrics.get(name, 0.0) for metrics in rounds] or [0.0])


def _rest(metrics: Mapping[str, float]) -> float:
    known = (WAIT, TRAIN, UPDATE, AGREEMENT, "perf/eval_time", "perf/save_time")
    return max(0.0, metrics[STEP] - sum(metrics.get(name, 0.0) for name in known))
