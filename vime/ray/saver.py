"""The checkpoints of one run, at most one of them being written: at once, or (--async-save) while training continues.

A save in the background is a draft (`ray/checkpoint.py`) that the trainer ranks still fill. It becomes the latest
checkpoint when every rank has written its part; until then, or when a rank fails or anything is killed, the previous
one stays the latest. Owned by the driver's main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from vime.ray.checkpoint import Draft, RunState, save_checkpoint
from vime.utils.manifest import Entry


class PendingSave(Protocol):
    """Ranks that are writing."""

    def is_over(self) -> bool:
        """Whether `wait` would return or raise at once."""
        ...

    def wait(self, name: str, deadline_s: float) -> Mapping[str, Entry]:
        """Wait until every rank has written. Returns size and hash of the files by their names below the directory;
        raises the error of a rank that could not write."""
        ...


class SavingTrainers(Protocol):
    """What is asked of `ray/trainers.py::Trainers`."""

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        """Return when everything is written; in the background, when the current state is copied."""
        ...


class Saver:
    """Writes checkpoints into `root`; `on_saved(round, path)` is called for each when it is visible.

    `deadline_s` bounds every wait for a save that is being written. `keep` and `protected` as in `Draft.publish`.
    """

    def __init__(
        self,
        root: Path,
        *,
        is_async: bool,
        keep: int | None,
        protected: Path | None,
        deadline_s: float,
        on_saved: Callable[[int, Path], None],
    ) -> None:
        self._root, self._is_async, self._deadline_s = root, is_async, deadline_s
        self._keep, self._protected, self._on_saved = keep, protected, on_saved
        self._being_written: tuple[Draft, PendingSave] | None = None
        self.latest: Path | None = None  # of this run
        self._latest_round: int | None = None

    def protect(self, checkpoint: Path | None) -> None:
        """Never delete this one, if it is one: the attempt before a restart was loaded from it."""
        self._protected = checkpoint or self._protected

    @property
    def newest_round(self) -> int | None:
        """The round of the save that is being written, or else of `latest`: one that failed does not count."""
        return self._being_written[0].state.rollout_id if self._being_written is not None else self._latest_round

    def save(self, state: RunState, trainers: SavingTrainers) -> None:
        """Begin a checkpoint as soon as the previous one is visible; without --async-save also finish it."""
        self.finish()
        if not self._is_async:
            path = save_checkpoint(
                self._root,
                state,
                lambda directory: self._wait(trainers.save(directory), state),
                keep=self._keep,
                protected=self._protected,
            )
            self._note(state, path)
            return
        draft = Draft(root=self._root, state=state)
        draft.begin()
        self._being_written = draft, trainers.save(draft.model, in_background=True)

    def poll(self) -> None:
        """Make a save visible that has been written meanwhile; raises what `finish` raises."""
        if self._being_written is not None and self._being_written[1].is_over():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is being written, if there is one. Afterwards none is being written, whether it
        succeeded or not."""
        if self._being_written is None:
            return
        draft, pending = self._being_written
        self._being_written = None
        written = self._wait(pending, draft.state)
        self._note(draft.state, draft.publish(written, keep=self._keep, protected=self._protected))

    def _wait(self, pending: PendingSave, state: RunState) -> Mapping[str, Entry]:
        return pending.wait(f"the checkpoint of round {state.rollout_id} to be written", self._deadline_s)

    def _note(self, state: RunState, path: Path) -> None:
        self.latest, self._latest_round = path, state.rollout_id
        self._on_saved(state.rollout_id, path)
