"""The two producers of examples/external/ as processes, over real HTTP, until the rounds of a run are trained."""

import math
import re
import shutil
import signal
import time

import pytest

from tests.helpers.external_run import EXAMPLES, ExternalRun, Producer, javascript_words, python_words
from tests.helpers.lossy_proxy import LossyProxy
from vime.handoff.ledger import Ledger

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH: its packages are not ours")
LETTERS = 8  # of producer.mjs
WAIT_S = 120.0


@pytest.fixture
def started():
    """Producers and runs that a test starts, ended with it."""
    parts = []
    yield lambda part: parts.append(part) or part
    for part in reversed(parts):
        part.close()


def until(claim):
    """Poll: what is waited for happens in another process."""
    ends = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < ends
        time.sleep(0.02)


def groups_of(run):
    return sorted(task.group for task, _ in run.trained)


def is_uniform(sample):
    return sample.rollout_log_probs == pytest.approx([-math.log(LETTERS), 0.0])  # stored as fp32


def test_the_python_producer_is_a_hundred_and_fifty_lines_and_imports_nothing_of_vime():
    source = (EXAMPLES / "producer.py").read_text()
    assert len(source.splitlines()) <= 150
    assert not re.search(r"^\s*(import|from) (vime|tests)\b", source, re.MULTILINE)


def test_the_python_producer_feeds_a_run_with_the_log_probabilities_of_the_versions_that_it_names(tmp_path, started):
    run = started(ExternalRun(tmp_path, num_rounds=4))
    run.start()
    token = run.run.tokens.make("job-py", ("train",), seconds=600)
    producer = started(Producer(python_words(run.run.server.url, run.model_directory), tmp_path, token))
    run.wait()
    assert producer.wait() == 0, producer.log.read_text()
    assert groups_of(run) == list(range(8))
    samples = [sample for _, group in run.trained for sample in group]
    for sample in samples:
        assert sample.rollout_log_probs == pytest.approx(run.log_probs(sample), abs=1e-5)
        assert sample.tokens[:2] == run.run.gateway._prompts.group_at(sample.group_index)[0].tokens
        assert sample.status.value == ("completed" if sample.tokens[-1] == 2 else "truncated")  # 2: <eos>
        assert sample.reward == float(sample.tokens[2:] == [sample.tokens[1], 2])  # the letter of the prompt, the end
    versions = {span.version for sample in samples for span in sample.token_policy_versions}
    assert len(versions) >= 3, "it loaded new versions on the way"
    job = run.run.gateway.jobs["job-py"]
    assert (job.committed, set(job.refused) - {"unknown_version"}) == (8, set())


@needs_node
def test_both_producers_feed_one_run_and_one_that_is_killed_comes_back(tmp_path, started):
    run = started(ExternalRun(tmp_path, num_rounds=10, max_staleness=10))  # who is slow on this machine still counts
    jobs, url = run.run.gateway.jobs, run.run.server.url
    words = {
        "job-py": python_words(url, run.model_directory),
        "job-js": javascript_words(url, run.model_directory),
    }
    tokens = {name: run.run.tokens.make(name, ("train",), seconds=600) for name in words}
    producers = {"job-js": started(Producer(words["job-js"], tmp_path, tokens["job-js"]))}
    until(lambda: "job-js" in jobs and jobs["job-js"].committed == 4)  # all slots
    producers["job-py"] = started(Producer(words["job-py"], tmp_path, tokens["job-py"]))
    until(lambda: run.run.weights.has_confirmed("job-py", 0))  # now both wait for the slots that the first round frees
    run.start()
    until(lambda: jobs["job-py"].committed)
    for name in words:
        producers[name].kill()
        producers[name].wait()
        producers[name] = started(Producer(words[name], tmp_path, tokens[name]))
    run.wait()
    for name, producer in producers.items():
        assert producer.wait() == 0, f"{name}: {producer.log.read_text()}"
    trained = groups_of(run)
    assert len(set(trained)) == len(trained) == 20, "each group is trained once, also those of a killed process"
    made = [is_uniform(sample) for _, group in run.trained for sample in group]
    assert (any(made), all(made)) == (True, False), "groups of both"
    for _, group in run.trained:
        for sample in group:
            if not is_uniform(sample):
                assert sample.rollout_log_probs == pytest.approx(run.log_probs(sample), abs=1e-5)


@pytest.mark.parametrize("kind", ["py", pytest.param("js", marks=needs_node)])
def test_lost_responses_and_a_gateway_that_is_away_cost_nothing_and_count_once(tmp_path, started, kind):
    run = started(ExternalRun(tmp_path, num_rounds=4, lease_timeout_s=8.0))  # heartbeats every 2 s
    seen = {}

    def loses(path, number):
        """The first two responses of each kind of call; of version 0 each file's first."""
        seen[path] = seen.get(path, 0) + 1
        return seen[path] <= (2 if "/files/" not in path else 1 if "/0/files/" in path else 0)

    proxy = started(LossyProxy(run.run.server.url, loses))
    words = {"py": python_words, "js": javascript_words}[kind]
    token = run.run.tokens.make("job", ("train",), seconds=600)
    producer = started(Producer(words(proxy.url, run.model_directory), tmp_path, token))
    jobs = run.run.gateway.jobs
    until(lambda: "job" in jobs and jobs["job"].committed == 4)  # all slots: the next lease waits
    proxy.is_away = True
    began = len(proxy.calls)
    until(lambda: len(proxy.calls) > began + 1)
    proxy.is_away = False
    run.start()
    run.wait()
    assert producer.wait() == 0, producer.log.read_text()
    assert groups_of(run) == list(range(8))
    assert jobs["job"].committed == 8
    for path, body in proxy.lost:
        assert proxy.calls.count((path, body)) >= 2, f"{path} was not repeated as it was"
    lost = {path for path, _ in proxy.lost}
    assert {"/v1/producers/register", "/v1/leases", "/v1/groups", "/v1/weights/loaded", "/v1/weights/serving"} <= lost


@pytest.mark.parametrize("kind", ["py", pytest.param("js", marks=needs_node)])
def test_a_producer_that_is_asked_to_stop_gives_its_leases_back(tmp_path, started, kind):
    run = started(ExternalRun(tmp_path, num_rounds=4, lease_timeout_s=3600.0))
    # it has a lease, of which it never hears
    proxy = started(LossyProxy(run.run.server.url, lambda path, number: path == "/v1/leases"))
    words = {"py": python_words, "js": javascript_words}[kind]
    token = run.run.tokens.make("job", ("train",), seconds=600)
    producer = started(Producer(words(proxy.url, run.model_directory), tmp_path, token))
    until(lambda: any(path == "/v1/leases" for path, _ in proxy.lost))
    until(lambda: run.run.port.call(Ledger.status).producers == {"external/job": 1})
    producer.kill(signal.SIGTERM)
    assert producer.wait() == 0, producer.log.read_text()
    status = run.run.port.call(Ledger.status)
    assert (status.producers, status.retry) == ({}, 1), "given back, long before the lease would end"
