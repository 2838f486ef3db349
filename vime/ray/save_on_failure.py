"""The end of a run that does not reach its last round: save what was trained since the last checkpoint, and say where.

An error of a reward, an engine or the data does not touch the trainers: what they learned is still in them and is
saved as on Ctrl-C. It is not saved when the failure came in the middle of training (the weights then belong to no whole
round) or of saving (a second try would fail in the same way).
"""

from __future__ import annotations

import logging

from vime.ray.checkpoint import newest_checkpoint
from vime.ray.components import Components, Doing
from vime.types import VimeError

logger = logging.getLogger(__name__)


def save_on_failure(components: Components) -> tuple[bool, str]:
    """Record and save the last trained round. Returns whether nothing is lost, and the message for the user.

    Bounded by the deadlines of a save; a second Ctrl-C ends it at once. Raises no ordinary exception, because the
    caller has an error to report that matters more.
    """
    round_metrics, trained = components.watchers.round_metrics, components.trained_round
    try:
        components.saver.finish()
    except Exception as error:  # boundary: the round it holds is saved anew below, if it can be
        logger.warning("the checkpoint that was being written is lost with the run: %s", error)
    if components.doing is Doing.TRAINING:
        return (
            False,
            f"This was in the middle of a round of training: its weights are not saved. {_newest(components)}",
        )
    if components.doing is Doing.SAVING:
        return (
            False,
            f"Round {trained} is trained, but not saved. {_newest(components)}",
        )
    if components.open_round is not None and components.open_round == trained:
        try:
            round_metrics.finish(trained, components.versions.trained)
        except Exception:  # boundary: a line of metrics is worth less than the round, and its sink may be what failed
            logger.exception("the metrics of round %d could not be written", trained)
    try:
        engines, is_publishing = components.parts.engines, components.doing is Doing.PUBLISHING
        if engines is not None and (is_publishing or (components.turns is not None and components.has_work())):
            # rank 0 may wait for one that hangs, and no rank can save meanwhile; or they have the trainers' GPUs
            engines.stop()
        components.save()
        components.saver.finish()
    except Exception as error:  # boundary: reported together with the error that ended the run
        if not isinstance(error, VimeError):
            logger.exception("saving at the end of a failed run")
        return (
            False,
            f"Saving round {trained} failed too: {type(error).__name__}: {error}\n{_newest(components)}",
        )
    saved = components.saver.latest
    if saved is None:
        return (
            True,
            f"No round was trained, so there is nothing to save. {_newest(components)}",
        )
    return True, f"State saved in {saved}; continue with --load {saved.parent}"


def _newest(components: Components) -> str:
    return newest_checkpoint(components.checkpoint_root, components.loaded)
