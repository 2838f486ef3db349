"""The results of a run, read from its directory alone: totals, curves, completions before and after.

Used by the end screen and by `vime report`, so both show the same for a live, finished or dead run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.config.eval_sets import eval_sets
from vime.observability.curve import RESPONSE_LENGTH, REWARD
from vime.observability.events import Event, EventKind, outcome, read_events
from vime.observability.metrics import VERSION, read_metrics, series
from vime.observability.run_dir import config_value, read_config
from vime.observability.unit_costs import recorded_config
from vime.types import DataError, RewardError, Sample, VimeError

logger = logging.getLogger(__name__)
_EVAL_FILE = re.compile(r"(?P<name>.+)_(?P<rollout_id>\d+)\.jsonl")
_PHASE = re.compile(r"perf/(?P<phase>\w+)_time")
# Not phases of the driver: the whole round, and parts of another phase.
_NOT_PHASES = ("step", "pause", "rollout")
NUM_ANSWERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPair:
    """One evaluation prompt with completions of the first and of the last evaluated weights."""

    prompt: str
    label: str
    before: str
    after: str
    is_before_right: bool
    is_after_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Totals count what was logged; seconds are wall seconds of the driver."""

    run_dir: Path
    outcome: str  # "finished", "failed: why" or "not finished"
    rewards: Mapping[int, float]  # by round
    response_lengths: Mapping[int, float]  # by round, tokens
    num_rounds: int
    num_samples: int
    num_tokens: int  # response tokens
    wall_s: float  # all starts of the run together
    phase_s: Mapping[str, float]
    answers: tuple[CompletionPair, ...]
    answers_title: str


def summarise(run_dir: Path) -> RunSummary:
    """Read everything the end screen shows. Raises DataError when `run_dir` holds no run."""
    run_dir = Path(run_dir)
    rounds = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else {}
    events = read_events(run_dir, with_spans=False)
    rewards = series(rounds, REWARD)
    title, answers = read_completions(run_dir)
    return RunSummary(
        run_dir=run_dir,
        outcome=outcome(events),
        rewards=rewards,
        response_lengths=series(rounds, RESPONSE_LENGTH),
        num_rounds=len(series(rounds, VERSION)) or len(rewards),
        num_samples=int(_total(rounds, "rollout/num_samples", "train/num_samples")),
        num_tokens=int(_total(rounds, "rollout/num_tokens", "train/num_tokens")),
        wall_s=_wall_s(events),
        phase_s=_phases(rounds),
        answers=answers,
        answers_title=title,
    )


def read_completions(run_dir: Path, limit: int = NUM_ANSWERS) -> tuple[str, tuple[CompletionPair, ...]]:
    """Return a title and up to `limit` prompts of both the first and the last evaluation, spread over the set.

    The first data set by name is shown. Empty when there are no two evaluations to compare.
    """
    files: dict[str, dict[int, Path]] = {}
    for path in (Path(run_dir) / "eval").glob("*.jsonl"):
        match = _EVAL_FILE.fullmatch(path.name)
        if match:
            files.setdefault(match["name"], {})[int(match["rollout_id"])] = path
    compared = {name: paths for name, paths in sorted(files.items()) if len(paths) >= 2}
    if not compared:
        return "", ()
    name, paths = next(iter(compared.items()))
    first, last = min(paths), max(paths)
    rule = _pass_rule(Path(run_dir), name)
    before, after = _first_by_prompt(paths[first], rule), _first_by_prompt(paths[last], rule)
    shared = [prompt for prompt in before if prompt in after]
    shown = [shared[index * len(shared) // min(limit, len(shared))] for index in range(min(limit, len(shared)))]
    pairs = tuple(
        CompletionPair(
            prompt=prompt,
            label=str(before[prompt].label),
            before=before[prompt].response,
            after=after[prompt].response,
            is_before_right=is_right(before[prompt], *rule),
            is_after_right=is_right(after[prompt], *rule),
        )
        for prompt in shown
    )
    return f"{name}: completions before round {first} and after round {last - 1}", pairs


def is_right(sample: Sample, reward_key: str | None, pass_reward: float) -> bool:
    """Return whether its reward, of a dict the entry `reward_key`, is at least `pass_reward`, as pass@k counts
    (rollout/metrics.py). Without a usable one the completion is not right here, where a run ends with its name."""
    try:
        return sample.scalar_reward(reward_key) >= pass_reward
    except RewardError:
        return False


def _pass_rule(run_dir: Path, name: str) -> tuple[str | None, float]:
    """Return the --reward-key of an evaluation set, which may have one of its own in --eval-config, and
    --pass-reward."""
    try:
        config = read_config(run_dir)
    except DataError:
        return None, 1.0
    key = config_value(config, "reward", "reward_key")
    least = config_value(config, "eval", "pass_reward")
    with contextlib.suppress(VimeError):  # a run of another version, or its file of sets is gone
        own = {one.name: one.config.reward.reward_key for one in eval_sets(recorded_config(run_dir))}
        key = own.get(name, key)
    return (key if isinstance(key, str) else None), (least if isinstance(least, int | float) else 1.0)


def _first_by_prompt(path: Path, rule: tuple[str | None, float]) -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            sample = Sample.from_dict(json.loads(line))
            found.setdefault(_prompt_text(sample), sample)
            is_right(sample, *rule)
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("%s:%d: left out a line that is not a sample: the file is damaged", path, number)
    return found


def _prompt_text(sample: Sample) -> str:
    """Return the prompt as written; of a conversation its last message."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return str(sample.prompt[-1].get("content", "")) if sample.prompt else ""


def _total(rounds: Mapping[int, Mapping[str, float]], *names: str) -> float:
    """Return the sum over the rounds of the first of `names` that any round has."""
    found = next((values for name in names if (values := series(rounds, name))), {})
    return sum(value for value in found.values() if math.isfinite(value))


def _phases(rounds: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    phases: dict[str, float] = {}
    for metrics in rounds.values():
        for name, value in metrics.items():
            match = _PHASE.fullmatch(name)
            if match and match["phase"] not in _NOT_PHASES:
                phase = match["phase"].replace("_", " ")
                phases[phase] = phases.get(phase, 0.0) + value
    return phases


def _wall_s(events: Iterable[Event]) -> float:
    """Return the time from each run_started to the last event before the next: the time between crash and resume is not
    counted."""
    total, started, latest = 0.0, None, 0.0
    for event in events:
        if event.kind == EventKind.RUN_STARTED:
            total += latest - started if started is not None else 0.0
            started = event.time_s
        latest = event.time_s
    return total + (latest - started if started is not None else 0.0)
