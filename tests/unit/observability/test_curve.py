"""The curves, checked point by point."""

from __future__ import annotations

from pathlib import Path

from vime.config.run import TrackingConfig
from vime.observability.curve import reward_curve_png, smooth, terminal_curve
from vime.observability.metrics import Tracker

NAN = float("nan")


def test_the_mean_of_three_rounds_looks_back_and_is_shorter_at_the_start() -> None:
    # 3 | (3+0)/2 | (3+0+3)/3 | (0+3+6)/3
    assert smooth([3.0, 0.0, 3.0, 6.0]) == [3.0, 1.5, 2.0, 3.0]


def test_a_curve_that_rises_and_falls_turns_the_right_corners() -> None:
    # Width 12 leaves 12 - 9 = 3 columns: one for each value. Levels 0, 2, 1 of three rows.
    assert terminal_curve([0.0, 1.0, 0.5], width=12, height=3).splitlines() == [
        "      1 ┤ ╭╮",
        "    0.5 ┤ │╰",
        "      0 ┤─╯",
    ]


def test_without_unicode_the_same_curve_is_drawn_in_ascii() -> None:
    drawing = terminal_curve([0.0, 1.0, 0.5], width=12, height=3, is_ascii=True)
    assert drawing.isascii()
    assert drawing.splitlines()[0] == "      1 | .."


def test_more_rounds_than_columns_are_averaged() -> None:
    # Six values on 3 columns: means 0, 1, 2 of pairs; the single values -1 and 3 are never drawn.
    drawing = terminal_curve([-1.0, 1.0, 0.0, 2.0, 1.0, 3.0], width=12, height=3)
    assert drawing.splitlines()[0].startswith("      2")
    assert drawing.splitlines()[-1].startswith("      0")
    assert max(map(len, drawing.splitlines())) == 12


def test_a_round_without_a_number_leaves_a_gap() -> None:
    assert terminal_curve([0.0, NAN, 1.0], width=12, height=2).splitlines() == ["      1 ┤  ─", "      0 ┤─"]


def test_a_constant_curve_and_an_empty_one_are_drawn_without_failing() -> None:
    assert "──" in terminal_curve([0.5, 0.5], width=20, height=3)
    assert terminal_curve([], width=20, height=3) == "(no values to draw)"
    assert terminal_curve([NAN], width=20, height=3) == "(no values to draw)"


def test_the_png_is_an_image(tmp_path: Path) -> None:
    tracker = Tracker(TrackingConfig(), tmp_path, {})
    for step in range(5):
        tracker.log(step, {"rollout/reward_mean": step / 5, "rollout/response_len_mean": 7.0 + step})
    path = reward_curve_png(tmp_path)
    assert path == tmp_path / "reward_curve.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
