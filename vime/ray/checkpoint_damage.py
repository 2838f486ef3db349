"""Check that a checkpoint is still what was written, byte for byte: before anything starts, and before weights load.

Before the start the driver reads at most QUICK_BYTES of it and compares the sizes of all files, so that a damaged
checkpoint rarely costs a start of every part. Before the weights are replaced the trainer ranks read the whole of it,
each rank its share. What either finds is one refusal that names every file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from vime.ray.checkpoint import LATEST, complete_checkpoints, read_run_state
from vime.types import CheckpointError
from vime.utils.manifest import MANIFEST, Entry, compare_sizes, find_damage, read_manifest

QUICK_BYTES = 1 << 30  # a second or two from a disk
MAX_NAMED = 20
Compare = Callable[[Path, dict[str, Entry]], list[str]]
"""Reads the given files of a checkpoint and returns those that hold other bytes."""


def refuse_damage(checkpoint: Path) -> None:
    """Raise CheckpointError for what can be found quickly."""
    if _should_have_manifest(checkpoint) and (findings := find_damage(checkpoint, max_bytes=QUICK_BYTES)):
        raise _refusal(checkpoint, findings)


def refuse_any_damage(checkpoint: Path, compare: Compare) -> None:
    """Raise CheckpointError for every file that is missing, extra or not as it was written."""
    if not _should_have_manifest(checkpoint):
        return
    try:
        files = read_manifest(checkpoint)
    except ValueError as error:
        raise _refusal(checkpoint, [str(error)]) from error
    if findings := compare_sizes(checkpoint, files) + compare(checkpoint, files):
        raise _refusal(checkpoint, findings)


def doubts(checkpoint: Path, load: str | None) -> Iterator[str]:
    """Yield warnings about the checkpoint that `--load` means, although it can be loaded."""
    if not _has_manifest(checkpoint):
        yield f"{checkpoint} has no {MANIFEST}: it was written before manifests existed; damage would not be seen."
    if load is not None and Path(load) != checkpoint:  # the marker chose it
        names = [path.name for path in complete_checkpoints(checkpoint.parent)]
        is_among = checkpoint.name in names  # a link to one that lies elsewhere is not
        later = (
            [name for name in names[names.index(checkpoint.name) + 1 :] if name > checkpoint.name] if is_among else []
        )
        if later:
            yield (
                f"{checkpoint.parent / LATEST} names {checkpoint.name}, but {', '.join(later)} was written later. "
                "If you did not choose that, write its number into the marker: else its rounds are trained again."
            )


def _has_manifest(checkpoint: Path) -> bool:
    """Older checkpoints of Vime have no manifest."""
    return (checkpoint / MANIFEST).is_file()


def _should_have_manifest(checkpoint: Path) -> bool:
    """Whether it has a manifest. Raises CheckpointError when it lost one: a run that writes `written_with` writes a
    manifest too."""
    if not _has_manifest(checkpoint) and read_run_state(checkpoint).written_with is not None:
        raise _refusal(checkpoint, [f"{MANIFEST}: is missing"])
    return _has_manifest(checkpoint)


def _refusal(checkpoint: Path, findings: list[str]) -> CheckpointError:
    named = "\n".join(f"  {finding}" for finding in findings[:MAX_NAMED])
    more = f"\n  and {len(findings) - MAX_NAMED} more" if len(findings) > MAX_NAMED else ""
    return CheckpointError(
        f"--load {checkpoint}: {len(findings)} of its files are not as they were written; expected what its {MANIFEST} "
        f"says. Nothing was loaded.\n{named}{more}\n{_advice(checkpoint)}"
    )


def _advice(damaged: Path) -> str:
    """Return the other checkpoints of the directory that are whole according to a quick check, newest first."""
    others = [path for path in complete_checkpoints(damaged.parent) if path.resolve() != damaged.resolve()]
    whole = [path for path in others if _has_manifest(path) and not find_damage(path, max_bytes=QUICK_BYTES)]
    if not whole:
        return (
            "No other checkpoint beside it is known to be whole. Copy it again from where it came from, or begin anew "
            "from an export (--save-hf) as --hf-checkpoint."
        )
    names = ", ".join(path.name for path in reversed(whole))
    return f"Continue with --load {whole[-1]} instead (whole beside it: {names}), or copy the damaged files again."
