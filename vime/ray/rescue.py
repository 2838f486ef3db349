"""The end of a run that does not reach its last round: save what was trained since the last checkpoint, say where.

An error of a reward, an engine or the data does not touch the trainers: what they learned is still in them and is
saved as on Ctrl-C. It is not saved when the failure came in the middle of training (the weights are then no whole
round's) or of saving (a second try would fail alike).
"""

from __future__ import annotations

import logging

from vime.ray.checkpoint import newest_checkpoint
from vime.ray.machine import Doing, Machine
from vime.types import VimeError

logger = logging.getLogger(__name__)


def rescue(machine: Machine) -> tuple[bool, str]:
    """Book and save the last trained round. Answers whether nothing is lost, and what to tell the user.

    Bounded by the deadlines of a save; a second Ctrl-C ends it at once. Raises no ordinary exception, because the
    caller has an error to report that matters more.
    """
    books, trained = machine.watchers.books, machine.trained_round
    try:
        machine.saver.finish()
    except Exception as error:  # boundary: the round it holds is saved anew below, if it can be
        logger.warning("the checkpoint that was being written is lost with the run: %s", error)
    if machine.doing is Doing.TRAINING:
        return (
            False,
            f"This was in the middle of a round of training: its weights are not saved. {_newest(machine)}",
        )
    if machine.doing is Doing.SAVING:
        return (
            False,
            f"Round {trained} is trained, but not saved. {_newest(machine)}",
        )
    if machine.open_round is not None and machine.open_round == trained:
        try:
            books.finish(trained, machine.versions.trained)
        except Exception:  # boundary: a line of metrics is worth less than the round, and its sink may be what failed
            logger.exception("the metrics of round %d could not be written", trained)
    try:
        if machine.doing is Doing.PUBLISHING and machine.parts.engines is not None:
            machine.parts.engines.stop()  # rank 0 may wait for one that hangs, and no rank can save meanwhile
        machine.save()
        machine.saver.finish()
    except Exception as error:  # boundary: told together with the error that ended the run
        if not isinstance(error, VimeError):
            logger.exception("saving at the end of a failed run")
        return (
            False,
            f"Saving round {trained} failed too: {type(error).__name__}: {error}\n{_newest(machine)}",
        )
    saved = machine.saver.latest
    if saved is None:
        return (
            True,
            f"No round was trained, so there is nothing to save. {_newest(machine)}",
        )
    return True, f"State saved in {saved}; go on with --load {saved.parent}"


def _newest(machine: Machine) -> str:
    return newest_checkpoint(machine.checkpoint_root, machine.loaded)
