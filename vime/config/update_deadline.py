"""How long a weight update may take: known before it begins, to the ranks that send and to the driver that waits."""

from __future__ import annotations

from pathlib import Path

from vime.config.parse import Config


def update_deadline_s(config: Config) -> float:
    """--update-weight-timeout-secs, and a second for each whole GB that travels. That is taken as twice the files of
    the checkpoint: bf16 may be trained and sent in fp32."""
    files = Path(config.model.hf_checkpoint).expanduser().glob("*.safetensors")
    sent = 2 * sum(file.stat().st_size for file in files)
    return config.weights.update_weight_timeout_secs + sent // 10**9
