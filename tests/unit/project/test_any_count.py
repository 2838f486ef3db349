"""`Any` in vime/ only gets less: one number for each package."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.helpers.any_count import annotations_of, count_any, mentions_any

ROOT = Path(__file__).resolve().parents[3]
# Annotations that mention `Any`. `Any` is for what another library or a plug-in does not type.
NUM_ANY = {
    "agents": 0,
    "algo": 0,
    "backends": 0,
    "backends.fsdp_utils": 0,
    "backends.megatron_utils": 0,
    "backends.vllm_utils": 1,
    "batching": 0,
    "cli": 0,
    "config": 2,
    "data": 0,
    "gateway": 0,
    "handoff": 3,
    "observability": 0,
    "ray": 0,
    "rollout": 3,
    "sessions": 0,
    "protocols": 1,
    "training": 0,
    "types": 2,
    "utils": 0,
    "weights": 2,
}
ADVICE = """
{package} has {counted} annotations that mention Any, and NUM_ANY in {file} says {written}. Less: write {counted} there.
More: say the type (object, a dataclass, a TypedDict, a Protocol) where no other library or plug-in forces Any; see them
all with `python -m tests.helpers.any_count -v`."""


def test_each_package_has_as_many_any_as_are_written_down() -> None:
    counted = {package: count.num_any for package, count in count_any(ROOT / "vime").items()}
    advice = [
        ADVICE.format(
            package=package, counted=counted.get(package), written=NUM_ANY.get(package), file=Path(__file__).name
        )
        for package in sorted(counted.keys() | NUM_ANY.keys())
        if counted.get(package) != NUM_ANY.get(package)
    ]
    assert not advice, "".join(advice)


def test_any_is_found_wherever_an_annotation_can_hide_it() -> None:
    source = """
Block = dict[str, Any]
size: int = 3
held: typing.Any = None
def f(a: Any, *b: "Any", c: list[Any] | None = None, **d: object) -> Callable[..., Any]: ...
def g(a: Literal["Any how", "any"]) -> AnyStr: ...
"""
    found = [(ast.unparse(node), mentions_any(node)) for node in annotations_of(ast.parse(source))]
    # of Block, held, a, b, c and the answer of f; not of size, d, and the two of g
    assert sorted(text for text, is_any in found if is_any) == sorted(
        ["dict[str, Any]", "typing.Any", "Any", "'Any'", "list[Any] | None", "Callable[..., Any]"]
    )
    assert len(found) == 10
