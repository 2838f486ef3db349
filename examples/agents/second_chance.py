"""An environment of several turns with a calculator: `--environment examples/agents/second_chance.py:SecondChance`.

The model of the quick start asks for the calculator by beginning with `<think>`: it puts the letters of the problem in
order. A wrong answer is answered by the problem again, once, and a right answer is then worth half. docs/agents.md
walks through this file.
"""

from __future__ import annotations

from typing import Any

CALL, END = "<think>", "</think>"
REWARDS = (1.0, 0.5)
"""Of a right answer, by the wrong ones before it."""


def calculate(problem: str) -> str:
    """The calculator: `4:xlzwxuqa=` -> `alquwxxz`."""
    return "".join(sorted(problem.partition(":")[2].removesuffix("=")))


class SecondChance:
    request = {"stop": [CALL]}  # noqa: RUF012 - never changed

    def reset(self, task: Any) -> list[dict[str, str]]:
        self.problem, self.answer = task.prompt, task.label
        self.num_wrong, self.is_right = 0, False
        return [{"role": "user", "content": self.problem}]

    def step(self, message: dict[str, Any]) -> list[dict[str, str]] | None:
        if message["content"] == CALL:
            return [{"role": "tool", "tool_call_id": "sort", "content": calculate(self.problem) + END}]
        self.is_right = message["content"] == self.answer
        if self.is_right:
            return None
        self.num_wrong += 1
        return [{"role": "user", "content": self.problem}] if self.num_wrong < len(REWARDS) else None

    def reward(self) -> float:
        return REWARDS[self.num_wrong] if self.is_right else 0.0
