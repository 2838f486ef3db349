"""The data source of a rollout job (`vime produce`): it has no prompts, because the gateway leases them."""

from __future__ import annotations

from vime.config.parse import Args
from vime.types import DataError, Sample


class LeasedPrompts:
    """Stands where a data source is asked for. Nothing may be drawn from it."""

    def __init__(self, args: Args) -> None: ...

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        raise DataError(f"a rollout job draws no prompts ({num_groups} asked for): the gateway leases them.")

    def add_samples(self, groups: list[list[Sample]]) -> None:
        raise DataError(f"a rollout job takes back no groups ({len(groups)} given): it gives leases back.")

    def save(self, rollout_id: int) -> dict[str, object]:  # noqa: ARG002
        return {}

    def load(self, state: dict[str, object]) -> None: ...

    def __len__(self) -> int:
        return 0
