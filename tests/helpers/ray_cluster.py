"""One local Ray for a whole test session. Import the fixture into a conftest.py; a Ray that runs is reused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vime.ray.template import BaseProcess

START_DEADLINE_S = 120.0
CPUS = 4
OBJECT_STORE_BYTES = 200 << 20


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray of 4 logical CPUs, without a dashboard."""
    import ray

    from vime.ray.template import BaseProcess

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # As a run does (vime/ray/cluster.py). By Ray's own 15 the engines of a test almost stop beside the other tests.
    os.environ.setdefault("RAY_worker_niceness", "0")
    starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray-start")
    base = BaseProcess()
    starting = starter.submit(_start, base)
    try:
        starting.result(timeout=START_DEADLINE_S)
    except TimeoutError:
        pytest.fail(f"Ray did not start in {START_DEADLINE_S:g} s; look for leftovers of another one.", pytrace=False)
    yield
    ray.shutdown()
    base.end()
    # Not earlier: Ray's processes are tied to the thread that started them and die with it.
    starter.shutdown(wait=False)


def _start(base: BaseProcess) -> None:
    """Start Ray as a run does (vime/ray/cluster.py): its workers are copies, which saves most of an actor's start."""
    import ray

    from vime.ray.cluster import STOCK_WORKER, servers_alone

    with servers_alone(base.worker_program(STOCK_WORKER)):
        ray.init(
            address="local",  # or Ray joins one that `ray start` has left running, also that of another test
            num_cpus=CPUS,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
    base.begin(with_queue=True)  # not beside Ray's own start: Ray gives that 15 s, also on a busy machine
