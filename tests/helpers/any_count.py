"""How much of vime/ is typed as `Any`: by package, how many annotations there are and how many of them mention it.

python -m tests.helpers.any_count      one line for each package, with its share
python -m tests.helpers.any_count -v   and before it every place

Counted are the annotations of arguments, of what a function returns and of variables. A name for a type, `Block =
dict[str, Any]`, counts with them when it mentions `Any`: it would be a way around otherwise.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.shape_check import ROOT, clone_files, package_of

TOP = "(top)"
"""Files that are in no package: `vime/__main__.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """One place that says a type."""

    package: str
    file: Path
    line: int
    text: str
    is_any: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Annotations of one package."""

    num_annotations: int
    num_any: int

    @property
    def share(self) -> float:
        return self.num_any / self.num_annotations if self.num_annotations else 0.0


def count_any(root: Path) -> dict[str, Count]:
    """By package, in the order of their names."""
    found = list(annotations(root))
    return {
        package: Count(
            num_annotations=sum(each.package == package for each in found),
            num_any=sum(each.package == package and each.is_any for each in found),
        )
        for package in sorted({each.package for each in found})
    }


def annotations(root: Path) -> Iterator[Annotation]:
    for path in clone_files(root, "*.py"):
        package = package_of(path.relative_to(root).with_suffix("").parts) or TOP
        for node in annotations_of(ast.parse(path.read_text())):
            text = ast.unparse(node)
            yield Annotation(package=package, file=path, line=node.lineno, text=text, is_any=mentions_any(node))


def annotations_of(tree: ast.Module) -> Iterator[ast.expr]:
    """Every annotation, and every name for a type that mentions `Any`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            said = node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = node.returns
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
            said = node.value if mentions_any(node.value) else None
        else:
            continue
        if said is not None:
            yield said


def mentions_any(annotation: ast.expr) -> bool:
    """`Any`, `typing.Any`, also inside of another type or of a string."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id == "Any":
            return True
        if isinstance(node, ast.Attribute) and node.attr == "Any":
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_quoted_any(node.value):
            return True
    return False


def _is_quoted_any(text: str) -> bool:
    try:
        return mentions_any(ast.parse(text, mode="eval").body)
    except SyntaxError:  # a `Literal` may hold any text
        return False


if __name__ == "__main__":
    shown = ROOT / "vime"
    if "-v" in sys.argv[1:]:
        for each in annotations(shown):
            if each.is_any:
                sys.stdout.write(f"{each.file.relative_to(ROOT)}:{each.line}: {each.text}\n")
    for name, count in count_any(shown).items():
        sys.stdout.write(f"{name:28} {count.num_any:4} of {count.num_annotations:5}  {count.share:6.1%}\n")
