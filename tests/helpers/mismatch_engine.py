"""A real trainer beside a real engine, with faults that only weights and caches can have. Runs in a process of its own:
the trainer's device layer must not reach the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.helpers.dist_launch import Ranks
from tests.helpers.engines import KEYS, engine_config
from tests.helpers.megatron_models import make_plan
from vime.backends.vllm_utils.control import FleetControl
from vime.config.checks import FP32_THRESHOLD
from vime.config.lora import AdapterInfo
from vime.data.rows import TrainRow
from vime.observability.mismatch_record import Stage, write_record
from vime.protocols import UpdateResponse
from vime.ray.backends import make_backend
from vime.ray.mismatch_probes import MismatchProbes
from vime.rollout.engine_client import read_version
from vime.training.evidence import MeasuredMismatch
from vime.training.export import weights_hash
from vime.training.mismatch import Judge, LogprobMismatch
from vime.training.worker import TrainWorker
from vime.types import EngineAddress, RankInfo, SamplingRule, VersionSpan
from vime.weights.publish import publish
from vime.weights.transports import make_sender
from vime.weights.update_info import UpdateInfo, is_last

PROMPT = [5 + (7 * position) % 100 for position in range(300)]  # 18 full cache blocks of 16 tokens
NUM_TOKENS = 24


class CarelessControl(FleetControl):
    """Forgets to clear the prefix cache, when told so."""

    clears = True

    def update(
        self, update_info: UpdateInfo, *, version: int, pause_mode: str, adapter: AdapterInfo | None = None
    ) -> UpdateResponse:
        """By vLLM's own routes, one after the other, which Vime's do in one."""
        assert adapter is None
        if self.clears:
            return super().update(update_info, version=version, pause_mode=pause_mode)
        if update_info["index"] == 0:
            self._http.post(f"/pause?mode={pause_mode}&clear_cache=false")
            self._http.post("/start_weight_update")
        self._http.post("/update_weights", {"update_info": update_info})
        if not is_last(update_info):
            return UpdateResponse(pause_s=0.0, confirm_s=0.0, reports=[])
        self._http.post("/finish_weight_update", {"weight_version": str(version)})
        return UpdateResponse(pause_s=0.0, confirm_s=0.0, reports=self.reports())


class Pair:
    """One trainer rank and one engine. `Trainers` as far as probes need it."""

    def __init__(self, ranks: Ranks, model: Path, engine: EngineAddress, directory: Path) -> None:
        self.config = engine_config(model, distributed_backend="gloo", distributed_timeout_minutes=1.0, lr=1e-3)
        rank = RankInfo(
            rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=ranks.rendezvous("pair", 1)
        )
        self.worker = TrainWorker(self.config, make_backend(self.config, rank), total_steps=1)
        self.engine, self.directory = engine, directory
        self.fleet = CarelessControl([engine], timeout_s=60)
        self.sender = make_sender("shm", bucket_bytes=60_000, directory=directory, timeout_s=60)
        self.sender.connect(self.fleet)
        self.versions = itertools.count(200)
        self.version = 0

    def log_probs(self, rows: list[TrainRow], rule: SamplingRule) -> list[list[float]]:
        return [logp_R.tolist() for logp_R in self.worker.log_probs(rows, rule)]

    def weights_hash(self) -> str:
        return weights_hash(self.worker.actor)

    def push(self, *, noise: float = 0.0) -> None:
        """Publish the trainer's weights as the next version, or others under its name."""
        generator = torch.Generator().manual_seed(1)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.worker.actor.export_weights():
                yield name, (tensor + noise * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)

        self.version = next(self.versions)
        publish(
            stream(), self.worker.actor.weight_metadata(), version=self.version, fleet=self.fleet, sender=self.sender,
            pause_mode="wait", deadline_s=60,
        )  # fmt: skip

    def sampled(self, prompt: Sequence[int], num_rows: int = 4) -> list[TrainRow]:
        body = {
            "token_ids": list(prompt),
            "sampling_params": {
                "n": num_rows, "max_tokens": NUM_TOKENS, "logprobs": 0, "ignore_eos": True, "detokenize": False
            },
        }  # fmt: skip
        url = f"{self.engine.url}/inference/v1/generate"
        answer = httpx.post(url, json=body, headers=self.engine.headers, timeout=60).raise_for_status()
        return [
            TrainRow(
                sample_index=number,
                group_index=0,
                rollout_id=self.version,
                tokens=(*prompt, *choice["token_ids"]),
                response_length=NUM_TOKENS,
                loss_mask=(1,) * NUM_TOKENS,
                rollout_log_probs=tuple(entry["logprob"] for entry in choice["logprobs"]["content"]),
                token_policy_versions=tuple(
                    VersionSpan(read_version(span["version"]), span["start"], span["end"])
                    for span in choice["weight_versions"]
                ),
                reward=1.0,
                raw_reward=1.0,
                status="truncated",
                truncated=True,
            )
            for number, choice in enumerate(answer.json()["choices"])
        ]

    def measured(self, rows: Sequence[TrainRow]) -> dict[str, Any]:
        """The mean of a judged round, and the file that records a large one; weights stay where they are."""
        plan = make_plan(list(rows), dp_size=1)
        try:
            self.worker.train_round(plan, dict(enumerate(rows)), judge=Judge(version=self.version, threshold=-1.0))
        except LogprobMismatch as error:
            found: MeasuredMismatch = error.measured
        if found.mean <= FP32_THRESHOLD:
            return {"mean": found.mean, "record": None}
        probes = MismatchProbes(
            self.config, trainers=self, fleet=self.fleet, texts_of=lambda _, indices: [None for _ in indices],
            threshold=FP32_THRESHOLD,
        )  # fmt: skip
        record = probes.record(
            found, rollout_id=self.version, stage=Stage.BEFORE_TRAINING, version=self.version, rule=SamplingRule()
        )
        return {"mean": found.mean, "record": str(write_record(self.directory, record))}


def run(ranks: Ranks, model: Path, url: str) -> dict[str, Any]:
    pair = Pair(ranks, model, EngineAddress(name="engine-0", url=url, key=KEYS.control), ranks.directory)
    pair.push()
    answers = {"sound": pair.measured(pair.sampled(PROMPT))}
    pair.push(noise=0.02)
    answers["other weights"] = pair.measured(pair.sampled(PROMPT)) | {"hash": pair.weights_hash()}
    pair.fleet.clears = False
    pair.push()  # the trainer's weights, over keys and values of the others
    answers["stale cache"] = pair.measured(pair.sampled(PROMPT))
    pair.fleet.clears = True
    pair.push()
    answers["sound again"] = pair.measured(pair.sampled(PROMPT))
    pair.sender.close()
    pair.fleet.close()
    pair.worker.backend.close()
    return answers
