"""A custom data source: `--data-source-path examples/customization/data_source.py:AdditionSource`.

Makes addition problems on the fly, endless and never repeated: no file, no epochs. A data source has five methods;
`save` returns what `load` needs to continue after a restart, as JSON values.
"""

from __future__ import annotations

import random
from typing import Any

from vime.rollout.prompts import load_tokenizer
from vime.types import Sample


class AdditionSource:
    """Problem number i is a function of --rollout-seed and i, so the counter is the whole state."""

    def __init__(self, args: Any) -> None:
        self._size, self._seed = args.n_samples_per_prompt, args.rollout_seed
        self._tokenizer = load_tokenizer(args.hf_checkpoint)
        self._next = 0
        self._unused: list[list[Sample]] = []

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """Groups that came back first, then new ones."""
        back, self._unused = self._unused[:num_groups], self._unused[num_groups:]
        return back + [self._new_group() for _ in range(num_groups - len(back))]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self._unused.extend(groups)

    def save(self, rollout_id: int) -> dict[str, Any]:
        return {"next": self._next, "unused": [[sample.to_dict() for sample in group] for group in self._unused]}

    def load(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        self._unused = [[Sample.from_dict(record) for record in group] for group in state["unused"]]

    def __len__(self) -> int:
        """Prompts of one epoch; only --num-epoch asks."""
        return 1_000_000

    def _new_group(self) -> list[Sample]:
        number, self._next = self._next, self._next + 1
        rng = random.Random(f"{self._seed}:{number}")
        left, right = rng.randint(1, 99), rng.randint(1, 99)
        text = f"{left}+{right}="
        tokens = self._tokenizer.encode(text)
        return [
            Sample(
                group_index=number,
                index=number * self._size + offset,
                prompt=text,
                tokens=list(tokens),
                label=str(left + right),
            )
            for offset in range(self._size)
        ]
