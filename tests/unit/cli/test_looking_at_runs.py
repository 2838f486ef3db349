"""`vime samples`, `vime ls`, `vime compare` on run directories that no run made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.kept import round_groups
from tests.helpers.long_run import write_run
from vime.cli.main import main
from vime.config.rollout import LEASED_PROMPTS
from vime.observability.events import EventKind, EventLog
from vime.observability.run_dir import RunDir
from vime.observability.samples import DroppedGroup, SampleStore
from vime.types import Sample, SampleStatus, VersionSpan


def answered(group: int, index: int, reward: float) -> Sample:
    sample = Sample(group_index=group, index=index, prompt=[{"role": "user", "content": f"ask {group}"}], tokens=[9])
    sample.append_response_tokens([1, 2], [-0.25, -1.5], versions=[VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)])
    sample.append_response_tokens([7], [0.0], trainable=False, versions=[VersionSpan(4, 0, 1)])
    sample.response, sample.status, sample.reward = f"reply {index}", SampleStatus.TRUNCATED, reward
    return sample


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Round 0 of two groups, round 7 of two groups and one that was dropped."""
    with RunDir.create(str(tmp_path / "run"), "{}") as claimed:
        store = SampleStore(claimed.path, 1 << 20)
        store.write(0, round_groups([[answered(0, 0, 0.5)], [answered(1, 1, 0.0)]]), [])
        lost = DroppedGroup(group_index=16, reason="zero_std", samples=[answered(16, 16, 1.0)])
        bare = DroppedGroup(group_index=17, reason="filter")
        store.write(
            7, round_groups([[answered(14, 14, 0.25), answered(14, 15, 0.75)], [answered(15, 18, -1.0)]]), [lost, bare]
        )
        return claimed.path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def answers(text: str) -> list[str]:
    return re.findall(r"reply \d+", text)


def test_the_newest_round_is_shown_with_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "samples", str(run), "--limit", "0")
    assert answers(text) == ["reply 14", "reply 15", "reply 18", "reply 16"]
    assert "round 7, group 14, kept for training" in text
    assert "round 7, group 16, dropped: zero_std" in text
    assert "[user] ask 14" in text
    assert "completion 14: reward 0.25, 3 tokens, truncated, versions 3 to 4" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--round", "0"], ["reply 0", "reply 1"]),
        (["--worst"], ["reply 18", "reply 14", "reply 15", "reply 16"]),
        (["--best", "-n", "2"], ["reply 16", "reply 15"]),
        (["--group", "14"], ["reply 14", "reply 15"]),
        (["--group", "0"], ["reply 0"]),  # from a round that is not the newest
        (["--dropped"], ["reply 16"]),
    ],
)
def test_answers_are_chosen(
    run: Path, words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert answers(said(capsys, "samples", str(run), *words)) == expected


def test_tokens_have_log_probabilities_where_the_policy_chose_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "samples", str(run), "--group", "0", "--tokens")
    rows = [line.split() for line in text.splitlines() if re.match(r"\s+\d+\s+\d+\s+[-\d]", line)]
    assert rows == [["0", "1", "-0.2500", "v3"], ["1", "2", "-1.5000", "v4"], ["2", "7", "-", "v4"]]


def test_json_is_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in said(capsys, "samples", str(run), "--json", "-n", "0").splitlines()]
    assert [record["reward"] for record in records] == [0.25, 0.75, -1.0, 1.0]
    assert records[3]["dropped"] == "zero_std"
    assert records[0]["log_probs"][:2] == [-0.25, -1.5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--round", "5"], "no completions of round 5 are kept; the nearest rounds that are: 0, 7"),
        (["--group", "17"], "group 17 of round 7 was dropped: filter. Its completions are not kept"),
        (["--group", "99"], "no finished group 99 is known"),
        (["--limit", "-1"], "--limit -1: expected at least 0"),
        (["--round", "0", "--dropped"], "no group of round 0 was dropped"),
    ],
)
def test_what_is_not_there_is_said(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(run), *words]) == 3
    assert message in capsys.readouterr().err


def test_a_run_without_answers_and_a_directory_without_run_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(str(tmp_path / "run"), "{}") as claimed:
        pass
    assert main(["samples", str(claimed.path)]) == 3
    assert "no completions are kept there" in capsys.readouterr().err
    assert main(["samples", str(tmp_path)]) == 2
    assert "expected the run directory of a Vime run" in capsys.readouterr().err


def test_control_characters_of_a_model_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(str(tmp_path / "run"), "{}") as claimed:
        nasty = answered(0, 0, 1.0)
        nasty.response = "\x1b[2Jgone\x07 [bold]kept"
        SampleStore(claimed.path, 1 << 20).write(0, round_groups([[nasty]]), [])
    assert "?[2Jgone? [bold]kept" in said(capsys, "samples", str(claimed.path))


def test_nor_do_those_of_a_reward_s_entries_and_of_a_filter_s_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(str(tmp_path / "run"), "{}") as claimed:
        nasty = answered(0, 0, 1.0)
        nasty.reward = {"\x1b[2J\ud800": 1.0}
        lost = DroppedGroup(group_index=0, reason="\x1b]0;title\x07", samples=[nasty])
        SampleStore(claimed.path, 1 << 20).write(0, [], [lost])
    text = said(capsys, "samples", str(claimed.path))
    assert "reward ?[2J? 1" in text
    assert "dropped: ?]0;title?" in text


def test_text_of_any_script_is_shown_also_where_the_terminal_knows_few(tmp_path: Path) -> None:
    text = "\u6f22\u5b57\u3000\u00e9"  # with an ideographic space, which `isprintable` does not count
    with RunDir.create(str(tmp_path / "run"), "{}") as claimed:
        sample = answered(0, 0, 1.0)
        sample.response = text
        SampleStore(claimed.path, 1 << 20).write(0, round_groups([[sample]]), [])
    shown = {}
    for encoding in ("utf-8", "ascii"):
        done = subprocess.run(
            [sys.executable, "-m", "vime", "samples", str(claimed.path)],
            env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown[encoding] = done.stdout.decode(encoding)
    assert text in shown["utf-8"]
    assert "    ????" in shown["ascii"]


def test_the_report_of_a_run_that_may_only_be_read_is_shown_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else's run; directories stand in the way, because these tests may be root's."""
    run = write_run(tmp_path / "run", num_rounds=3, groups=1)
    for name in ("report.html", "reward_curve.png", "trace.json"):
        (run / name).mkdir()
    text = said(capsys, "report", str(run))
    assert re.search(r"Curve: +not written: .*reward_curve.png", text)
    assert re.search(r"Trace: +not written: .*trace.json", text)
    [record] = [record for record in caplog.records if "report.html could not be written" in record.message]
    assert not record.exc_info  # the message says it
    assert list(run.glob(".report*")) == []
    assert "3 rounds" in text


def test_ls_names_state_rounds_and_reward_the_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", num_rounds=3, groups=1)
    write_run(tmp_path / "b", num_rounds=5, groups=1, error="interrupted during generation")
    write_run(tmp_path / "sweep" / "c", num_rounds=2, groups=1, error="engine-0 died")
    (tmp_path / "no-run").mkdir()
    job = {"data": {"data_source_path": LEASED_PROMPTS}, "rollout": {"num_rollout": 1}}
    with RunDir.create(str(tmp_path / "job"), json.dumps(job)) as of_produce:
        EventLog(of_produce.path, "driver").emit(EventKind.RUN_FINISHED)
    with RunDir.create(str(tmp_path / "alive"), "{}") as alive:
        EventLog(alive.path, "driver").emit(EventKind.RUN_STARTED)
        text = said(capsys, "ls", str(tmp_path))
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert re.search(r"a +finished +3/3 +\d\.\d{3}", rows["a"])
    assert re.search(r"b +interrupted +5/5", rows["b"])
    assert re.search(r"sweep/c +failed +2/2", rows["sweep/c"])
    assert re.search(r"alive +running +0", rows["alive"])
    assert re.search(r"job +finished +rollout job", rows["job"])
    assert "no-run" not in text
    assert re.search(r"alive +ended without a word", said(capsys, "ls", str(tmp_path)))


def test_ls_shows_a_damaged_run_and_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good", num_rounds=2, groups=1)
    bad = write_run(tmp_path / "bad", num_rounds=2, groups=1)
    (bad / "config.json").write_bytes(b"\xff{")
    (bad / "metrics.jsonl").unlink()
    text = said(capsys, "ls", str(tmp_path))
    assert "good" in text
    assert "bad" in text


@pytest.mark.parametrize(("name", "message"), [("missing", "no such directory"), (".", "no run in it")])
def test_ls_says_when_there_is_nothing(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_compare_shows_what_differs_and_overlays_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_run(tmp_path / "x" / "run", num_rounds=4, groups=1)
    second = write_run(tmp_path / "y" / "run", num_rounds=6, groups=1)
    page = tmp_path / "out.html"
    text = said(capsys, "compare", str(first), str(second), "--output", str(page), "--metric", "perf/other_1$")
    assert re.search(r"x/run +y/run", text)
    assert re.search(r"rounds +4 +6", text)
    assert re.search(r"--num-rollout +4 +6", text)
    assert "--lr" not in text
    from tests.unit.observability.test_html_report import read_page

    record = read_page(page)
    charts = {
        chart["title"]: [(line["key"], line["name"]) for line in chart["series"]]
        for section in record["sections"] for block in section["blocks"] for chart in block.get("charts", [])
    }  # fmt: skip
    assert charts["Loss"] == [("0|train/loss", "x/run"), ("1|train/loss", "y/run")]
    assert "perf/other_1" in charts
    assert "perf/other_10" not in charts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "got 1 run, expected two or more"),
        (["run", "run"], "is given twice"),
        (["run", "nowhere"], "is no directory"),
        (["run", "other", "--metric", "("], "--metric (: no regular expression"),
        (["run", "other", "--output", "nowhere/x.html"], "--output nowhere/x.html: cannot be written"),
    ],
)
def test_compare_refuses_what_cannot_be_compared(
    tmp_path: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "run", num_rounds=2, groups=1)
    write_run(tmp_path / "other", num_rounds=2, groups=1)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err
