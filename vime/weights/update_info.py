"""What an engine is told about weights and adapters, as JSON. No torch: the engine's API server reads it too."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class DeviceMemory(TypedDict):
    """Memory of a GPU that another process may open (CUDA IPC). Texts are base64."""

    handle: str
    storage_bytes: int
    offset_bytes: int  # of the storage, in the memory that the handle names
    counter: str
    counter_offset: int
    event: str
    waits_for_event: bool


class UpdateInfo(TypedDict):
    """Call `index` of `count`: its tensors in order, and where their bytes are, if not in a broadcast. They are cut
    into buckets of `bucket_bytes`; without it they are one bucket."""

    index: int
    count: int
    names: list[str]
    dtypes: list[str]  # as torch spells them, without `torch.`
    shapes: list[list[int]]
    bucket_bytes: NotRequired[int]
    path: NotRequired[str]
    group: NotRequired[str]  # the name of the broadcast group that brings the bytes
    device_memory: NotRequired[DeviceMemory]


def is_last(update_info: UpdateInfo) -> bool:
    """Whether the update ends with this call."""
    return update_info["index"] + 1 == update_info["count"]
