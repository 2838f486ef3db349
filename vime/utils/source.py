"""Which Vime runs here: the files of the package, by their content.

The version says nothing about that: it is the same for every commit of a checkout. So processes of several machines
that have to run the same code are compared by these files (ray/nodes.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ASK_S = 60.0
_CHILD = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("vime")
names = [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
print(json.dumps([spec.origin if spec is not None else None, names]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The Python files of a package."""

    root: str
    files: Mapping[str, str]  # path under `root` -> SHA-256 of the content

    @property
    def digest(self) -> str:
        """Return the first 12 digits of a hash of all paths and contents. Where the package lies does not count."""
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()[:12]

    def changed(self, other: Source) -> list[str]:
        """Return the paths that only one of the two has, or that have another content."""
        paths = sorted({*self.files, *other.files})
        return [path for path in paths if self.files.get(path) != other.files.get(path)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What a new Python process finds, as vLLM's are: without the paths that Ray gives its workers."""

    source: Source | None  # None: no vime
    plugins: Sequence[str]  # names of entry points for vLLM


def read_source(root: Path) -> Source:
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    files = {  # without what editors leave, which nobody can import
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in paths.items()
        if not any(part.startswith(".") for part in name.split("/"))
    }
    return Source(root=str(root), files=files)


@functools.cache
def own_source() -> Source:
    """Return the files of the package that this process imports. Cached: it is about what was imported, and files may
    change later."""
    return read_source(PACKAGE)


def installed_source(python: Sequence[str] = (sys.executable,)) -> Installed:
    """Ask a new process, in this one's directory and with its environment. Raises OSError, or SubprocessError."""
    said = subprocess.run([*python, "-c", _CHILD], capture_output=True, text=True, timeout=ASK_S, check=True)
    origin, plugins = json.loads(said.stdout.splitlines()[-1])
    if origin is None:
        return Installed(source=None, plugins=plugins)
    root = Path(origin).resolve().parent
    return Installed(source=own_source() if root == PACKAGE else read_source(root), plugins=plugins)
