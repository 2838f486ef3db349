"""TransferQueue as a keyed store of bytes: starting it, joining it, put, get and clear. Only the `queue_*.py` files
import it, and only when a queue is used, so that mode `off` never loads it.

A row has one column, and its cell is bytes: TransferQueue's cost grows with the number of cells, and a tensor costs
more than bytes (decision 0015). What it does not promise is checked here: every call has a deadline (a client of a dead
controller waits for ever), a read counts its rows (missing keys are left out silently), each row carries its key (row
numbers are reused in other partitions), and a put confirms that its rows are visible (a lost notification is only
logged). Its samplers and consumption marks are not used.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import struct
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from vime.handoff.group_store import Handle
from vime.handoff.queue_actors import SimpleStorageUnit, TransferQueueController
from vime.handoff.queue_keys import QueueKeys, secure_sockets
from vime.types import HandoffLostError, VimeError, WaitTimeoutError
from vime.utils.errors import first_line
from vime.utils.failpoints import Point, failpoint
from vime.utils.waits import waiting

if TYPE_CHECKING:
    from vime.config.training import QueueConfig

LIVENESS_PROBE_S = 2.0
CLOSE_S = 5.0
_KEY_LENGTH = struct.Struct("<H")
ROW_FIELD = "row"
ACTORS = ("TransferQueueController", "SimpleStorageUnit")  # names shown by `vime why-stuck`


Result = TypeVar("Result")


class QueueLostError(HandoffLostError):
    """An actor of the queue is dead. What lay in the queue is lost there."""


class Reference(Protocol):
    """A reference of Ray, which is not imported here: the result of an actor's call."""

    def future(self) -> concurrent.futures.Future[object]: ...


class RemoteMethod(Protocol):
    def remote(self) -> Reference: ...


class QueueActor(Protocol):
    """A handle of one of the actors in queue_actors.py."""

    @property
    def get_zmq_server_info(self) -> RemoteMethod: ...
    @property
    def __ray_terminate__(self) -> RemoteMethod: ...


class ActorClass(Protocol):
    """The result of `ray.remote` for a class."""

    def options(self, *, name: str, num_cpus: float) -> ActorClass: ...
    def remote(self, *arguments: object, **options: object) -> QueueActor: ...


class Meta(Protocol):
    """The metadata of some keys in TransferQueue."""

    size: int
    field_names: Sequence[str]


class Cells(Protocol):
    def tolist(self) -> list[bytes]: ...


class KeyedClient(Protocol):
    """The methods of TransferQueue's client that are used here; it has no types for mypy."""

    async def async_kv_retrieve_meta(self, keys: list[str], partition: str, *, create: bool) -> Meta: ...
    async def async_put(self, data: object, metadata: Meta) -> object: ...
    async def async_get_data(self, metadata: Meta) -> Mapping[str, Cells]: ...
    async def async_clear_samples(self, metadata: Meta) -> object: ...
    async def async_get_partition_list(self) -> list[str]: ...
    async def async_clear_partition(self, partition: str) -> object: ...
    def initialize_storage_manager(self, kind: str, config: dict[str, object]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAddress:
    """How to reach the queue of this run, picklable into actors. The queue lives while anyone holds its handles."""

    run_id: str
    keys: QueueKeys
    controller: QueueActor
    storage_units: tuple[QueueActor, ...]


def start_queue(
    queue: QueueConfig, *, remote: Callable[[type], ActorClass], num_cpus: float = 0.1, run_id: str | None = None
) -> QueueAddress:
    """Ask Ray (`remote` is `ray.remote`) for the controller and the storage units; `connect` waits for them. The keys
    of the queue are made here.

    The stock `transfer_queue.init` is not used: it has one fixed actor name per cluster and one CPU per actor, and
    waits silently when CPUs are short.
    """
    run_id, keys = run_id or uuid.uuid4().hex[:8], QueueKeys.make()
    num_units = queue.num_data_storage_units
    controller = (
        remote(TransferQueueController)
        .options(name=f"vime-{run_id}-queue-controller", num_cpus=num_cpus)
        .remote(
            keys,
            polling_mode=True,  # without it one waiting reader stops every writer for 5 s
        )
    )
    unit = remote(SimpleStorageUnit)
    units = [
        unit.options(name=f"vime-{run_id}-queue-storage-{index}", num_cpus=num_cpus).remote(
            keys, config={"total_storage_size": None, "num_data_storage_units": num_units}
        )
        for index in range(num_units)
    ]
    return QueueAddress(run_id=run_id, keys=keys, controller=controller, storage_units=tuple(units))


def stop_queue(address: QueueAddress) -> None:
    """End the queue's actors. Called by the driver, when every process has left the queue."""
    for actor in (*address.storage_units, address.controller):
        actor.__ray_terminate__.remote()


class QueueClient:
    """TransferQueue's client on an event loop of its own; every call has a deadline and detects dead actors."""

    def __init__(self, address: QueueAddress, timeout_s: float) -> None:
        secure_sockets(address.keys)
        from transfer_queue.client import AsyncTransferQueueClient

        self._timeout_s = timeout_s
        self._actors: dict[str, QueueActor] = {"TransferQueue controller": address.controller}
        self._actors |= {f"TransferQueue storage unit {i}": unit for i, unit in enumerate(address.storage_units)}
        ends = time.monotonic() + timeout_s
        controller, *units = [_server_info(name, actor, ends, timeout_s) for name, actor in self._actors.items()]
        self._client: KeyedClient = AsyncTransferQueueClient(
            f"vime-{address.run_id}-{uuid.uuid4().hex[:8]}", controller
        )
        try:
            zmq_info = {f"unit-{index}": info for index, info in enumerate(units)}
            self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": zmq_info})
        except Exception as error:
            raise HandoffLostError(
                f"TransferQueue of run {address.run_id}: no response to the handshake: {error}"
            ) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vime-queue-client", daemon=True)
        self._thread.start()

    def put(self, partition: str, keys: list[str], chunks: Sequence[bytes]) -> list[Handle]:
        """Store one chunk per key; returns when the controller shows all of them. The keys are the handles."""
        if keys:
            rows = [_frame(key, chunk) for key, chunk in zip(keys, chunks, strict=True)]
            self._call(_store_rows(self._client, partition, keys, rows), f"put of {len(keys)} rows into {partition}")
            failpoint(Point.PUT_HALF)
            self._call(_confirm_rows(self._client, partition, keys), f"look at {len(keys)} rows of {partition}")
        return list(keys)

    def get(self, partition: str, handles: Sequence[Handle]) -> list[bytes]:
        """Return the chunks under these keys, in this order, each checked to be the one that was put under its key; a
        missing one is an error."""
        if not handles:
            return []
        keys = list(map(str, handles))
        rows = self._call(_get_rows(self._client, partition, keys), f"get of {len(keys)} rows of {partition}")
        return [_unframe(partition, key, row) for key, row in zip(keys, rows, strict=True)]

    def clear(self, partition: str, handles: Sequence[Handle]) -> None:
        """Remove the rows under these keys; missing ones are skipped."""
        if handles:
            keys = list(map(str, handles))
            self._call(_clear_rows(self._client, partition, keys), f"clear of {len(keys)} rows of {partition}")

    def partitions(self) -> list[str]:
        return list(self._call(self._client.async_get_partition_list(), "list of partitions"))

    def clear_partition(self, partition: str) -> None:
        self._call(self._client.async_clear_partition(partition), f"clear of {partition}")

    def close(self) -> None:
        """End pending calls and leave; a call left on a stopped loop would be destroyed by the garbage collector."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)
        self._client.close()

    def _call(self, work: Coroutine[object, object, Result], name: str) -> Result:
        """Run one client call: QueueLostError once an actor of the queue is dead, otherwise wait until the
        deadline."""
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, self._timeout_s), self._loop)
        try:
            with waiting(name, *ACTORS, deadline_s=self._timeout_s):
                return self._answer(future, name)
        except VimeError:
            raise
        except Exception as error:
            self._check_actors(name)
            raise HandoffLostError(f"TransferQueue: {name} failed: {type(error).__name__}: {error}") from error
        finally:
            future.cancel()

    def _answer(self, future: concurrent.futures.Future[Result], name: str) -> Result:
        ends = time.monotonic() + self._timeout_s
        while True:
            try:
                return future.result(timeout=max(0.0, min(LIVENESS_PROBE_S, ends - time.monotonic())))
            except (TimeoutError, concurrent.futures.CancelledError) as error:
                if future.done() or time.monotonic() >= ends:
                    advice = "If the queue is only slow, raise --transferqueue-timeout-secs."
                    raise WaitTimeoutError(name, self._timeout_s, "TransferQueue", advice) from error
            self._check_actors(name)

    def _check_actors(self, name: str) -> None:
        """QueueLostError when an actor of the queue is dead; one that is only slow passes."""
        for actor_name, actor in self._actors.items():
            try:
                actor.get_zmq_server_info.remote().future().result(timeout=LIVENESS_PROBE_S)
            except TimeoutError:
                continue
            except Exception as error:
                raise QueueLostError(
                    f"{name} cannot finish: the {actor_name} is dead ({first_line(error)}). What it held is lost: "
                    "start again with --load to resume."
                ) from error


async def _store_rows(client: KeyedClient, partition: str, keys: list[str], rows: list[bytes]) -> None:
    from tensordict import NonTensorStack, TensorDict

    fields = TensorDict({ROW_FIELD: NonTensorStack(*rows)}, batch_size=[len(keys)])
    meta = await client.async_kv_retrieve_meta(keys, partition, create=True)
    await client.async_put(fields, meta)


async def _confirm_rows(client: KeyedClient, partition: str, keys: list[str]) -> None:
    seen = await client.async_kv_retrieve_meta(keys, partition, create=False)
    if seen.size != len(keys) or ROW_FIELD not in seen.field_names:
        raise HandoffLostError(
            f"{partition}: not all of the {len(keys)} rows just put can be seen ({seen.size} keys, with the columns "
            f"{sorted(seen.field_names)}). The controller missed the notification; see its log."
        )


async def _clear_rows(client: KeyedClient, partition: str, keys: list[str]) -> None:
    meta = await client.async_kv_retrieve_meta(keys, partition, create=False)
    if meta.size:
        await client.async_clear_samples(meta)


async def _get_rows(client: KeyedClient, partition: str, keys: list[str]) -> list[bytes]:
    meta = await client.async_kv_retrieve_meta(keys, partition, create=False)
    if meta.size != len(keys) or ROW_FIELD not in meta.field_names:
        raise HandoffLostError(
            f"{partition}: {meta.size} of {len(keys)} rows are in the queue, with the columns "
            f"{sorted(meta.field_names)}. The round was cleared already, or its storage was lost."
        )
    data = await client.async_get_data(meta)
    return list(data[ROW_FIELD].tolist())


async def _cancel_others() -> None:
    """Cancel every other task of this loop and wait until each has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _server_info(name: str, actor: QueueActor, ends: float, timeout_s: float) -> object:
    left_s = max(0.0, ends - time.monotonic())
    try:
        with waiting(f"start of the {name}", *ACTORS, deadline_s=left_s):
            return actor.get_zmq_server_info.remote().future().result(timeout=left_s)
    except TimeoutError as error:
        advice = "Ray has not placed it or it is slow to start. Free CPUs, or raise --transferqueue-timeout-secs."
        raise WaitTimeoutError(f"start of the {name}", timeout_s, "Ray", advice) from error
    except Exception as error:
        raise HandoffLostError(f"{name}: did not start: {first_line(error)}. See the Ray logs.") from error


def _frame(key: str, payload: bytes) -> bytes:
    name = key.encode()
    return _KEY_LENGTH.pack(len(name)) + name + payload


def _unframe(partition: str, key: str, row: bytes) -> bytes:
    [length] = _KEY_LENGTH.unpack_from(row)
    start = _KEY_LENGTH.size + length
    if row[_KEY_LENGTH.size : start] != key.encode():
        held = row[_KEY_LENGTH.size : start].decode(errors="replace")
        raise HandoffLostError(f"{partition}: asked for row {key}, got row {held}. It was cleared meanwhile.")
    return row[start:]
