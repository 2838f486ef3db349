"""`vime produce`: a rollout job of ours for a run on another machine, which it knows by an address and a token alone.

Engines, router, rewards and plug-ins as in the trainer's own run; weights come as files through the gateway, are loaded
by the engines, and each engine's own hash is reported before the first prompt is taken.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray

from vime.backends.vllm_utils.external import ADDRS_FLAG
from vime.config.parse import Config, dump
from vime.config.rollout import LEASED_PROMPTS
from vime.gateway import messages as m
from vime.gateway.client import GatewayAwayError, GatewayClient, OtherBytesError, RefusedError
from vime.observability.events import EventKind, open_events
from vime.observability.logs import setup_logging
from vime.observability.run_dir import RunDir
from vime.observability.screen import Screen
from vime.ray.cluster import limit_threads, start_ray, stop_ray
from vime.ray.engines import Engines
from vime.ray.interrupts import Interrupts, children_outlive_the_terminal
from vime.ray.job_worker import JobWorker, renew
from vime.ray.placement import reserved
from vime.ray.preflight import read_command_line
from vime.ray.relaunch import Program
from vime.ray.waits import Interrupted
from vime.rollout.generation import use_engine_key
from vime.rollout.loops import rollout_loop
from vime.rollout.vllm_rollout import close_generation
from vime.types import ConfigError, Version, VimeError
from vime.utils.heap import collect_garbage, collect_when_asked
from vime.utils.waits import waiting

if TYPE_CHECKING:
    from vime.ray.publisher import Publisher

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
TOKEN_VARIABLE = "VIME_TOKEN"
OF_EVERY_JOB = ("--debug-rollout-only", "--data-source-path", LEASED_PROMPTS, "--num-rollout", "1")
"""What the flags of a run must say where nothing is trained and prompts come from elsewhere."""
POLL_S, STOP_S, CONFIRM_S = 0.25, 20.0, 60.0
TRIES = 3
"""How often a version is fetched whose files are not those of its manifest, or whose hash is not the gateway's."""
REPLACED = frozenset({"unknown_file", "no_such_range", "wrong_hash"})
"""What the gateway says of a version that was published anew since its manifest was read."""
INTERRUPTED = 130


@dataclass(slots=True)
class Weights:
    """Brings versions to the engines of this job, one after the other. Used on the rollout loop."""

    config: Config
    directory: Path
    client: GatewayClient
    engines: Engines
    screen: Screen
    reports: dict[Version, dict[str, str]] = field(default_factory=dict)  # hash by engine, of versions that were loaded
    held: tuple[Version, str] = (-1, "")  # version and hash that the engines hold now
    _publisher: Publisher | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def bring(self, version: Version) -> None:
        """Load a version, unless the engines hold it, and report what each of them holds. VimeError when an engine
        holds something else than the trainer sent. A run that went back to a checkpoint may serve an older version,
        and another content under a number that was served before, also while this one is fetched: then everything is
        begun anew with the new manifest, TRIES times in all."""
        async with self._lock:
            for tries_left in reversed(range(TRIES)):
                try:
                    await self._bring(version)
                    return
                except (OtherBytesError, RefusedError) as error:
                    is_replaced = isinstance(error, OtherBytesError) or error.code in REPLACED
                    if not is_replaced or not tries_left:
                        raise
                    logger.warning("version %d is fetched anew: %s", version, error)

    async def _bring(self, version: Version) -> None:
        manifest = await self.client.get(f"/v1/weights/{version}", m.WeightManifest)
        if (version, manifest.content_hash) != self.held:
            directory = await self._files(manifest)
            collect_garbage()  # once for each version, as a worker of the run does once a round
            self.reports[version] = await asyncio.to_thread(self._load, directory, manifest)
            [loaded] = set(self.reports[version].values())
            self.held = (version, loaded)
        await self.report(version)

    async def report(self, version: Version) -> None:
        """Report a version that was loaded once: a gateway that was started again asks for it."""
        if version in self.reports:
            loaded = m.Loaded(version=version, engines=self.reports[version])
            await self.client.call("/v1/weights/loaded", loaded, m.Confirmed)

    async def _files(self, manifest: m.WeightManifest) -> Path:
        """Return a directory with the files of a version. Where this machine sees the trainer's own they are linked,
        so that they stay when the trainer deletes an old version; else they are downloaded."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        for file in manifest.files:
            try:
                os.link(Path(manifest.location) / Path(file.name).name, self.directory / Path(file.name).name)
            except OSError:
                await self.client.download(manifest.version, file, self.directory)
        return self.directory

    def _load(self, directory: Path, manifest: m.WeightManifest) -> dict[str, str]:
        """Move the tensors to the engines, and return by engine the hash that the gateway asks for. It is taken of the
        very tensors that are sent; that each engine holds them is what `publish` confirms, by the content hash."""
        from vime.ray.publisher import Publisher
        from vime.weights.hashing import OrderedHash, hashed
        from vime.weights.published import metadata_of, tensors_of

        if self._publisher is None:
            self._publisher = Publisher(self.config, self.directory.parent, self.engines.addresses)
        metadata, ordered = metadata_of(directory), OrderedHash()
        stream = hashed(((meta.name, tensor) for meta, tensor in tensors_of(directory)), metadata, ordered)
        report = self._publisher.publish(stream, metadata, manifest.version)
        self.screen.note(f"version {report.version} is loaded, hash {ordered.hexdigest()}")
        return {each.engine: ordered.hexdigest() for each in report.engine_reports}

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def main(address: str, flags: Sequence[str]) -> int:
    """Run one job until the run has no prompt left, or until it is stopped. Returns the exit code."""
    program = Program()
    program.hide_secrets()
    token = os.environ.get(TOKEN_VARIABLE, "")
    with contextlib.ExitStack() as claims:
        try:
            if not token:
                raise ConfigError(
                    f"{TOKEN_VARIABLE} is not set. Expected the token that `vime token make RUN NAME` printed."
                )
            if not address.startswith(("http://", "https://")):
                raise ConfigError(
                    f"{address}: expected http://HOST:PORT or https://HOST:PORT, as RUN/gateway.json says."
                )
            if any(flag.startswith(ADDRS_FLAG) for flag in flags):
                raise ConfigError(
                    f"{ADDRS_FLAG} with vime produce: a job loads each version into engines that it starts itself. "
                    "Leave it out; give it to the run, which uses such engines directly."
                )
            config = read_command_line([*flags, *OF_EVERY_JOB], is_async=False, program="vime produce ADDRESS")
            if config.rollout.partial_rollout:
                raise ConfigError(
                    "--partial-rollout with vime produce: a job that gives a group back keeps nothing of it, because "
                    "whoever gets it next cannot read this job's tokens. Leave it out; give it to the run, whose own "
                    "workers continue what they began."
                )
            run_dir = claims.enter_context(RunDir.create(config.tracking.run_dir, dump(config)))
        except (VimeError, OSError) as error:
            sys.stderr.write(f"refused: {error}\n")
            return ConfigError.exit_code
        program.adopt_orphans()
        setup_logging(run_dir.path, "driver")
        events = open_events(run_dir.path, "driver")
        events.emit(EventKind.RUN_STARTED)
        screen = Screen(run_dir=run_dir.path)
        with Interrupts() as interrupts:
            try:
                _run(config, run_dir.path, GatewayClient(address, token), screen, interrupts)
            except (Interrupted, KeyboardInterrupt):
                events.emit(EventKind.RUN_FAILED, error="interrupted")
                screen.failed("stopped; the leases of this job went back to the run.")
                return INTERRUPTED
            except VimeError as error:
                events.emit(EventKind.RUN_FAILED, error=str(error))
                screen.failed(f"{error}\nLogs: {run_dir.path / 'logs'}")
                return error.exit_code
        events.emit(EventKind.RUN_FINISHED)
        screen.note("the run has no prompt left: done")
        return 0


def _run(config: Config, run_dir: Path, client: GatewayClient, screen: Screen, interrupts: Interrupts) -> None:
    limit_threads(config)
    loop = rollout_loop()
    with contextlib.ExitStack() as stack:
        stack.callback(
            lambda: loop.run(client.close(), name="the connection to the gateway to close", timeout_s=STOP_S)
        )
        said = m.Register(model=Path(config.model.hf_checkpoint).name, engines=config.cluster.num_engines)
        registering = loop.submit(client.call("/v1/producers/register", said, m.Registered))
        renewing = loop.submit(_renew_once_registered(client, registering))
        stack.callback(renewing.cancel)

        def poll() -> None:
            """The gateway may refuse this job while its engines start, and may itself come later than they do."""
            interrupts.raise_if_asked("start-up")
            if registering.done():
                _refuse_other_sampling(config, registering.result())
            if renewing.done():
                renewing.result()

        stack.callback(stop_ray)
        screen.stage("starting Ray")
        with children_outlive_the_terminal():
            start_ray(config, poll)
        engines = Engines(config, run_dir, places=stack.enter_context(reserved(config, poll)))
        stack.callback(engines.stop)
        routers = config.engine.vllm_router_count
        screen.stage(f"starting {len(engines)} vLLM engine(s) and {routers} router(s), about 15 s")
        import vime.ray.publisher  # noqa: F401  brings torch, while the engines start

        connected = engines.wait_ready(str(ray.get_runtime_context().get_node_id()), poll)
        screen.stage(f"registering at {client.url}")
        registered = _wait(registering, "the gateway to register this job", interrupts)
        _refuse_other_sampling(config, registered)
        use_engine_key(engines.generate_key)
        stack.callback(close_generation)
        weights = Weights(connected, run_dir / "weights", client, engines, screen)
        stack.callback(weights.close)
        worker = JobWorker(
            connected.flat,
            client,
            registered,
            weights,
            num_prompts=config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size,
        )
        collect_when_asked()
        screen.stage("generating")
        if not renewing.cancel():  # else the worker sends heartbeats
            renewing.result()
            return  # the run has ended, has said so, and its gateway may be gone
        work = loop.submit(worker.run())
        try:
            _wait(work, "prompts of the run", interrupts, engines)
        except GatewayAwayError:
            if not worker.stats.committed_groups:
                raise
            screen.note("the gateway is gone: the run has ended")
        finally:
            worker.end_soon()
            work.cancel()
            loop.run(worker.leave(), name="the job to leave the run", timeout_s=CONFIRM_S)
            screen.note(f"{worker.stats.committed_groups} groups committed, {worker.stats.late_groups} too late")


async def _renew_once_registered(client: GatewayClient, registering: Future[m.Registered]) -> None:
    """Send heartbeats from the registration on, also while this process waits for Ray and hears of nothing else."""
    await renew(client, await asyncio.wrap_future(registering))


def _wait(work: Future[Result], name: str, interrupts: Interrupts, engines: Engines | None = None) -> Result:
    """Wait for `work`, and look for a signal and at the engines meanwhile."""
    with waiting(name, "gateway", deadline_s=None):
        while True:
            interrupts.raise_if_asked(name)
            if engines is not None:
                engines.check()
            if concurrent.futures.wait([work], POLL_S).done:
                return work.result()


def _refuse_other_sampling(config: Config, registered: m.Registered) -> None:
    """Refuse a temperature that the trainer does not assume: its log-probabilities would be of another distribution."""
    given = config.rollout.rollout_temperature
    if given != registered.temperature:
        raise ConfigError(
            f"--rollout-temperature {given:g}: the run trains at {registered.temperature:g}, so its log-probabilities "
            f"would be of another distribution than the job's. Give {registered.temperature:g}."
        )
