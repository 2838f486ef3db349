"""A run that external producers feed: the gateway with real weights of a tiny model, and a trainer that takes rounds,
makes the next version, and ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.gateway_run import ROOT, GatewayRun
from tests.helpers.rollout_setup import write_jsonl, write_model_directory
from tests.helpers.tiny_models import perturb
from tests.helpers.weight_files import write_weights
from vime.handoff.ledger_types import Task
from vime.handoff.round_ledger import RoundLedger
from vime.types import Sample

EXAMPLES = ROOT / "examples" / "external"
ROUND_S = 120.0


class ExternalRun:
    """`num_rounds` rounds of two groups; round r is trained on version r, which has weights of its own."""

    def __init__(
        self, directory: Path, *, num_rounds: int, lease_timeout_s: float = 30.0, max_staleness: int = 1, **more: Any
    ) -> None:
        self.directory, self.num_rounds = directory, num_rounds
        self.model_directory = write_model_directory(directory / "model")
        write_jsonl(directory / "prompts.jsonl", [{"input": letter, "label": letter} for letter in "abcdef"])
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(self.model_directory)
        self.model = AutoModelForCausalLM.from_config(config).eval()
        self.states: list[dict[str, torch.Tensor]] = []
        manifest = self._write_version(0)
        self.run = GatewayRun(
            directory, manifest=manifest, num_rounds=num_rounds, lease_timeout_s=lease_timeout_s,
            max_staleness=max_staleness,
            limits={"lease_timeout_s": lease_timeout_s, "max_body_bytes": 1 << 20}, **more,
        )  # fmt: skip
        self.trained: list[tuple[Task, list[Sample]]] = []
        self.fault: BaseException | None = None
        self._trainer = threading.Thread(target=self._train, daemon=True)

    def start(self) -> None:
        """Let the trainer work; without it four groups, the slots, can be put."""
        self._trainer.start()

    def wait(self) -> None:
        """Until every round is trained and the producers are told to leave."""
        self._trainer.join(self.num_rounds * ROUND_S)
        if self.fault is not None:
            raise self.fault
        assert not self._trainer.is_alive(), self.run.gateway.jobs

    def _train(self) -> None:
        try:
            for round_id in range(self.num_rounds):
                self._round(round_id)
        except BaseException as error:
            self.fault = error

    def _round(self, round_id: int) -> None:
        port, seen, ends = self.run.port, -1, time.monotonic() + ROUND_S
        while (found := port.call(RoundLedger.lease, round_id, version=round_id, holder="t", count=2).lease) is None:
            assert time.monotonic() < ends, f"round {round_id} did not become full"
            seen = port.wait_for_news(seen, 1.0)
        for group in found.groups:
            self.trained.append((group.task, self.run.store.samples(group.task, group.payload.checksum)))
        port.call(RoundLedger.trained, round_id, found.fence)
        perturb(self.model, seed=round_id)
        self.run.weights.release(self._write_version(round_id + 1))
        if round_id >= 1:  # jobs that are slow get the newest one
            shutil.rmtree(self.directory / "weights" / str(round_id - 1))
            self.run.weights.forget(round_id - 1)
        port.call(RoundLedger.release, round_id + 1)

    def _write_version(self, version: int):
        state = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.states.append(state)
        return write_weights(self.directory / "weights" / str(version), state, version)

    def log_probs(self, sample: Sample) -> list[float]:
        """What a plain forward gives for the completion, with the weights that the sample names."""
        [span] = sample.token_policy_versions
        self.model.load_state_dict(self.states[span.version])
        with torch.no_grad():
            logp_TV = self.model(torch.tensor([sample.tokens[:-1]])).logits[0].float().log_softmax(-1)
        start = len(sample.tokens) - sample.response_length
        return [float(logp_TV[place - 1, sample.tokens[place]]) for place in range(start, len(sample.tokens))]

    def close(self) -> None:
        self.run.gateway.is_stopping = True  # ends calls that wait
        if self._trainer.ident is not None:
            self._trainer.join(ROUND_S)
        self.run.close()


class Producer:
    """A producer in a process of its own; its output is in a file."""

    def __init__(self, words: list[str], directory: Path, token: str, **variables: str) -> None:
        self.log = directory / f"producer-{token[5:21]}.log"
        self._file = self.log.open("ab")
        self.process = subprocess.Popen(
            words, stdout=self._file, stderr=subprocess.STDOUT, cwd=directory,
            env={**os.environ, "VIME_TOKEN": token, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **variables},
        )  # fmt: skip

    def wait(self, timeout_s: float = 120.0) -> int:
        return self.process.wait(timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def close(self) -> None:
        self.kill()
        self.process.wait(20)
        self._file.close()


class Bringer(threading.Thread):
    """A job with prompts of its own and without an engine: made-up tokens under the keys 0, 1, 2, ... as one process
    after the other may send them. It reports the hashes that manifests name, also those of older versions."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(daemon=True)
        self.client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60.0)
        self.put: list[dict[str, Any]] = []  # the calls that were acknowledged
        self.hashes: dict[int, str] = {}  # by version
        self.is_stopping = False

    def run(self) -> None:
        facts, body = None, None
        while not self.is_stopping:
            try:
                facts = facts or self.client.post("/v1/producers/register", json={"model": "none"}).json()
                version = self.load()
                body = body or self.group(str(len(self.put)), version, facts["samples_per_prompt"])
                response = self.client.post("/v1/groups/own", json=body)
                if response.status_code == 200:
                    self.put.append(body)
                    body = None
                elif response.json()["code"] == "unconfirmed_version":  # a gateway that was started again
                    self.report(body["samples"][0]["versions"][0][2])
                elif not response.json()["may_repeat"]:
                    return
            except (httpx.TransportError, ValueError, KeyError):  # the run starts, or its gateway does again
                time.sleep(0.1)

    def load(self) -> int:
        manifest = self.client.get("/v1/weights/serving").json()
        self.hashes[manifest["version"]] = manifest["content_hash"]
        self.report(manifest["version"])
        return int(manifest["version"])

    def report(self, version: int) -> None:
        loaded = {"version": version, "engines": {"none": self.hashes[version]}}
        self.client.post("/v1/weights/loaded", json=loaded)

    def group(self, key: str, version: int, size: int) -> dict[str, Any]:
        rows = [
            {"index": place, "tokens": [5, 6, 7, 8], "response_length": 2, "log_probs": [-1.0, -1.0],
             "versions": [[0, 2, version]], "reward": float(place)}
            for place in range(size)
        ]  # fmt: skip
        return {"key": key, "prompt": "mine", "metadata": {"number": key}, "samples": rows, "wait_s": 5}

    def close(self) -> None:
        self.is_stopping = True
        if self.ident is not None:
            self.join(120.0)
        self.client.close()


def python_words(url: str, model: Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / "producer.py"), url, "--model", str(model), "--max-new-tokens", "6"]


def javascript_words(url: str, model: Path) -> list[str]:
    return [shutil.which("node") or "node", str(EXAMPLES / "producer.mjs"), url, "--model", str(model)]
