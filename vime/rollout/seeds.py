"""The seed of a request in --reference-mode: it depends on the completion, and on nothing that time decides."""

from __future__ import annotations

import hashlib

from vime.types import PluginError, Sample


def request_seed(rollout_seed: int, sample: Sample, *, num_tokens: int, copy: int = 0) -> int:
    """Return a seed that is the same for the same completion in every run, mode and process; 32 bits, which is all that
    torch's CPU generator keeps.

    `num_tokens`: response tokens that already exist, so that the turns of a conversation differ. `copy`: how many
    samples of this identity one call has asked for before, so that a plug-in's copies differ. The version is not part
    of it: a group that is generated again draws the same from the same weights.
    """
    if sample.group_index < 0 or sample.index < 0:
        raise PluginError(
            f"--reference-mode: a sample has group_index {sample.group_index} and index {sample.index}, expected both "
            "from 0 on, the same in every run: its seed is made of them. Set them in the data source or plug-in."
        )
    key = f"{rollout_seed}:{sample.group_index}:{sample.index}:{copy}:{num_tokens}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
