"""The worker of `vime produce` before a gateway that is played by a list of responses."""

import asyncio
import os
import struct
import subprocess
import sys
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from tests.helpers.rollout_setup import make_args, write_model_directory
from vime.gateway import messages as m
from vime.gateway.client import RefusedError
from vime.ray import job_worker
from vime.ray.interrupts import Interrupts
from vime.ray.job_worker import JobWorker, renew
from vime.ray.produce import _renew_once_registered, _wait
from vime.types import PluginError, RewardError, Sample, SampleStatus, VersionSpan

REGISTERED = m.Registered(
    producer="job", protocol=1, serving=0, samples_per_prompt=1, max_staleness=0, temperature=1.0, lease_timeout_s=0.06,
    max_body_bytes=1 << 20,
)  # fmt: skip


class Gateway:
    """Heartbeats say what `alive` says. A lease gets `prompts`; without them no response: the run ended between two
    calls."""

    def __init__(self, alive: m.Alive, prompts: m.Prompts | None = None) -> None:
        self.alive, self.prompts, self.asked = alive, prompts, []
        self.patience_s = None  # of the last call

    async def call(self, path, message, kind, **waits):
        self.asked.append(path)
        self.patience_s = waits.get("patience_s")
        if kind is m.Alive:
            return self.alive
        if kind is m.Left:
            return m.Left(given_back=0)
        if self.prompts is not None:
            return self.prompts
        return await asyncio.Event().wait()


class Loader:
    """Loads nothing, and fails the test when it is asked to."""

    async def bring(self, version):
        raise AssertionError(f"version {version} is loaded though the run is over")

    async def report(self, version): ...


def sample_of(**changes):
    """One token of version 0."""
    return Sample(
        index=3, tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[-1.0],
        token_policy_versions=[VersionSpan(version=0, start=0, end=1)], status=SampleStatus.COMPLETED, **changes,
    )  # fmt: skip


def test_an_error_of_the_work_that_looks_like_a_wait_that_is_over_ends_the_wait():
    work = Future()
    work.set_exception(TimeoutError("of the work itself"))
    with pytest.raises(TimeoutError, match="of the work itself"):
        _wait(work, "prompts of the run", Interrupts())


def given_by(tmp_path, registered, *flags, **changes):
    """What a job with these flags sends of a sample."""
    write_model_directory(tmp_path / "model")
    args = make_args("--hf-checkpoint", tmp_path / "model", "--rm-type", "exact_match", *flags)
    worker = JobWorker(args, Gateway(m.Alive(leases=[], serving=0)), registered, Loader(), num_prompts=2)
    given = worker._given(sample_of(**changes), registered.extra_fields)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=m.GivenSample)


def test_a_job_sends_entries_where_the_run_trains_on_one_and_else_its_own_number(tmp_path):
    reward = {"score": 1.0, "style": 2, "note": "good", "bad": float("nan")}
    entries = msgspec.structs.replace(REGISTERED, reward_key="score")
    assert given_by(tmp_path, entries, reward=reward).reward == {"score": 1.0, "style": 2.0}
    assert given_by(tmp_path, entries, reward=0.5).reward == 0.5
    assert given_by(tmp_path, REGISTERED, "--reward-key", "style", reward=reward).reward == 2.0
    with pytest.raises(RewardError, match="score"):
        given_by(tmp_path, entries, reward={"style": 2.0})


def test_a_job_sends_the_columns_that_the_run_asks_for(tmp_path):
    wanted = msgspec.structs.replace(REGISTERED, extra_fields=["teacher_log_probs", "weights", "note", "absent"])
    given = given_by(
        tmp_path, wanted, reward=0.0, teacher_log_probs=[-0.5], metadata={"weights": np.array([1, 2]), "note": {"a": 1}}
    )
    assert given.extra == {"teacher_log_probs": [-0.5], "weights": [1, 2], "note": {"a": 1}, "absent": None}
    assert given_by(tmp_path, REGISTERED, reward=0.0, metadata={"weights": [1]}).extra == {}


def test_a_job_packs_its_columns(tmp_path):
    given = given_by(tmp_path, REGISTERED, reward=0.0)
    assert (given.tokens, given.log_probs, given.loss_mask) == (
        b"\1\0\0\0\2\0\0\0", struct.pack("<f", -1.0), b"\1",
    )  # fmt: skip


def run_with(gateway, tmp_path, kind=JobWorker, loader=None, flags=()) -> JobWorker:
    write_model_directory(tmp_path / "model")
    args = make_args("--hf-checkpoint", tmp_path / "model", "--rm-type", "exact_match", *flags)

    async def run():
        worker = kind(args, gateway, REGISTERED, loader or Loader(), num_prompts=2)
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
    assert gateway.asked[-1] == "/v1/producers/leave"
    assert gateway.patience_s == 0.0  # there is nothing to give back, and perhaps nobody there


@pytest.mark.timeout(60)
def test_heartbeats_before_the_worker_begins_end_when_the_run_does():
    """Their answer was the only news: the gateway waits for nobody whom it has told."""
    alive = Gateway(m.Alive(leases=[], serving=0, is_exhausted=True))
    asyncio.run(asyncio.wait_for(renew(alive, REGISTERED), 30))
    assert alive.asked == ["/v1/producers/heartbeat"]


@pytest.mark.timeout(60)
def test_heartbeats_begin_with_the_registration_whatever_the_starting_process_waits_for():
    """The main thread may stand in Ray's start for longer than a lease lasts."""
    alive, registering = Gateway(m.Alive(leases=[], serving=0, is_exhausted=True)), Future()

    async def run():
        renewing = asyncio.create_task(_renew_once_registered(alive, registering))
        await asyncio.sleep(0)
        assert alive.asked == []
        registering.set_result(REGISTERED)
        await asyncio.wait_for(renewing, 30)

    asyncio.run(run())
    assert alive.asked == ["/v1/producers/heartbeat"]


@pytest.mark.timeout(60)
def test_a_worker_sends_its_first_heartbeat_at_once(tmp_path, monkeypatch):
    """Until it began another part of the job sent them: two waits in a row would be longer than one."""
    monkeypatch.setattr(job_worker, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(sys.modules[__name__], "REGISTERED", msgspec.structs.replace(REGISTERED, lease_timeout_s=1e5))
    gateway = Gateway(m.Alive(leases=[], serving=1, is_exhausted=True))
    assert run_with(gateway, tmp_path).is_exhausted, "it heard of the end by a heartbeat"


@pytest.mark.timeout(60)
def test_a_job_that_hears_of_the_end_does_not_load_the_last_weights_first(tmp_path):
    """They are offered just before the run ends: the gateway would be gone when the job reports them."""
    over = m.Prompts(prompts=[], serving=1, is_exhausted=True)
    assert run_with(Gateway(m.Alive(leases=[], serving=1), over), tmp_path).is_exhausted


@pytest.mark.timeout(120)
def test_vime_produce_refuses_partial_rollout_by_name(tmp_path):
    write_model_directory(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    words = ["--hf-checkpoint", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run"), "--rm-type", "exact_match"]
    words += ["--rollout-max-response-len", "8"]
    partial = ["--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--over-sampling-batch-size", "64"]
    done = subprocess.run(
        [sys.executable, "-m", "vime", "produce", "http://127.0.0.1:9", *words, *partial],
        env={**os.environ, "VIME_TOKEN": "t"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, "refused: --partial-rollout with vime produce" in done.stderr) == (2, True), done.stderr


@pytest.mark.timeout(120)
def test_vime_produce_refuses_engines_of_others_by_name():
    flags = ["--rollout-external-engine-addrs", "127.0.0.1:9", "--rollout-external-engine-keys", "keys"]
    done = subprocess.run(
        [sys.executable, "-m", "vime", "produce", "http://127.0.0.1:9", *flags],
        env={**os.environ, "VIME_TOKEN": "t"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    said = "refused: --rollout-external-engine-addrs with vime produce"
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def one_prompt(lease="L", group=5):
    prompt = m.Prompt(lease=lease, group=group, attempt=0, prompt="", tokens=[1], label=None, samples=[])
    return m.Prompts(prompts=[prompt], serving=-1)


class LateGateway:
    """Its first heartbeat is answered when a lease has come after it was made; until the second nothing is done."""

    def __init__(self) -> None:
        self.begun, self.is_worked_on, self.again = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ended = asyncio.Event()
        self.beats = 0

    async def call(self, path, message, kind, **waits):
        if kind is m.Alive:
            self.beats += 1
            if self.beats == 1:
                self.begun.set()
                await self.is_worked_on.wait()
                return m.Alive(leases=[], serving=-1)
            self.again.set()
            return m.Alive(leases=["L"], serving=-1)
        await self.begun.wait()
        if self.is_worked_on.is_set():
            await self.ended.wait()
            return m.Prompts(prompts=[], serving=-1, is_exhausted=True)
        return one_prompt()


class Patient(JobWorker):
    """Works on a group until the gateway has heard two heartbeats."""

    async def generate(self, assignment):
        self._client.is_worked_on.set()
        await self._client.again.wait()
        return []

    async def finish(self, assignment, samples):
        self.stats.committed_groups += 1

    async def produce(self, assignment):
        try:
            await super().produce(assignment)
        finally:
            self._client.ended.set()


@pytest.mark.timeout(60)
def test_a_heartbeat_that_is_older_than_a_lease_stops_no_work(tmp_path):
    assert run_with(LateGateway(), tmp_path, Patient).stats.committed_groups == 1


class StrayGateway:
    """Lists a lease in each heartbeat that the job never got, since its first call for leases. Such a call is answered
    every third heartbeat."""

    def __init__(self) -> None:
        self.beats, self.beaten, self.given_back, self.is_asked = 0, asyncio.Event(), [], False

    async def call(self, path, message, kind, **waits):
        if kind is m.Alive:
            self.beats += 1
            if self.beats % 3 == 0:
                self.beaten.set()
            return m.Alive(leases=["stray"] if self.is_asked and not self.given_back else [], serving=-1)
        if path == "/v1/leases/give-back":
            self.given_back.append((message.lease, self.beats))
            return m.Ended(repeated=False)
        self.is_asked = True
        await self.beaten.wait()
        self.beaten.clear()
        return m.Prompts(prompts=[], serving=-1, is_exhausted=bool(self.given_back) or self.beats > 12)


@pytest.mark.timeout(60)
def test_a_lease_that_the_job_does_not_know_is_given_back_once_no_response_can_bring_it(tmp_path):
    gateway = StrayGateway()
    run_with(gateway, tmp_path)
    [(lease, beats)] = gateway.given_back
    assert lease == "stray"
    assert beats in (3, 4), "while a call for leases is under way, its response may bring the lease"


def refused(path, code):
    body = m.ErrorBody(code=code, what="", got="", expected="", next="", may_repeat=False)
    return RefusedError(path, body)


class ResumedGateway:
    """Gives one prompt. It asks for the weights of the put, and then refuses their hash: the run was started again, and
    the version has other bits now."""

    def __init__(self) -> None:
        self.num_leases, self.is_put = 0, asyncio.Event()

    async def call(self, path, message, kind, **waits):
        if kind is m.Alive:
            return m.Alive(leases=["L"], serving=-1)
        if path == "/v1/groups":
            self.is_put.set()
            raise refused(path, "unconfirmed_version")
        self.num_leases += 1
        if self.num_leases > 1:
            await self.is_put.wait()
            return m.Prompts(prompts=[], serving=-1, is_exhausted=True)
        return one_prompt()

    async def report(self, version):
        raise refused("/v1/weights/loaded", "wrong_hash")


class Whole(JobWorker):
    """Makes each group of one sample."""

    async def generate(self, assignment):
        return [sample_of(reward=1.0)]


class Generated(Whole):
    """Puts it without asking its filters."""

    async def finish(self, assignment, samples):
        await self.keep(assignment, samples)


@pytest.mark.timeout(60)
def test_a_group_of_weights_that_the_run_has_no_more_is_discarded_and_the_job_goes_on(tmp_path):
    gateway = ResumedGateway()
    stats = run_with(gateway, tmp_path, Generated, loader=gateway).stats
    assert (stats.late_groups, stats.committed_groups) == (1, 0)


class RejectingGateway:
    """Gives one prompt, and trains no group of mixed versions."""

    def __init__(self) -> None:
        self.num_leases, self.ended = 0, []
        self.is_ended = asyncio.Event()

    async def call(self, path, message, kind, **waits):
        if kind is m.Alive:
            return m.Alive(leases=["L"], serving=-1)
        if path == "/v1/groups":
            raise refused(path, "mixed_versions")
        if kind is m.Ended:
            self.ended.append((path, message.reason))
            self.is_ended.set()
            return m.Ended(repeated=False)
        self.num_leases += 1
        if self.num_leases > 1:
            await self.is_ended.wait()
            return m.Prompts(prompts=[], serving=-1, is_exhausted=True)
        return one_prompt()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("policy", "path"), [("drop", "/v1/leases/drop"), ("retry", "/v1/leases/give-back")])
def test_a_group_that_the_run_rejects_because_of_its_versions_is_settled_as_the_stale_policy_says(
    tmp_path, policy, path
):
    gateway = RejectingGateway()
    stats = run_with(gateway, tmp_path, Generated, flags=("--stale-policy", policy)).stats
    assert gateway.ended == [(path, "mixed_versions")]
    assert (stats.committed_groups, stats.dropped["mixed_versions"]) == (0, int(policy == "drop"))


class EndlessGateway(RejectingGateway):
    """Gives another prompt whenever a group was dropped."""

    async def call(self, path, message, kind, **waits):
        if kind is m.Prompts:
            self.num_leases += 1
            return one_prompt(f"L{self.num_leases}", self.num_leases)
        if kind is m.Alive:
            return m.Alive(leases=[f"L{number + 1}" for number in range(self.num_leases)], serving=-1)
        return await super().call(path, message, kind, **waits)


@pytest.mark.timeout(60)
def test_a_job_whose_groups_are_all_rejected_ends_by_name(tmp_path):
    with pytest.raises(PluginError, match="3 groups in a row"):
        run_with(EndlessGateway(), tmp_path, Whole, flags=("--max-dropped-in-a-row", "3"))
