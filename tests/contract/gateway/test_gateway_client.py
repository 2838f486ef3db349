"""The client of our own rollout jobs, with a real gateway."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.helpers.gateway_run import GatewayRun, confirm, group_of, lease
from vime.gateway import messages as m
from vime.gateway.client import GatewayClient, RefusedError
from vime.gateway.tokens import Scope


def test_a_gateway_that_forgot_the_weights_is_told_to_the_job_at_once(tmp_path: Path) -> None:
    """Repeated by the client alone, the call would be refused until the job gives up: nobody reports the weights while
    every prompt of the job waits in such a call."""
    run = GatewayRun(tmp_path)
    try:
        token = run.tokens.make("job-a", (Scope.TRAIN,), seconds=600)
        job = run.client("job-a")
        put = msgspec.convert(group_of(lease(job)[0]), m.PutGroup)
        run.weights.forget_confirmations()

        async def call() -> m.Put:
            client = GatewayClient(run.server.url, token, patience_s=3.0)
            try:
                return await client.call("/v1/groups", put, m.Put)
            finally:
                await client.close()

        with pytest.raises(RefusedError) as refused:
            asyncio.run(call())
        assert refused.value.code == "unconfirmed_version"
        confirm(job)
        assert asyncio.run(call()).is_committed
    finally:
        run.close()
