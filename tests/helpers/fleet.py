"""Engines as a run has them, with the scripted engine in vLLM's place, and what a trainer would publish to them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import torch

from tests.helpers.rollout_setup import write_model_directory
from vime.config.parse import parse
from vime.observability.events import EventLog, read_events
from vime.ray.actor import Options
from vime.ray.engines import Engines
from vime.ray.placement import Places
from vime.ray.publisher import Publisher
from vime.types import KEY_HEADER, EngineAddress
from vime.weights.plan import TensorMeta
from vime.weights.publish import PublishReport

SCRIPTED = "vime.backends.vllm_utils.scripted_server"
HEALTH_S = 15.0  # a scripted engine that imports torch, on a busy core, responds within it


class Fleet:
    """Engines as a run has them, and what a trainer would publish to them. `parts`: on how many nodes each is, all of
    which are this machine."""

    def __init__(self, directory: Path, model: Path, count: int, *flags: str, parts: int = 1) -> None:
        self.directory, self.told = directory, list[str]()
        self.config = parse(
            [
                *("--device", "cpu", "--hf-checkpoint", str(model), "--debug-engine-module", SCRIPTED),
                *("--rollout-num-engines", str(count), "--engine-health-interval-secs", "0.5"),
                *("--engine-health-timeout-secs", str(HEALTH_S), "--update-weight-transport", "shm"),
                *("--update-weight-buffer-size", "1024", *flags),  # of one tensor
            ]
        )
        places = Places(engines=[[Options()] * parts] * count)
        self.engines = Engines(self.config, directory, EventLog(directory, "driver"), self.told.append, places=places)
        self.connected = self.engines.wait_ready(ray.get_runtime_context().get_node_id())
        self.routers = [
            f"http://{self.connected.engine.vllm_router_ip}:{port}" for port in self.connected.engine.router_ports
        ]
        self.router = self.routers[0]
        self._publisher: Publisher | None = None
        self.new: list[str] = []  # engines for which the newest update was the first since their start

    def publish(
        self, version: int, during: Callable[[], None] = lambda: None, midway: Callable[[], None] = lambda: None
    ) -> list[str]:
        """One update of 8 buckets, as TrainerActor and Components make it; `during` runs between the choice of engines
        and the first bucket, `midway` before the fifth, each once. Returns the engines that confirmed it."""
        weights = {f"w{number}": torch.full((16, 16), float(version)) for number in range(8)}
        metadata, todo = [TensorMeta.of(*pair) for pair in weights.items()], {"during": during, "midway": midway}

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights.items():
                if name == "w4":
                    todo.pop("midway", lambda: None)()
                yield name, tensor

        def send(addresses: list[EngineAddress]) -> PublishReport:
            if self._publisher is not None and not self._publisher.reaches(addresses):
                self._publisher.close()
                self._publisher = None
            self._publisher = self._publisher or Publisher(self.config, self.directory, addresses, may_lose=True)
            todo.pop("during", lambda: None)()
            return self._publisher.publish(stream(), metadata, version)

        report = self.engines.update(send)
        self.new = [address.name for address in self.engines.new(report.engine_reports)]
        self.engines.served(version, report.engine_reports)
        return sorted(each.engine for each in report.engine_reports)

    def server(self, index: int) -> psutil.Process:
        """The scripted engine itself, below its guard."""
        url = self.engines._engines[index].address.url
        port = url.rpartition(":")[2]
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if command[1:3] == ["-m", SCRIPTED] and port in command:
                return process
        raise AssertionError(f"no scripted engine at {url}")

    def further_server(self, index: int) -> psutil.Process:
        """The second part of an engine, below its guard."""
        command = self.server(index).cmdline()
        meeting = command[command.index("--master-port") + 1]
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if command[1:3] == ["-m", SCRIPTED] and meeting in command and "--headless" in command:
                return process
        raise AssertionError(f"no further part of engine-{index} in {command}")

    def router_server(self, number: int = 0) -> psutil.Process:
        """The router itself, below its guard."""
        actor_pid = ray.get(self.engines._routers.each[number].actor.run(lambda _: os.getpid()), timeout=60)
        for process in psutil.Process(actor_pid).children(recursive=True):
            if "vllm::router" in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"no router below {actor_pid}")

    def check_until(self, is_so: Callable[[], bool], deadline_s: float = 90) -> None:
        """Do what the driver does while it waits."""
        ends = time.monotonic() + deadline_s
        while not is_so():
            assert time.monotonic() < ends, self.events()
            self.engines.check()
            time.sleep(0.05)

    def events(self) -> list[tuple[str, str]]:
        return [
            (event.kind, str(event.fields["engine"])) for event in read_events(self.directory) if "engine" in event.kind
        ]

    def router_events(self) -> list[str]:
        return [event.kind for event in read_events(self.directory) if "router" in event.kind]

    def routers_lost(self) -> list[str]:
        return [str(event.fields["router"]) for event in read_events(self.directory) if event.kind == "router_lost"]

    def routed(self, number: int = 0) -> list[str]:
        """Names of the engines that the router sends to."""
        urls = httpx.get(f"{self.routers[number]}/list_workers").json()["urls"]
        return [engine.name for engine in self.engines._engines if engine.address and engine.address.url in urls] + [
            f"unknown {url}" for url in urls if url not in {address.url for address in self.engines.addresses}
        ]

    def versions(self, num_requests: int, number: int = 0) -> set[str]:
        """The versions on the tokens of so many requests to the router; every one has to succeed."""
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 0}}
        headers = {KEY_HEADER: self.engines.generate_key}
        found = set()
        for _ in range(num_requests):
            response = httpx.post(
                f"{self.routers[number]}/inference/v1/generate", json=body, headers=headers, timeout=60
            )
            assert response.status_code == 200, response.text
            spans = response.json()["choices"][0]["weight_versions"]
            found |= {span["version"] for span in spans}
        return found

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self.engines.stop()


@pytest.fixture
def start_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    model = write_model_directory(tmp_path / "model")
    made: list[Fleet] = []

    def started(count: int, *flags: str, parts: int = 1) -> Fleet:
        made.append(Fleet(tmp_path / "run", model, count, *flags, parts=parts))
        return made[-1]

    yield started
    for fleet in made:
        fleet.close()
