"""The worker of `vime produce` before a gateway that is played by a list of responses."""

import asyncio

import pytest

from tests.helpers.rollout_setup import make_args, write_model_directory
from vime.gateway import messages as m
from vime.ray.job_worker import JobWorker

REGISTERED = m.Registered(
    producer="job", protocol=1, serving=0, samples_per_prompt=1, max_staleness=0, temperature=1.0, lease_timeout_s=0.06,
    max_body_bytes=1 << 20,
)  # fmt: skip


class Gateway:
    """Never responds to a lease: the run ended between two calls. Heartbeats say what `alive` says."""

    def __init__(self, alive: m.Alive) -> None:
        self.alive, self.asked = alive, []

    async def call(self, path, message, kind, **waits):
        self.asked.append(path)
        if kind is m.Alive:
            return self.alive
        return await asyncio.Event().wait()


class Loader:
    async def bring(self, version): ...
    async def report(self, version): ...


@pytest.mark.timeout(30)
def test_a_job_that_a_heartbeat_told_of_the_end_waits_for_no_lease_any_longer(tmp_path):
    write_model_directory(tmp_path / "model")
    args = make_args("--hf-checkpoint", tmp_path / "model", "--rm-type", "exact_match")
    gateway = Gateway(m.Alive(leases=[], serving=1, is_exhausted=True))

    async def run():
        worker = JobWorker(args, gateway, REGISTERED, Loader(), num_prompts=2)
        async with asyncio.timeout(20):
            await worker.run()
        await worker.leave()
        return worker

    worker = asyncio.run(run())
    assert worker.is_exhausted
    assert "/v1/leases" in gateway.asked
    assert "/v1/producers/leave" not in gateway.asked  # nothing to give back, and perhaps nobody there
