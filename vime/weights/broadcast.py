"""Transports `gloo` and `nccl`: the sender broadcasts buckets to every worker of every engine.

One process group outside torch's default one: the sender is rank 0, engine workers follow in the order of the fleet.
gloo carries CPU memory over TCP; nccl is the same with buffers on the GPU. vLLM's stock NCCL engine is not used
because it cannot say what it received: this one hashes every bucket before it is loaded.

A group that could not be made, or in which a broadcast failed, is given up for good: the sender says so in the group's
store, and a receiver that waits over gloo, for the others to join or for bytes, looks there, so that it can join the
next group (decision 0039).

nccl has not run yet between two GPUs (docs/never-run.md); what it adds to gloo's code is `_device`, `_completion` and
the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist

from vime.protocols import EngineControl
from vime.types import PublishError, WaitTimeoutError
from vime.utils.background import in_background
from vime.utils.waits import waiting
from vime.weights.plan import Bucket, TensorMeta
from vime.weights.rendezvous import join_store, open_store
from vime.weights.update_info import UpdateInfo
from vime.weights.wire import BucketReceiver, BucketSender, Deliver, update_to_wire

R = TypeVar("R")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GIVEN_UP = "given-up"  # the key in the store of a group
GIVEN_UP_SAYS = "the sender has given up the broadcast group of this weight update."
LOOK_S = 0.5
"""Seconds between two looks of a receiver whether its group was given up."""


class BroadcastGroup(Protocol):
    """The part of torch's process groups that is used here and that torch's own types lack."""

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions, /) -> dist.Work: ...

    def abort(self) -> None: ...


class BroadcastSender(BucketSender):
    """Rank 0 of the group."""

    def __init__(self, backend: str, *, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._backend = backend
        self._group: BroadcastGroup | None = None
        self._store: dist.TCPStore | None = None
        self._name = ""

    def connect(self, fleet: EngineControl) -> None:
        """Open a new group on a new port. The engines wait inside `init_transfer` until rank 0 has joined too."""
        self._group = self._store = None
        self._name = secrets.token_hex(8)
        worlds = fleet.world_sizes()
        world_size = 1 + sum(worlds)
        address = local_address(fleet.addresses[0].url)
        timeout = timedelta(seconds=self._timeout_s)
        self._store = open_store(address, 0, world_size, timeout=timeout)
        infos = [
            {
                "transport": self._backend,
                "master_address": address,
                "master_port": self._store.port,
                "world_size": world_size,
                "rank_offset": 1 + sum(worlds[:position]),
                "timeout_s": self._timeout_s,
                "group": self._name,
            }
            for position in range(len(worlds))
        ]
        try:
            # A connection of its own: while the group waits for an engine there, nothing else can be said on it.
            store = join_store(address, self._store.port, world_size, timeout=timeout)
            self._group = self._meet(fleet, infos, store, world_size, address)
        except BaseException:
            self._say_given_up()
            raise

    def _meet(
        self,
        fleet: EngineControl,
        infos: Sequence[Mapping[str, object]],
        store: dist.Store,
        world_size: int,
        address: str,
    ) -> BroadcastGroup | None:
        meeting: Future[BroadcastGroup | None] = in_background("weight-connect", partial(fleet.init_transfer, infos))
        timeout, device = timedelta(seconds=self._timeout_s), _device(self._backend)
        make = partial(_new_group, self._backend, store, 0, world_size, address, timeout)
        making: Future[BroadcastGroup] = in_background("weight-connect", make)
        joining: Future[BroadcastGroup | None] = in_background(
            "weight-connect", lambda: _with_first_byte(making.result(), 0, device)
        )
        try:
            # The first to fail ends both: rank 0 would wait for an engine that could not join until the timeout.
            with waiting("the engines to join the broadcast group", "engine", deadline_s=self._timeout_s):
                done, _ = wait([meeting, joining], timeout=self._timeout_s, return_when=FIRST_EXCEPTION)
            for future in (meeting, joining):
                if future in done:
                    future.result()
            if len(done) < 2:
                advice = "Raise --update-weight-timeout-secs, or check that the hosts reach each other."
                raise WaitTimeoutError("the engines to join the broadcast group", self._timeout_s, "weights", advice)
            return joining.result()
        except BaseException:
            making.add_done_callback(partial(_give_up_made, self._backend))
            raise

    def _say_given_up(self) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the failure that is raised explains more
                self._store.set(GIVEN_UP, "")

    def close(self) -> None:
        self._group = self._store = None

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        return torch.empty(bucket.nbytes, dtype=torch.uint8, device=_device(self._backend))

    def _send(
        self, filled: Iterator[tuple[Bucket, torch.Tensor]], metadata: Sequence[TensorMeta], deliver: Deliver
    ) -> None:
        """Ask the engines once, when the first bucket is ready; then broadcast bucket after bucket, each while the next
        one is filled and the engines load those before."""
        group = _joined(self._group)
        answer: Future[object] | None = None
        travelling: Future[object] | None = None
        try:
            for _, buffer in filled:
                if answer is None:
                    told: UpdateInfo = {**update_to_wire(metadata, self._bucket_bytes), "group": self._name}
                    answer = in_background("weight-delivery", partial(deliver, told))
                elif travelling is not None:
                    self._wait(travelling, answer)
                work = _broadcast(group, buffer)
                travelling = in_background("weight-broadcast", _completion(work, buffer.device))
            if answer is not None and travelling is not None:
                self._wait(travelling, answer)
                self._wait(answer, answer)
        except BaseException:
            self._group = None
            self._say_given_up()
            _give_up(group, self._backend, [] if travelling is None else [travelling])
            raise

    def _wait(self, awaited: Future[object], answer: Future[object]) -> None:
        """Wait for `awaited`, but not when the engines have failed: theirs is the error that explains."""
        with waiting("the engines to take a bucket of weights", "engine", deadline_s=self._timeout_s):
            done, _ = wait([awaited, answer], timeout=self._timeout_s, return_when=FIRST_COMPLETED)
            if answer in done:
                answer.result()
                done, _ = wait([awaited], timeout=self._timeout_s)  # every engine has every bucket
        if awaited not in done:
            advice = "Raise --update-weight-timeout-secs, or look for a stuck engine in RUN_DIR/logs."
            raise WaitTimeoutError("the engines to take a bucket of weights", self._timeout_s, "weights", advice)
        awaited.result()


class _ConnectInfo(msgspec.Struct):
    """What `BroadcastSender.connect` tells an engine."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    timeout_s: float
    group: str


class BroadcastReceiver(BucketReceiver):
    """Rank `rank_offset` + this worker's own rank."""

    backend = "gloo"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._group: BroadcastGroup | None = None
        self._store: dist.TCPStore | None = None
        self._name = ""

    def check_call(self, update_info: Mapping[str, object]) -> None:
        """A call of a group that was given up may have waited here until requests ended: it would take the buckets of
        the next group."""
        if update_info.get("group") != self._name:
            raise PublishError("weight update over another broadcast group than this engine has joined last.")

    def connect(self, init_info: Mapping[str, object], worker_rank: int) -> None:
        """Called once. A call that comes late, of a group that was given up, is refused at once."""
        told = msgspec.convert(init_info, _ConnectInfo)
        timeout = timedelta(seconds=told.timeout_s)
        _refuse_absent(told.master_address, told.master_port, told.timeout_s)
        # Two connections: while the group waits for a peer at one of them, nothing else can be asked there.
        store, self._store = (
            join_store(told.master_address, told.master_port, told.world_size, timeout=timeout) for _ in range(2)
        )
        if self._store.check([GIVEN_UP]):
            raise PublishError(GIVEN_UP_SAYS)
        rank, own = told.rank_offset + worker_rank, local_address(f"http://{told.master_address}")
        join = partial(_join, self.backend, store, rank, told.world_size, own, timeout)
        self._group = join() if self.backend == "nccl" else self._unless_given_up(join)
        self._name = told.group

    def close(self) -> None:
        self._group = self._store = None

    def _read(
        self,
        buckets: Sequence[Bucket],
        update_info: Mapping[str, object],  # noqa: ARG002
    ) -> Iterator[list[torch.Tensor]]:
        """A bucket travels while the one before it is loaded."""
        group, travelling = _joined(self._group), deque[tuple[Bucket, torch.Tensor, dist.Work]]()
        try:
            for bucket in buckets:
                buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=_device(self.backend))
                travelling.append((bucket, buffer, _broadcast(group, buffer)))
                if len(travelling) == 2:
                    yield self._arrived(travelling)
            while travelling:
                yield self._arrived(travelling)
        except BaseException:
            self._group = None
            works = [work for *_, work in travelling] if self.backend == "gloo" else []
            _give_up(group, self.backend, [in_background("weight-broadcast", work.wait) for work in works])
            raise

    def _arrived(self, travelling: deque[tuple[Bucket, torch.Tensor, dist.Work]]) -> list[torch.Tensor]:
        """Return the tensors of the first bucket, and take it off the list when it is here."""
        bucket, buffer, work = travelling[0]
        if buffer.device.type != "cpu":
            work.wait()
        else:
            self._unless_given_up(work.wait)
        travelling.popleft()
        return [slot.view(buffer) for slot in bucket.slots]

    def _unless_given_up(self, call: Callable[[], R]) -> R:
        """Return what `call` returns. PublishError when the sender gives the group up, or ends, before that: gloo
        itself would wait until its deadline."""
        calling = in_background("weight-broadcast", call)
        while not wait([calling], timeout=LOOK_S).done:
            if self._is_given_up():
                raise PublishError(GIVEN_UP_SAYS)
        return calling.result()

    def _is_given_up(self) -> bool:
        try:
            return self._store is None or self._store.check([GIVEN_UP])
        except dist.DistError:  # the store ended with the sender
            return True


class NcclReceiver(BroadcastReceiver):
    """The same on the GPU."""

    backend = "nccl"


def _refuse_absent(host: str, port: int, timeout_s: float) -> None:
    """Refuse a store whose process is gone: torch would try until its deadline. The sender opens it before it asks."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise PublishError(
            f"the sender of this weight update does not listen at {host}:{port}: {error}. Expected the store that it "
            "opened before this call. Either it is gone, and its run connects anew, or a firewall is between: check "
            "that this host reaches the trainer's."
        ) from error


def local_address(url: str) -> str:
    """The address under which the host of `url` reaches this machine: loopback when it is this machine."""
    host = urlsplit(url).hostname or "127.0.0.1"
    if host in LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; only picks the interface
        return str(probe.getsockname()[0])


def _join(
    backend: str, store: dist.Store, rank: int, world_size: int, address: str, timeout: timedelta
) -> BroadcastGroup:
    group = _new_group(backend, store, rank, world_size, address, timeout)
    try:
        return _with_first_byte(group, rank, _device(backend))
    except BaseException:
        _give_up(group, backend, [])
        raise


def _new_group(
    backend: str, store: dist.Store, rank: int, world_size: int, address: str, timeout: timedelta
) -> BroadcastGroup:
    """Make a process group of its own. gloo waits here until all have joined, NCCL does not.

    A plain constructor, because `init_process_group` would make it the default one. gloo listens on `address`, by which
    the others reach this process; the host's own name may not resolve to it."""
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


def _with_first_byte(group: BroadcastGroup, rank: int, device: torch.device) -> BroadcastGroup:
    """Return the group after a first broadcast of one byte: NCCL makes its communicator only then, and a rank that
    cannot join is found here, under the deadline of `connect`, and not by the first version."""
    first = torch.full((1,), int(rank == 0), dtype=torch.uint8, device=device)
    _broadcast(group, first).wait()
    if first.item() != 1:
        raise PublishError(f"rank {rank} of the broadcast group got another byte than rank 0 has sent.")
    return group


def _joined(group: BroadcastGroup | None) -> BroadcastGroup:
    if group is None:
        raise PublishError("weight update over a broadcast group that was not joined, or is given up. Connect first.")
    return group


def _broadcast(group: BroadcastGroup, buffer: torch.Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([buffer], options)


def _give_up(group: BroadcastGroup, backend: str, under_way: Sequence[Future[object]]) -> None:
    """Leave a group in whose broadcast no engine may take part any more, so that the error comes out now and the
    process can save and end: deleting the group waits for `under_way`, until the timeout or until the engines are
    stopped.

    gloo's is deleted behind that, by a thread that dies with the process. Left alone, its loop turns without rest
    in every third such group: it is told again and again that a peer is gone. NCCL's is aborted, which ends a broadcast
    that waits for a peer, and never deleted, not even when Python ends and empties its modules; it has a watchdog that
    ends the process when the broadcast is late."""
    if backend == "nccl":
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        in_background("weight-abort", group.abort)
        return
    held = [group]

    def delete() -> None:
        wait(under_way)
        held.clear()

    in_background("weight-group-end", delete)


def _give_up_made(backend: str, making: Future[BroadcastGroup]) -> None:
    """Give up the group that `making` has made, if it has: the connect failed, maybe before that. A thread may wait in
    its first broadcast: an abort ends that of NCCL, and gloo's group is deleted behind it, when that thread ends."""
    if making.exception() is None:
        _give_up(making.result(), backend, [])


def _completion(work: dist.Work, device: torch.device) -> Callable[[], object]:
    """A call that returns when a broadcast has ended. NCCL's own `wait` returns at once and holds up the stream in
    which it is called: a stream of its own, because the next bucket is filled in the usual one."""
    if device.type == "cpu":
        return work.wait
    with torch.cuda.stream(torch.cuda.Stream(device)):
        work.wait()
        ended = torch.cuda.Event()
        ended.record()
    return ended.synchronize


def _device(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
