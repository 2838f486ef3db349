"""Valid bodies of calls with a few changes, for tests that send anything."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest


def changed(body: object, *, seed: int, values: Sequence[object], wait: object = 0) -> Any:
    """Return a copy of which one place for each value, anywhere in it, is replaced, left out, doubled, cut or another
    number; `wait` stands for every `wait_s`. From a seed, because most numbers that hypothesis draws are small: nearly
    all changes would be the same."""
    body, chance = copy.deepcopy(body), random.Random(seed)
    for value in values:
        node: Any = body
        key: Any = None
        while node and isinstance(node, (dict, list)):
            above, key = node, chance.choice([*node] if isinstance(node, dict) else range(len(node)))
            node = node[key]
            if chance.random() < 0.15:
                break
        if key is None:
            continue
        if key == "wait_s":
            above[key] = wait
        elif chance.random() < 0.1:
            del above[key]
        elif chance.random() < 0.2:
            above[key] = value
        elif isinstance(above, list) and chance.random() < 0.3:
            above.insert(key, node)
        elif isinstance(node, (str, bytes, list)):
            above[key] = node[:-1]
        elif isinstance(node, (int, float)) and abs(node) < 2**64:
            above[key] = node + chance.choice([-node, -1, 1, 64, 0.5, 2**31, -float(2**127)])
    return body


def say(config: pytest.Config, text: str) -> None:
    """Write a line of the session's own output, also while output is captured: for the log of the night."""
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.get_terminal_writer().line(f"\n{text}")
