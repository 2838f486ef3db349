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
    """Heartbeats say what `alive` says. A lease gets `prompts`; without them no response: the run ended between two
    calls."""

    def __init__(self, alive: m.Alive, prompts: m.Prompts | None = None) -> None:
        self.alive, self.prompts, self.asked = alive, prompts, []

    async def call(self, path, message, kind, **waits):
        self.asked.append(path)
        if kind is m.Alive:
            return self.alive
        if self.prompts is not None:
            return self.prompts
        return await asyncio.Event().wait()


class Loader:
    """Loads nothing, and fails the test when it is asked to."""

    async def bring(self, version):
        raise AssertionError(f"version {version} is loaded though the run is over")

    async def report(self, version): ...


def run_with(gateway, tmp_path) -> JobWorker:
    write_model_directory(tmp_path / "model")
    args = make_args("--hf-checkpoint", tmp_path / "model", "--rm-type", "exact_match")

    async def run():
        worker = JobWorker(args, gateway, REGISTERED, Loader(), num_prompts=2)
        async with asyncio.timeout(20):
            await worker.run()
        await worker.leave()
        return worker

    return asyncio.run(run())


@pytest.mark.timeout(60)
def test_a_job_that_a_heartbeat_told_of_the_end_waits_for_no_lease_any_longer(tmp_path):
    gateway = Gateway(m.Alive(leases=[], serving=1, is_exhausted=True))
    assert run_with(gateway, tmp_path).is_exhausted
    assert "/v1/leases" in gateway.asked
    assert "/v1/producers/leave" not in gateway.asked  # nothing to give back, and perhaps nobody there


@pytest.mark.timeout(60)
def test_a_job_that_hears_of_the_end_does_not_load_the_last_weights_first(tmp_path):
    """They are offered just before the run ends: the gateway would be gone when the job reports them."""
    over = m.Prompts(prompts=[], serving=1, is_exhausted=True)
    assert run_with(Gateway(m.Alive(leases=[], serving=1), over), tmp_path).is_exhausted
