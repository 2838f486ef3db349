"""Rules of the code base that a machine can hold: floors of the rooms, heavy imports, size budgets, banned habits.

python tests/helpers/shape_check.py vime      one line per finding; exit 1 when there is one
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# A room may import rooms with a smaller number, never an equal or larger one.
FLOOR = {
    "utils": 0,
    "types": 1,
    "seams": 2,
    "config": 2,
    "algo": 3,
    "batching": 3,
    "handoff": 3,
    "weights": 3,
    "observability": 3,
    "backends": 3,  # what the training backends share
    "rollout": 4,
    "training": 4,
    "gateway": 4,
    "backends.megatron_utils": 4,
    "backends.fsdp_utils": 4,
    "backends.vllm_utils": 4,
    "ray": 5,
    "cli": 6,
}
BACKENDS = {"backends.megatron_utils", "backends.fsdp_utils", "backends.vllm_utils"}
# Packages too heavy, or too bound to a machine, to be loaded everywhere; and the rooms that may load them.
HEAVY = {
    "ray": {"ray"},
    "vllm": {"backends.vllm_utils"},
    "megatron": {"backends.megatron_utils"},
    "transfer_queue": {"handoff"},
    "wandb": {"observability"},
    "fastapi": {"gateway"},
    "transformers": {"ray", "rollout"} | BACKENDS,
    "torch": {"algo", "backends", "batching", "handoff", "weights", "rollout", "training"} | BACKENDS,
}
MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_METHODS, MAX_BRANCHES = 600, 80, 300, 15, 15
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCH = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.AsyncFor)

ROOT = Path(__file__).resolve().parents[2]
# What .gitignore keeps out of a clone, for a copy that git knows nothing of.
IGNORED_IN_ROOT = {ROOT / name for name in (".git", ".venv", "runs", "models", "data", "wandb")}
IGNORED = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}

Finding = tuple[int, str]


def clone_files(directory: Path, pattern: str = "*") -> list[Path]:
    """Files under `directory` that a clone has or will have: tracked, or new and not ignored. What a run, a tool or an
    environment left there is none of them."""
    command = ["git", "-c", "core.quotePath=false", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=False)
    files = {directory / line for line in listed.stdout.splitlines()}
    if not files:  # an unpacked archive has no git, or lies in a directory that an outer one ignores
        files = {path for path in directory.rglob("*") if not _is_ignored(path)}
    return sorted(path for path in files if path.is_file() and path.match(pattern))


def _is_ignored(path: Path) -> bool:
    is_by_name = any(part in IGNORED or part.endswith(".egg-info") for part in path.parts)
    return is_by_name or not IGNORED_IN_ROOT.isdisjoint((path, *path.parents))


def findings(package: Path) -> Iterator[str]:
    """Every broken rule under `package`, as `path:line: message`."""
    for path in clone_files(package, "*.py"):
        source = path.read_text()
        tree = ast.parse(source)
        room = room_of(path.relative_to(package).with_suffix("").parts)
        for line, message in [
            *check_imports(tree, package.name, room),
            *check_sizes(tree, source),
            *check_habits(tree, source),
        ]:
            yield f"{path}:{line}: {message}"


def room_of(parts: tuple[str, ...]) -> str | None:
    """('backends', 'vllm_utils', 'client') -> 'backends.vllm_utils'; None outside the rooms."""
    return next((name for length in (2, 1) if (name := ".".join(parts[:length])) in FLOOR), None)


def check_imports(tree: ast.Module, package: str, room: str | None) -> Iterator[Finding]:
    for name, line in imported_modules(tree):
        root, *rest = name.split(".")
        if root in HEAVY and room not in HEAVY[root]:
            yield line, f"'{root}' may only be imported in {sorted(HEAVY[root])}, not in '{room}'"
        target = room_of(tuple(rest)) if root == package else None
        if room and target and target != room and FLOOR[target] >= FLOOR[room]:
            yield line, f"room '{room}' (floor {FLOOR[room]}) imports '{target}' (floor {FLOOR[target]})"


def imported_modules(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import that runs; imports for the type checker do not."""
    for_types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            if "." not in node.module:
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def check_sizes(tree: ast.Module, source: str) -> Iterator[Finding]:
    num_lines = source.count("\n")
    if num_lines > MAX_FILE:
        yield 1, f"file has {num_lines} lines, budget {MAX_FILE}"
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION):
            branches = 1 + sum(isinstance(inner, BRANCH) for inner in ast.walk(node))
            if _length(node) > MAX_FUNCTION or branches > MAX_BRANCHES:
                budget = f"budget {MAX_FUNCTION}/{MAX_BRANCHES}"
                yield node.lineno, f"{node.name}: {_length(node)} lines, {branches} branches; {budget}"
        elif isinstance(node, ast.ClassDef):
            methods = sum(isinstance(inner, FUNCTION) for inner in node.body)
            if _length(node) > MAX_CLASS or methods > MAX_METHODS:
                budget = f"budget {MAX_CLASS}/{MAX_METHODS}"
                yield node.lineno, f"class {node.name}: {_length(node)} lines, {methods} methods; {budget}"


def check_habits(tree: ast.Module, source: str) -> Iterator[Finding]:
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from _check_call(node, node.func.id)
        elif isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "Exception"):
            is_excused = "# boundary:" in lines[node.lineno - 1]
            if not is_excused and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield node.lineno, "broad except that neither re-raises nor says '# boundary: why'"


def _check_call(node: ast.Call, called: str) -> Iterator[Finding]:
    if called == "zip" and "strict" not in {keyword.arg for keyword in node.keywords}:
        yield node.lineno, "zip without strict=: a length mismatch would pass in silence"
    elif called == "print":
        yield node.lineno, "print: use the module logger"
    elif called == "getattr" and len(node.args) == 3 and "config" in ast.unparse(node.args[0]):
        yield node.lineno, "getattr default on config: the default belongs in the dataclass"


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


if __name__ == "__main__":
    report = list(findings(Path(sys.argv[1]).resolve()))
    sys.stdout.write("".join(line + "\n" for line in report))
    sys.exit(bool(report))
