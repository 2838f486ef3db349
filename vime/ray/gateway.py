"""The gateway as a process of the run (--transferqueue-mode external): one more place where groups are stored.

`workers.RemoteWorkers` starts it, watches it, and starts another one at the same address when it dies. It keeps
nothing that the ledger, the spool and the files of published weights do not have: after its death a job repeats the
call that got no response, and is asked to confirm its weights again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vime.config.eval_sets import EvalSet
from vime.config.hf_config import read_model_shape
from vime.config.parse import Config
from vime.gateway.address import ADDRESS_NAME, write_address
from vime.gateway.app import make_app
from vime.gateway.evaluation import EvalPart, Evaluation, Place, Result
from vime.gateway.messages import EvalSampling, WeightFile, WeightManifest
from vime.gateway.samples import Limits
from vime.gateway.server import GatewayServer
from vime.gateway.service import Gateway
from vime.gateway.tokens import TokenFile
from vime.gateway.weights import Weights
from vime.handoff.group_store import EncodedGroup
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import EXTERNAL, Payload
from vime.observability.samples import DroppedGroup
from vime.ray.ledger_actor import LedgerClient
from vime.ray.worker_process import WorkerProcess, WorkerReport
from vime.rollout.convert import encoded_group
from vime.rollout.evaluate import eval_data_sets, eval_groups
from vime.rollout.generation import eval_sampling_params
from vime.rollout.group_worker import WorkerStats
from vime.rollout.group_writer import GroupWriter
from vime.rollout.partial import num_response_tokens
from vime.rollout.prompts import context_limit
from vime.rollout.worker import has_capacity, payload_of
from vime.types import EngineReport, Sample, Version
from vime.utils.waits import waiting
from vime.weights.published import PublishedWeights, forget_before, read_back, version_directory, whole_versions

if TYPE_CHECKING:
    from vime.handoff.queue_client import QueueAddress

logger = logging.getLogger(__name__)
PROCESS = "gateway"
TELL_S, TELL_POLL_S, ONLINE_S = 8.0, 0.05, 15.0
"""A job that has called within ONLINE_S hears of the end at its next call: `vime produce` calls every 5 s."""
KEPT_VERSIONS = 1
"""Versions kept beyond those that --max-staleness lets jobs generate with: a job may be loading one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalProgress:
    """How far an evaluation is, in prompts. `num_tokens`: of completions; `waits_for`: why it does not go on
    (empty: it does); `results`: once all are there."""

    done: int
    total: int
    num_tokens: int
    waits_for: str
    results: Mapping[Place, Result] | None = None


def gateway_of(producer: str) -> str:
    """Return the name of the gateway that stored a group, from the group's producer; empty for a rollout worker."""
    return f"{PROCESS}.{producer.partition('.')[2]}" if producer.startswith(EXTERNAL) else ""


class GatewayActor(WorkerProcess):
    """`name`: `gateway.` and what no other process of the run has; `address`: HOST:PORT with a port of its own."""

    def __init__(
        self,
        config: Config,
        number: int,
        name: str,
        run_dir: str,
        queue_address: QueueAddress | None,
        ledger: LedgerClient,
        address: str,
    ) -> None:
        super().__init__(config, number, PROCESS, run_dir, queue_address)
        self._run_dir, self._mark = Path(run_dir), name.removeprefix(f"{PROCESS}.")
        self._args, self._config, self._ledger = config.flat, config, ledger
        self._weights = Weights(self._run_dir)
        for version in whole_versions(self._run_dir):
            self._serve(version)
        tokens = TokenFile(self._run_dir)
        self._gateway = Gateway(
            ledger=ledger,
            store=self._store,
            writer=GroupWriter(self._store, ledger),
            prompts=self._source,
            encode=self._encode,
            weights=self._weights,
            limits=_limits(config),
            lease_key=tokens.lease_key,
        )
        self._taken = WorkerStats()  # what `_take_stats` has reported
        self._counting = threading.Lock()  # of `_taken`: the next report may be asked for while statistics are taken
        queue = config.queue
        self._server = GatewayServer(
            make_app(self._gateway, tokens),
            address,
            certificate=None if queue.transferqueue_tls_cert is None else Path(queue.transferqueue_tls_cert),
            key=None if queue.transferqueue_tls_key is None else Path(queue.transferqueue_tls_key),
        )
        self._server.start()
        write_address(self._run_dir, self._server.url)

    def serve_to_jobs(self, version: Version) -> EngineReport:
        """Read the files of a version back, and offer it to the jobs. Calling it again changes nothing."""
        found = self._serve(version)
        oldest = version - self._config.queue.transferqueue_max_staleness - KEPT_VERSIONS
        for old in forget_before(self._run_dir, oldest):
            self._weights.forget(old)
        return EngineReport(
            engine=PROCESS, version=found.version, content_hash=found.content_hash, num_tensors=found.num_tensors
        )

    def evaluate(self, before_round: int) -> EvalProgress:
        """Offer the prompts of an evaluation of the serving weights, unless it was done already, and return how far it
        is."""
        evaluations = self._gateway.evaluations
        if evaluations.current is None or evaluations.current.before_round != before_round:
            evaluations.current = Evaluation(
                before_round=before_round,
                version=self._weights.serving,
                parts={
                    one.name: _eval_part(self._gateway.limits, one, eval_groups(one, prompts, before_round))
                    for one, prompts in eval_data_sets(self._args)
                },
                lease_timeout_s=self._gateway.limits.lease_timeout_s,
            )
        results, total = dict(evaluations.current.results), evaluations.current.total
        is_whole = len(results) == total
        return EvalProgress(
            done=len(results),
            total=total,
            num_tokens=sum(num_response_tokens(group) for group in results.values() if not isinstance(group, str)),
            waits_for="" if is_whole else self._no_evaluator(),
            results=results if is_whole else None,
        )

    def start(self, num_workers: int) -> None:
        """Nothing: jobs ask for prompts when they have confirmed weights, which the run has offered by now."""

    def share(self, num_workers: int) -> None:
        """Nothing: the slots that the workers of the run leave are the jobs'."""

    def stop(self) -> None:
        """Nothing: jobs go on to the end of the run."""

    def report(self) -> WorkerReport:
        jobs = self._online()
        return WorkerReport(
            stats=self._stats(),
            num_running=0,  # the ledger knows
            waits_for="" if jobs else self._why_nobody(),
            spool_bytes=self._store.spool_bytes,
            num_jobs=len(jobs),
        )

    def _take_stats(self) -> tuple[WorkerStats, list[DroppedGroup]]:
        with self._counting:
            stats = self._counted()
            self._taken.committed_groups += stats.committed_groups
            self._taken.dropped += stats.dropped
            self._taken.partial.masked_tokens += stats.partial.masked_tokens
            del self._gateway.rewards[: len(stats.rewards)]
        return stats, []

    def close(self) -> None:
        """When the run is over, waits for: jobs that have called lately to hear it, TELL_S at most."""
        began = time.monotonic()
        if self._ledger.call(Ledger.status).is_over:
            self._gateway.evaluations.is_over = True
            with waiting("jobs outside to hear that the run is over", "external job", deadline_s=TELL_S):
                while self._gateway.not_told(began - ONLINE_S) and time.monotonic() < began + TELL_S:
                    time.sleep(TELL_POLL_S)
        self._gateway.is_stopping = True
        self._server.stop()
        self._store.close()
        (self._run_dir / ADDRESS_NAME).unlink(missing_ok=True)

    def _stats(self) -> WorkerStats:
        with self._counting:
            return self._counted()

    def _counted(self) -> WorkerStats:
        """Return what was counted since `_take_stats`. Calls of jobs are counted meanwhile, on the server's loop."""
        jobs = list(self._gateway.jobs.values())
        stats = WorkerStats(rewards=list(self._gateway.rewards))
        stats.partial.masked_tokens = self._gateway.masked_tokens - self._taken.partial.masked_tokens
        stats.committed_groups = sum(job.committed for job in jobs) - self._taken.committed_groups
        for job in jobs:
            stats.dropped.update(dict(job.dropped))  # copied in one step
        stats.dropped -= self._taken.dropped
        return stats

    def _online(self) -> list[str]:
        """Return the jobs for which slots are left free: they have called within the time of a lease, and have the
        serving weights, or had them a moment ago. While they load a new version the run's own workers would take every
        slot that it frees."""
        since = time.monotonic() - self._gateway.limits.lease_timeout_s
        oldest = self._weights.serving - self._config.queue.transferqueue_max_staleness - 1
        return [
            name
            for name, job in list(self._gateway.jobs.items())
            if job.called >= since and self._weights.newest(name) >= max(0, oldest)
        ]

    def _no_evaluator(self) -> str:
        """Say why nobody evaluates; empty when a job does."""
        since = time.monotonic() - self._gateway.limits.lease_timeout_s
        jobs = [(name, job) for name, job in list(self._gateway.jobs.items()) if job.evaluates and job.called >= since]
        if not jobs:
            return (
                f"a rollout job at {self._server.url} that evaluates: none has asked for prompts of evaluations (vime "
                "token make RUN NAME makes a token with the scopes train and eval)"
            )
        lags = {name: self._weights.lag(name) for name, _ in jobs}
        return "" if "" in lags.values() else "; ".join(f"{name}: {lag}" for name, lag in lags.items())

    def _why_nobody(self) -> str:
        """Say why no job takes prompts."""
        jobs = list(self._gateway.jobs.items())
        if not jobs:
            return f"a rollout job at {self._server.url}: none has called (vime token make RUN NAME makes a token)"
        return "; ".join(
            f"{name}, which called {time.monotonic() - job.called:.0f} s ago: {self._weights.lag(name) or 'nothing'}"
            for name, job in jobs[:8]
        )

    def _serve(self, version: Version) -> PublishedWeights:
        found = read_back(version_directory(self._run_dir, version))
        self._weights.release(
            WeightManifest(
                version=found.version,
                content_hash=found.ordered_hash,
                location=str(found.directory),
                files=[
                    WeightFile(name=file.name, num_bytes=file.num_bytes, sha256=file.sha256) for file in found.files
                ],
            )
        )
        return found

    def _encode(self, producer: str, samples: list[Sample]) -> tuple[EncodedGroup, Payload]:
        """As a rollout worker does. The producer's name says which gateway put the rows into the queue."""
        place, name = self._store.partition, f"{producer}.{self._mark}"
        group = encoded_group(self._args, samples, partition_id=place, producer_id=name, with_samples=True)
        return group, payload_of(group, samples)


def _eval_part(limits: Limits, one: EvalSet, groups: list[list[Sample]]) -> EvalPart:
    args = one.config.flat
    params = eval_sampling_params(args)
    return EvalPart(
        name=one.name,
        groups=groups,
        sampling=EvalSampling(
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=params.get("top_k", -1),
            max_tokens=params["max_tokens"],
        ),
        limits=replace(
            limits,
            samples_per_prompt=args.n_samples_per_eval_prompt,
            max_tokens=context_limit(args),
            reward_key=args.reward_key or "",
            extra_fields=(),
        ),
    )


def _limits(config: Config) -> Limits:
    args, queue = config.flat, config.queue
    return Limits(
        samples_per_prompt=config.rollout.n_samples_per_prompt,
        max_staleness=queue.transferqueue_max_staleness,
        lease_timeout_s=queue.transferqueue_lease_timeout_secs,
        vocab_size=read_model_shape(args.hf_checkpoint).vocab_size,
        max_tokens=context_limit(args),
        temperature=config.rollout.rollout_temperature,
        evaluates=not config.cluster.num_engines and config.eval.has_sets,
        reward_key=args.reward_key or "",
        extra_fields=tuple(args.transfer_queue_extra_data_fields),
        mixed_versions=queue.mixed_version_policy or "correct",
        has_capacity=has_capacity(args),
    )
