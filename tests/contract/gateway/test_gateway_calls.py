"""The gateway's calls over real HTTP, against the real ledger, spool and data source."""

import concurrent.futures
import errno
import socket

import msgspec
import pytest

from tests.helpers.gateway_run import GatewayRun, confirm, group_of, job_client, lease, own_of, sample
from vime.gateway.messages import ErrorBody, Prompts, WeightManifest
from vime.gateway.service import Job
from vime.gateway.tokens import Scope
from vime.handoff.ledger import CALLS, Ledger
from vime.handoff.ledger_types import Admission, Task
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger
from vime.types import HandoffError


@pytest.fixture
def run(tmp_path):
    run = GatewayRun(tmp_path)
    yield run
    run.close()


def refused(response, status, code):
    assert response.status_code == status, response.text
    body = response.json()
    assert body["code"] == code
    assert all(body[part] for part in ("what", "got", "expected", "next")), body
    assert set(body) == set(ErrorBody.__struct_fields__)
    return body


def num_ready(run):
    return run.port.call(Ledger.status).ready


def test_a_leased_prompt_that_is_put_whole_is_ready_and_has_the_jobs_tokens(run):
    client = run.client()
    [prompt] = lease(client)
    assert (prompt["prompt"], prompt["label"], prompt["attempt"]) == ("a", "a", 1)
    assert prompt["tokens"] == run.gateway._prompts.group_at(0)[0].tokens
    assert len(prompt["tokens"]) == 2, "<bos> and the letter"
    put = client.post("/v1/groups", json=group_of(prompt)).json()
    assert put == {"group": 0, "attempt": 1, "is_committed": True, "missing": [], "repeated": False}
    assert num_ready(run) == 1
    task = Task("train", 0, 1)
    [stored] = [checksum for held, checksum, _ in run.spool.entries() if held == task]
    found = run.store.samples(task, stored)
    assert [s.tokens for s in found] == [[1, 5, 7, 8, 9]] * 2
    assert [s.reward for s in found] == [0.0, 1.0]
    assert len(run.queue.chunks) == 1


def test_a_group_put_sample_by_sample_is_ready_with_its_last_sample_and_not_before(run):
    client = run.client()
    [prompt] = lease(client)
    first, last = (sample(s["index"]) for s in prompt["samples"])
    call = {"lease": prompt["lease"], "sample": first}
    assert client.post("/v1/samples", json=call).json()["missing"] == [last["index"]]
    repeated = client.post("/v1/samples", json=call).json()
    assert (repeated["missing"], repeated["repeated"], num_ready(run)) == ([last["index"]], True, 0)
    better = {"sample": sample(first["index"], reward=2.0)}
    refused(client.post("/v1/samples", json=call | better), 409, "other_sample")
    done = client.post("/v1/samples", json=call | {"sample": last}).json()
    assert (done["is_committed"], num_ready(run)) == (True, 1)
    again = client.post("/v1/samples", json=call).json()
    assert (again["is_committed"], again["repeated"], num_ready(run)) == (True, True, 1)


def test_repeated_calls_count_once_also_when_they_arrive_together(run):
    client = run.client()
    [prompt] = lease(client, request="one")
    assert lease(client, request="one") == [prompt]
    group = group_of(prompt)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/groups", json=group).json(), range(8)))
    assert sorted(answer["repeated"] for answer in answers) == [False] + [True] * 7
    assert all(answer["is_committed"] for answer in answers)
    assert num_ready(run) == 1
    [dropped, returned] = lease(client, 2, request="two")
    for path, prompt in (("drop", dropped), ("give-back", returned)):
        end = {"lease": prompt["lease"], "reason": "no reward"}
        assert [client.post(f"/v1/leases/{path}", json=end).json()["repeated"] for _ in range(2)] == [False, True]
    [again] = lease(client, 1, request="three")
    assert (again["group"], again["attempt"]) == (returned["group"], 2)
    refused(client.post("/v1/groups", json=group_of(returned)), 409, "lease_lost")


def test_no_producer_sees_or_ends_another_ones_leases(run):
    client, thief = run.client("job-a"), run.client("job-b")
    [prompt] = lease(client)
    end = {"lease": prompt["lease"], "reason": "mine now"}
    for path, call in (
        ("/v1/groups", group_of(prompt)),
        ("/v1/samples", {"lease": prompt["lease"], "sample": sample(prompt["samples"][0]["index"])}),
        ("/v1/leases/drop", end),
        ("/v1/leases/give-back", end),
    ):
        theirs = refused(thief.post(path, json=call), 404, "unknown_lease")
        invented = refused(thief.post(path, json=call | {"lease": "train/7#1." + "A" * 32}), 404, "unknown_lease")
        assert {**theirs, "got": ""} == {**invented, "got": ""}, "the answer must not tell whether a lease exists"
    assert thief.post("/v1/producers/heartbeat", json={}).json()["leases"] == []
    assert thief.post("/v1/producers/leave", json={}).json() == {"given_back": 0}
    assert prompt["lease"] not in [other["lease"] for other in lease(thief, 4, request="r")]
    refused(thief.get("/v1/producers"), 403, "forbidden")
    for scope in (Scope.TRAIN, Scope.EVAL, Scope.READ):
        other = run.client(f"{scope}-job", scopes=(scope,), confirms=False)
        refused(other.post("/v1/producers/end", json={"producer": "job-a", "revoke": True}), 403, "forbidden")
    assert client.post("/v1/producers/heartbeat", json={}).json()["leases"] == [prompt["lease"]]
    assert client.post("/v1/groups", json=group_of(prompt)).json()["is_committed"]


def test_an_admin_sees_everything_and_ends_a_job_and_its_tokens_but_does_no_work(run):
    client, other = run.client("job-a"), run.client("job-b")
    admin = run.client("keeper", scopes=(Scope.ADMIN,), confirms=False)
    [prompt], [kept] = lease(client), lease(other)
    run.tokens.make("job-a", (Scope.EVAL,), seconds=60)
    assert {job["name"] for job in admin.get("/v1/producers").json()["producers"]} == {"job-a", "job-b"}
    assert admin.get("/v1/queue").json()["leases"] == {"external/job-a": 1, "external/job-b": 1}
    for path, call in (("/v1/leases", {"request": "r"}), ("/v1/producers/register", {})):
        refused(admin.post(path, json=call), 403, "forbidden")
    ended = {"given_back": 1, "revoked": []}
    assert admin.post("/v1/producers/end", json={"producer": "job-a"}).json() == ended
    refused(client.post("/v1/groups", json=group_of(prompt)), 409, "lease_lost")
    [again] = lease(client, request="again")
    assert (again["group"], again["attempt"]) == (prompt["group"], 2)
    revoking = {"producer": "job-a", "revoke": True}
    told = admin.post("/v1/producers/end", json=revoking).json()
    assert (told["given_back"], len(told["revoked"])) == (1, 2)
    assert admin.post("/v1/producers/end", json=revoking).json() == {"given_back": 0, "revoked": []}
    refused(client.post("/v1/producers/heartbeat", json={}), 401, "unauthorized")
    assert {token.name for token in run.tokens.tokens()} == {"job-b", "keeper"}
    assert other.post("/v1/producers/heartbeat", json={}).json()["leases"] == [kept["lease"]]
    nobody = {"given_back": 0, "revoked": []}
    assert admin.post("/v1/producers/end", json={"producer": "nobody", "revoke": True}).json() == nobody


def report(client, *engines, version=0):
    """Say that these engines have loaded a version."""
    call = {"version": version, "engines": dict.fromkeys(engines, f"hash-of-version-{version}")}
    assert client.post("/v1/weights/loaded", json=call).status_code == 200


def test_a_process_that_registers_reports_its_own_engines_whatever_an_earlier_one_had(run):
    """Engines of both together would be as many as were registered."""
    client = run.client(confirms=False)
    for engine in ("old", "new"):
        client.post("/v1/producers/register", json={"engines": 2})
        report(client, engine)
        assert client.post("/v1/producers/heartbeat", json={}).json()["lags"].endswith("1 of its 2 engines have")
    other = run.client("job-b", confirms=False)
    other.post("/v1/producers/register", json={})
    report(other, "any")  # who registers no number is confirmed by one report
    assert other.post("/v1/producers/heartbeat", json={}).json()["lags"] == ""


def test_a_job_gets_prompts_only_with_the_serving_weights_and_a_wrong_hash_is_refused(run):
    client = run.client(confirms=False)
    reader = run.client("eyes", scopes=(Scope.READ,), confirms=False)
    client.post("/v1/producers/register", json={"model": "tiny", "engines": 2})
    empty = client.post("/v1/leases", json={"request": "r"}).json()
    assert (empty["prompts"], empty["waits_for"]) == (
        [], "job-a to load version 0 and report its hash; it has confirmed none",
    )  # fmt: skip
    wrong = {"version": 0, "engines": {"left": "hash-of-version-0", "right": "other"}}
    assert "'right'" in refused(client.post("/v1/weights/loaded", json=wrong), 409, "wrong_hash")["got"]
    for _ in range(2):  # the same engine twice is one
        report(client, "left")
        half = client.post("/v1/leases", json={"request": "r"}).json()
        assert (half["prompts"], half["lags"]) == (
            [], "job-a to load version 0 and report its hash; 1 of its 2 engines have",
        )  # fmt: skip
        assert client.post("/v1/producers/heartbeat", json={}).json()["lags"] == half["lags"]
    report(client, "right")
    [prompt] = lease(client)
    group = group_of(prompt, versions=[[0, 1, 0], [1, 3, 1]])
    assert refused(client.post("/v1/groups", json=group), 409, "unconfirmed_version")["may_repeat"]
    run.weights.release(WeightManifest(version=1, content_hash="hash-of-version-1", location="weights/1"))
    [job] = reader.get("/v1/producers").json()["producers"]
    assert (job["name"], job["newest_version"], job["refused"]) == (
        "job-a", 0, {"wrong_hash": 1, "unconfirmed_version": 1},
    )  # fmt: skip
    assert (job["model"], job["engines"]) == ("tiny", 2)
    assert job["lags"].startswith("job-a to load version 1")
    assert lease(client, request="later") == []
    assert client.get("/v1/weights/serving").json()["content_hash"] == "hash-of-version-1"
    report(client, "left", version=1)
    assert refused(client.post("/v1/groups", json=group), 409, "unconfirmed_version")["may_repeat"]
    report(client, "left", "right", version=1)
    assert client.post("/v1/groups", json=group).json()["is_committed"]
    assert len(lease(client, request="later")) == 1


def test_an_empty_response_says_what_is_waited_for_and_a_freed_slot_ends_a_long_poll(run):
    client = run.client()
    first, *_ = lease(client, 4)
    empty = client.post("/v1/leases", json={"request": "next"}).json()
    assert empty["waits_for"].startswith("a slot: 4 groups hold one")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        polled = pool.submit(client.post, "/v1/leases", json={"request": "next", "wait_s": 15})
        client.post("/v1/leases/drop", json={"lease": first["lease"], "reason": "too long"})
        assert [prompt["group"] for prompt in polled.result(15).json()["prompts"]] == [4]


def test_every_wrong_number_is_refused_by_name_and_stores_nothing(run):
    client = run.client()
    [prompt] = lease(client)
    cases = {
        "tokens": [1, 5, 7, 8, 64],  # the vocabulary ends at 63
        "response_length": 5,  # no prompt left
        "log_probs": [-0.5, -0.25],
        "loss_mask": [1, 1],
        "versions": [[0, 2, 0]],
        "reward": 1e300,
    }
    for name, value in cases.items():
        refused(client.post("/v1/groups", json=group_of(prompt) | {
            "samples": [sample(s["index"]) | {name: value} for s in prompt["samples"]]
        }), 422, "invalid")  # fmt: skip
    for value in (float("nan"), float("-inf"), float("inf"), 0.5, -1e300):  # the last is no float32
        body = msgspec.msgpack.encode(group_of(prompt, log_probs=[value, -1.0, -1.0]))
        response = client.post("/v1/groups", content=body, headers={"content-type": "application/msgpack"})
        assert response.status_code == 422
        found = msgspec.msgpack.decode(response.content)
        assert (found["code"], "a log-probability is impossible" in found["what"]) == ("invalid", True), found
    alone = group_of(prompt)
    alone["samples"].pop()
    refused(client.post("/v1/groups", json=alone), 422, "invalid")
    refused(client.post("/v1/groups", json=group_of(prompt) | {"smaples": []}), 400, "not_this_message")
    assert (list(run.spool.entries()), run.queue.chunks, num_ready(run)) == ([], {}, 0)


def test_json_and_msgpack_carry_the_same(run):
    client = run.client()
    headers = {"content-type": "application/msgpack"}
    body = msgspec.msgpack.encode({"request": "r"})
    response = client.post("/v1/leases", content=body, headers=headers)
    assert response.headers["content-type"] == "application/msgpack"
    assert msgspec.to_builtins(msgspec.msgpack.decode(response.content, type=Prompts))["prompts"] == lease(client)
    refused(client.post("/v1/leases", content=b"r", headers={"content-type": "text/plain"}), 415, "unknown_encoding")


def test_size_and_rate_are_bounded_before_anything_is_parsed(tmp_path):
    run = GatewayRun(tmp_path, limits={"calls_per_s": 2.0, "max_body_bytes": 1000})
    try:
        client = run.client()  # one call
        refused(
            client.post("/v1/groups", content=b"[" * 1001, headers={"content-type": "application/json"}),
            413,
            "too_large",
        )
        chunks = (b"[" * 400 for _ in range(3))
        refused(
            client.post("/v1/groups", content=chunks, headers={"content-type": "application/json"}), 413, "too_large"
        )
        host, port = run.server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:  # says a size and sends nothing
            head = f"POST /v1/groups HTTP/1.1\r\nhost: x\r\nauthorization: {client.headers['authorization']}\r\n"
            connection.sendall(f"{head}content-type: application/json\r\ncontent-length: 1001\r\n\r\n".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
        answers = [client.post("/v1/producers/heartbeat", json={}) for _ in range(8)]
        slow = next(answer for answer in answers if answer.status_code != 200)
        refused(slow, 429, "too_many_calls")
        assert slow.headers["retry-after"] == "1"
    finally:
        run.close()


def begin_body(run, client, size):
    """Return a connection of a call whose body is awaited by the gateway."""
    host, port = run.server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST /v1/groups HTTP/1.1\r\nhost: x\r\nauthorization: {client.headers['authorization']}\r\n"
    head += f"content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {size}\r\n\r\n"
    connection.sendall(head.encode())
    assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
    return connection


def test_the_bytes_of_bodies_at_a_time_are_bounded_of_each_job_and_of_all_before_they_are_read(tmp_path):
    limits = {"max_body_bytes": 1000, "max_held_bytes_of_job": 1500, "max_held_bytes": 2500}
    run = GatewayRun(tmp_path, limits=limits)
    try:
        first, second, third = (run.client(name) for name in ("job-a", "job-b", "job-c"))

        def put(client, content):
            return client.post("/v1/groups", content=content, headers={"content-type": "application/json"})

        with begin_body(run, first, 1000) as held, begin_body(run, second, 1000):
            for content in (b"[" * 501, (b"[" for _ in range(2))):  # the size of the second is not known: 1000 at most
                answer = put(first, content)
                refused(answer, 429, "too_many_calls")
                assert answer.headers["retry-after"] == "1"
            refused(put(third, b"[" * 501), 503, "unavailable")
            refused(put(third, b"[" * 1001), 413, "too_large")
            refused(put(third, b"[" * 500), 400, "not_this_message")
            held.sendall(b"[" * 1000)
            assert held.recv(1000).startswith(b"HTTP/1.1 400 ")
            refused(put(first, b"[" * 501), 400, "not_this_message")  # what was held is given back
    finally:
        run.close()


def test_a_full_queue_tells_when_to_repeat_and_a_too_large_group_is_named(tmp_path):
    run = GatewayRun(tmp_path, max_tokens=10)  # a group has 2 samples of 5 tokens
    try:
        client = run.client()
        first, second, third = lease(client, 3)
        assert client.post("/v1/groups", json=group_of(first)).status_code == 200
        full = client.post("/v1/groups", json=group_of(second))
        assert (refused(full, 429, "no_room")["may_repeat"], full.headers["retry-after"]) == (True, "1")
        refused(client.post("/v1/groups", json=group_of(third, tokens=[1] * 6)), 413, "too_large")
        assert num_ready(run) == 1
    finally:
        run.close()


def test_rewards_of_a_group_count_once_however_often_it_was_refused_for_want_of_room(tmp_path):
    run = GatewayRun(tmp_path, max_tokens=10)
    try:
        client = run.client()
        first, second = lease(client, 2)
        assert client.post("/v1/groups", json=group_of(first)).status_code == 200
        for _ in range(3):
            refused(client.post("/v1/groups", json=group_of(second)), 429, "no_room")
        assert run.gateway.rewards == [0.0, 1.0]
    finally:
        run.close()


MIXED = [[0, 1, 0], [1, 3, 1]]
"""The first token of a completion is of version 0, the others of version 1."""


@pytest.mark.parametrize(("policy", "mask"), [("correct", [1, 1, 1]), ("mask", [0, 1, 1])])
def test_the_run_decides_what_is_trained_of_a_completion_that_two_versions_sampled(tmp_path, policy, mask):
    run = GatewayRun(tmp_path, limits={"mixed_versions": policy})
    try:
        client = run.client()
        run.serve(client, 1)
        whole, in_parts = lease(client, 2)
        assert client.post("/v1/groups", json=group_of(whole, versions=MIXED)).status_code == 200
        for one in group_of(in_parts, versions=MIXED)["samples"]:
            put = client.post("/v1/samples", json={"lease": in_parts["lease"], "sample": one})
            assert put.status_code == 200, put.text
        assert client.post("/v1/groups/own", json=own_of(versions=MIXED)).status_code == 200
        for task in (Task("train", number, 1) for number in range(3)):
            *_, stored = [checksum for held, checksum, _ in run.spool.entries() if held == task]  # samples came before
            assert [list(s.loss_mask) for s in run.store.samples(task, stored)] == [mask] * 2
        assert run.gateway.masked_tokens == 6 * (3 - sum(mask))
    finally:
        run.close()


def test_a_row_that_is_too_old_beside_the_newest_of_its_group_is_masked_whole(tmp_path):
    """With a staleness of 1 it would make the group too old; a worker of the run masks it too."""
    run = GatewayRun(tmp_path, limits={"mixed_versions": "mask"})
    try:
        client = run.client()
        run.serve(client, 1)
        run.serve(client, 2)
        [prompt] = lease(client)
        group = group_of(prompt)
        group["samples"][1]["versions"] = [[0, 3, 2]]
        assert client.post("/v1/groups", json=group).status_code == 200
        [stored] = [checksum for _, checksum, _ in run.spool.entries()]
        assert [list(s.loss_mask) for s in run.store.samples(Task("train", 0, 1), stored)] == [[0] * 3, [1] * 3]
        assert run.gateway.masked_tokens == 3
    finally:
        run.close()


def test_a_group_of_mixed_versions_is_refused_by_name_where_the_run_rejects_it_and_keeps_its_lease(tmp_path):
    run = GatewayRun(tmp_path, limits={"mixed_versions": "reject"})
    try:
        client = run.client()
        run.serve(client, 1)
        [prompt] = lease(client)
        bad = group_of(prompt, versions=MIXED)
        refused(client.post("/v1/groups", json=bad), 422, "mixed_versions")
        refused(
            client.post("/v1/samples", json={"lease": prompt["lease"], "sample": bad["samples"][0]}),
            422,
            "mixed_versions",
        )
        refused(client.post("/v1/groups/own", json=own_of(versions=MIXED)), 422, "mixed_versions")
        assert num_ready(run) == 0
        fine = group_of(prompt, versions=MIXED, loss_mask=[0, 1, 1])  # the token of version 0 is not trained
        assert client.post("/v1/groups", json=fine).status_code == 200
        assert num_ready(run) == 1
    finally:
        run.close()


def test_reasons_of_a_job_are_told_apart_until_there_are_many():
    job = Job()
    for number in range(1000):
        job.note_drop(f"reason {number}")
    assert (len(job.dropped), job.dropped["reason 0"], sum(job.dropped.values())) == (65, 1, 1000)


def test_a_queue_without_a_bound_is_not_asked_for_room(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(CALLS, "PromptLedger.admit", lambda *_, **__: asked.append(1) or Admission(granted=True))
    for has_capacity, expected in ((True, [1]), (False, [1])):
        run = GatewayRun(tmp_path / str(has_capacity), limits={"has_capacity": has_capacity})
        try:
            client = run.client()
            assert client.post("/v1/groups", json=group_of(*lease(client))).status_code == 200
            assert (asked, num_ready(run)) == (expected, 1)
        finally:
            run.close()


def test_what_cannot_be_stored_is_not_acknowledged_and_the_same_call_is_accepted_later(run, monkeypatch):
    client = run.client()
    [prompt] = lease(client)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("vime.handoff.spool._write_all", full)
        answer = client.post("/v1/groups", json=group_of(prompt))
        assert refused(answer, 503, "unavailable")["may_repeat"]
        one = {"lease": prompt["lease"], "sample": sample(prompt["samples"][0]["index"])}
        refused(client.post("/v1/samples", json=one), 503, "unavailable")
    with monkeypatch.context() as patched:

        def lost(*_):
            raise HandoffError("the queue is gone")

        patched.setattr(run.queue, "put", lost)
        refused(client.post("/v1/groups", json=group_of(prompt)), 503, "unavailable")
    assert num_ready(run) == 0
    assert client.post("/v1/groups", json=group_of(prompt)).json()["repeated"] is False
    assert num_ready(run) == 1


def test_a_lease_that_another_producer_got_after_its_time_is_refused(run):
    client, other = run.client("job-a"), run.client("job-b")
    [prompt] = lease(client)
    run.port.call(PromptLedger.abandon, "external/job-a")
    [again] = lease(other)
    assert (again["group"], again["attempt"]) == (prompt["group"], 2)
    refused(client.post("/v1/groups", json=group_of(prompt)), 409, "lease_lost")
    assert other.post("/v1/groups", json=group_of(again)).json()["is_committed"]
    refused(client.post("/v1/groups", json=group_of(prompt)), 409, "lease_lost")


def test_tokens_are_checked_at_every_call_and_only_hashes_are_kept(run, tmp_path):
    clock = [1000.0]
    run.tokens._clock = lambda: clock[0]
    token = run.tokens.make("job-a", (Scope.TRAIN,), seconds=60)
    client = job_client(run.server.url, token)
    assert token.split("_")[2] not in (tmp_path / "gateway_tokens.json").read_text()
    assert (tmp_path / "gateway_tokens.json").stat().st_mode & 0o777 == 0o600
    assert client.post("/v1/producers/register", json={}).json()["producer"] == "job-a"
    forged = job_client(run.server.url, token[:-1] + ("0" if token[-1] != "0" else "1"))
    answer = forged.post("/v1/producers/register", json={})
    assert (refused(answer, 401, "unauthorized"), answer.headers["www-authenticate"])[1] == "Bearer"
    clock[0] += 61
    refused(client.post("/v1/producers/register", json={}), 401, "unauthorized")
    clock[0] -= 61
    run.tokens.revoke(token.split("_")[1])
    refused(client.post("/v1/producers/register", json={}), 401, "unauthorized")


def test_the_schema_names_every_call_and_message(run):
    client = run.client()
    document = client.get("/v1/openapi.json").json()
    assert document["paths"]["/v1/groups"]["post"]["requestBody"]["content"]["application/msgpack"]["schema"] == {
        "$ref": "#/components/schemas/PutGroup"
    }
    for path, methods in document["paths"].items():
        for method in methods:
            address = path.replace("{version}", "0").replace("{name}", "x")
            response = client.request(method, address, json={} if method == "post" else None)
            if "{name}" in path:
                refused(response, 404, "unknown_file")
                continue
            assert response.status_code in (200, 400, 403), f"{method} {path}: {response.text}"
    refused(client.get("/v1/groups"), 405, "no_such_call")
    refused(client.get("/v2/groups"), 404, "no_such_call")


def test_calls_without_a_valid_token_are_limited_together_and_slow_nobody_else_down(tmp_path):
    run = GatewayRun(tmp_path, limits={"failures_per_s": 0.001, "calls_per_s": 1000.0})  # less than one fits
    try:
        client, stranger = run.client(), job_client(run.server.url, "guess")
        refused(stranger.post("/v1/producers/heartbeat", json={}), 429, "too_many_calls")
        assert client.post("/v1/producers/heartbeat", json={}).status_code == 200
    finally:
        run.close()


def test_samples_of_groups_that_are_not_whole_are_bounded_by_producer_also_after_their_leases_end(tmp_path):
    run = GatewayRun(tmp_path, limits={"max_partial_bytes": 400})  # a stored sample has 150 to 200 bytes
    try:
        client, other = run.client("job-a"), run.client("job-b")
        first, second = lease(client, 2)
        [third] = lease(other)

        def put(who, prompt, number=0):
            call = {"lease": prompt["lease"], "sample": sample(prompt["samples"][number]["index"])}
            return who.post("/v1/samples", json=call)

        assert put(client, first).json()["missing"]
        assert put(client, second).json()["missing"]
        assert refused(put(client, second, 1), 429, "no_room")["may_repeat"]
        assert put(client, first).json()["repeated"], "what is stored needs no room"
        assert put(other, third).json()["missing"], "each producer has a bound of its own"
        for prompt in (first, second):
            client.post("/v1/leases/give-back", json={"lease": prompt["lease"], "reason": "again"})
        again, also = lease(client, 2, request="again")
        refused(put(client, again), 429, "no_room")
        assert client.post("/v1/groups", json=group_of(again)).json()["is_committed"], "whole groups need none"
        put(client, also)
        run.store.compact({})  # a checkpoint: first the segment ends, then it is deleted
        other.post("/v1/groups", json=group_of(third))
        run.store.compact({})
        assert put(client, also).json()["missing"]
    finally:
        run.close()


def test_groups_of_jobs_leave_the_spool_after_the_checkpoint_that_has_them_and_not_before(run):
    """However they were put: whole, sample by sample (each is a record of its own too), or for a prompt of the job's
    own. A segment of the spool is deleted when none of its records is needed and a newer one is there."""
    client = run.client()

    def stored():
        run.store.compact(run.port.call(Ledger.needed_payloads))
        return {task.group for task, *_ in run.spool.entries()}

    def trained(round_id):
        taken = run.port.call(RoundLedger.lease, round_id, version=round_id, holder="t", count=2).lease
        run.port.call(RoundLedger.trained, round_id, taken.fence)
        run.port.call(RoundLedger.release, round_id + 1)

    whole, by_sample = lease(client, 2)
    assert client.post("/v1/groups", json=group_of(whole)).json()["is_committed"]
    for one in by_sample["samples"]:
        call = {"lease": by_sample["lease"], "sample": sample(one["index"])}
        assert client.post("/v1/samples", json=call).status_code == 200
    trained(0)
    assert stored() == {0, 1}
    assert client.post("/v1/groups/own", json=own_of()).json()["group"] == 2
    assert stored() == {0, 1, 2}, "round 0 is trained, but in no checkpoint"
    [last] = lease(client, request="round 1")
    assert client.post("/v1/groups", json=group_of(last)).json()["is_committed"]
    trained(1)
    run.port.call(RoundLedger.durable, 1)
    stored()
    [prompt] = lease(client, request="round 2")
    client.post("/v1/samples", json={"lease": prompt["lease"], "sample": sample(prompt["samples"][0]["index"])})
    assert stored() == {4}, "what is under way"


def test_a_job_that_begins_anew_gives_back_what_its_dead_process_had(run):
    """Otherwise its heartbeats would renew leases that nobody works on, and a round would wait for ever."""
    client = run.client()
    [old] = lease(client)
    registered = client.post("/v1/producers/register", json={})
    assert registered.status_code == 200
    [again] = lease(client, request="of the new process")
    assert (again["group"], again["attempt"]) == (old["group"], old["attempt"] + 1)
    late = client.post("/v1/groups", json=group_of(old))
    assert (late.status_code, late.json()["code"]) == (409, "lease_lost")
    assert client.post("/v1/groups", json=group_of(again)).json()["is_committed"]


def test_leases_whose_response_was_lost_come_back_though_the_gateway_forgot_the_jobs_weights(run):
    """A gateway that was killed between the ledger's answer and its own has forgotten the confirmations too. It may not
    ask for weights first: the job would lease anew, and its heartbeats would renew leases that it does not know."""
    client = run.client()
    [lost] = lease(client, request="whose response was lost")
    run.weights.forget_confirmations()
    [again] = lease(client, request="whose response was lost")
    assert again == lost
    refused(client.post("/v1/groups", json=group_of(again)), 409, "unconfirmed_version")
    confirm(client)
    assert client.post("/v1/groups", json=group_of(again)).json()["is_committed"]
