"""docs/metrics.md names what the code says and nothing else: metrics and spans."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.metrics_page import FAMILIES, as_pattern, documented_metrics, documented_spans, undocumented
from tests.helpers.shape_check import clone_files
from vime.batching.flops import RoundWork
from vime.training.loss_statistics import STATISTICS, to_metrics
from vime.training.value_loss import VALUE_STATISTICS, value_metrics

ROOT = Path(__file__).resolve().parents[3]
METRIC = re.compile(rf"({'|'.join(FAMILIES)})/[\w<>/]+|<>/\w[\w<>/@]*")


def templates() -> Iterator[tuple[str, str]]:
    """(where, text) of every string of the code that reads like a metric; what is filled in, or added behind a `_`, is
    `<>`."""
    for path in clone_files(ROOT / "vime", "*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "<>" for part in node.values)
            else:
                continue
            if METRIC.fullmatch(text):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text + "<>" * text.endswith("_")


def in_loops() -> set[str]:
    """Names that are put together in loops, by running them."""
    one_a_bucket = dict.fromkeys(STATISTICS, 0.5) | {name: 1.0 for name in STATISTICS if name.startswith("count/")}
    named = to_metrics([one_a_bucket[name] for name in STATISTICS], with_mismatch=True)
    named |= value_metrics([0.5] * len(VALUE_STATISTICS))
    work = RoundWork(num_tokens=1, model_flops=1, executed_flops=1)
    return {*named, *work.rates(1.0, num_ranks=1, device_name="NVIDIA H100", bf16=True)}


def test_every_metric_of_the_code_is_on_the_page() -> None:
    fixed = {text: where for where, text in templates() if "<>" not in text}
    assert {fixed[name]: name for name in undocumented(fixed)} == {}
    assert undocumented(in_loops()) == []


def test_every_metric_of_the_page_is_in_the_code() -> None:
    said = in_loops()
    telling = {text for _, text in templates() if not text.endswith("/<>")}  # those are run in loops
    patterns = [re.compile(re.escape(text).replace("<>", r"[\w<>/.-]+")) for text in telling]
    missing = [
        name
        for name in documented_metrics()
        if not any(pattern.fullmatch(name) for pattern in patterns)
        and not any(re.fullmatch(as_pattern(name), other) for other in said)
    ]
    assert missing == []


def test_the_spans_of_the_page_are_those_of_the_code() -> None:
    found: set[str] = set()
    for path in clone_files(ROOT / "vime", "*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            called, text = ast.unparse(node.func), node.args[0].value
            if called.split(".")[-1] == "timed":
                found.add(text.removeprefix("perf/").removesuffix("_time"))
            elif called in ("span", "note_span"):
                found.add(text)
    assert sorted(documented_spans()) == sorted(found)


def test_a_name_that_is_not_on_the_page_is_seen() -> None:
    assert undocumented(["rollout/reward_mean", "rollout/rewad_mean", "eval/gsm8k.v1/time", "rollout/dropped_"]) == [
        "rollout/dropped_", "rollout/rewad_mean",
    ]  # fmt: skip
