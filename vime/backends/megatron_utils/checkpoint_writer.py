"""The bytes of a checkpoint on disk: megatron plans who writes what, this rank writes its part, then all ranks agree.

Two ways to call it. At once: the live tensors are written and the caller waits. In the background: the tensors are
copied to host memory, the caller continues training, and a thread of this rank writes the copies. Both write the same
files with the same code.

megatron's own asynchronous callers are not used (docs/decisions/0007): they fork a process that is full of the threads
of Ray, gloo and OpenMP, share CPU tensors with the training until the fork, and finish by collectives on the training's
own process groups. Here nothing is forked, and ranks communicate over a separate gloo group, so this may run at the
same time as any collective of the training.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Protocol, cast

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from vime.types import CheckpointError, WaitTimeoutError, describe, is_machine_fault
from vime.utils.failpoints import Point, failpoint
from vime.utils.hashing import new_hash
from vime.utils.manifest import Entry
from vime.utils.waits import peer, waiting

logger = logging.getLogger(__name__)
BACKEND, VERSION = "torch_dist", 1


class PlannedStrategy(TorchDistSaveShardedStrategy):
    """megatron's strategy up to the plan; `writer` and `metadata` are what is left to do."""

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION, thread_count=1)  # one file a rank
        self.writer: FileSystemWriterAsync
        self.metadata: Metadata | None  # of all ranks together; on rank 0 only

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: tuple[FileSystemWriterAsync, Metadata | None]
    ) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


class Transforms(Protocol):
    """torch's: encryption and the like, none unless the user of torch asks for one."""

    def transform_save_stream(self, item: WriteItem, stream: IO[bytes]) -> tuple[IO[bytes], list[str]]: ...


Bucket = tuple[str, str, tuple[list[object], Iterable[tuple[WriteItem, Tensor]]]]
"""File, key, and what is written there: objects, which are bytes already, and tensors."""


class HashedFile:
    """Hashes what torch writes into one file, on its way there: reading it back would cost twice as much. Replaces
    torch's transforms, which make a stream for each tensor, and lies below that stream."""

    def __init__(self, transforms: Transforms) -> None:
        self._transforms, self._content, self._num_bytes = transforms, new_hash(), 0
        self._file: IO[bytes]

    @property
    def entry(self) -> Entry:
        return self._num_bytes, self._content.hexdigest()

    def transform_save_stream(self, item: WriteItem, file: IO[bytes]) -> tuple[IO[bytes], list[str]]:
        self._file = file
        return self._transforms.transform_save_stream(item, cast("IO[bytes]", self))  # of a file only what is below

    def write(self, data: bytes) -> int:
        self._content.update(data)
        written = self._file.write(data)
        self._num_bytes += written
        return written

    def flush(self) -> None:
        self._file.flush()


class PendingSave:
    """This rank's part of one checkpoint that is being written.

    The thread *consumes* the buckets of the plan, *waits for* the other ranks over `group`, and is *unblocked by* their
    results or by the end of their processes.
    """

    def __init__(self, directory: Path, planned: PlannedStrategy, group: dist.ProcessGroup) -> None:
        self.directory = directory
        self._writer, self._metadata, self._group = planned.writer, planned.metadata, group
        self.hashes: dict[Path, Entry] = {}
        self._failure: str | None = None
        self._fault: Exception | None = None  # of a peer that is lost: it says nothing about the disk
        self._thread: threading.Thread | None = None

    def copy(self) -> None:
        """Copy the tensors, so that training may change them. Objects (random states) are bytes already."""
        for index, (file, key, (objects, tensors)) in enumerate(self._writer.write_buckets or []):
            copies = []
            while tensors:  # one after the other, so that a copy made by the plan is freed before the next is made
                item, tensor = tensors.pop(0)
                copies.append((item, tensor.detach().to("cpu", copy=True)))
            self._writer.write_buckets[index] = (file, key, (objects, copies))

    def start(self) -> None:
        """Write in the background. Call `copy` before."""
        self._thread = threading.Thread(target=self.run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Write, and learn whether every rank did. Collective over the group of checkpoints."""
        started = time.monotonic()
        try:
            mine: list[WriteResult] | str = [
                result for bucket in self._writer.write_buckets or [] for result in self._write(bucket)
            ]
        except Exception as error:  # boundary: a failure of this rank goes to all ranks as data
            mine = f"rank {dist.get_rank()}: {describe(error)}"
        finally:
            self._writer.write_buckets = None  # gives the copies back
        failpoint(Point.SAVE)
        try:
            self._failure = self._agree(mine)
        except Exception as error:  # boundary: a rank that is gone ends the wait of the others
            self._failure = f"the trainer ranks could not agree: {describe(error)}"
            self._fault = error if is_machine_fault(error) else None
        logger.info("%s: written in %.1f s, failure: %s", self.directory, time.monotonic() - started, self._failure)

    def wait(self, deadline_s: float) -> None:
        """Wait until the checkpoint is complete on every rank. Raises CheckpointError when it cannot be, and what torch
        says of a peer that is lost."""
        if self._thread is not None:
            with waiting("the checkpoint's bytes to be written", deadline_s=deadline_s):
                self._thread.join(deadline_s)
            if self._thread.is_alive():
                raise WaitTimeoutError(
                    f"the checkpoint {self.directory} to be written",
                    deadline_s,
                    "checkpoint-writer",
                    "The disk is slow or a trainer rank hangs; the previous checkpoint is untouched.",
                )
        if self._fault is not None:
            raise self._fault
        if self._failure is not None:
            raise CheckpointError.unwritable(self.directory, self._failure)

    def _write(self, bucket: Bucket) -> list[WriteResult]:
        """Write one file, flushed to the disk, with megatron's own function, which returns results through a queue."""
        answers: queue.Queue[tuple[int, list[WriteResult] | Exception]] = queue.Queue()
        running: queue.Queue[int] = queue.Queue()
        running.put(0)
        hashed = HashedFile(self._writer.transforms)
        file, key, (objects, tensors) = bucket
        # megatron's function takes no tensor of a GPU; one at a time, so that the host holds no second copy of them all
        on_host = ((item, tensor.cpu()) for item, tensor in tensors)
        bucket = (file, key, (objects, on_host))
        FileSystemWriterAsync.write_preloaded_data([hashed], 0, bucket, answers, running, use_fsync=True)
        _, results = answers.get_nowait()
        if isinstance(results, Exception):
            raise results
        self.hashes[Path(file)] = hashed.entry
        return results

    def _agree(self, mine: list[WriteResult] | str) -> str | None:
        """Return the failures of any rank, the same on all ranks. Rank 0 writes the metadata last."""
        is_first = dist.get_rank() == 0
        everyone: list[list[WriteResult] | str | None] | None
        everyone = [None] * dist.get_world_size() if is_first else None
        with waiting("the peers to have written their part of the checkpoint", peer(), deadline_s=None):
            dist.gather_object(mine, everyone, dst=0, group=self._group)
        failure: list[str | None] = [None]
        if everyone is not None:
            failures = [answer for answer in everyone if isinstance(answer, str)]
            results = [answer for answer in everyone if isinstance(answer, list)]
            failure = ["; ".join(failures)[:600] or self._write_contents(results)]
        with waiting("rank 0 to complete the checkpoint", *([] if is_first else [peer(0)]), deadline_s=None):
            dist.broadcast_object_list(failure, src=0, group=self._group)
        return failure[0]

    def _write_contents(self, results: list[list[WriteResult]]) -> str | None:
        try:
            self._writer.finish(self._metadata, results)
            save_config(CheckpointingConfig(BACKEND, VERSION), str(self.directory))
        except Exception as error:  # boundary: the other ranks wait for the result
            return f"rank 0: {describe(error)}"
        return None
