"""Rules of the code base that a machine can hold: layers of the packages, heavy imports, import circles, size budgets,
banned habits.

python tests/helpers/shape_check.py vime      one line per finding; exit 1 when there is one
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# A package may import packages with a smaller number, never an equal or larger one.
LAYER = {
    "utils": 0,
    "types": 1,
    "data": 2,
    "protocols": 3,
    "config": 3,
    "algo": 4,
    "batching": 4,
    "handoff": 4,
    "weights": 4,
    "observability": 4,
    "backends": 4,  # what the training backends share
    "rollout": 5,
    "training": 5,
    "gateway": 5,
    "sessions": 5,
    "backends.megatron_utils": 5,
    "backends.fsdp_utils": 5,
    "backends.vllm_utils": 5,
    "agents": 6,
    "ray": 6,
    "cli": 7,
}
BACKENDS = {"backends.megatron_utils", "backends.fsdp_utils", "backends.vllm_utils"}
# Packages too heavy, or too bound to a machine, to be loaded everywhere; and the packages that may load them.
HEAVY = {
    "ray": {"ray"},
    "vllm": {"backends.vllm_utils"},
    "megatron": {"backends.megatron_utils"},
    "transfer_queue": {"handoff"},
    "wandb": {"observability"},
    "fastapi": {"gateway"},
    "aiohttp": {"utils"},  # one HTTP client: docs/decisions/0031
    "transformers": {"ray", "rollout"} | BACKENDS,
    "torch": {"algo", "backends", "batching", "handoff", "weights", "rollout", "training"} | BACKENDS,
}
MAX_FILE, MAX_FUNCTION, MAX_BRANCHES = 600, 80, 15  # none for classes: no code moves because one has many methods
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
        name = package_of(path.relative_to(package).with_suffix("").parts)
        for line, message in [
            *check_imports(tree, package.name, name),
            *check_sizes(tree, source),
            *check_habits(tree, source),
        ]:
            yield f"{path}:{line}: {message}"
    yield from check_circles(package)


def package_of(parts: tuple[str, ...]) -> str | None:
    """('backends', 'vllm_utils', 'client') -> 'backends.vllm_utils'; None outside the packages."""
    return next((name for length in (2, 1) if (name := ".".join(parts[:length])) in LAYER), None)


def check_imports(tree: ast.Module, package: str, name: str | None) -> Iterator[Finding]:
    for imported, line in imported_modules(tree):
        root, *rest = imported.split(".")
        if root in HEAVY and name not in HEAVY[root]:
            yield line, f"'{root}' may only be imported in {sorted(HEAVY[root])}, not in '{name}'"
        target = package_of(tuple(rest)) if root == package else None
        if name and target and target != name and LAYER[target] >= LAYER[name]:
            yield line, f"package '{name}' (layer {LAYER[name]}) imports '{target}' (layer {LAYER[target]})"


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


def check_circles(package: Path) -> Iterator[str]:
    for circle in import_circles(package):
        yield (
            f"{package.parent / circle[0]}:1: these files import each other: {', '.join(circle)}. Move what they "
            "share to a file that imports none of them"
        )


def import_circles(package: Path) -> list[tuple[str, ...]]:
    """Groups of files each of which imports all others of its group, over whatever files are between. Every import
    counts, also one inside of a function or for the type checker."""
    files = {_module_name(path, package): path for path in clone_files(package, "*.py")}
    graph = {
        module: {name for node in ast.walk(ast.parse(path.read_text())) for name in _targets(node, set(files))}
        for module, path in files.items()
    }
    groups = (group for group in _strongly_connected(graph) if len(group) > 1)
    return sorted(tuple(sorted(files[module].relative_to(package.parent).as_posix() for module in g)) for g in groups)


def _module_name(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def _targets(node: ast.AST, modules: set[str]) -> Iterator[str]:
    """The files that an import statement loads; `from package import module` loads the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        named = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in named if name in modules)
        if node.module in modules and not all(name in modules for name in named):
            yield node.module


def _strongly_connected(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Modules that reach each other. Each is a member of one group, mostly alone."""
    reached = {module: _reachable(graph, module) for module in graph}
    left = set(graph)
    while left:
        module = left.pop()
        group = {module} | {other for other in reached[module] if module in reached[other]}
        left -= group
        yield group


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo.extend(graph[module])
    return found


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
