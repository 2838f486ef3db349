"""report.html: what is on it, how large it gets, and that nothing of a run directory can keep it from being written."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.long_run import write_run
from vime.cli.main import main
from vime.observability.html_report import REPORT_FILE, build_report, write_report
from vime.observability.page import MAX_BYTES, MAX_POINTS, Page, thinned_points
from vime.observability.samples import read_fates
from vime.types import HandoffError


def read_page(path: Path) -> dict[str, Any]:
    match = re.search(r'id="data">([^<]*)<', path.read_text())
    assert match is not None
    record: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return record


def blocks(page: dict[str, Any], title: str) -> list[dict[str, Any]]:
    return next((section["blocks"] for section in page["sections"] if section["title"] == title), [])


def charts(page: dict[str, Any]) -> dict[str, list[str]]:
    """Title -> the metrics of its lines."""
    found = [chart for section in page["sections"] for block in section["blocks"] for chart in block.get("charts", [])]
    return {chart["title"]: [line["key"] for line in chart["series"]] for chart in found}


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "short", num_rounds=12, groups=3, error="engine-0 died")


def test_every_curve_of_the_list_is_there(short_run: Path) -> None:
    written = write_report(short_run)
    assert written == short_run / REPORT_FILE
    drawn = charts(read_page(written))
    assert drawn["Reward by entry"] == ["rollout/reward/right/mean", "rollout/reward/short/mean"]
    assert drawn["Evaluation: pass@k"] == ["eval/held/pass@1", "eval/held/pass@2", "eval/held/pass@4"]
    assert drawn["Answer length, tokens"] == ["rollout/response_len_mean", "rollout/response_len_p95"]
    assert drawn["KL, nats"] == ["train/kl_loss", "train/ppo_kl"]
    assert drawn["Staleness, versions"] == [f"transferqueue/sample_staleness/{kind}" for kind in ("mean", "max")]
    single = {
        "Reward": "rollout/reward_mean", "Loss": "train/loss", "Entropy, nats": "train/entropy",
        "Gradient norm, before the clip": "train/grad_norm", "Effective sample size": "train/ess",
        "Share of tokens that were clipped": "train/pg_clipfrac", "Evaluation: reward": "eval/held/reward_mean",
    }  # fmt: skip
    assert {title: drawn[title] for title in single} == {title: [key] for title, key in single.items()}
    assert sorted(drawn["Seconds of each round, by phase"]) == ["time|train", "time|wait"]
    assert "Critic" not in drawn  # this run has none


def test_what_went_wrong_stands_first_and_equal_warnings_once(short_run: Path) -> None:
    page = read_page(write_report(short_run) or Path())
    assert page["badge"] == ["failed", "bad"]
    failure, logged = blocks(page, "Warnings")
    assert failure["text"] == "failed: engine-0 died"
    [[times, process, _, text]] = logged["rows"]
    assert (times, process, text[:20]) == (99, "trainer-0", "warning: row 0 is lo")


def test_what_libraries_say_about_their_own_future_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_rounds=2, groups=1)
    packages = "/env/lib/python3.11/site-packages"
    said = [
        f"{packages}/megatron/core/layers.py:713: DeprecationWarning: Warning: tp_group is None",
        f"{packages}/megatron/core/transformer_config.py:17: UserWarning: full scope is deprecated. Use another",
        f"{packages}/torch/x.py:3: FutureWarning: a name goes",
        f"{packages}/torch/x.py:4: UserWarning: the answer may be wrong",
        f"{packages}/vime/algo/x.py:5: DeprecationWarning: ours is shown also where it is installed",
        "/home/somebody/reward.py:9: DeprecationWarning: a plug-in's too",
    ]
    lines = [f"2026-11-23 16:08:0{second},467 WARNING py.warnings: {text}" for second, text in enumerate(said)]
    (run / "logs" / "trainer-0.log").write_text("\n".join(lines) + "\n")
    [logged] = blocks(read_page(write_report(run) or Path()), "Warnings")
    shown = {text: (times, process, first) for times, process, first, text in logged["rows"]}
    assert [text for text in shown if "deprecat" in text.lower() and "libraries" not in text] == [
        f"warning: {said[4]}",
        f"warning: {said[5]}",
    ]
    assert f"warning: {said[3]}" in shown
    [folded] = [text for text in shown if "libraries" in text]
    assert shown[folded] == (3, "all", "2026-11-23 16:08:00")
    assert folded.endswith("(megatron 2, torch 1); RUN_DIR/logs has them.")
    assert len(shown) == 4


def test_every_group_is_accounted_for(short_run: Path) -> None:
    """Round r has groups 4r to 4r + 2 and drops 4r + 3."""
    page = read_page(write_report(short_run) or Path())
    _, totals, lookup, lost = blocks(page, "Groups")
    assert totals["rows"] == [["trained", 36], ["dropped: zero_std", 12]]
    assert lookup["fates"]["kept for training"]["5"] == [20, 21, 22]
    assert lookup["fates"]["dropped: zero_std"]["5"] == [23]
    assert [11, 47, "zero_std"] in lost["rows"]
    assert len(lost["rows"]) == 12


def test_how_much_was_dropped_is_a_number_and_a_curve_by_reason(short_run: Path) -> None:
    page = read_page(write_report(short_run) or Path())
    fates = read_fates(short_run).values()
    dropped = sum(len(groups) for fate in fates for groups in fate.dropped.values())
    judged = dropped + sum(len(fate.kept) for fate in fates)
    assert 0 < dropped < judged
    [tiles] = page["sections"][0]["blocks"]
    assert [f"groups dropped of {judged}", f"{dropped} ({dropped / judged:.0%})"] in tiles["tiles"]
    reasons = sorted({reason for fate in fates for reason in fate.dropped})
    shares = charts(page)["Share of finished groups that were dropped, by reason"]
    assert shares == [f"dropped share|{reason}" for reason in reasons]
    drawn = [page["series"][key][1] for key in shares]
    for fate, *values in zip(fates, *drawn, strict=True):
        here = sum(map(len, fate.dropped.values()))
        assert sum(values) == pytest.approx(here / (here + len(fate.kept)), abs=1e-4)


def test_what_was_set_and_not_measured_is_never_smoothed(short_run: Path) -> None:
    page = read_page(write_report(short_run) or Path())
    drawn = [chart for section in page["sections"] for block in section["blocks"] for chart in block.get("charts", [])]
    assert [chart["title"] for chart in drawn if chart["kind"] == "exact"] == ["Learning rate"]


def test_what_only_the_ledger_knows_is_added(short_run: Path) -> None:
    def ledger(run: Path) -> dict[str, dict[int | None, list[int]]]:
        return {"trained": {5: [20, 21, 22]}, "dropped: stale": {None: [99]}, "ready": {None: [100, 101]}}

    write_report(short_run, ledger)
    _, totals, lookup, _ = blocks(read_page(short_run / REPORT_FILE), "Groups")
    assert totals["rows"][2:] == [["ledger, at the end: dropped: stale", 1], ["ledger, at the end: ready", 2]]
    assert lookup["fates"]["dropped: stale, says the ledger"] == {"-": [99]}

    def broken(run: Path) -> dict[str, dict[int | None, list[int]]]:
        raise HandoffError("no ledger can be read")

    assert write_report(short_run, broken) is not None


def test_answers_configuration_and_machine_are_there(short_run: Path) -> None:
    page = read_page(write_report(short_run) or Path())
    [shown] = blocks(page, "Answers")
    group = shown["rounds"][-1]["groups"][0]
    assert group["fate"] == "kept for training · best of the round"
    assert [answer["reward"] for answer in group["answers"]] == ["right 1, short 0.5"] * 2 + ["right 0, short 0.5"] * 2
    assert [answer["score"] for answer in group["answers"]] == [1, 1, 0, 0]
    said, everything = blocks(page, "Configuration")
    assert ["reward_key", "right"] in said["rows"]
    assert ["rollout_temperature", "1.0"] in everything["rows"]
    assert ["rollout_temperature", "1.0"] not in said["rows"]
    [machine] = blocks(page, "Components")
    assert {"cores", "memory", "python", "command"} <= {name for name, _ in machine["rows"]}


def test_a_run_of_5000_rounds_stays_under_10_mb(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", num_rounds=5000, groups=32)
    path = write_report(run)
    assert path is not None
    assert path.stat().st_size < MAX_BYTES
    page = read_page(path)
    assert max(map(len, page["xs"])) <= MAX_POINTS
    _, totals, _, lost = blocks(page, "Groups")
    assert totals["rows"] == [["trained", 160_000], ["dropped: zero_std", 5000]]
    assert len(lost["rows"]) == 5000


def test_thinned_points_are_means_of_equal_stretches_without_what_is_not_finite() -> None:
    points = {step: float(step) for step in range(2 * MAX_POINTS)} | {1: math.nan, 4: math.inf, 5: math.nan}
    xs, ys = thinned_points(points)
    assert (xs[:4], ys[:4]) == ([1, 3, 5, 7], [0.0, 2.5, None, 6.5])
    assert len(xs) == MAX_POINTS


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples/groups.jsonl", "config.json", "machine.json", "logs/x.log"])
def test_a_damaged_file_costs_its_part_of_the_page(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", num_rounds=3, groups=2)
    (run / name).write_bytes(b'\xff\x00{"round": [\n{"step": "x"}\n')
    for path in (run / "samples").glob("round_*"):
        path.write_bytes(b"no gzip")
    assert write_report(run) is not None


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "events").mkdir()
    page = read_page(write_report(tmp_path) or Path())
    assert page["badge"] == ["ended without a word", "bad"]


def test_a_page_that_cannot_be_written_does_not_raise(short_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert write_report(short_run / "nowhere") is None
    assert "report.html could not be written" in caplog.text


def test_vime_report_writes_it(short_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (short_run / REPORT_FILE).unlink(missing_ok=True)
    assert main(["report", str(short_run)]) == 0
    assert f"Report:           {short_run / REPORT_FILE}" in capsys.readouterr().out


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, str):
        yield value


def test_no_text_of_a_run_stands_in_the_page_as_html(short_run: Path) -> None:
    path = write_report(short_run)
    assert path is not None
    text = path.read_text()
    assert "example.invalid" not in text  # it is inside, compressed
    assert any("example.invalid" in part for part in _texts(read_page(path)))
    Page(title="<b>&", subtitle="", badge=("", "")).write(path)
    assert "<title>&lt;b&gt;&amp;</title>" in path.read_text()


def test_the_page_of_a_live_run_says_so(tmp_path: Path) -> None:
    from vime.observability.run_dir import RunDir

    with RunDir.create(str(tmp_path / "run"), "{}") as run:
        assert build_report(run.path).badge == ("running", "")
    assert build_report(run.path).badge == ("ended without a word", "bad")
