"""A gateway over a real ledger, spool and data source, with a dict in place of TransferQueue; here or in a process that
a test may kill: `python -m tests.helpers.gateway_run DIRECTORY`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.helpers.rollout_setup import make_args, write_jsonl, write_model_directory
from vime.gateway.app import make_app
from vime.gateway.messages import WeightManifest
from vime.gateway.samples import Limits
from vime.gateway.server import GatewayServer
from vime.gateway.service import Gateway
from vime.gateway.tokens import Scope, TokenFile
from vime.gateway.weights import Weights
from vime.handoff.group_store import GroupStore, MemoryStore
from vime.handoff.ledger import Ledger, LocalLedgerPort
from vime.handoff.ledger_types import LedgerRules
from vime.handoff.spool import Spool
from vime.rollout.convert import encoded_group
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.group_writer import GroupWriter
from vime.rollout.worker import payload_of

ROOT = Path(__file__).resolve().parents[2]
URL_FILE, START_S = "url", 60.0
HASH = "hash-of-version-"


class GatewayRun:
    """What a run has around its gateway. Two samples a prompt, four slots, six prompts, versions of hash HASH + v.
    `port`: of a ledger that is open elsewhere; `certificates`: for TLS."""

    ledger = None

    def __init__(
        self,
        directory: Path,
        *,
        clock=time.monotonic,
        limits=None,
        wraps_store=None,
        manifest=None,
        flags=(),
        port=None,
        certificates=None,
        **rules,
    ):
        model = directory / "model"
        if not model.is_dir():
            write_model_directory(model)
            write_jsonl(directory / "prompts.jsonl", [{"input": letter, "label": letter} for letter in "abcdef"])
        self.args = make_args(
            "--hf-checkpoint", model, "--prompt-data", directory / "prompts.jsonl", "--label-key", "label",
            "--rm-type", "exact_match", "--rollout-batch-size", 2, "--n-samples-per-prompt", 2,
            "--transferqueue-mode", "streaming", "--rollout-max-response-len", 8,
            *flags,
        )  # fmt: skip
        bounds = {"max_slots": 4, "max_staleness": 1, "lease_timeout_s": 30.0, "num_rounds": 3, "groups_per_round": 2}
        if port is None:
            self.ledger = Ledger(directory / "ledger.db", LedgerRules(**(bounds | rules)), clock=clock)
        self.port, self.queue = port or LocalLedgerPort(self.ledger), MemoryStore()
        self.spool = Spool(directory / "spool")
        self.store = GroupStore(
            self.queue if wraps_store is None else wraps_store(self.queue), self.spool, partition="train"
        )
        self.writer = GroupWriter(self.store, self.port)
        self.tokens = TokenFile(directory)
        self.weights = Weights(
            directory, manifest or WeightManifest(version=0, content_hash=f"{HASH}0", location="weights/0")
        )
        usual = {
            "samples_per_prompt": 2, "max_staleness": 1, "lease_timeout_s": 30.0, "vocab_size": 64, "max_tokens": 64,
            "temperature": 1.0, "max_body_bytes": 1 << 16, "calls_per_s": 1000.0,
        }  # fmt: skip
        self.gateway = Gateway(
            ledger=self.port,
            store=self.store,
            writer=self.writer,
            prompts=RolloutDataSourceWithBuffer(self.args),
            encode=self._encode,
            weights=self.weights,
            limits=Limits(**(usual | (limits or {}))),
            lease_key=self.tokens.lease_key,
        )
        tls = {} if certificates is None else {"certificate": certificates.certificate, "key": certificates.key}
        self.server = GatewayServer(make_app(self.gateway, self.tokens), "127.0.0.1:0", **tls)
        self.server.start()

    def _encode(self, producer, samples):
        group = encoded_group(self.args, samples, producer_id=producer, with_samples=True)
        return group, payload_of(group, samples)

    def client(
        self, name: str = "job-a", *, scopes=(Scope.TRAIN,), confirms: bool = True, seconds: float = 600
    ) -> httpx.Client:
        """A job with a token of its own, which has confirmed version 0."""
        client = job_client(self.server.url, self.tokens.make(name, scopes, seconds=seconds))
        if confirms:
            confirm(client)
        return client

    def serve(self, client: httpx.Client, version: int) -> None:
        """Publish weights, and let a job confirm them."""
        self.weights.release(WeightManifest(version=version, content_hash=f"{HASH}{version}", location=""))
        confirm(client, version)

    def close(self):
        self.server.stop()
        self.writer.close()
        self.store.close()
        if self.ledger is not None:
            self.ledger.close()


def job_client(url: str, token: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=20.0)


def confirm(client: httpx.Client, version: int = 0) -> None:
    call = {"version": version, "engines": {"engine-0": f"{HASH}{version}"}}
    assert client.post("/v1/weights/loaded", json=call).status_code == 200


def lease(client: httpx.Client, count: int = 1, request: str = "r") -> list[dict]:
    response = client.post("/v1/leases", json={"request": request, "count": count})
    assert response.status_code == 200, response.text
    return response.json()["prompts"]


def sample(index: int, reward: float = 1.0, **changes) -> dict:
    """Two tokens of a prompt and three of a completion, all of version 0."""
    return {
        "index": index, "tokens": [1, 5, 7, 8, 9], "response_length": 3, "log_probs": [-0.5, -0.25, -1.0],
        "versions": [[0, 3, 0]], "reward": reward,
    } | changes  # fmt: skip


def group_of(prompt: dict, **changes) -> dict:
    samples = [sample(s["index"], **({"reward": float(n)} | changes)) for n, s in enumerate(prompt["samples"])]
    return {"lease": prompt["lease"], "samples": samples}


def own_of(key: str = "k", **changes) -> dict:
    """A group for a prompt that the job brings itself."""
    samples = [sample(place, **({"reward": float(place)} | changes)) for place in range(2)]
    return {"key": key, "prompt": "mine", "label": 7, "metadata": {"from": "me"}, "samples": samples}


class GatewayProcess:
    """The same in a process of its own; `failpoints` as in VIME_FAILPOINTS."""

    def __init__(self, directory: Path, failpoints: str = ""):
        self._url = directory / URL_FILE
        self._url.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.gateway_run", str(directory)],
            cwd=ROOT,
            env={**os.environ, "VIME_FAILPOINTS": failpoints, "VIME_FAILPOINTS_DIR": str(directory / "notes")},
        )
        ends = time.monotonic() + START_S
        while not self._url.exists():
            assert self._process.poll() is None, "the gateway ended while it started"
            assert time.monotonic() < ends, "the gateway did not start"
            time.sleep(0.02)  # the file appears when the server listens
        self.url = self._url.read_text()

    def wait_until_dead(self) -> int:
        return self._process.wait(20)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)


def main(directory: Path) -> None:
    run = GatewayRun(directory)
    draft = directory / "url.tmp"
    draft.write_text(run.server.url)
    draft.replace(directory / URL_FILE)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
