"""Write the quick start's data: no download, no package but the standard library, a second.

The task is "k-th largest letter, think or guess". The prompt `4:xlzwxuqa=` asks for the 4th largest letter. The policy
may guess (`w`) or write a scratchpad first (`<think>alquwxxz</think>w`: sort, then answer). The reward looks only at
the text after the last `</think>`; length and format are not rewarded. The model in `model/`, which `warm_start.py`
made, can think but mostly guesses, so reinforcement learning has something to find out: thinking pays. Most of the gain
is strategy selection, not skill learned from nothing.

    python examples/quickstart/prepare.py --data-dir data/quickstart-seed0

Running it again does nothing while the data match the arguments (see `data.json`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
RECIPE = 1  # raise when anything below changes what the seed produces


@dataclass(frozen=True)
class Problem:
    """One prompt with its answer and the sorted letters that a thinking completion writes."""

    prompt: str
    answer: str
    scratchpad: str
    k: int


def sample_problem(rng: random.Random) -> Problem:
    """4 + Exp(mean 5) letters, at most 24, repeats allowed; k uniform in 1..4."""
    size = min(24, 4 + int(rng.expovariate(1 / 5.0)))
    letters = [rng.choice(LETTERS) for _ in range(size)]
    k = rng.choice((1, 2, 3, 4))
    ordered = sorted(letters)
    return Problem(f"{k}:{''.join(letters)}=", ordered[-k], "".join(ordered), k)


def write_data(directory: Path, *, num_train: int, num_eval: int, seed: int) -> None:
    """train.jsonl and eval.jsonl; no evaluation prompt is in the training file."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1000 + seed)
    problems: dict[str, Problem] = {}
    while len(problems) < num_train + num_eval:
        problem = sample_problem(rng)
        problems.setdefault(problem.prompt, problem)
    ordered = list(problems.values())
    for name, part in (("eval.jsonl", ordered[:num_eval]), ("train.jsonl", ordered[num_eval:])):
        lines = [
            json.dumps({"input": p.prompt, "label": p.answer, "metadata": {"k": p.k, "letters": len(p.scratchpad)}})
            for p in part
        ]
        write_atomically(directory / name, "\n".join(lines) + "\n")


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def stamp_matches(path: Path, wanted: dict[str, object], outputs: list[str]) -> bool:
    """Whether the stamp records these arguments and every output is there."""
    if not path.is_file() or not all((path.parent / name).is_file() for name in outputs):
        return False
    try:
        made = json.loads(path.read_text())
    except ValueError:
        return False
    return all(made.get(key) == value for key, value in wanted.items())


def make_data(directory: Path, *, num_train: int, num_eval: int, seed: int) -> None:
    wanted = {"recipe": RECIPE, "seed": seed, "train": num_train, "eval": num_eval}
    stamp = directory / "data.json"
    if stamp_matches(stamp, wanted, ["train.jsonl", "eval.jsonl"]):
        say(f"data: {directory} is up to date")
        return
    stamp.unlink(missing_ok=True)
    write_data(directory, num_train=num_train, num_eval=num_eval, seed=seed)
    write_atomically(stamp, json.dumps(wanted))
    say(f"data: {num_train} training and {num_eval} evaluation problems in {directory}")


def say(text: str) -> None:
    sys.stdout.write(f"prepare: {text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data/quickstart-seed0"))
    parser.add_argument("--seed", type=int, default=0, help="of the data (default: 0)")
    parser.add_argument("--num-train", type=int, default=4096, help="training problems (default: 4096)")
    parser.add_argument("--num-eval", type=int, default=64, help="evaluation problems (default: 64)")
    options = parser.parse_args()
    make_data(options.data_dir, num_train=options.num_train, num_eval=options.num_eval, seed=options.seed)


if __name__ == "__main__":
    main()
