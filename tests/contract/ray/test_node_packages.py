"""A run does not start on nodes that would run another Vime than its own, on real Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.training import ROOT
from vime.utils.source import own_source, read_source


def copied(to: Path) -> Path:
    shutil.copytree(ROOT / "vime", to / "vime", ignore=shutil.ignore_patterns("__pycache__"))
    return to


def test_every_node_whose_vime_has_other_files_is_named_at_the_start(tmp_path: Path) -> None:
    """The head has this Vime, one node the same files under another path, one a file that differs and one more; the
    version is the same everywhere."""
    same, other = (copied(tmp_path / name) for name in ("same", "other"))
    (other / "vime/ray/added.py").write_text("")
    with (other / "vime/types.py").open("a") as file:
        file.write("# as it was before\n")
    started = tmp_path / "started"
    started.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    subprocess.run(
        [sys.executable, "-m", "tests.helpers.node_packages", tmp_path / "said", same, other],
        cwd=started,
        env={**kept, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=200,
    )
    line, advice = (tmp_path / "said").read_text().splitlines()
    assert line.startswith("node ")
    theirs, mine = read_source(other / "vime"), own_source()
    assert line.partition("): ")[2] == (
        f"vime: got other files ({theirs.digest}) in {theirs.root}, which Ray's workers import: ray/added.py and 1 "
        f"more; expected those of this process ({mine.digest}) in {mine.root}"
    )
    assert advice.startswith("Install the same environment on every node")
