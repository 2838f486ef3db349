"""--eval-config: sets with keys, reward, number of answers and sampling of their own, as YAML and as TOML."""

from pathlib import Path

import pytest

from vime.config.eval_sets import eval_sets
from vime.config.parse import Config, parse
from vime.types import ConfigError

YAML = """
eval:
  defaults: {max_response_len: 64, top_p: 0.7}
  datasets:
    - {name: aime, path: aime.jsonl, n_samples_per_eval_prompt: 16}
    - {name: gpqa, path: "sub/gpqa.jsonl@[0:8]", rm_type: gpqa, label_key: answer, temperature: 0, top_p: 1}
"""
TOML = """
[defaults]
max_response_len = 64
top_p = 0.7
[[datasets]]
name = "aime"
path = "aime.jsonl"
n_samples_per_eval_prompt = 16
[[datasets]]
name = "gpqa"
path = "sub/gpqa.jsonl@[0:8]"
rm_type = "gpqa"
label_key = "answer"
temperature = 0
top_p = 1
"""


@pytest.mark.parametrize(("name", "text"), [("sets.yaml", YAML), ("sets.toml", TOML)])
def test_each_set_has_the_run_s_configuration_but_for_what_it_says(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    flags = ["--custom-rm-path", "a.b", "--label-key", "label", "--eval-prompt-data", "own", "own.jsonl"]
    own, aime, gpqa = eval_sets(parse([*flags, "--eval-config", str(file)]))
    assert (own.name, own.path, own.config.eval.eval_top_p) == ("own", "own.jsonl", None)
    assert aime.path == str(tmp_path / "aime.jsonl")
    assert (aime.config.eval.n_samples_per_eval_prompt, aime.config.eval.eval_top_p) == (16, 0.7)
    assert aime.config.eval.eval_max_response_len == gpqa.config.eval.eval_max_response_len == 64
    assert (aime.config.reward.custom_rm_path, aime.config.data.label_key) == ("a.b", "label")
    assert gpqa.path == f"{tmp_path}/sub/gpqa.jsonl@[0:8]"
    assert (gpqa.config.reward.rm_type, gpqa.config.reward.custom_rm_path) == ("gpqa", None)
    assert (gpqa.config.data.label_key, gpqa.config.eval.eval_temperature) == ("answer", 0)
    assert gpqa.config.eval.eval_top_p == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets = 3", "no datasets there"),
        ("[[datasets]]\nname = 'a'", "set 1: path is None"),
        ("[[datasets]]\nname = 'a'\npath = 'b'\ntemprature = 1", "unknown key temprature. Did you mean temperature"),
        ("[[datasets]]\nname = 'a'\npath = 'b'\ntop_p = 3", "top_p: --eval-top-p: got 3, expected 0 to 1"),
        ("[[datasets]]\nname = 'a'\npath = 'b'\ntop_k = 'many'", "top_k: got 'many', expected int"),
        (
            "[[datasets]]\nname = 'a'\npath = 'b'\nrm_type = 'maths'",
            "rm_type: got 'maths', expected one of",
        ),
        ("[[datasets]]\nname = 'a'\npath = 'b'\nrm_type = 'f1'\ncustom_rm_path = 'x.y'", "are both given"),
        ("[[datasets]]\nname = 'a'\npath = 'b'\n[[datasets]]\nname = 'a'\npath = 'c'", "names must differ, got a"),
        ("[[datasets", "cannot be read"),
        *(
            (f"[[datasets]]\nname = '{name}'\npath = 'b'", "--eval-config: a set is called .*, .* Rename it")
            for name in ("../../up", "math/hard", ".hidden", "a" * 101)
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_key(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "sets.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        eval_sets(parse(["--eval-config", str(file)]))
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot be read"):
        eval_sets(parse(["--eval-config", str(tmp_path / "no.yaml")]))


def test_names_that_are_a_part_of_a_path_are_taken() -> None:
    names = ["aime-2024", "gsm8k_v1.1", "a+b", "two words (数学)", "a" * 100]
    sets = eval_sets(Config().replace(eval_prompt_data=tuple(word for name in names for word in (name, "x.jsonl"))))
    assert [one.name for one in sets] == names
    with pytest.raises(ConfigError, match=r"--eval-prompt-data: a set is called 'a/b'"):
        eval_sets(parse(["--eval-prompt-data", "a/b", "x.jsonl"]))
