"""Groups for prompts that a job brought itself: over real HTTP, with the real ledger, spool and audit."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.helpers.gateway_run import GatewayRun, confirm, group_of, lease, own_of, sample
from vime.gateway.messages import WeightManifest
from vime.handoff.audit import audit
from vime.handoff.ledger import Ledger
from vime.handoff.ledger_types import Task
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger
from vime.types import Sample

OWN = "/v1/groups/own"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[GatewayRun]:
    run = GatewayRun(tmp_path)
    yield run
    run.close()
    audited(tmp_path)


def audited(directory: Path) -> None:
    report = audit(directory / "ledger.db", checkpoint_round=None, spool=directory / "spool")
    assert report.findings == ()


def refused(response: httpx.Response, status: int, code: str) -> dict[str, object]:
    assert response.status_code == status, response.text
    body: dict[str, object] = response.json()
    assert body["code"] == code
    return body


def ready(run: GatewayRun) -> int:
    return run.port.call(Ledger.status).ready


def stored(run: GatewayRun, group: int) -> list[Sample]:
    task = Task("train", group, 1)
    [checksum] = [checksum for held, checksum, _ in run.spool.entries() if held == task]
    return run.store.samples(task, checksum)


def train_round(run: GatewayRun, round_id: int) -> list[int]:
    found = run.port.call(RoundLedger.lease, round_id, version=round_id, holder="t", count=2).lease
    assert found is not None
    run.port.call(RoundLedger.trained, round_id, found.fence)
    run.port.call(RoundLedger.release, round_id + 1)
    return [group.task.group for group in found.groups]


def test_it_takes_the_next_number_of_the_run_and_a_round_consists_of_both_kinds(run: GatewayRun) -> None:
    client = run.client()
    [first] = lease(client)
    put = client.post(OWN, json=own_of()).json()
    assert put == {"group": 1, "attempt": 1, "is_committed": True, "missing": [], "repeated": False}
    [third] = lease(client, request="next")
    assert (third["group"], third["prompt"]) == (2, "c"), "it took the place of the second prompt, b"
    samples = stored(run, 1)
    assert [(s.index, s.prompt, s.label, s.reward) for s in samples] == [(2, "mine", 7, 0.0), (3, "mine", 7, 1.0)]
    assert [s.metadata for s in samples] == [{"from": "me", "own_key": "k"}] * 2
    assert samples[0].tokens == [1, 5, 7, 8, 9]
    assert client.post("/v1/groups", json=group_of(first)).json()["is_committed"]
    assert train_round(run, 0) == [1, 0]


def test_a_key_counts_once_and_other_content_is_refused_by_name(run: GatewayRun) -> None:
    client, other = run.client("job-a"), run.client("job-b")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post(OWN, json=own_of()).json(), range(8)))
    assert sorted(answer["repeated"] for answer in answers) == [False] + [True] * 7
    packed = {"content-type": "application/msgpack", "accept": "application/json"}
    again = client.post(OWN, content=msgspec.msgpack.encode(own_of() | {"wait_s": 1.0}), headers=packed).json()
    assert (again["repeated"], again["group"]) == (True, 0)
    changes: list[dict[str, object]] = [
        {"prompt": "other"}, {"label": 8}, {"metadata": {}}, {"samples": own_of(reward=9.0)["samples"]},
    ]  # fmt: skip
    for change in changes:
        error = refused(client.post(OWN, json=own_of() | change), 409, "other_content")
        assert (error["may_repeat"], "'k'" in str(error["what"]), "group 0" in str(error["expected"])) == (
            False,
            True,
            True,
        )
    assert other.post(OWN, json=own_of()).json()["group"] == 1, "a key is of its producer"
    assert ready(run) == 2


def test_slots_and_a_full_queue_hold_it_back_and_a_freed_slot_is_its_while_it_holds_fewest(tmp_path: Path) -> None:
    run = GatewayRun(tmp_path, max_tokens=10)  # a group has 2 samples of 5 tokens
    try:
        client, other = run.client("job-a"), run.client("job-b")
        prompts = lease(other, 4)
        full = client.post(OWN, json=own_of())
        assert refused(full, 429, "no_room")["may_repeat"]
        assert ("4 groups hold one" in full.json()["expected"], full.headers["retry-after"]) == (True, "1")
        assert other.post("/v1/groups", json=group_of(prompts[0])).json()["is_committed"]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waits = pool.submit(client.post, OWN, json=own_of() | {"wait_s": 15})
            end = {"lease": prompts[1]["lease"], "reason": "not needed"}
            other.post("/v1/leases/drop", json=end)
            assert lease(other, 1, request="more") == [], "the slot is promised"
            answer = waits.result(20)
        assert "tokens held" in str(refused(answer, 429, "no_room")["expected"]), "it has a slot, and the queue is full"
        assert train_one(run) == 0
        put = client.post(OWN, json=own_of()).json()
        assert (put["group"], put["repeated"]) == (4, False)
        large = client.post(OWN, json=own_of("large", tokens=[1] * 6)).json()
        assert large["code"] == "too_large", "the free slot is the job's, which holds 1 group; the other one holds 2"
        assert len(lease(other, 1, request="more")) == 1, "what was refused for good keeps no slot"
    finally:
        run.close()
    audited(tmp_path)


def train_one(run: GatewayRun) -> int:
    found = run.port.call(RoundLedger.lease, 0, version=0, holder="t", count=1).lease
    assert found is not None
    run.port.call(RoundLedger.trained, 0, found.fence)
    run.port.call(RoundLedger.release, 1)
    return found.groups[0].task.group


def test_what_is_wrong_is_refused_before_it_has_a_number(run: GatewayRun) -> None:
    client = run.client()
    whole = own_of()["samples"]
    for wrong in (whole[:1], [whole[0], whole[0]], [*whole, sample(2)], own_of(log_probs=[0.5] * 3)["samples"]):
        refused(client.post(OWN, json=own_of() | {"samples": wrong}), 422, "invalid")
    refused(client.post(OWN, json=own_of(versions=[[0, 3, 1]])), 409, "unconfirmed_version")
    refused(client.post(OWN, json=own_of("")), 400, "not_this_message")
    refused(client.post(OWN, json=own_of() | {"lease": "x"}), 400, "not_this_message")
    assert lease(client)[0]["group"] == 0
    assert client.post(OWN, json=own_of()).json()["group"] == 1


def test_it_is_known_after_rounds_new_weights_a_lost_confirmation_and_the_end_of_the_run(run: GatewayRun) -> None:
    client = run.client()
    for key in ("a", "b"):
        client.post(OWN, json=own_of(key))
    assert train_round(run, 0) == [0, 1]
    run.weights.release(WeightManifest(version=1, content_hash="hash-of-version-1", location="weights/1"))
    run.weights.forget_confirmations()
    assert client.post(OWN, json=own_of("a")).json()["repeated"], "also for a job that has loaded nothing yet"
    refused(client.post(OWN, json=own_of("c")), 409, "unconfirmed_version")
    confirm(client, 1)
    run.port.call(RoundLedger.release, 1)
    for round_id in (1, 2):
        for place in (0, 1):
            key = f"{round_id}-{place}"
            put = client.post(OWN, json=own_of(key, versions=[[0, 3, 1]])).json()
            assert put["is_committed"], put
        train_round(run, round_id)
    assert client.post(OWN, json=own_of("b")).json()["repeated"]
    refused(client.post(OWN, json=own_of("late", versions=[[0, 3, 1]])), 409, "run_over")


def test_a_group_in_flight_whose_job_begins_anew_is_given_up_and_its_key_is_free(
    run: GatewayRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = run.client()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("vime.handoff.spool._write_all", full)
        refused(client.post(OWN, json=own_of()), 503, "unavailable")
    assert client.post("/v1/producers/heartbeat", json={}).json()["leases"] == [], "it is no lease"
    assert client.post("/v1/producers/register", json={}).status_code == 200
    assert run.port.call(Ledger.status).active == 0
    assert client.post(OWN, json=own_of(reward=3.0)).json()["group"] == 1, "what was never stored binds nobody"


def test_a_group_that_is_given_up_while_it_is_stored_is_put_again(
    run: GatewayRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, put = run.client(), run.writer.put

    async def slow(*arguments: object) -> float:
        run.port.call(PromptLedger.abandon, "external/job-a")
        return await put(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(run.writer, "put", slow)
        assert refused(client.post(OWN, json=own_of()), 503, "unavailable")["may_repeat"]
    assert client.post(OWN, json=own_of()).json()["group"] == 1


def test_the_audit_finds_a_payload_that_is_not_of_its_key(tmp_path: Path) -> None:
    """The spool is evidence that neither the ledger nor the gateway's answer has written."""
    run = GatewayRun(tmp_path)
    try:
        run.client().post(OWN, json=own_of())
        sql = "update prompt_group set own_key = 'x' where grp = 0"
        run.ledger._store.change(sql)
    finally:
        run.close()
    report = audit(tmp_path / "ledger.db", checkpoint_round=None, spool=tmp_path / "spool")
    messages = [found.message for found in report.findings if found.check == "own"]
    assert "its payload names the keys ['k'], the ledger 'x'" in messages


def test_no_job_reaches_a_prompt_of_an_evaluation_and_its_own_groups_are_of_the_train_partition(
    run: GatewayRun,
) -> None:
    """The partition stands in the lease, which only the gateway signs, and it signs leases of the train partition."""
    client = run.client()
    grant = run.port.call(PromptLedger.issue, "external/job-a", 1, request="e", partition="eval/held-out", end=1)
    [issued] = grant.prompts
    [train] = lease(client)
    assert train["group"] == 0
    forged = train["lease"].replace("train/", "eval/held-out/")
    assert forged.startswith(str(issued.task))
    for path, call in (
        ("/v1/groups", group_of(train) | {"lease": forged}),
        ("/v1/samples", {"lease": forged, "sample": sample(0)}),
        ("/v1/leases/drop", {"lease": forged, "reason": "mine"}),
    ):
        refused(client.post(path, json=call), 404, "unknown_lease")
    put = client.post(OWN, json=own_of("eval/held-out/0")).json()
    assert (put["group"], stored(run, 1)[0].metadata["own_key"]) == (1, "eval/held-out/0")
