"""Completions of a run on its page: rounds spread over the run, of each the best, the worst and a dropped group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vime.observability.page import Block, table_block
from vime.observability.samples import KeptGroup, KeptSample, kept_rounds, read_round
from vime.observability.summary import RunSummary

MAX_ROUNDS, MAX_ANSWERS, MAX_CHARS = 8, 4, 3000


def answers_blocks(run_dir: Path, reward_key: str | None) -> list[Block]:
    """Add at most MAX_ROUNDS rounds of four groups of MAX_ANSWERS completions: 0.4 MB of text at the most."""
    rounds = kept_rounds(run_dir)
    count = min(MAX_ROUNDS, len(rounds))
    chosen = sorted({rounds[place * (len(rounds) - 1) // max(1, count - 1)] for place in range(count)})
    shown = []
    for round_id in chosen:
        groups = list(read_round(run_dir, round_id))
        picked = _picked(groups, reward_key)
        if picked:
            name = f"round {round_id}: {len(picked)} of {len(groups)} groups"
            shown.append({"name": name, "groups": [_group(group, why, reward_key) for group, why in picked]})
    return [{"kind": "samples", "rounds": shown}] if shown else []


def eval_blocks(summary: RunSummary) -> list[Block]:
    """Add prompts of both the first and the last evaluation."""
    rows = [
        (_cut(pair.prompt), _cut(pair.label), _mark(pair.is_before_right) + _cut(pair.before),
         _mark(pair.is_after_right) + _cut(pair.after))
        for pair in summary.answers
    ]  # fmt: skip
    columns = ("prompt", "label", "before", "after")
    return [{"kind": "text", "text": summary.answers_title}, table_block(columns, rows)] if rows else []


def answer_text(value: object) -> str:
    """Return a prompt as text; of a conversation each turn with its role."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        return "\n".join(f"[{turn.get('role', '?')}] {answer_text(turn.get('content', ''))}" for turn in value)
    return json.dumps(value, default=str)


def reward_text(reward: object) -> str:
    """0.5, or each entry with its name."""
    if isinstance(reward, Mapping):
        return ", ".join(f"{name} {reward_text(value)}" for name, value in reward.items())
    return "none" if reward is None else f"{reward:.4g}" if isinstance(reward, int | float) else str(reward)


def version_text(answer: KeptSample) -> str:
    """Return the versions of the weights that sampled the completion."""
    versions = sorted({version for version, _, _ in answer.versions})
    if not versions:
        return "no version"
    return f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"


def _picked(groups: Sequence[KeptGroup], key: str | None) -> list[tuple[KeptGroup, str]]:
    """Choose the best, middle and worst of the groups that train, and the first dropped one."""
    scored = sorted(
        (group for group in groups if group.reason is None), key=lambda group: _mean(group, key), reverse=True
    )
    places = {0: "best", len(scored) // 2: "middle", len(scored) - 1: "worst"} if scored else {}
    picked = [(scored[place], why) for place, why in sorted(places.items())]
    return picked + [(group, "") for group in groups if group.reason is not None][:1]


def _mean(group: KeptGroup, key: str | None) -> float:
    scores = [score for answer in group.answers if (score := answer.score(key)) is not None and score == score]
    return sum(scores) / len(scores) if scores else 0.0


def _group(group: KeptGroup, why: str, key: str | None) -> dict[str, object]:
    def order(answer: KeptSample) -> float:
        score = answer.score(key)
        return -score if score is not None and score == score else float("inf")

    ordered = sorted(group.answers, key=order)
    half = MAX_ANSWERS // 2
    shown = ordered if len(ordered) <= MAX_ANSWERS else ordered[:half] + ordered[-half:]
    return {
        "group": group.group_index,
        "reason": group.reason,
        "fate": f"kept for training · {why} of the round" if group.reason is None else f"dropped: {group.reason}",
        "label": "" if group.label is None else _cut(answer_text(group.label), 300),
        "prompt": _cut(answer_text(group.prompt)),
        "answers": [_answer(answer, key) for answer in shown],
        "more": f"{len(shown)} of {len(ordered)} completions: the best and the worst"
        if len(shown) < len(ordered)
        else "",
    }


def _answer(answer: KeptSample, key: str | None) -> dict[str, object]:
    score = answer.score(key)
    facts = f"{len(answer.tokens)} tokens · {answer.status} · {version_text(answer)}"
    return {
        "score": score if score is not None and abs(score) < float("inf") else None,
        "reward": reward_text(answer.reward),
        "facts": facts + (" · left out of the loss" if answer.is_removed else ""),
        "text": _cut(answer.response) or "(empty)",
    }


def _cut(text: str, limit: int = MAX_CHARS) -> str:
    """Return the beginning and the end of a long text: the answer is at the end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[... {len(text) - limit:,} characters ...]\n{text[-limit // 2 :]}"


def _mark(is_right: bool) -> str:
    return "✓ " if is_right else "✗ "
