"""--check-weight-update-equal: do the engines compute with the weights the trainer has?

The content hash proves that the bytes arrived. It cannot see a packed copy inside the engine that was never rebuilt
(vLLM's CPU build has two such cases, repaired in our transfer engine), so this check compares what matters: the
log-probabilities of the same tokens on both sides.
"""

from __future__ import annotations

import logging
import statistics

import numpy as np

from vime.backends.vllm_utils.control import FleetControl
from vime.config.parse import Config
from vime.data.rows import TrainRow
from vime.ray.trainers import Trainers
from vime.types import PublishError, Version, VersionSpan

logger = logging.getLogger(__name__)

PROBE_LENGTH = 16
FP32_BOUND = 1e-3  # of the largest difference
BF16_BOUND = 0.1  # of the median, twice the largest mean of sound models; rounding moves single tokens by whole nats


def check_engines_agree(config: Config, trainers: Trainers, fleet: FleetControl, version: Version) -> float:
    """How far an engine's log-probabilities are from the trainer's, at worst; PublishError above the bound."""
    tokens = [5 + (7 * position) % 23 for position in range(PROBE_LENGTH)]
    response = PROBE_LENGTH - 1
    row = TrainRow(
        sample_index=-1,
        group_index=-1,
        rollout_id=-1,
        tokens=np.asarray(tokens, dtype=np.int32),
        response_length=response,
        loss_mask=np.ones(response, dtype=np.uint8),
        rollout_log_probs=np.zeros(response, dtype=np.float32),
        token_policy_versions=[VersionSpan(version, 0, response)],
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
    )
    [expected_R] = trainers.log_probs([row])
    bound = BF16_BOUND if config.parallel.bf16 else FP32_BOUND
    worst = 0.0
    for address, [got_R] in zip(fleet.addresses, fleet.prompt_log_probs([tokens]), strict=True):
        differences = [abs(a - b) for a, b in zip(got_R, expected_R, strict=True)]
        difference = statistics.median(differences) if config.parallel.bf16 else max(differences)
        worst = max(worst, difference)
        if not difference <= bound:
            raise PublishError(
                f"engine {address.name}: log-probabilities differ from the trainer's by {difference:.3g} after version "
                f"{version} (bound {bound:g}), although the bytes were confirmed. The engine computes with other "
                "weights: restart the run with --load, and report this with the model type."
            )
    logger.info("version %d: engines agree with the trainer within %.2g", version, worst)
    return worst
