"""Checkpoints of a whole run: the trainer writes model state, this file run state; visible at once or not at all.

Layout: `<dir>/iter_0000012/{model/, run_state.json, manifest.json}` and `<dir>/latest_checkpointed_iteration.txt`, the
marker, which names the newest one. The manifest has size and hash of every other file of its directory
(`utils/manifest.py`; who reads it: `ray/checkpoint_damage.py`, `vime audit`). A kill or power cut at any byte leaves a
loadable latest checkpoint, because of four invariants:

1. The marker alone says which checkpoint is the latest. It is replaced by one rename and only names what is on disk.
2. A directory `iter_*` is complete from the moment it has this name, and never written again. A round that is saved
   twice gets a second name (`iter_0000012.2`).
3. What the marker names is never moved or removed; the one before goes only after the marker is on disk.
4. Everything half-written or half-removed is called `.partial_*`; no reader looks there, the next save removes it.

One run writes a directory at a time; any number may read it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vime.config.parse import Config
from vime.handoff.ledger_types import LedgerMark
from vime.ray.checkpoint_identity import Facts
from vime.types import CheckpointError, Version, VimeError
from vime.utils.failpoints import Point, failpoint
from vime.utils.files import sync, sync_tree
from vime.utils.manifest import Entry, write_manifest

logger = logging.getLogger(__name__)
LATEST = "latest_checkpointed_iteration.txt"
LEDGER_RUN = "ledger_run"  # in the data cursor: directory of the run whose ledger belongs to the checkpoint
NO_CHECKPOINT = "none"  # content of the marker during the first save
PARTIAL = ".partial_"
NAME = re.compile(r"iter_(\d{7,})(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run needs besides the model to continue: the last trained round, the version and the data cursor.

    `ledger`: the last line of the ledger's history before it was written; None in modes off and buffer, and in
    checkpoints from before ledgers had ids. `receipt`: the link of what the trainer stepped on (`handoff/receipts.py`).
    `written_with`: facts about the run that wrote it (`ray/checkpoint_identity.py`). Both are None in older
    checkpoints. `metrics`: those of the round that were known, because its line is written later; None when the line
    was there.
    """

    rollout_id: int
    version: Version
    data_source: dict[str, object]
    ledger: LedgerMark | None = None
    receipt: str | None = None
    written_with: Facts | None = None
    metrics: dict[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: its first round, the checkpoint before that round (None: from --hf-checkpoint), and the link
    of the receipt that it keeps."""

    rollout_id: int
    checkpoint: Path | None
    receipt: str | None = None


def checkpoint_root(config: Config, run_dir: Path) -> Path:
    """Return the directory where this run saves."""
    return Path(config.model.save) if config.model.save else run_dir / "checkpoints"


def newest_checkpoint(*roots: Path | None) -> str:
    """Tell the user where the next run can start: at the newest checkpoint of the first of `roots` that has one."""
    for root in roots:
        try:
            if root is not None and (found := find_latest(root)) is not None:
                return f"The newest checkpoint is {found}; continue with --load {root}"
        except (VimeError, OSError) as error:
            return f"No checkpoint can be found: {error}"
    return "There is no checkpoint."


def find_start(load: str | None) -> Start:
    """Resolve `--load` now. Later saves may move the marker; the run still counts as started from this checkpoint."""
    checkpoint = find_latest(Path(load)) if load else None
    if checkpoint is None:
        return Start(rollout_id=0, checkpoint=None)
    state = read_run_state(checkpoint)
    return Start(rollout_id=state.rollout_id + 1, checkpoint=checkpoint, receipt=state.receipt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint that is being written: nobody sees it before `publish`, and nothing is lost with it.

    One at a time in a directory: beginning one removes what other drafts left.
    """

    root: Path
    state: RunState

    @property
    def _directory(self) -> Path:
        return self.root / f"{PARTIAL}{_name(self.state.rollout_id)}"

    @property
    def model(self) -> Path:
        """The directory that the trainer fills."""
        return self._directory / "model"

    def begin(self) -> None:
        with self.explained():
            _prepare(self.root)
            self.model.mkdir(parents=True)
        failpoint(Point.DRAFT)

    def publish(self, written: Mapping[str, Entry], *, keep: int | None = None, protected: Path | None = None) -> Path:
        """Make it the latest; `model` is complete, and `written` has size and hash of its files as far as those who
        wrote them know: the rest is hashed here. Then all but the newest `keep` (None: all) are removed, but never
        `protected`. Until then the disk holds `keep` + 1 of them."""
        failpoint(Point.WRITTEN)
        with self.explained():
            (self._directory / "run_state.json").write_text(json.dumps(asdict(self.state)))
            write_manifest(self._directory, {f"model/{name}": entry for name, entry in written.items()})
            sync_tree(self._directory)
            final = _free_place(self.root, self.state.rollout_id)
            self._directory.rename(final)
            sync(self.root)
            failpoint(Point.RENAMED)
            is_first_of_round = final.name == _name(self.state.rollout_id)
            _write_marker(self.root, str(self.state.rollout_id) if is_first_of_round else final.name)
        failpoint(Point.MARKED)
        _retire(self.root, final, keep=keep, protected=protected)
        return final

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"checkpoint of round {self.state.rollout_id} in {self.root}: {error}. The previous checkpoint is "
                "intact; free space or fix permissions, then resume with --load."
            ) from error


def save_checkpoint(
    root: Path,
    state: RunState,
    save_model: Callable[[Path], Mapping[str, Entry] | None],
    *,
    keep: int | None = None,
    protected: Path | None = None,
) -> Path:
    """Write one checkpoint and make it the latest. `save_model` fills the `model` directory it is given, and may return
    sizes and hashes for `Draft.publish`."""
    draft = Draft(root=root, state=state)
    draft.begin()
    with draft.explained():
        written = save_model(draft.model)
    return draft.publish(written or {}, keep=keep, protected=protected)


def find_latest(root: Path) -> Path | None:
    """The newest complete checkpoint, or None for a missing or empty directory. `root` may also be one checkpoint."""
    if (root / "run_state.json").is_file():
        return root
    marker = root / LATEST
    if not marker.is_file():
        names = sorted(path.name for path in complete_checkpoints(root))
        if names:
            raise CheckpointError(f"{root} holds {names} but no {LATEST}. Write the wanted number into that file.")
        return None
    text = marker.read_text(errors="backslashreplace").strip()
    if text == NO_CHECKPOINT:
        return None
    found = root / (_name(int(text)) if text.isdigit() else text)
    if found == root or not (found / "run_state.json").is_file():
        raise CheckpointError(
            f"{marker} names {text!r}, but {found} is not a complete checkpoint. Write another name there; complete "
            f"are {sorted(path.name for path in complete_checkpoints(root))}."
        )
    return found


def read_run_state(checkpoint: Path) -> RunState:
    path = checkpoint / "run_state.json"
    try:
        state = RunState(**json.loads(path.read_text()))
        return state if state.ledger is None else replace(state, ledger=LedgerMark(**state.ledger))  # type: ignore[arg-type]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}. Resume from an older checkpoint.") from error


def _name(rollout_id: int) -> str:
    return f"iter_{rollout_id:07d}"


def _free_place(root: Path, rollout_id: int) -> Path:
    """Return `iter_0000012`, or `iter_0000012.2`, ... when that round was saved before."""
    names = itertools.chain([_name(rollout_id)], (f"{_name(rollout_id)}.{count}" for count in itertools.count(2)))
    return next(root / name for name in names if not os.path.lexists(root / name))


def complete_checkpoints(root: Path) -> list[Path]:
    """Return complete checkpoints, oldest first, by the time they were written: after a return to an earlier round, the
    rounds of the abandoned run are the older ones. The round decides between equal times (of a copied directory)."""
    if not root.is_dir():
        return []
    ages = []
    for path in root.iterdir():
        name, state = NAME.fullmatch(path.name), path / "run_state.json"
        if name and not path.is_symlink() and state.is_file():
            ages.append((state.stat().st_mtime_ns, int(name[1]), path.name, path))
    return [path for *_, path in sorted(ages)]


def _prepare(root: Path) -> None:
    """A directory without leftovers and with a marker. Without the marker of NO_CHECKPOINT, a kill between the two
    renames of the first save would leave a checkpoint that nothing names."""
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    if not (root / LATEST).exists() and not complete_checkpoints(root):
        _write_marker(root, NO_CHECKPOINT)
        sync(root.parent)


def _retire(root: Path, latest: Path, *, keep: int | None, protected: Path | None) -> None:
    """Remove what `latest` replaces: earlier saves of its round, and all but the newest `keep`. Failing here costs
    disk space, not the checkpoint: the next save tries again."""
    try:
        others = [path for path in complete_checkpoints(root) if path != latest]
        doomed = [path for path in others if _round(path) == _round(latest)]
        if keep is not None:
            older = [path for path in others if path not in doomed]
            doomed += older[: max(0, len(older) - (keep - 1))]
        if protected is not None:
            doomed = [path for path in doomed if path.resolve() != protected.resolve()]
        for path in doomed:
            path.rename(root / f"{PARTIAL}{path.name}")
        if doomed:
            sync(root)  # before the first file goes: no power cut may bring the name back without its files
            _sweep(root)
            logger.info("removed checkpoints %s: %s is the latest", [path.name for path in doomed], latest.name)
    except OSError as error:
        logger.warning("an old checkpoint in %s could not be removed: %s. The next save tries again.", root, error)


def _round(path: Path) -> str:
    return path.name.split(".")[0]


def _sweep(root: Path) -> None:
    """Remove what a killed save, or a killed removal, left behind. What cannot be removed is reported and left."""
    for path in root.glob(f"{PARTIAL}*"):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            logger.warning("the leftover %s could not be removed: %s. The next save tries again.", path, error)


def _write_marker(root: Path, text: str) -> None:
    """On disk when this returns; the marker is the old or the new one at every moment."""
    partial = root / f"{PARTIAL}{LATEST}"
    partial.write_text(f"{text}\n")
    sync(partial)
    partial.rename(root / LATEST)
    sync(root)
