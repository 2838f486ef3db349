"""Rewards with entries, extra columns and samples of several rows, as a job sends them and as the run stores them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from tests.helpers.gateway_run import GatewayRun, group_of, lease, own_of, sample
from vime.data.payload import split_record, unpack_rows
from vime.data.rows import TrainRow
from vime.gateway.service import SAMPLE_MARK
from vime.handoff.ledger_types import Task

FLAGS = ("--reward-key", "score", "--transfer-queue-extra-data-fields", "weights", "note")
LIMITS = {"reward_key": "score", "extra_fields": ("weights", "note")}


@pytest.fixture
def run(tmp_path: Path):
    run = GatewayRun(tmp_path, flags=FLAGS, limits=LIMITS)
    yield run
    run.close()


@pytest.fixture
def plain(tmp_path: Path):
    run = GatewayRun(tmp_path)
    yield run
    run.close()


def rich(score: float = 1.0, **changes: object) -> dict[str, object]:
    return {
        "reward": {"score": score, "style": 0.5}, "extra": {"weights": [0.5, 1.0, 2.0], "note": {"tool": "x"}},
    } | changes  # fmt: skip


def put(client: httpx.Client, prompt: dict, samples: list[dict]) -> httpx.Response:
    return client.post("/v1/groups", json={"lease": prompt["lease"], "samples": samples})


def invalid(response: httpx.Response) -> str:
    assert (response.status_code, response.json()["code"]) == (422, "invalid"), response.text
    return f"{response.json()['what']} {response.json()['got']} {response.json()['expected']}"


def rows_of(run: GatewayRun, group: int) -> list[TrainRow]:
    task = Task("train", group, 1)
    kept = [run.spool.read(task, checksum) for held, checksum, _ in run.spool.entries() if held == task]
    [record] = [record for record in kept if not record.startswith(SAMPLE_MARK)]
    return [row for chunk in split_record(record)[0] for row in unpack_rows(chunk)]


def test_entries_and_columns_reach_the_rows_in_both_encodings_and_sample_by_sample(run: GatewayRun) -> None:
    client = run.client()
    registered = client.post("/v1/producers/register", json={}).json()
    assert (registered["reward_key"], registered["extra_fields"]) == ("score", ["weights", "note"])
    whole, packed, single = lease(client, 3)
    answers = [put(client, whole, [sample(s["index"], **rich(n)) for n, s in enumerate(whole["samples"])])]
    body = msgspec.msgpack.encode(group_of(packed, **rich()) | {"lease": packed["lease"]})
    answers.append(client.post("/v1/groups", content=body, headers={"content-type": "application/msgpack"}))
    for entry in single["samples"]:
        call = {"lease": single["lease"], "sample": sample(entry["index"], **rich())}
        answers.append(client.post("/v1/samples", json=call))
    answers.append(client.post("/v1/groups/own", json=own_of(**rich())))
    assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]
    for group in range(4):
        for row in rows_of(run, group):
            assert row.extra["weights"].tolist() == [0.5, 1.0, 2.0]
            assert row.extra["note"] == b'{"tool": "x"}'
    assert [row.raw_reward for row in rows_of(run, 0)] == [0.0, 1.0]
    [checksum] = [checksum for held, checksum, _ in run.spool.entries() if held == Task("train", 0, 1)]
    assert run.store.samples(Task("train", 0, 1), checksum)[1].reward == {"score": 1.0, "style": 0.5}


def test_what_the_run_did_not_ask_for_or_lacks_is_refused_by_name(run: GatewayRun) -> None:
    client = run.client()
    [prompt] = lease(client)
    cases = {
        "'weights'": {"extra": {"note": 1}},
        "'more'": {"extra": {"weights": [1.0], "note": 1, "more": 1}},
        "'score'": {"reward": {"style": 0.5}},
        "finite": {"reward": {"score": 1.0, "style": 1e300}},
        "note": {"extra": {"weights": [1.0], "note": None}},
    }
    for named, change in cases.items():
        assert named in invalid(client.post("/v1/groups", json=group_of(prompt, **rich(**change)))), change
    body = msgspec.msgpack.encode(group_of(prompt, **rich(reward={"score": float("nan")})))
    packed = {"content-type": "application/msgpack", "accept": "application/json"}
    invalid(client.post("/v1/groups", content=body, headers=packed))
    wrong = client.post("/v1/groups/own", json=own_of(**rich(extra={"weights": [1.0], "note": None})))
    assert "note" in invalid(wrong)
    assert client.post("/v1/groups/own", json=own_of(**rich())).status_code == 200, "its key is free after a refusal"
    assert client.post("/v1/groups", json=group_of(prompt, **rich(reward=2.0))).status_code == 200, "a number will do"


def test_a_run_without_them_refuses_entries_and_columns(plain: GatewayRun) -> None:
    client = plain.client()
    [prompt] = lease(client)
    assert "reward_key" in invalid(client.post("/v1/groups", json=group_of(prompt, reward={"score": 1.0})))
    assert "'x'" in invalid(client.post("/v1/groups", json=group_of(prompt, extra={"x": 1})))


def test_rows_of_one_sample_stay_together_and_count_once(plain: GatewayRun) -> None:
    """Sample 0 has two rows and reward 1, sample 1 one and reward 0: mean 0.5, each row of sample 0 is above it."""
    client = plain.client()
    [prompt] = lease(client)
    first, second = (entry["index"] for entry in prompt["samples"])
    rows = [sample(first), sample(first, tokens=[1, 5, 9, 8, 7]), sample(second, 0.0)]
    assert put(client, prompt, rows).json()["is_committed"]
    found = rows_of(plain, 0)
    assert [(row.sample_index, row.tokens.tolist()[2:], row.raw_reward) for row in found] == [
        (0, [7, 8, 9], 1.0), (0, [9, 8, 7], 1.0), (1, [7, 8, 9], 0.0),
    ]  # fmt: skip
    assert found[0].reward == found[1].reward == -found[2].reward > 0


def test_rows_put_sample_by_sample_are_kept_and_repeated_as_they_were(plain: GatewayRun) -> None:
    client = plain.client()
    [prompt] = lease(client)
    first, second = (entry["index"] for entry in prompt["samples"])
    call = {"lease": prompt["lease"], "sample": sample(first), "more_rows": [sample(first, tokens=[1, 5, 9, 8, 7])]}
    assert client.post("/v1/samples", json=call).json()["missing"] == [second]
    assert client.post("/v1/samples", json=call).json()["repeated"]
    shorter = client.post("/v1/samples", json=call | {"more_rows": []})
    assert (shorter.status_code, shorter.json()["code"]) == (409, "other_sample")
    plain.gateway._samples.clear()  # as after a restart: they are read from the spool
    last = {"lease": prompt["lease"], "sample": sample(second, 0.0)}
    assert client.post("/v1/samples", json=last).json()["is_committed"]
    assert [row.sample_index for row in rows_of(plain, 0)] == [0, 0, 1]


def test_rows_that_are_no_sample_are_refused(plain: GatewayRun) -> None:
    client = plain.client()
    [prompt] = lease(client)
    first, second = (entry["index"] for entry in prompt["samples"])
    apart = [sample(first), sample(second), sample(first)]
    assert "follow each other" in invalid(put(client, prompt, apart))
    assert "rewards" in invalid(put(client, prompt, [sample(first), sample(first, 2.0), sample(second)]))
    call = {"lease": prompt["lease"], "sample": sample(first), "more_rows": [sample(second)]}
    assert "several samples" in invalid(client.post("/v1/samples", json=call))
    assert put(client, prompt, [sample(first), sample(second)]).json()["is_committed"]


def as_packed(given: dict, **columns: object) -> dict:
    """The same sample with packed columns."""
    kinds = {"tokens": "<i4", "log_probs": "<f4", "loss_mask": "u1"}
    return given | {
        name: np.asarray(columns.get(name, given[name]), kind).tobytes()
        for name, kind in kinds.items()
        if name in given
    }


def test_packed_columns_are_stored_as_lists_are(plain: GatewayRun) -> None:
    """In msgpack as bytes, in JSON as base64 (the job's own prompt); whole groups and single samples."""
    client, packed = plain.client(), {"content-type": "application/msgpack"}
    changes = {"log_probs": [-0.1, -2.5, -1e-7], "loss_mask": [1, 0, 1]}
    by_list, by_bytes, single = lease(client, 3)
    samples = {
        prompt["group"]: [sample(entry["index"], **changes) for entry in prompt["samples"]]
        for prompt in (by_list, by_bytes, single)
    }
    answers = [put(client, by_list, samples[by_list["group"]])]
    given = [as_packed(entry) for entry in samples[by_bytes["group"]]]
    body = msgspec.msgpack.encode({"lease": by_bytes["lease"], "samples": given})
    answers += [client.post("/v1/groups", content=body, headers=packed) for _ in range(2)]
    for entry in samples[single["group"]]:
        call = {"lease": single["lease"], "sample": as_packed(entry)}
        answers += [client.post("/v1/samples", content=msgspec.msgpack.encode(call), headers=packed) for _ in range(2)]
    own = own_of(**changes)
    own["samples"] = [as_packed(entry) for entry in own["samples"]]
    text = {"content-type": "application/json"}
    answers.append(client.post("/v1/groups/own", content=msgspec.json.encode(own), headers=text))
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    expected = rows_of(plain, by_list["group"])
    for group in (by_bytes["group"], single["group"], answers[-1].json()["group"]):
        for mine, theirs in zip(rows_of(plain, group), expected, strict=True):
            for name in ("tokens", "rollout_log_probs", "loss_mask"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            assert mine.token_policy_versions == theirs.token_policy_versions


@pytest.mark.parametrize(
    ("column", "content", "why"),
    [
        ("tokens", b"123456789", r"bytes of its tokens are no whole numbers.* 9 bytes 4 for each number \(int32"),
        ("tokens", np.asarray([1, -5, 7, 8, 9], "<i4").tobytes(), "no such token.* token -5 0 to"),
        ("tokens", np.asarray([1, 5, 7, 8, 2**31 - 1], "<i4").tobytes(), "no such token.* token 2147483647"),
        ("tokens", b"", "not a prompt and a completion within the bound.* 0 tokens"),
        ("log_probs", b"12345", r"bytes of its log_probs are no whole numbers.* 4 for each number \(float32"),
        ("log_probs", np.asarray([-1.0, np.nan, -1.0], "<f4").tobytes(), "log-probability is impossible.* nan"),
        ("log_probs", np.asarray([-1.0, -np.inf, -1.0], "<f4").tobytes(), "log-probability is impossible.* -inf"),
        ("log_probs", np.asarray([-1.0, 0.5, -1.0], "<f4").tobytes(), "log-probability is impossible.* 0.5"),
        ("log_probs", np.asarray([-1.0], "<f4").tobytes(), "do not line up.* 1 log_probs"),
        ("loss_mask", bytes([1, 2, 1]), "number of its loss_mask is impossible.* 2 0 or 1"),
        ("loss_mask", bytes([1, 1]), "do not line up.* 2 entries of loss_mask"),
    ],
)
def test_packed_columns_that_are_no_columns_are_refused(
    plain: GatewayRun, column: str, content: bytes, why: str
) -> None:
    client = plain.client()
    [prompt] = lease(client, 1)
    given = [sample(entry["index"]) | {column: content} for entry in prompt["samples"]]
    body = msgspec.msgpack.encode({"lease": prompt["lease"], "samples": given})
    answer = client.post(
        "/v1/groups", content=body, headers={"content-type": "application/msgpack", "accept": "application/json"}
    )
    assert re.search(why, invalid(answer)), answer.text
