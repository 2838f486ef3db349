"""Have engines score given rows anew after a publish, and compare the scores with the trainer's.

The content hash proves that the bytes arrived (`weights/versions.py`). It cannot see a packed copy inside the engine
that was never rebuilt (vLLM's CPU build has two such cases, repaired in our transfer engine). So this compares the
log-probabilities of the same tokens on both sides. `check_engines_agree` uses a fixed text, for
--check-weight-update-equal and for engines that got their first weights; other callers pass rows of a round.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np

from vime.backends.vllm_utils.control import FleetControl
from vime.config.parse import Args, Config
from vime.data.images import IMAGE_COLUMN, images_of
from vime.data.rows import TrainRow
from vime.observability.mismatch_record import EngineLogprobs
from vime.ray.trainers import Trainers
from vime.rollout.images import image_column, single_image_prompt
from vime.rollout.prompts import context_limit
from vime.training.evidence import MeasuredMismatch, of_rows
from vime.types import EngineError, PublishError, Sample, SamplingRule, Version, VersionSpan

logger = logging.getLogger(__name__)

PROBE_LENGTH = 16
FP32_BOUND = 1e-3  # of the largest difference
BF16_BOUND = 0.1  # of the median, twice the largest mean of sound models; rounding moves single tokens by whole nats


RowImages = Sequence[Mapping[str, object] | None]
"""Of each row `Sample.multimodal_inputs`."""


def rescore(fleet: FleetControl, rows: Sequence[TrainRow], images: RowImages) -> list[EngineLogprobs]:
    """Return from every engine which weights it holds and the log-probabilities [R] of each row's response tokens,
    computed anew at temperature 1 over the whole vocabulary. EngineError when an engine cannot be reached, or when the
    images of a row are not there."""
    if lacks_images(rows, images):
        raise EngineError("the images of a row are not there any more, and without them its score is another")
    reports = fleet.reports()
    scores = fleet.prompt_log_probs([row.tokens.tolist() for row in rows], images)
    return [
        EngineLogprobs(
            engine=report.engine,
            version=report.version,
            content_hash=report.content_hash,
            log_probs=[values[-row.response_length :] for values, row in zip(by_row, rows, strict=True)],
        )
        for report, by_row in zip(reports, scores, strict=True)
    ]


def lacks_images(rows: Sequence[TrainRow], images: RowImages) -> bool:
    return any(images_of(row) and not inputs for row, inputs in zip(rows, images, strict=True))


def compare_with_engines(
    fleet: FleetControl,
    trainers: Trainers,
    rows: Sequence[TrainRow],
    images: RowImages,
    *,
    between: Callable[[], None] | None = None,
) -> dict[str, MeasuredMismatch]:
    """Return by engine how far its new scores are from the trainer's at the trainable tokens of `rows`. Both score at
    the same time; with `between` the trainers first, and it is called before the engines do. EngineError when an engine
    cannot be reached."""
    if between is not None:
        own = trainers.log_probs(list(rows), SamplingRule())
        between()
        scored = rescore(fleet, rows, images)
        return {each.engine: of_rows(_as_recorded(rows, each.log_probs), own) for each in scored}
    with ThreadPoolExecutor(1, thread_name_prefix="rescore") as beside:
        asked = beside.submit(rescore, fleet, rows, images)
        own = trainers.log_probs(list(rows), SamplingRule())
        scored = asked.result()
    return {each.engine: of_rows(_as_recorded(rows, each.log_probs), own) for each in scored}


def check_engines_agree(
    config: Config,
    trainers: Trainers,
    fleet: FleetControl,
    version: Version,
    *,
    between: Callable[[], None] | None = None,
    is_of_text: bool = False,
) -> float:
    """Compare the scores of a fixed text, with --multimodal-keys also of one about a fixed image where the context
    has space for it, and return the worst engine's difference, nats a token; PublishError with each engine above the
    bound. `between`: as in `compare_with_engines`. `is_of_text`: without the image, for which this process would import
    torch."""
    bound = BF16_BOUND if config.parallel.bf16 else FP32_BOUND
    worst, wrong = 0.0, list[str]()
    rows, images = [_probe_row(version)], cast("list[Mapping[str, object] | None]", [None])
    if config.flat.multimodal_keys and not is_of_text:
        row, inputs = image_probe(config.flat, version)
        if row.total_length < context_limit(config.flat):
            rows, images = [*rows, row], [*images, inputs]
    for engine, found in compare_with_engines(fleet, trainers, rows, images, between=between).items():
        medians = [statistics.median(suspect.gaps()) for suspect in found.suspects]
        difference = max(medians) if config.parallel.bf16 else found.largest
        if math.isnan(found.mean):  # one NaN token is enough; neither median nor maximum would show it
            difference = math.nan
        worst = max(worst, difference)
        if not difference <= bound:
            wrong.append(f"engine {engine}: log-probabilities differ from the trainer's by {difference:.3g}")
    if wrong:
        raise PublishError(
            f"{'; '.join(wrong)} after version {version} (bound {bound:g}), although the bytes were confirmed. They "
            "compute with other weights, or are quantised. If they are not: restart the run with --load, and report "
            "this with the model type."
        )
    logger.info("version %d: engines agree with the trainer within %.2g", version, worst)
    return worst


def _probe_row(version: Version) -> TrainRow:
    response = PROBE_LENGTH - 1
    return TrainRow(
        sample_index=-1,
        group_index=-1,
        rollout_id=-1,
        tokens=np.asarray([5 + (7 * position) % 23 for position in range(PROBE_LENGTH)], dtype=np.int32),
        response_length=response,
        loss_mask=np.ones(response, dtype=np.uint8),
        rollout_log_probs=np.zeros(response, dtype=np.float32),
        token_policy_versions=[VersionSpan(version, 0, response)],
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
    )


def image_probe(args: Args, version: Version) -> tuple[TrainRow, Mapping[str, object]]:
    """Return the row of a prompt that is one image alone, of which no two rows or columns are alike, with the tokens of
    the text after it."""
    tokens, inputs = single_image_prompt(args, _picture())
    text = _probe_row(version)
    sample = Sample(multimodal_inputs=dict(inputs))
    cell = image_column(args, sample, "the probe")
    joined = np.asarray([*tokens, *text.tokens[1:]], dtype=np.int32)
    return dataclasses.replace(text, tokens=joined, extra={IMAGE_COLUMN: cell}), inputs


def _picture() -> bytes:
    """Return a PNG of 64 x 64 colours."""
    from PIL import Image

    down, across = np.mgrid[0:64, 0:64]
    colours = np.stack([4 * down, 4 * across, 255 - 2 * (down + across)], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).save(buffer, format="PNG")
    return buffer.getvalue()


def _as_recorded(rows: Sequence[TrainRow], log_probs: Sequence[Sequence[float]]) -> list[TrainRow]:
    """Return the rows as if these log-probabilities had been recorded at sampling."""
    return [
        dataclasses.replace(row, rollout_log_probs=np.asarray(values, dtype=np.float32))
        for row, values in zip(rows, log_probs, strict=True)
    ]
