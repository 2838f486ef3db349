"""vLLM's server reads its settings until it has started, and not for each token of each request."""

from __future__ import annotations

import os
import subprocess
import sys

from vime.backends.vllm_utils.access import EngineKeys

SCRIPT = """
import asyncio, os
from starlette.applications import Starlette
from vllm import envs
from vime.backends.vllm_utils.routes import EngineMiddleware

async def start_and_stop():
    told = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    async def receive():
        return told.pop(0)
    async def send(message):
        print(message["type"])
    await app({"type": "lifespan", "state": {}}, receive, send)

app = Starlette()
app.add_middleware(EngineMiddleware)
for value in "10":
    os.environ["VLLM_SERVER_DEV_MODE"] = value
    print("before", envs.VLLM_SERVER_DEV_MODE)
asyncio.run(start_and_stop())
os.environ["VLLM_SERVER_DEV_MODE"] = "1"
print("after", envs.VLLM_SERVER_DEV_MODE)
"""


def test_vllm_reads_its_settings_no_more_once_its_server_has_started() -> None:
    keys = EngineKeys(control="control-key", generate="generate-key").environment()
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **keys}, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.splitlines() == [
        *("before True", "before False"),
        *("lifespan.startup.complete", "lifespan.shutdown.complete"),
        "after False",
    ], ran.stderr
