"""Where processes of torch.distributed meet: a store that listens on one address. torch's own listens on all.

Every host that reaches a store may write to it, because torch asks for no secret: only hosts of the run may reach its
address (docs/security.md).
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from vime.config.cluster import ClusterConfig
from vime.types import ClusterError, RankInfo
from vime.utils.network import listener
from vime.utils.waits import peer, waiting


def open_store(
    host: str, port: int, world_size: int, *, timeout: timedelta, wait_for_workers: bool = False
) -> dist.TCPStore:
    """Open the store in the process where the others meet; port 0 takes a free one. OSError when the port is taken."""
    server = listener(host, port, backlog=max(128, world_size))
    port = server.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        master_listen_fd=server.detach(),  # the store closes it
    )


def join_store(host: str, port: int, world_size: int, *, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store from another process. Waits until its host listens, at most `timeout`."""
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)


def meet(host: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Open the store on rank 0, join it on the others; returns when all are there. Each rank calls it once."""
    if rank == 0:
        return open_store(host, port, world_size, timeout=timeout, wait_for_workers=True)
    return join_store(host, port, world_size, timeout=timeout)


def meet_trainer_ranks(rank: RankInfo, cluster: ClusterConfig) -> None:
    """Make the process group of all trainer ranks. Collective over them.

    A collective that a peer never joins fails after --distributed-timeout-minutes on every rank that waits.
    """
    host, port, timeout = rank.master_address, rank.master_port, timedelta(minutes=cluster.distributed_timeout_minutes)
    try:
        with waiting("the other trainer ranks to meet", peer(), deadline_s=timeout.total_seconds()):
            dist.init_process_group(
                cluster.distributed_backend or ("nccl" if cluster.device == "cuda" else "gloo"),
                store=meet(host, port, rank=rank.rank, world_size=rank.world_size, timeout=timeout),
                rank=rank.rank,
                world_size=rank.world_size,
                timeout=timeout,
            )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise ClusterError(
            f"trainer rank {rank.rank} of {rank.world_size} found no rendezvous at {host}:{port} within "
            f"{timeout.total_seconds():g} s: {error}. Check that every trainer rank started, and "
            "--distributed-timeout-minutes."
        ) from error
