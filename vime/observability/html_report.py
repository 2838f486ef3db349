"""RUN_DIR/report.html: one page about one run, for a browser without a network.

Curves, time by phase, the fate of every group, completions, warnings, configuration, machine. Written at the end of
each run, also of one that failed, and by `vime report RUN`, also for a live or a dead one. Whatever a run directory
lacks is left out of the page.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from vime.config.flags import knobs
from vime.config.parse import SECTIONS
from vime.observability.curve import WINDOW
from vime.observability.events import Event, EventKind, read_events
from vime.observability.html_samples import answers_blocks, eval_blocks
from vime.observability.machine_facts import MACHINE_FILE
from vime.observability.metrics import VERSION, read_metrics
from vime.observability.page import MAX_POINTS, Block, Line, Page, chart_block, table_block
from vime.observability.report import duration
from vime.observability.run_dir import config_value, is_alive, read_config
from vime.observability.samples import RoundFates, read_fates
from vime.observability.summary import RunSummary, summarise
from vime.types import VimeError

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"
BADGES = {"finished": "good", "interrupted": "warn", "running": ""}
MAX_WARNINGS, LOG_BYTES = 200, 4 << 20
Rounds = Mapping[int, Mapping[str, float]]
QueueFates = Mapping[str, Mapping[int | None, Sequence[int]]]
"""Additional facts of the ledger of mode streaming: state or reason -> round, None where there is none -> groups."""

CHARTS: tuple[tuple[str, str, str, str], ...] = (
    # section, title, metrics (the group is the line's name), note
    ("Learning", "Reward", r"rollout/(reward_mean|reward_mean_before_filter)", ""),
    ("Learning", "Reward by entry", r"rollout/reward/(.+)/mean", ""),
    ("Learning", "Evaluation: reward", r"eval/([^/]+)/reward_mean", ""),
    ("Learning", "Evaluation: pass@k", r"eval/(.+/pass@\d+)", "of k completions, one is right"),
    ("Learning", "Answer length, tokens", r"rollout/response_len_(mean|p50|p95|max)", ""),
    ("Learning", "Share of completions cut at the length limit", r"rollout/(truncated_ratio)", ""),
    ("Learning", "Reward by data source", r"rollout/by_source/(.+)/reward_mean", ""),
    ("Learning", "Reward by completion length, tokens", r"rollout/by_length/(.+)/reward_mean", ""),
    ("Learning", "Share of completions by length, tokens", r"rollout/by_length/(.+)/share", ""),
    ("Learning", "Evaluation: reward by entry", r"eval/(.+/reward/.+)/mean", ""),
    ("Optimizer", "Loss", r"train/(loss|value_loss)", ""),
    ("Optimizer", "KL, nats", r"train/(ppo_kl|kl_loss|mismatch_kl|mismatch_k3_kl)", "ppo_kl: old policy to new one"),
    ("Optimizer", "Entropy, nats", r"train/(entropy)", ""),
    ("Optimizer", "Gradient norm, before the clip", r"train/(grad_norm|critic_grad_norm)", ""),
    ("Optimizer", "Share of tokens that were clipped", r"train/((?:pg|tis|value)_clipfrac|opsm_maskfrac)", ""),
    ("Optimizer", "Learning rate", r"train/(lr|critic_lr)", ""),
    ("Optimizer", "Critic", r"train/(value_mean|return_mean|explained_variance)", ""),
    ("Freshness", "Staleness, versions", r"transferqueue/sample_staleness/(mean|max)", "by a sample's oldest token"),
    ("Freshness", "Effective sample size", r"train/(ess)", "1: the tokens are the policy's own"),
    ("Freshness", "Effective sample size by staleness", r"train/ess/(staleness_\w+)", ""),
    ("Freshness", "Trainer against engine, nats a token", r"train/train_rollout_logprob_abs_(diff|diff_max)", ""),
    ("Speed", "Tokens a second", r"perf/(tokens_per_sec|accepted_tokens_per_sec|train_tokens_per_sec)",
     "response tokens of a round; those that entered the loss; what the trainer computes"),
    ("Speed", "Seconds a round", r"perf/(step_time)", ""),
    ("Speed", "Memory of the fullest rank, GiB", r"perf/(peak_memory)", ""),
)  # fmt: skip
EXACT = frozenset({"Learning rate"})
"""Titles of charts of what was set, not measured: smoothing would show values that never were."""
UNTRAINED = {
    "rollout/surplus_groups": "surplus: the round was full",
    "rollout/aborted_groups": "aborted: the round was full",
    "rollout/partial_groups": "cut, continued later",
    "transferqueue/stale_dropped_groups": "too old when the round was leased",
    "transferqueue/late_groups": "late: another attempt had taken its place",
}
_OF_LIBRARY = re.compile(r"^\S*/site-packages/(?P<package>[^/]+)/\S*:\d+: (?P<kind>\w+): (?P<said>.*)$")
_WARNING = re.compile(r"^(?P<date>[\d-]{10} [\d:]{8}),\d+ (?P<level>WARNING|ERROR|CRITICAL)\s+\S+: (?P<text>.*)$")


def write_report(run_dir: Path, queue_fates: Callable[[Path], QueueFates] | None = None) -> Path | None:
    """Write the page. Returns its path, or None when it could not be made, which is logged: a run does not fail because
    of it."""
    try:
        return build_report(Path(run_dir), queue_fates).write(Path(run_dir) / REPORT_FILE)
    except Exception as error:  # boundary: a page about a run must not change how the run ends
        is_ours = not isinstance(error, OSError)  # else the message says all
        logger.warning("%s could not be written: %s: %s", REPORT_FILE, type(error).__name__, error, exc_info=is_ours)
        return None


def build_report(run_dir: Path, queue_fates: Callable[[Path], QueueFates] | None = None) -> Page:
    """The page of one run."""
    summary, events = summarise(run_dir), read_events(run_dir, with_spans=False)
    rounds = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else {}
    config = _config(run_dir)
    state = run_state(run_dir, summary.outcome)
    page = Page(
        title=run_dir.resolve().name, subtitle=_subtitle(run_dir, config), badge=(state, BADGES.get(state, "bad"))
    )
    for name, points in by_name(rounds).items():
        page.add_points(name, points)
    page.add_section("", [_tiles(summary, rounds, read_fates(run_dir))])
    page.add_section("Warnings", _warnings(run_dir, summary, events, rounds))
    for section in dict.fromkeys(entry[0] for entry in CHARTS):
        charts = [chart for chart in _charts(page, section) if chart["series"]]
        note = _reading(len(rounds)) if section == "Learning" else ""
        page.add_section(section, [{"kind": "charts", "charts": charts}] if charts else [], note)
    page.add_section("Time", _time_blocks(page, summary, rounds))
    page.add_section("Groups", *_group_blocks(run_dir, page, rounds, queue_fates))
    page.add_section("Answers", answers_blocks(run_dir, _reward_key(config)))
    page.add_section("Evaluations", eval_blocks(summary))
    metrics = {name: name for name in sorted(by_name(rounds))}
    page.add_section("All metrics", [{"kind": "explorer", "metrics": metrics, "x": "round"}] if metrics else [])
    page.add_section("Configuration", config_blocks(config))
    page.add_section("Components", _machine_blocks(run_dir))
    return page


def by_name(rounds: Rounds) -> dict[str, dict[int, float]]:
    """Metric -> value by round, for metrics that are numbers."""
    found: dict[str, dict[int, float]] = {}
    for step, metrics in rounds.items():
        for name, value in metrics.items():
            if isinstance(value, int | float):
                found.setdefault(name, {})[step] = float(value)
    return found


def flat_config(config: Mapping[str, object]) -> dict[str, object]:
    """Flag -> value, over all sections."""
    flat = {knob: value for part in config.values() if isinstance(part, dict) for knob, value in part.items()}
    return flat | {name: config[name] for name in ("vllm_flags", "router_flags") if config.get(name)}


def config_blocks(config: Mapping[str, object]) -> list[Block]:
    """Show what differs from the defaults, and everything."""
    defaults = {spec.name: spec.default for kind in SECTIONS.values() for _, spec in knobs(kind)}
    flat = flat_config(config)
    rows = [(name, _shown(value)) for name, value in sorted(flat.items())]
    said = [row for row in rows if _shown(defaults.get(row[0])) != row[1]]
    if not rows:
        return []
    return [
        table_block(("differs from the default", "value"), said),
        table_block(("flag", "value"), rows, closed="All flags"),
    ]


def _reading(num_rounds: int) -> str:
    size = -(-num_rounds // MAX_POINTS)
    means = f" Each point is the mean of {size} rounds." if size > 1 else ""
    return f"Drag to zoom, double click to go back.{means}"


def _charts(page: Page, section: str) -> Iterator[Block]:
    names = page.point_keys()
    for of_section, title, pattern, note in CHARTS:
        if of_section == section:
            matches = [match for name in names if (match := re.fullmatch(pattern, name))]
            lines = [Line(key=match[0], name=match[1]) for match in sorted(matches, key=_natural)]
            yield chart_block(title, lines, note=note, kind="exact" if title in EXACT else "line")


def _natural(match: re.Match[str]) -> list[tuple[int, str]]:
    """Sort `128_255` after `16_31`, and the mean first."""
    if match[1] in ("mean", "reward_mean"):
        return [(-1, "")]
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", match[1]) if part]


def _reward_key(config: Mapping[str, object]) -> str | None:
    key = config_value(config, "reward", "reward_key")
    return key if isinstance(key, str) else None


def _subtitle(run_dir: Path, config: Mapping[str, object]) -> str:
    model = Path(str(config_value(config, "model", "hf_checkpoint", "?"))).name
    estimator = config_value(config, "algo", "advantage_estimator", "?")
    mode = config_value(config, "queue", "transferqueue_mode", "?")
    written = time.strftime("%Y-%m-%d %H:%M")
    return f"{model} · {estimator} · queue {mode} · {run_dir.resolve()} · page written {written}"


def run_state(run_dir: Path, ended: str) -> str:
    """Return the state in a word or two; `ended` is the result of `events.outcome`. A killed run logs no end."""
    if ended == "finished":
        return ended
    if ended.startswith("failed"):
        return "interrupted" if ended.startswith("failed: interrupted") else "failed"
    return "running" if is_alive(run_dir) else "ended without a word"


def _tiles(summary: RunSummary, rounds: Rounds, fates: Mapping[int, RoundFates]) -> Block:
    tiles: list[tuple[str, object]] = [("rounds", summary.num_rounds), ("wall time", duration(summary.wall_s))]
    rewards = list(summary.rewards.values())
    if rewards:
        count = min(10, len(rewards))
        first, last = rewards[:WINDOW], rewards[-count:]
        tiles.append((f"reward, first {len(first)} rounds", f"{sum(first) / len(first):.3f}"))
        tiles.append((f"reward, last {count} rounds", f"{sum(last) / count:.3f}"))
    for name, points in sorted(by_name(rounds).items()):
        if (match := re.fullmatch(r"eval/([^/]+)/(reward_mean|pass@1)", name)) and len(tiles) < 9:
            values = list(points.values())
            change = f"{values[0]:.3f} → {values[-1]:.3f}" if len(values) > 1 else f"{values[-1]:.3f}"
            tiles.append((f"{match[1]}: {match[2].replace('_', ' ')}", change))
    num_dropped = sum(len(groups) for fate in fates.values() for groups in fate.dropped.values())
    if num_dropped:
        num_judged = num_dropped + sum(len(fate.kept) for fate in fates.values())
        tiles.append((f"groups dropped of {num_judged:,}", f"{num_dropped:,} ({num_dropped / num_judged:.0%})"))
    tiles += [("samples", summary.num_samples), ("response tokens", summary.num_tokens)]
    if summary.wall_s > 0 and summary.num_tokens:
        tiles.append(("response tokens a second, start-up included", f"{summary.num_tokens / summary.wall_s:,.0f}"))
    return {"kind": "tiles", "tiles": tiles}


def _warnings(run_dir: Path, summary: RunSummary, events: Sequence[Event], rounds: Rounds) -> list[Block]:
    """List why it failed, restarts, disagreements, metrics that are NaN, and warnings of the logs, most frequent
    first."""
    blocks: list[Block] = []
    if summary.outcome.startswith("failed"):
        blocks.append({"kind": "text", "text": summary.outcome, "style": "problem"})
    rows: list[tuple[object, ...]] = []
    for event in events:
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time_s))
        if event.kind == EventKind.RUN_RESTARTED:
            rows.append((1, "driver", date, f"started again: {event.fields.get('error')}"))
        elif event.kind == EventKind.DISAGREEMENT:
            told = json.dumps(dict(event.fields))[:500]
            rows.append((1, "driver", date, f"trainer and engine disagree: {told}; vime diagnose {run_dir} says why"))
    for name, points in by_name(rounds).items():
        odd = [step for step, value in points.items() if value != value or abs(value) == float("inf")]
        if odd:
            shown = ", ".join(map(str, odd[:10]))
            rows.append(
                (len(odd), "metrics", "", f"{name} is not finite in rounds {shown}{' ...' if odd[10:] else ''}")
            )
    rows += _logged(run_dir)
    if rows:
        blocks.append(table_block(("times", "process", "first", "what"), rows[:MAX_WARNINGS]))
    return blocks


def _logged(run_dir: Path) -> list[tuple[object, ...]]:
    """Collect warnings and errors of every log; those that differ only in numbers are one."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], tuple[str, str]] = {}
    outdated: Counter[str] = Counter()  # of libraries about themselves: nothing that a user of this run can change
    outdated_since = ""
    for path in sorted((run_dir / "logs").glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        for line in lines:
            if match := _WARNING.match(line):
                if package := _outdated_package(match["text"]):
                    outdated[package] += 1
                    outdated_since = min(filter(None, (outdated_since, match["date"])))
                    continue
                key = (path.stem, re.sub(r"\d+", "#", match["text"]))
                counts[key] += 1
                first.setdefault(key, (match["date"], f"{match['level'].lower()}: {match['text'][:600]}"))
    rows: list[tuple[object, ...]] = [
        (count, key[0], *first[key]) for key, count in counts.most_common(MAX_WARNINGS - 1)
    ]
    if outdated:
        packages = ", ".join(f"{name} {count}" for name, count in outdated.most_common())
        text = f"libraries say that a part of theirs is deprecated ({packages}); RUN_DIR/logs has them."
        rows.append((outdated.total(), "all", outdated_since, text))
    return rows


def _outdated_package(text: str) -> str:
    """Return the library that warns of its own deprecation; empty for any other warning, and for those of Vime."""
    match = _OF_LIBRARY.match(text)
    if match is None or match["package"] == "vime":
        return ""
    is_outdated = match["kind"].endswith(("DeprecationWarning", "FutureWarning")) or "deprecated" in match["said"]
    return match["package"] if is_outdated else ""


def _time_blocks(page: Page, summary: RunSummary, rounds: Rounds) -> list[Block]:
    """Show seconds of the driver by phase: round by round, and in all."""
    if not summary.phase_s:
        return []
    phases = sorted(summary.phase_s, key=lambda phase: -summary.phase_s[phase])
    lines = []
    for phase in phases:
        name = f"perf/{phase.replace(' ', '_')}_time"
        spent = {step: metrics.get(name, 0.0) for step, metrics in rounds.items() if VERSION in metrics}
        page.add_points(f"time|{phase}", spent)
        lines.append(Line(key=f"time|{phase}", name=phase))
    whole = sum(summary.phase_s.values())
    rows = [
        (phase, round(summary.phase_s[phase], 2), f"{summary.phase_s[phase] / whole:.1%}" if whole else "")
        for phase in phases
    ]
    rows.append(
        ("outside rounds and phases: start-up, saving at the end", round(max(0.0, summary.wall_s - whole), 2), "")
    )
    charts = [chart_block("Seconds of each round, by phase", lines, kind="stack")]
    return [{"kind": "charts", "charts": charts}, table_block(("phase of the driver", "seconds", "share"), rows)]


def _group_blocks(
    run_dir: Path, page: Page, rounds: Rounds, queue_fates: Callable[[Path], QueueFates] | None
) -> tuple[list[Block], str]:
    """Show counts by fate and round, each dropped group with its reason, and the fate of a chosen group."""
    fates = read_fates(run_dir)
    of_queue = _of_queue(run_dir, fates, queue_fates)
    counts = _counts(fates, rounds)
    if not counts:
        return [], ""
    every = sorted({step for points in counts.values() for step in points})
    for name, points in counts.items():
        page.add_points(f"group|{name}", {step: points.get(step, 0) for step in every})
    lines = [Line(key=f"group|{name}", name=name) for name in counts]
    totals = [(name, int(sum(points.values()))) for name, points in counts.items()]
    totals += [(f"ledger, at the end: {name}", sum(map(len, found.values()))) for name, found in of_queue.items()]
    charts = [chart_block("Groups of each round, by fate", lines, kind="stack")]
    if reasons := sorted({reason for fate in fates.values() for reason in fate.dropped}):
        shares = []
        for reason in reasons:
            page.add_points(f"dropped share|{reason}", {step: _dropped_share(fates[step], reason) for step in fates})
            shares.append(Line(key=f"dropped share|{reason}", name=reason))
        charts.append(chart_block("Share of finished groups that were dropped, by reason", shares, kind="stack"))
    blocks: list[Block] = [
        {"kind": "charts", "charts": charts},
        table_block(("fate", "groups"), totals),
        {"kind": "lookup", "fates": _looked_up(fates, of_queue)},
    ]
    if lost := list(_dropped(fates)):
        blocks.append(table_block(("round", "group", "reason"), lost, closed=f"All {len(lost):,} dropped groups"))
    note = (
        "A group is one prompt with its completions. Groups that a full round did not take are generated again later."
    )
    return blocks, note


def _dropped_share(fate: RoundFates, reason: str) -> float:
    finished = len(fate.kept) + sum(map(len, fate.dropped.values()))
    return len(fate.dropped.get(reason, ())) / finished if finished else 0.0


def _counts(fates: Mapping[int, RoundFates], rounds: Rounds) -> dict[str, dict[int, float]]:
    """Fate -> round -> groups."""
    counts: dict[str, dict[int, float]] = {}
    for fate in fates.values():
        is_trained = VERSION in rounds.get(fate.round_id, {})
        name = "trained" if is_trained else "kept, the round was not trained"
        counts.setdefault(name, {})[fate.round_id] = len(fate.kept)
        for reason, groups in fate.dropped.items():
            counts.setdefault(f"dropped: {reason}", {})[fate.round_id] = len(groups)
    for metric, name in UNTRAINED.items():
        points = {step: metrics[metric] for step, metrics in rounds.items() if metrics.get(metric)}
        if points:
            counts[name] = points
    return counts


def _dropped(fates: Mapping[int, RoundFates]) -> Iterator[tuple[int, int, str]]:
    """Newest round first."""
    for round_id in sorted(fates, reverse=True):
        for reason, groups in fates[round_id].dropped.items():
            for group in groups:
                yield round_id, group, reason


def _of_queue(
    run_dir: Path, fates: Mapping[int, RoundFates], queue_fates: Callable[[Path], QueueFates] | None
) -> QueueFates:
    """Return facts of the ledger about groups that are in no finished round."""
    if queue_fates is None:
        return {}
    try:
        told = queue_fates(run_dir)
    except VimeError as error:
        logger.warning("what the ledger knows of the groups is left out of the report: %s", error)
        return {}
    known = {group for fate in fates.values() for groups in (fate.kept, *fate.dropped.values()) for group in groups}
    rest = {
        name: {round_id: [group for group in groups if group not in known] for round_id, groups in by_round.items()}
        for name, by_round in told.items()
    }
    return {name: by_round for name, by_round in rest.items() if any(by_round.values())}


def _looked_up(fates: Mapping[int, RoundFates], of_queue: QueueFates) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {"kept for training": {}}
    for fate in fates.values():
        found["kept for training"][str(fate.round_id)] = list(fate.kept)
        for reason, groups in fate.dropped.items():
            found.setdefault(f"dropped: {reason}", {})[str(fate.round_id)] = list(groups)
    for name, by_round in of_queue.items():
        entry = found.setdefault(f"{name}, says the ledger", {})
        for round_id, numbers in by_round.items():
            entry["-" if round_id is None else str(round_id)] = list(numbers)
    return found


def _machine_blocks(run_dir: Path) -> list[Block]:
    path = run_dir / MACHINE_FILE
    try:
        facts = json.loads(path.read_text())
        rows = [(name, _shown(value)) for name, value in facts.items()]
    except (OSError, ValueError, AttributeError):
        return []
    command = run_dir / "command.sh"
    if command.is_file():
        rows.append(("command", command.read_text(errors="replace").split("\n", 1)[-1].strip()))
    return [table_block(("", ""), rows)]


def _config(run_dir: Path) -> dict[str, object]:
    try:
        return read_config(run_dir)
    except VimeError as error:
        logger.warning("the configuration is left out of the report: %s", error)
        return {}


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
