"""--transferqueue-mode external through train.py, with real parts: rollout jobs that share an address with the run."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.external_run import Bringer, Producer, javascript_words, python_words
from tests.helpers.jobs import gateway_address, make_token, produce
from tests.helpers.ports import ports_on_loopback
from tests.helpers.training import Finished, TinyTask, Training, interrupt, train
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.handoff.ledger_types import SPOOL_NAME
from vime.handoff.spool import Spools
from vime.observability.claims import read_claims

ROUNDS = 4
SLOW_REWARD = '''"""Three seconds for each answer: a round lasts longer than a job takes to load its weights."""

import asyncio


async def reward(args, sample, **kwargs):
    await asyncio.sleep(3.0)
    return float(len(set(sample.tokens)) % 3)
'''
MARKED_REWARD = '''"""Say that an answer is being scored, and take three seconds for it."""

import asyncio
import pathlib


async def reward(args, sample, **kwargs):
    pathlib.Path("{marker}").touch()
    await asyncio.sleep(3.0)
    return 1.0
'''
FILTER = '''"""Drop about half of the groups, so that what a round is made of depends on what was sampled."""


def keep(args, samples):
    return sum(sample.reward for sample in samples) >= len(samples) / 2
'''


def hashes(finished: Finished) -> dict[int, str]:
    """Version -> content hash."""
    return {event["version"]: event["content_hash"] for event in finished.events("weights_confirmed")}


def job_flags(tiny_task: TinyTask) -> list[str]:
    """The part of the task's flags that a rollout job has: the run has the prompts."""
    flags = tiny_task.flags()
    for name in ("--prompt-data", "--input-key", "--label-key", "--micro-batch-size", "--lr"):
        at = flags.index(name)
        del flags[at : at + 2]
    return flags


def brought(training: Training, job: str) -> int:
    """Groups of a job in the rounds that were trained so far."""
    if not (training.run_dir / "metrics.jsonl").exists():
        return 0
    metrics = training.so_far().metrics().values()
    return int(sum(of_round.get(f"producers/{job}/groups", 0) for of_round in metrics))


def wait_until_it_brings(training: Training, job: str, *, more_than: int = 0) -> None:
    ends = time.monotonic() + 240
    while brought(training, job) <= more_than:
        assert training.process.poll() is None, training.so_far().output
        assert time.monotonic() < ends, training.so_far().output
        time.sleep(0.1)


def evaluated(run: Path) -> dict[str, list[tuple[list[int], float, str]]]:
    """File of each evaluation -> tokens, reward and status of each of its samples."""
    return {
        file.name: [
            (sample["tokens"], sample["reward"], sample["status"])
            for sample in map(json.loads, file.read_text().splitlines())
        ]
        for file in sorted((run / "eval").glob("*.jsonl"))
    }


@pytest.mark.timeout(900)
def test_a_job_in_place_of_the_inside_worker_gives_the_same_bits_also_after_the_trainer_was_killed(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    """One job lives through both lives of the trainer: it loads the versions that the second one serves. It evaluates
    too: the run has no engines."""
    plugin = tmp_path / "filter.py"
    plugin.write_text(FILTER)
    shared = ["--reference-mode", "--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path", f"{plugin}:keep"]
    flags = [*tiny_task.flags(), "--num-rollout", str(ROUNDS), "--save-interval", "1"]
    held_out = f"{flags[flags.index('--prompt-data') + 1]}@[0:3]"
    flags += ["--eval-prompt-data", "held_out", held_out, "--eval-interval", "2", "--n-samples-per-eval-prompt", "2"]
    flags += ["--eval-temperature", "0.7"]
    inside = train([*flags, *shared], tmp_path / "off")
    assert inside.code == 0, inside.output
    assert len(set(hashes(inside).values())) == ROUNDS + 1

    address, run = gateway_address(), tmp_path / "run"
    flags += [
        *("--reference-mode", "--transferqueue-mode", "external", "--transferqueue-address", address),
        *("--rollout-num-engines", "0", "--save", str(tmp_path / "checkpoints")),
    ]
    job = produce(tmp_path / "job", address, "job-a", [*job_flags(tiny_task), *shared], run=run)
    training = Training("train.py", flags, run)
    training.wait_for_event("weights_confirmed", count=3)
    os.kill(training.process.pid, signal.SIGKILL)
    killed = training.finish()
    assert killed.code == -signal.SIGKILL
    resumed = train([*flags, "--load", str(tmp_path / "checkpoints")], run)
    assert resumed.code == 0, resumed.output
    assert job.finish(deadline_s=60).code == 0
    assert hashes(resumed) == hashes(inside)
    assert evaluated(run) == evaluated(tmp_path / "off")
    assert len(evaluated(run)) == 3, "before round 0, 2 and 4"
    report = audit_run(run, saved=newest_checkpoint(run), claims=partial(read_claims, run))
    assert report.findings == ()
    assert report.groups["durable"] == 4 * ROUNDS


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system than the run's: no file can be linked there, as on another machine."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        assert os.stat(directory).st_dev != tmp_path.stat().st_dev
        yield Path(directory)


def assert_the_gateway_and_all_others_are_on_loopback(training: Training, job: Training, number: int) -> None:
    """`number`: the gateway's port. Waits for another gateway in place of the one that was killed."""
    ends = time.monotonic() + 120
    while number not in {port.number for port in ports_on_loopback(training) if port.owner == "gateway"}:
        assert training.process.poll() is None, training.so_far().output
        assert time.monotonic() < ends, training.so_far().output
        time.sleep(0.1)
    owners = {port.owner for port in ports_on_loopback(job)}
    assert owners >= {"job", "Ray", "router", "vLLM server"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_evaluation_whose_gateway_is_killed_is_done_by_the_same_job(
    tiny_task: TinyTask, tmp_path: Path, elsewhere: Path
) -> None:
    """The job has its results, and weights that the new gateway does not know of, when the old one is gone. It
    downloads the weights. Run and job listen on loopback alone. What a checkpoint has leaves the spool of the gateway
    at the next one, when there is a newer segment."""
    address, run, marker = gateway_address(), tmp_path / "run", tmp_path / "is_scored"
    plugin = tmp_path / "slow.py"
    plugin.write_text(MARKED_REWARD.format(marker=marker))
    flags = [*tiny_task.flags(), "--num-rollout", "2", "--rollout-num-engines", "0"]
    flags += ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1"]
    prompts = f"{flags[flags.index('--prompt-data') + 1]}@[0:3]"
    flags += ["--transferqueue-mode", "external", "--transferqueue-address", address]
    flags += ["--eval-prompt-data", "held_out", prompts, "--eval-interval", "1", "--n-samples-per-eval-prompt", "2"]
    reward = ["--custom-rm-path", f"{plugin}:reward"]
    job = produce(elsewhere / "job", address, "job-a", [*job_flags(tiny_task), *reward], run=run)
    training = Training("train.py", flags, run)
    ends = time.monotonic() + 240
    while not marker.exists():
        assert time.monotonic() < ends, training.so_far().output
        time.sleep(0.05)
    training.kill_member("GatewayActor")
    training.wait_for_event("worker_lost")
    assert_the_gateway_and_all_others_are_on_loopback(training, job, int(address.rpartition(":")[2]))
    finished = training.finish()
    assert finished.code == 0, finished.output
    assert {task.group for task, *_ in Spools(run / SPOOL_NAME).entries()} == {4, 5, 6, 7}, "those of the last round"
    assert "evaluation before round 0: by jobs outside" in finished.output
    assert len(finished.events("worker_lost")) == 1
    found = evaluated(run)
    assert list(found) == ["held_out_0.jsonl", "held_out_1.jsonl", "held_out_2.jsonl"]
    assert [len(samples) for samples in found.values()] == [6, 6, 6]
    ended = job.finish(deadline_s=60)
    assert ended.code == 0, ended.output
    downloaded = [*(elsewhere / "job" / "weights").iterdir()]
    assert any(file.suffix == ".safetensors" for file in downloaded)
    for file in downloaded:
        assert file.read_bytes() == (run / "published" / "version_0000002" / file.name).read_bytes()


@pytest.fixture
def started() -> Iterator[Callable[[Any], Any]]:
    """Producers that a test starts, ended with it."""
    producers: list[Producer | Bringer] = []
    yield lambda producer: producers.append(producer) or producer
    for producer in producers:
        producer.close()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_group_of_a_jobs_own_whose_gateway_and_job_are_killed_holds_no_slot(
    tiny_task: TinyTask, tmp_path: Path, started: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K = 1. Its slot was held until its lease ended, 600 s later, and the rounds waited: nobody worked on it. In
    the usual session, by the ledger alone: test_own_groups.py, a gateway that dies."""
    address, run, notes = gateway_address(), tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("VIME_FAILPOINTS_DIR", str(notes))
    flags = [*tiny_task.flags(), "--num-rollout", str(2 * ROUNDS), "--rollout-num-engines", "0"]
    flags += ["--transferqueue-mode", "external", "--transferqueue-address", address, "--max-staleness", "1"]
    flags += ["--on-train-rollout-diff", "ignore"]  # made-up log-probabilities
    killed, other = (started(Bringer(f"http://{address}", make_token(run, name))) for name in ("job-a", "job-b"))
    training = Training("train.py", flags, run)
    killed.start()
    wait_until_it_brings(training, "job-a")
    (notes / "armed").write_text("manager.commit:1:kill")  # between the slot and the commit; nobody else commits
    training.wait_for_event("worker_lost")
    killed.close()
    other.start()
    finished = training.finish(deadline_s=240)
    assert finished.code == 0, finished.output
    [lost] = finished.events("worker_lost")
    assert (lost["worker"].split(".")[0], lost["prompts"]) == ("gateway", 1)
    report = audit_run(run, saved=newest_checkpoint(run), claims=partial(read_claims, run))
    assert report.findings == ()
    assert report.groups["dropped"] >= 1, "and what was too old when a slot came"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_gateway_that_hangs_is_replaced_like_a_dead_one(
    tiny_task: TinyTask, tmp_path: Path, started: Callable[[Any], Any]
) -> None:
    """After 30 s without a response; what was put before counts once."""
    address, run = gateway_address(), tmp_path / "run"
    flags = [*tiny_task.flags(), "--num-rollout", "1000", "--rollout-num-engines", "0", "--max-staleness", "1"]
    flags += ["--transferqueue-mode", "external", "--transferqueue-address", address]
    flags += ["--on-train-rollout-diff", "ignore"]  # made-up log-probabilities
    own = started(Bringer(f"http://{address}", make_token(run, "job-own")))
    training = Training("train.py", flags, run)
    own.start()
    wait_until_it_brings(training, "job-own")
    gateway = training.member("GatewayActor")
    gateway.suspend()
    training.wait_for_event("worker_lost")
    wait_until_it_brings(training, "job-own", more_than=brought(training, "job-own"))
    assert not gateway.is_running()
    assert own.client.post("/v1/groups/own", json=own.put[0]).json()["repeated"]
    interrupt(training)
    finished = training.finish()
    assert finished.code == 130, finished.output
    assert finished.events("run_restarted") == []
    report = audit_run(run, saved=newest_checkpoint(run), claims=partial(read_claims, run))
    assert report.findings == ()
    assert report.groups["durable"] == 4 * len(finished.metrics())


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH: its packages are not ours")
@pytest.mark.timeout(900)
def test_workers_of_the_run_a_job_in_python_and_one_in_javascript_feed_it_while_each_is_killed(
    tiny_task: TinyTask, tmp_path: Path, started: Callable[[Any], Any]
) -> None:
    """K = 1. The jobs import nothing of Vime, and the run has two workers, one of which is killed. The gateway
    comes back at its address and asks for the weights' hashes again; the jobs come back with the tokens that they
    had. A fourth one brings prompts of its own: what it put before the gateway was killed counts once. The run is
    stopped when all of this was seen."""
    address, run, plugin = gateway_address(), tmp_path / "run", tmp_path / "slow.py"
    plugin.write_text(SLOW_REWARD)
    flags = [
        *tiny_task.flags(), "--custom-rm-path", f"{plugin}:reward", "--num-rollout", "1000", "--save-interval", "8",
        "--max-staleness", "1", "--on-train-rollout-diff", "ignore",  # the job in JavaScript has a policy of its own
        "--transferqueue-mode", "external", "--transferqueue-address", address, "--num-rollout-workers", "2",
    ]  # fmt: skip
    url = f"http://{address}"
    words = {"job-py": python_words(url, tiny_task.model), "job-js": javascript_words(url, tiny_task.model)}
    tokens = {name: make_token(run, name) for name in words}
    own = started(Bringer(url, make_token(run, "job-own")))
    jobs = {name: started(Producer(words[name], tmp_path, tokens[name])) for name in words}
    training = Training("train.py", flags, run)
    for name in words:
        wait_until_it_brings(training, name)
    own.start()
    wait_until_it_brings(training, "job-own")
    training.kill_member("GatewayActor")
    training.wait_for_event("worker_lost")
    wait_until_it_brings(training, "job-own", more_than=brought(training, "job-own"))
    first = own.put[0]
    assert own.client.post("/v1/groups/own", json=first).json()["repeated"]
    other = own.client.post("/v1/groups/own", json=first | {"prompt": "changed"}).json()
    assert (other["code"], other["may_repeat"]) == ("other_content", False)
    own.is_stopping = True  # it costs no time, so rounds would be over before the job in JavaScript has their weights
    training.members("RolloutWorkerActor")[0].kill()
    training.wait_for_event("worker_lost", count=2)
    again = {}
    for name, job in jobs.items():
        wait_until_it_brings(training, name, more_than=brought(training, name))
        job.kill()
        job.wait()
        # at once: while it stays away, the run waits for what it had until its lease ends
        again[name] = started(Producer(words[name], tmp_path, tokens[name]))
    for name in words:
        wait_until_it_brings(training, name, more_than=brought(training, name))
    interrupt(training)
    finished = training.finish()
    assert finished.code == 130, finished.output
    assert all(job.process.poll() is None for job in again.values())  # they wait for the run to come back
    lost = [event["worker"].split(".")[0] for event in finished.events("worker_lost")]
    assert (lost[0], lost[1].rpartition("-")[0]) == ("gateway", "rollout-worker")
    report = audit_run(run, saved=newest_checkpoint(run), claims=partial(read_claims, run))
    assert report.findings == ()
    assert report.groups["durable"] == 4 * len(finished.metrics())
    names = (*words, "job-own")
    assert set(report.producers) == {"rollout workers", *(f"external/{name}" for name in names)}
    assert {name: report.producers[f"external/{name}"] for name in names} == {
        name: brought(training, name) for name in names
    }
    assert report.own == {"external/job-own": brought(training, "job-own")}
