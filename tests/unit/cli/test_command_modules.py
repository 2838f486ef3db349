"""Each command of `vime` is in the table by which it is found, and loads nothing of the others."""

import argparse
import importlib
import subprocess
import sys

from vime.cli.main import MODULES, main


def test_the_table_names_the_module_that_adds_each_command():
    added: dict[str, str] = {}
    for name in dict.fromkeys(MODULES.values()):
        commands = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(f"vime.cli.{name}").add_parsers(commands)
        added |= dict.fromkeys(commands.choices, name)
    assert list(added.items()) == list(MODULES.items())


def test_a_command_loads_its_own_module_only(tmp_path):
    program = "import sys; from vime.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    words = [sys.executable, "-c", program, "ls", str(tmp_path)]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert {f"vime.cli.{name}" for name in MODULES.values()} & set(loaded) == {
        *("vime.cli.runs", "vime.cli.train", "vime.cli.produce")
    }


def test_without_a_command_and_with_an_unknown_one_all_are_named(capsys):
    for words in (["--help"], [], ["stuck"]):
        try:
            main(words)
        except SystemExit:
            said = "".join(capsys.readouterr())
        assert set(MODULES) <= set(said.replace("{", " ").replace("}", " ").replace(",", " ").replace("'", " ").split())
