"""What a node of a cluster has to have in common with the driver."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from vime.config.parse import Config
from vime.ray import nodes
from vime.ray.nodes import PACKAGES, Look, _differences
from vime.utils.source import PACKAGE, Installed, Source, installed_source, own_source, read_source

MINE = dict.fromkeys(PACKAGES, "1.0")
PLUGINS = ("vime_weight_transfer",)


def look(source: Source | None = None, servers: Source | None = None, plugins: Sequence[str] = PLUGINS) -> Look:
    mine = own_source()
    installed = Installed(source=servers or mine, plugins=plugins)
    return Look(
        listens_on="10.0.0.2", versions=MINE, missing=[], refused="", source=source or mine, installed=installed
    )


def edited(**files: str) -> Source:
    """Another machine's Vime, with other files than this process's."""
    return Source(root="/other/vime", files={**own_source().files, **files})


def test_transformer_engine_is_asked_for_on_every_node_where_the_run_uses_its_layers() -> None:
    here = {**MINE, "transformer_engine": "2.20.2"}
    assert _differences(look(), here, Config()) == [], "layers of Vime need none"
    config = Config().replace(transformer_impl="transformer_engine")
    [said] = _differences(look(), here, config)
    assert said == "transformer_engine: got none, expected 2.20.2 as in this process"
    assert _differences(dataclasses.replace(look(), versions=here), here, config) == []


def test_a_node_with_another_vime_of_the_same_version_is_named_with_the_files_that_differ() -> None:
    changed = edited(**{"types.py": "0" * 64, "ray/new.py": "0" * 64})
    mine = own_source()
    [said] = _differences(look(changed, changed), MINE, Config())
    assert said == (
        f"vime: got other files ({changed.digest}) in /other/vime, which Ray's workers import: ray/new.py and 1 more; "
        f"expected those of this process ({mine.digest}) in {mine.root}"
    )
    assert _differences(look(edited(), edited()), MINE, Config()) == [], "where it lies does not count"


def test_what_new_processes_import_is_compared_too() -> None:
    """Ray gives its workers the driver's directory; vLLM's processes have what is installed."""
    [said] = _differences(look(servers=edited(**{"types.py": "0" * 64})), MINE, Config())
    assert "in /other/vime, which new processes, so vLLM's, import: types.py;" in said


def test_a_vime_that_is_not_installed_is_named_although_it_can_be_imported() -> None:
    [said] = _differences(look(plugins=["another"]), MINE, Config())
    assert said.startswith("vime: got no entry point vime_weight_transfer for vLLM, expected that of the installed ")
    nothing = dataclasses.replace(look(), installed=Installed(source=None, plugins=PLUGINS))
    [said] = _differences(nothing, MINE, Config())
    assert said.startswith("vime: got none in a new process, expected the package to be installed")
    silent = dataclasses.replace(look(), installed="it ended with exit code 1")
    [said] = _differences(silent, MINE, Config())
    assert said == "a new process could not say which Vime it has: it ended with exit code 1"


def test_a_new_process_says_which_vime_it_finds_and_whether_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert installed_source().plugins.count("vime_weight_transfer") == 1
    monkeypatch.setenv("PYTHONPATH", "")
    bare = (sys.executable, "-S")  # without what is installed
    assert installed_source(bare) == Installed(source=None, plugins=[])
    shutil.copytree(PACKAGE, tmp_path / "vime", ignore=shutil.ignore_patterns("__pycache__"))
    copied = installed_source(bare)
    assert copied.plugins == []
    assert copied.source is not None
    assert (copied.source.root, copied.source.digest) == (str(tmp_path / "vime"), own_source().digest)


def test_a_digest_changes_with_a_files_content_and_with_its_name(tmp_path: Path) -> None:
    def written(**files: str) -> Source:
        root = tmp_path / "-".join([*files, *files.values()])
        root.mkdir()
        for name, text in files.items():
            (root / f"{name}.py").write_text(text)
        (root / "data.json").write_text(str(root))
        return read_source(root)

    first = written(a="x", b="y")
    assert first.changed(written(a="x", c="y")) == ["b.py", "c.py"]
    assert len({each.digest for each in (first, written(a="x", b="z"), written(a="x", d="y"))}) == 3
    assert first.digest == dataclasses.replace(first, root="elsewhere").digest


def test_what_an_editor_leaves_is_no_file_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    before = read_source(tmp_path)
    (tmp_path / ".#a.py").symlink_to(tmp_path / "nobody@here")  # a lock of Emacs, which leads nowhere
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/a.py").write_text("y")
    assert read_source(tmp_path) == before


def test_a_process_that_fails_to_say_is_quoted_without_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Installed:
        raise subprocess.CalledProcessError(1, ["python", "-c", "import json"], stderr="ImportError: no json\n")

    monkeypatch.setattr(nodes, "installed_source", fails)
    assert nodes.look_at_node(Config(), []).installed == "exit code 1: ImportError: no json"

    def says_nothing() -> Installed:
        return installed_source((sys.executable, "-c", "pass"))  # what follows are its arguments

    monkeypatch.setattr(nodes, "installed_source", says_nothing)
    assert isinstance(nodes.look_at_node(Config(), []).installed, str)
