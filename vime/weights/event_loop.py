"""One event loop for all of a process's gloo groups.

megatron makes two dozen groups a trainer rank, vLLM one dozen an engine. The loop of each is a thread that wakes up 100
times a second, also when nothing is sent: 1.4 ms of CPU time a second (docs/log.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a process without groups needs no torch
    from datetime import timedelta

    import torch.distributed as dist


def one_event_loop(original: type[dist.ProcessGroupGloo]) -> type[dist.ProcessGroupGloo]:
    """Return gloo's process group class, with all groups of a process on the event loop of the first."""
    devices: list[dist.ProcessGroupGloo.Device] = []
    gloo: Any = original  # torch's types know none of the names of its options, which are private

    class OneLoopGloo(gloo):  # type: ignore[misc]  # the base is torch's, as found
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            if not devices:  # torch chooses the network interface
                super().__init__(store, rank, size, timeout=timeout)
                devices.extend(self.options._devices)  # noqa: SLF001 - torch has no public name for it
                return
            options = gloo._Options()  # noqa: SLF001 - neither for these
            options._devices, options._timeout = devices, timeout  # noqa: SLF001
            options._threads = 2 * len(devices)  # noqa: SLF001 - as torch does
            super().__init__(store, rank, size, options)

    return OneLoopGloo
