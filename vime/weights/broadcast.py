"""Transports `gloo` and `nccl`: the sender broadcasts buckets to every worker of every engine.

One process group outside torch's default one: the sender is rank 0, engine workers follow in the order of the fleet.
gloo carries CPU memory over TCP; nccl is the same with buffers on the GPU. vLLM's stock NCCL engine is not used
because it cannot say what it received: this one hashes every bucket before it is loaded.

nccl has not run in the project's own tests, which have no GPU; the code it adds to gloo's is `_device` and the group.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist

from vime.protocols import EngineControl
from vime.types import PublishError, WaitTimeoutError
from vime.utils.waits import waiting
from vime.weights.plan import Bucket
from vime.weights.rendezvous import join_store, open_store
from vime.weights.wire import BucketReceiver, BucketSender, Deliver, bucket_to_wire

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class BroadcastGroup(Protocol):
    """The part of torch's process groups that is used here and that torch's own types lack."""

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions, /) -> dist.Work: ...


_abandoned: list[tuple[BroadcastGroup, dist.Work]] = []


class BroadcastSender(BucketSender):
    """Rank 0 of the group."""

    def __init__(self, backend: str, *, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._backend = backend
        self._group: BroadcastGroup | None = None
        self._store: dist.TCPStore | None = None
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="weight-broadcast")

    def connect(self, fleet: EngineControl) -> None:
        """Open a new group on a new port. The engines wait inside `init_transfer` until rank 0 has joined too."""
        self._group = self._store = None
        worlds = fleet.world_sizes()
        world_size = 1 + sum(worlds)
        timeout = timedelta(seconds=self._timeout_s)
        address = local_address(fleet.addresses[0].url)
        self._store = open_store(address, 0, world_size, timeout=timeout)
        infos = [
            {
                "transport": self._backend,
                "master_address": address,
                "master_port": self._store.port,
                "world_size": world_size,
                "rank_offset": 1 + sum(worlds[:position]),
                "timeout_s": self._timeout_s,
            }
            for position in range(len(worlds))
        ]
        meeting: Future[BroadcastGroup | None] = self._pool.submit(fleet.init_transfer, infos)
        joining: Future[BroadcastGroup | None] = self._pool.submit(
            _make_group, self._backend, self._store, 0, world_size, address, timeout
        )
        # The first to fail ends both: rank 0 would wait for an engine that could not join until the timeout.
        with waiting("the engines to join the broadcast group", "engine", deadline_s=self._timeout_s):
            done, _ = wait([meeting, joining], timeout=self._timeout_s, return_when=FIRST_EXCEPTION)
        for future in (meeting, joining):
            if future in done:
                future.result()
        if len(done) < 2:
            advice = "Raise --update-weight-timeout-secs, or check that the hosts reach each other."
            raise WaitTimeoutError("the engines to join the broadcast group", self._timeout_s, "weights", advice)
        self._group = joining.result()

    def close(self) -> None:
        self._group = self._store = None
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=_device(self._backend))

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor, deliver: Deliver) -> None:
        """Broadcast while the engines receive. Waits for their responses first: theirs is the error that explains."""
        delivered = self._pool.submit(deliver, bucket_to_wire(bucket))
        group = _joined(self._group)
        work = _broadcast(group, buffer)
        try:
            with waiting("the engines to take a bucket of weights", "engine", deadline_s=self._timeout_s):
                delivered.result(timeout=self._timeout_s)
        except BaseException:
            # Giving up the group would wait for the broadcast, which no engine may take any more: until the timeout or
            # until the engines are stopped. Keep it instead, so that the error comes out now.
            _abandoned.append((group, work))
            self._group = None
            raise
        work.wait()


class _ConnectInfo(msgspec.Struct):
    """What `BroadcastSender.connect` tells an engine."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    timeout_s: float


class BroadcastReceiver(BucketReceiver):
    """Rank `rank_offset` + this worker's own rank."""

    backend = "gloo"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._group: BroadcastGroup | None = None

    def connect(self, init_info: Mapping[str, object], worker_rank: int) -> None:
        told = msgspec.convert(init_info, _ConnectInfo)
        timeout = timedelta(seconds=told.timeout_s)
        store = join_store(told.master_address, told.master_port, told.world_size, timeout=timeout)
        rank, own = told.rank_offset + worker_rank, local_address(f"http://{told.master_address}")
        self._group = _make_group(self.backend, store, rank, told.world_size, own, timeout)

    def close(self) -> None:
        self._group = None

    def _read(self, bucket: Bucket, update_info: Mapping[str, object]) -> list[torch.Tensor]:  # noqa: ARG002
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=_device(self.backend))
        _broadcast(_joined(self._group), buffer).wait()
        return [slot.view(buffer) for slot in bucket.slots]


class NcclReceiver(BroadcastReceiver):
    """The same on the GPU."""

    backend = "nccl"


def local_address(url: str) -> str:
    """The address under which the host of `url` reaches this machine: loopback when it is this machine."""
    host = urlsplit(url).hostname or "127.0.0.1"
    if host in LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; only picks the interface
        return str(probe.getsockname()[0])


def _make_group(
    backend: str, store: dist.Store, rank: int, world_size: int, address: str, timeout: timedelta
) -> BroadcastGroup:
    """A process group of its own. A plain constructor, because `init_process_group` would make it the default one.
    gloo listens on `address`, by which the others reach this process; the host's own name may not resolve to it."""
    store = dist.PrefixStore("vime-weights", store)
    torch_groups: Any = dist  # its types know neither gloo's options nor that a group can broadcast
    group: BroadcastGroup
    if backend == "nccl":
        options = torch_groups.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - torch has no public name for it
        group = torch_groups.ProcessGroupNCCL(store, rank, world_size, options)
    else:
        gloo = torch_groups.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - torch has no public names for these four
        options._timeout = timeout  # noqa: SLF001
        options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001
        options._threads = 2  # noqa: SLF001
        group = gloo(store, rank, world_size, options)
    return group


def _joined(group: BroadcastGroup | None) -> BroadcastGroup:
    if group is None:
        raise PublishError("weight update over a broadcast group that was not joined, or is given up. Connect first.")
    return group


def _broadcast(group: BroadcastGroup, buffer: torch.Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([buffer], options)


def _device(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
