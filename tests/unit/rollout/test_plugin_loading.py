"""A plug-in that cannot be loaded is refused with its own file and line, whatever its import did."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config.parse import parse
from vime.protocols import load_plugin
from vime.rollout.plugins import check_plugins
from vime.types import ConfigError

CASES = {
    "a syntax error": ("x = 1\ndef rm(args, sample:\n    return 1\n", [":2)", "is not Python", "def rm(args"]),
    "bad indentation": ("def rm(args, sample):\nreturn 1\n", [":2)", "is not Python"]),
    "a name that is not there": ("x = 1\ny = undefined\n", ["NameError", ":2)"]),
    "a package that is not installed": ("\nimport no_such_package_xyz\n", ["no_such_package_xyz", ":2)", "Install it"]),
    "a name that a package has not": ("from json import no_such_name\n", ["no_such_name", ":1)"]),
    "an exit": ("import sys\n\nsys.exit(3)\n", ["SystemExit", ":3)"]),
    "an error below a library": ("import json\n\njson.loads('{')\n", ["JSONDecodeError", ":3)"]),
    "a wrong signature": ("\ndef rm(sample):\n    return 1\n", ["cannot be called as (args, sample)", ":2)"]),
    "a value": ("rm = 3\n", ["expected a function, got int 3"]),
    "another name": ("def reward(args, sample):\n    return 1\n", ["has no 'rm'", "it has reward"]),
    "a generator": ("def rm(args, sample):\n    yield 1\n", ["generator", "Return one value"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_an_import_does_is_refused_with_file_and_line(case: str, tmp_path: Path) -> None:
    code, says = CASES[case]
    file = tmp_path / "reward.py"
    file.write_text(code)
    for _ in range(2):  # half a module that stayed imported would hide the error from the next
        with pytest.raises(ConfigError) as refusal:
            check_plugins(parse(["--custom-rm-path", f"{file}:rm"]).flat)
        for text in ["--custom-rm-path", str(file), *says]:
            assert text in str(refusal.value)


def test_a_filter_that_nobody_would_await_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keep.py"
    file.write_text("async def keep(args, samples):\n    return True\n")
    with pytest.raises(ConfigError, match="it is not awaited"):
        check_plugins(parse(["--dynamic-sampling-filter-path", f"{file}:keep"]).flat)


def test_a_missing_module_and_a_missing_import_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="there is no module 'no_such_room'"):
        load_plugin("no_such_room.rewards.rm", "--custom-rm-path", ("args", "sample"))


def test_an_environment_without_its_methods_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text("class Game:\n    def reset(self, task): ...\n")
    with pytest.raises(ConfigError, match=r"--environment .*the class has no step, reward\. An environment has reset"):
        check_plugins(parse(["--environment", f"{file}:Game"]).flat)
