"""--partial-rollout: an engine that is killed while it continues a completion takes no earlier token along."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch

from tests.helpers.engines import engine_config
from tests.helpers.rollout_setup import make_args
from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.router import RouterProcess
from vime.backends.vllm_utils.routes import REQUESTS_ROUTE
from vime.rollout.generation import close_clients, generate, train_sampling_params
from vime.rollout.loops import rollout_loop
from vime.types import EngineAddress, Sample, SampleStatus, VersionSpan
from vime.weights.plan import TensorMeta
from vime.weights.publish import publish
from vime.weights.transports import make_sender

ENGINE = """
import sys
import vime.weights.transports
from vime.backends.vllm_utils.fake import FakeEngine
own = int(sys.argv[1])
with FakeEngine(complete=lambda request: ([own] * 99, [-own / 100] * 99), token_s=0.5) as it:
    print(it.address.url, flush=True)
    sys.stdin.read()
"""
OWN = (50, 60)  # the token that each engine samples, with log-probability -0.5 and -0.6


@pytest.fixture
def engines():
    """Two engines that take half a second for a token, each a process."""
    with ExitStack() as stack:
        started: list[subprocess.Popen] = []
        for own in OWN:
            command = [sys.executable, "-c", ENGINE, str(own)]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(started[-1].wait, 60)
            stack.callback(started[-1].kill)
        yield [(process, process.stdout.readline().strip()) for process in started]


def serve_version_5(addresses: list[EngineAddress], directory: Path) -> None:
    fleet = FleetControl(addresses, timeout_s=60)
    sender = make_sender("shm", bucket_bytes=1024, directory=directory, timeout_s=60)
    sender.connect(fleet)
    pair = ("w", torch.zeros(2))
    metadata = [TensorMeta.of(*pair)]
    publish(iter([pair]), metadata, version=5, fleet=fleet, sender=sender, pause_mode="keep", deadline_s=60)
    sender.close()
    fleet.close()


def with_the_request(urls: list[str]) -> int:
    """Return the number of the engine that works on a request, once one does."""
    ends = time.monotonic() + 60
    while True:
        for number, url in enumerate(urls):
            if httpx.get(url + REQUESTS_ROUTE).json()["in_progress"]:
                return number
        assert time.monotonic() < ends, "no engine got the request"


@pytest.mark.timeout(180)
def test_tokens_of_an_earlier_version_outlive_the_engine_that_continued_them(engines, tmp_path, model_dir):
    addresses = [EngineAddress(name=f"engine-{number}", url=url) for number, (_, url) in enumerate(engines)]
    serve_version_5(addresses, tmp_path)
    router = RouterProcess(engine_config(Path("unused")), addresses, run_dir=tmp_path)
    router.start()
    try:
        router.wait_ready(60)
        port = router.url.rpartition(":")[2]
        args = make_args(
            "--hf-checkpoint", model_dir, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", port,
            "--partial-rollout", "--max-staleness", 1, "--rollout-max-response-len", 8,
        )  # fmt: skip
        sample = Sample(index=0, tokens=[7, 8])
        sample.append_response_tokens([30, 31, 32], [-0.1, -0.2, -0.3], versions=[VersionSpan(4, 0, 3)])
        sample.status = SampleStatus.ABORTED  # what a publish cut in version 4
        with ThreadPoolExecutor(1) as pool:
            going_on = generate(args, sample, train_sampling_params(args))
            asked = pool.submit(rollout_loop().run, going_on, name="the rest of the completion", timeout_s=120)
            killed = with_the_request([url for _, url in engines])
            engines[killed][0].kill()
            asked.result()
    finally:
        close_clients()
        router.stop()
    other = OWN[1 - killed]
    assert sample.tokens == [7, 8, 30, 31, 32, *[other] * 5]  # 8 in all, of which 3 were there
    assert sample.rollout_log_probs == pytest.approx([-0.1, -0.2, -0.3, *[-other / 100] * 5])
    assert sample.token_policy_versions == [VersionSpan(4, 0, 3), VersionSpan(5, 3, 8)]
    assert sample.status is SampleStatus.TRUNCATED
