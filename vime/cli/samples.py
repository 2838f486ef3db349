"""`vime samples RUN`: the prompts of a round, the completions and their rewards."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from vime.cli.commands import Commands
from vime.observability.html_samples import answer_text, reward_text, version_text
from vime.observability.run_dir import check_run_dir, config_value, read_config
from vime.observability.samples import KeptGroup, KeptSample, kept_rounds, read_fates, read_round
from vime.types import DataError

if TYPE_CHECKING:  # loaded when tokens are shown
    from tokenizers import Tokenizer

SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """One completion with its group."""

    group: KeptGroup
    completion: KeptSample


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "samples",
        help="prompts and completions of a round, with rewards, versions, and why a group was dropped",
        description="Completions are kept for every round up to --keep-samples-mib; beyond that, rounds are removed.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--round", type=int, metavar="N", help="of this round (default: the newest that was kept)")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--worst", action="store_true", help="lowest reward first")
    choice.add_argument("--best", action="store_true", help="highest reward first")
    choice.add_argument("--group", type=int, metavar="G", help="all completions of one group, from any round")
    parser.add_argument("--dropped", action="store_true", help="only groups that were dropped")
    parser.add_argument(
        "-n", "--limit", type=int, default=SHOWN, metavar="N", help=f"completions to show (default: {SHOWN}; 0: all)"
    )
    parser.add_argument("--tokens", action="store_true", help="each response token with its log-probability")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for other programs")
    parser.set_defaults(run_command=run_samples)


def run_samples(arguments: argparse.Namespace) -> None:
    """Print the completions; DataError says what was kept instead."""
    run: Path = arguments.run
    check_run_dir(run)
    if arguments.limit < 0:
        raise DataError(f"--limit {arguments.limit}: expected at least 0, which shows all.")
    key = config_value(read_config(run), "reward", "reward_key")
    picks = _picks(run, arguments, key if isinstance(key, str) else None)
    limit = None if not arguments.limit or arguments.group is not None else arguments.limit
    console = Console(highlight=False, soft_wrap=True)
    if arguments.json:
        for pick in picks[:limit]:
            console.print(json.dumps(_record(pick)), markup=False)
        return
    pieces = _Pieces(run) if arguments.tokens else None
    for line in _lines(picks[:limit], pieces):
        console.print(line)
    if limit is not None and len(picks) > limit:
        console.print(Text(f"{limit} of {len(picks)} completions; --limit 0 shows all", style="dim"))


def _picks(run: Path, arguments: argparse.Namespace, key: str | None) -> list[Pick]:
    rounds = kept_rounds(run)
    if not rounds:
        raise DataError(
            f"{run}: no completions are kept there. Expected {run}/samples; the run generated no round, has "
            "--keep-samples-mib 0, or is of an older version. Completions of evaluations are in its directory eval."
        )
    if arguments.group is not None:
        return _of_group(run, arguments.group, rounds if arguments.round is None else [arguments.round])
    chosen = rounds[-1] if arguments.round is None else arguments.round
    if chosen not in rounds:
        near = ", ".join(str(known) for known in sorted(sorted(rounds, key=lambda known: abs(known - chosen))[:4]))
        raise DataError(f"{run}: no completions of round {chosen} are kept; the nearest rounds that are: {near}.")
    groups = [group for group in read_round(run, chosen) if group.reason is not None or not arguments.dropped]
    picks = [Pick(group=group, completion=completion) for group in groups for completion in group.answers]
    if arguments.dropped and not picks:
        raise DataError(f"{run}: no group of round {chosen} was dropped.")
    if arguments.worst or arguments.best:
        picks = [pick for pick in picks if pick.completion.score(key) is not None]
        picks.sort(key=lambda pick: _order(pick.completion.score(key)), reverse=arguments.best)
    return picks


def _order(score: float | None) -> float:
    return -math.inf if score is None or math.isnan(score) else score


def _of_group(run: Path, number: int, rounds: Iterable[int]) -> list[Pick]:
    """Return every attempt at a kept group."""
    found = [
        Pick(group=group, completion=completion)
        for round_id in rounds
        for group in read_round(run, round_id)
        if group.group_index == number
        for completion in group.answers
    ]
    if found:
        return found
    for fate in read_fates(run).values():
        reason = next((reason for reason, groups in fate.dropped.items() if number in groups), None)
        if reason is not None or number in fate.kept:
            what = "was kept for training" if reason is None else f"was dropped: {reason}"
            raise DataError(
                f"{run}: group {number} of round {fate.round_id} {what}. Its completions are not kept: "
                "--keep-samples-mib bounds them."
            )
    raise DataError(f"{run}: no finished group {number} is known. `vime samples {run}` shows some that are.")


def _lines(picks: Sequence[Pick], pieces: _Pieces | None) -> Iterator[Text]:
    shown: KeptGroup | None = None
    for pick in picks:
        group, completion = pick.group, pick.completion
        if shown is not group:
            shown = group
            yield from _heading(group)
        facts = [
            f"reward {_plain(reward_text(completion.reward))}",
            f"{len(completion.tokens)} tokens",
            completion.status,
            version_text(completion),
        ]
        facts += ["left out of the loss"] if completion.is_removed else []
        yield Text(f"  completion {completion.index}: {', '.join(facts)}", style="bold")
        if completion.prompt != group.prompt:
            yield Text(_indented(f"prompt: {_plain(answer_text(completion.prompt))}"))
        yield Text(_indented(_plain(completion.response)) or "    (empty)")
        if pieces is not None:
            yield from _token_lines(completion, pieces)
        yield Text()


def _heading(group: KeptGroup) -> Iterator[Text]:
    fate = "kept for training" if group.reason is None else f"dropped: {_plain(group.reason)}"
    style = "bold green" if group.reason is None else "bold yellow"
    yield Text(f"round {group.round_id}, group {group.group_index}, {fate}", style=style)
    yield Text(_indented(_plain(answer_text(group.prompt)), "  "))
    if group.label is not None:
        yield Text(_indented(f"label: {_plain(group.label)}", "  "))
    if group.metadata:
        yield Text(_indented(f"metadata: {json.dumps(group.metadata, default=str)}", "  "), style="dim")


def _token_lines(completion: KeptSample, pieces: _Pieces) -> Iterator[Text]:
    """Yield per token position, id, text, log-probability and version; `-` where the policy did not choose the
    token."""
    version_at = {place: span[0] for span in completion.versions for place in range(span[1], span[2])}
    for place, token in enumerate(completion.tokens):
        is_trained = bool(completion.loss_mask[place]) if place < len(completion.loss_mask) else True
        value = (
            f"{completion.log_probs[place]:9.4f}" if place < len(completion.log_probs) and is_trained else "        -"
        )
        yield Text(f"    {place:>5} {token:>7} {value}  v{version_at.get(place, '?')}  {pieces.text(token)}")


class _Pieces:
    """Turns tokens into text by the tokenizer of the run's model, where it is still there."""

    def __init__(self, run: Path) -> None:
        self._tokenizer: Tokenizer | None = None
        file = Path(str(config_value(read_config(run), "model", "hf_checkpoint"))) / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))

    def text(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        decoded: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return repr(decoded)


def _record(pick: Pick) -> dict[str, object]:
    group, completion = pick.group, pick.completion
    return {
        "round": group.round_id,
        "group": group.group_index,
        "dropped": group.reason,
        "label": group.label,
        "metadata": group.metadata,
        **dataclasses.asdict(completion),
    }


def _plain(value: object) -> str:
    """Return the text without control characters except line ends."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return "".join(char if char in "\n\t" or _is_shown(char) else "?" for char in text)


def _is_shown(char: str) -> bool:
    """Whether it can be printed. Python calls only the ASCII space printable; Zs has the spaces of all scripts."""
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _indented(text: str, margin: str = "    ") -> str:
    return "\n".join(margin + line for line in text.splitlines())
