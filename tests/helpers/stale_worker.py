"""vLLM's worker with a fault: what the CPU build derives from weights stays as the engine was started with it.

Given as `--worker-extension-cls`. The bytes of an update arrive, and their hash is right; a tied head of Llama keeps
computing with its packed copy of before.
"""

from __future__ import annotations

from unittest import mock

from vime.backends.vllm_utils import weight_transfer
from vime.backends.vllm_utils.routes import WorkerWeights
from vime.weights.update_info import UpdateInfo


class StaleWorker(weight_transfer.UpdateWorker):
    def vime_update_weights(self, update_info: UpdateInfo) -> WorkerWeights:
        with mock.patch.object(weight_transfer, "refresh_packed_copies"):
            return super().vime_update_weights(update_info)


STALE_WORKER = f"{__name__}.{StaleWorker.__name__}"
