"""One event loop for all of a process's gloo groups.

megatron makes two dozen groups a trainer rank, vLLM one dozen an engine. The loop of each is a thread that wakes up 100
times a second, also where nobody sends: 1.4 ms of CPU time a second (docs/log.md).
"""

from __future__ import annotations

from typing import Any


def one_event_loop(original: Any) -> Any:
    """gloo's process group, all of one process on the event loop of the first."""
    devices: list[Any] = []

    class OneLoopGloo(original):  # type: ignore[misc] # the base is torch's, as found
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            if not devices:  # torch chooses the network interface
                super().__init__(store, rank, size, timeout=timeout)
                devices.extend(self.options._devices)
                return
            options = original._Options()
            options._devices, options._timeout, options._threads = devices, timeout, 2 * len(devices)  # as torch does
            super().__init__(store, rank, size, options)

    return OneLoopGloo
