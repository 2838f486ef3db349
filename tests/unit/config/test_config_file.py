"""--config: flags in a TOML file, and the config.json of a run given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime.config.checks import resolve
from vime.config.parse import SECTIONS, Config, dump, parse, parse_readable
from vime.types import ConfigError

TOML = """
num-rollout = 7
bf16 = true
[rollout]
rollout_batch_size = 4
rollout-stop = ["</answer>", "END"]
rollout_top_k = -1
save_interval = 3
[vllm]
vllm-max-num-seqs = 64
"""


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_toml_file_says_what_the_same_flags_say(tmp_path: Path) -> None:
    flags = ["--num-rollout", "7", "--bf16", "--rollout-batch-size", "4", "--rollout-stop", "</answer>", "END"]
    flags += ["--save-interval", "3", "--vllm-max-num-seqs=64"]
    assert parse(["--config", write(tmp_path / "run.toml", TOML)]) == parse(flags)


def test_flags_win_over_the_file_wherever_they_stand(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", TOML)
    for argv in (
        ["--num-rollout", "9", "--no-bf16", "--config", file],
        [f"--config={file}", "--num-rollout=9", "--no-bf16"],
    ):
        config = parse(argv)
        assert (config.rollout.num_rollout, config.parallel.bf16, config.rollout.rollout_batch_size) == (9, False, 4)


def test_of_two_files_the_later_one_wins(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.toml", "lr = 1e-3\nnum_rollout = 1"), write(tmp_path / "b.toml", "lr = 2e-3")
    config = parse(["--config", first, "--config", second])
    assert (config.optimizer.lr, config.rollout.num_rollout) == (2e-3, 1)


COMMAND_LINES = (
    ["--num-rollout", "3"],
    ["--num-rollout", "3", "--rollout-batch-size", "4", "--global-batch-size", "16", "--no-save-optim"],
    ["--num-epoch", "1", "--max-staleness", "2", "--enable-vime-transfer-queue", "--transferqueue-mode", "streaming"],
    ["--num-rollout", "3", "--eval-prompt-data", "a", "x.jsonl", "b", "y.jsonl@[0:5]", "--rollout-stop", "\n", "x y"],
    ["--num-rollout", "3", "--lr", "3e-7", "--no-transferqueue-durable", "--vllm-eager", "--vllm-max-num-seqs", "8"],
    ["--num-rollout", "3", "--advantage-estimator", "ppo", "--router-log-level", "debug", "--bf16", "--seed", "0"],
)  # fmt: skip


@pytest.mark.parametrize("flags", COMMAND_LINES)
def test_the_configuration_of_a_run_given_back_is_equal(tmp_path: Path, flags: list[str]) -> None:
    first = resolve(parse(["--hf-checkpoint", "model", *flags]))
    (tmp_path / "config.json").write_text(dump(first))
    for given in (tmp_path / "config.json", tmp_path):
        assert resolve(parse(["--config", str(given)])) == first


def test_what_was_derived_is_no_flag_that_was_given(tmp_path: Path) -> None:
    """`check_given` refuses flags that nothing reads: a value that the run filled in itself must not look like one."""
    given = parse(["--hf-checkpoint", "model", "--num-rollout", "3"])
    (tmp_path / "config.json").write_text(dump(resolve(given)))
    again = parse(["--config", str(tmp_path)])
    differing = [
        name for name in SECTIONS
        if getattr(again, name) != getattr(given, name) and name != "model"  # its path became absolute
    ]  # fmt: skip
    assert differing == []


def test_an_edit_of_the_configuration_counts_also_where_the_value_was_derived(tmp_path: Path) -> None:
    record = json.loads(dump(resolve(parse(["--num-rollout", "3", "--rollout-batch-size", "4"]))))
    assert record["rollout"]["over_sampling_batch_size"] == 4  # derived: as many as --rollout-batch-size
    record["rollout"]["over_sampling_batch_size"] = 8
    record["optimizer"]["lr"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(record))
    config = resolve(parse(["--config", str(tmp_path)]))
    assert (config.rollout.over_sampling_batch_size, config.optimizer.lr) == (8, 0.5)


def test_derived_values_follow_what_flags_change(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(dump(resolve(parse(["--num-rollout", "3", "--rollout-batch-size", "4"]))))
    config = resolve(parse(["--config", str(tmp_path), "--rollout-batch-size", "6"]))
    assert config.rollout.over_sampling_batch_size == 6


def test_derived_values_survive_json() -> None:
    config = resolve(parse(["--num-rollout", "3", "--rollout-stop", "a"]))
    assert Config.from_dict(json.loads(dump(config))) == config


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "lr = ", "a.toml: is not TOML"),
        ("a.toml", "lr = [1, [2]]", "Expected a list of texts or numbers"),
        ("a.toml", "lr = 1e-3\n[x]\nlr = 2e-3", "'lr' is there twice"),
        ("a.toml", "rollout_batch_size = 'many'", r"a\.toml: --rollout-batch-size: invalid int"),
        ("a.toml", "rollout_batchsize = 4", r"a\.toml: unknown flag --rollout-batchsize.*--rollout-batch-size"),
        ("a.toml", "lr = 2026-11-23", "lr is date"),
        ("a.toml", "[a.b]\nlr = 1", "lies in a table"),
        ("a.toml", "config = 'a.toml'", "names a file itself"),
        ("a.json", "{", "a.json: is not JSON"),
        ("a.json", '{"model_type": "qwen3"}', "is not the configuration of a run"),
        ("a.json", "[1]", "is not the configuration of a run"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(["--config", write(tmp_path / name, text)])


def test_what_is_wrong_in_files_and_on_the_command_line_is_said_at_once_each_with_its_place(tmp_path: Path) -> None:
    first = write(tmp_path / "a.toml", "lr = 'much'\nsave_interval = 0")
    second = write(tmp_path / "b.toml", "rollout_batchsize = 4")
    with pytest.raises(ConfigError) as refusal:
        parse(["--config", first, "--config", second, "--seed", "x", "--nosuch", "1"])
    said = str(refusal.value).splitlines()
    assert said[0] == "5 problems"
    for begin in (
        f"--config {first}: --lr: invalid float",
        f"--config {first}: --save-interval: got 0",
        f"--config {second}: unknown flag --rollout-batchsize",
        "--seed: invalid int",
        "unknown flag --nosuch",
    ):
        assert [line.split(". ", 1)[1].startswith(begin) for line in said[1:]].count(True) == 1
    with pytest.raises(ConfigError) as refusal:
        parse(["--config", str(tmp_path / "none.toml"), "--seed", "x"])
    assert "none.toml: cannot be read" in str(refusal.value)
    assert "--seed: invalid int" in str(refusal.value)


def test_values_of_a_list_that_begin_with_dashes_are_values(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", 'rollout-stop = ["--END--", "-1", "--lr=1", "—"]')
    assert parse(["--config", file]).rollout.rollout_stop == ("--END--", "-1", "--lr=1", "—")
    first = resolve(parse(["--num-rollout", "3", "--rollout-stop=--END--"]))
    (tmp_path / "config.json").write_text(dump(first))
    assert resolve(parse(["--config", str(tmp_path)])) == first


def test_a_list_of_which_one_value_is_refused_leaves_the_default(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "rollout-stop-token-ids = [1, 'two']")
    config, refused = parse_readable(["--config", file, "--lr", "0.5"])
    assert (config.rollout.rollout_stop_token_ids, config.optimizer.lr) == ((), 0.5)
    assert refused == {"--rollout-stop-token-ids"}


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--config nowhere\.toml: cannot be read"):
        parse(["--config", "nowhere.toml"])
    with pytest.raises(ConfigError, match="--config: got no file"):
        parse(["--config", "--lr", "1"])
