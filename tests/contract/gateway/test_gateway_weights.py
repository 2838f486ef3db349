"""Weights over the gateway: the files of a version, byte for byte, and nothing else of the trainer's disk."""

import hashlib
import json
import shutil

import pytest
import torch

from tests.helpers.gateway_run import GatewayRun, job_client
from tests.helpers.weight_files import write_weights
from vime.gateway.messages import ErrorBody, Loaded, WeightManifest
from vime.gateway.refusal import Refusal
from vime.gateway.weights import Weights

TENSORS = {"b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "a": torch.zeros(0), "c": torch.tensor(1.5)}


@pytest.fixture
def run(tmp_path):
    run = GatewayRun(tmp_path, manifest=write_weights(tmp_path / "weights" / "0", TENSORS, 0))
    yield run
    run.close()


def refused(response, status, code):
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    return response.json()


def test_the_files_of_a_version_arrive_byte_for_byte_whole_or_in_parts(run):
    client = run.client(confirms=False)
    manifest = client.get("/v1/weights/serving").json()
    names = [file["name"] for file in manifest["files"]]
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tensors.json",
        "tokenizer.json",
    ]
    for file in manifest["files"]:
        address = f"/v1/weights/0/files/{file['name']}"
        whole = client.get(address)
        assert (whole.status_code, len(whole.content)) == (200, file["num_bytes"])
        assert hashlib.sha256(whole.content).hexdigest() == file["sha256"]
        part = client.get(address, headers={"range": "bytes=3-9"})
        assert (part.status_code, part.content) == (206, whole.content[3:10])
    order = json.loads(client.get("/v1/weights/0/files/tensors.json").content)
    assert [entry["name"] for entry in order["tensors"]] == ["b", "a", "c"]
    assert [entry["dtype"] for entry in order["tensors"]] == ["bfloat16", "float32", "float32"]
    assert order["content_hash"] == manifest["content_hash"]


@pytest.mark.parametrize(
    ("header", "status", "code"),
    [
        ("bytes=9-3", 400, "not_this_message"),
        ("bytes=-", 400, "not_this_message"),
        ("bytes=1-2,4-5", 400, "not_this_message"),
        ("lines=1-2", 400, "not_this_message"),
        ("bytes=", 400, "not_this_message"),
        ("bytes=1000000-", 416, "no_such_range"),
        ("bytes=-0", 416, "no_such_range"),
    ],
)
def test_a_part_that_cannot_be_sent_is_refused_with_an_error_body(run, header, status, code):
    client = run.client(confirms=False)
    error = refused(client.get("/v1/weights/0/files/tensors.json", headers={"range": header}), status, code)
    assert set(error) == set(ErrorBody.__struct_fields__)
    assert "bytes" in error["expected"]


def test_parts_reach_to_the_end_of_a_file_and_not_beyond(run):
    client = run.client(confirms=False)
    whole = client.get("/v1/weights/0/files/tensors.json").content
    for header, part in (("bytes=5-", whole[5:]), ("bytes=-7", whole[-7:]), ("bytes=3-99999999", whole[3:])):
        response = client.get("/v1/weights/0/files/tensors.json", headers={"range": header})
        assert (response.status_code, response.content) == (206, part)


def test_no_other_file_can_be_read_whatever_the_name(run, tmp_path):
    client = run.client(confirms=False)
    (tmp_path / "weights" / "0" / "secret").write_text("secret")
    for name in (
        "secret",
        "..%2f..%2fgateway_tokens.json",
        "%2e%2e",
        "tensors.json%00",
        "%2fetc%2fpasswd",
        "Tensors.json",
    ):
        response = client.get(f"/v1/weights/0/files/{name}")
        assert (response.status_code, response.json()["code"]) in ((404, "unknown_file"), (404, "no_such_call"))
    refused(client.get("/v1/weights/1/files/tensors.json"), 404, "unknown_version")
    nobody = job_client(run.server.url, "vime_0_0")
    refused(nobody.get("/v1/weights/0/files/tensors.json"), 401, "unauthorized")


def test_a_version_whose_files_are_deleted_is_unknown_by_name_but_its_hash_still_counts(run, tmp_path):
    client = run.client(confirms=False)
    newer = write_weights(tmp_path / "weights" / "1", {"b": TENSORS["b"] + 1}, 1, num_files=1)
    with pytest.raises(ValueError, match="is served"):
        run.weights.forget(0)
    run.weights.release(newer)
    shutil.rmtree(tmp_path / "weights" / "0")
    refused(client.get("/v1/weights/0/files/tensors.json"), 404, "unknown_version")
    run.weights.forget(0)
    for address in ("/v1/weights/0", "/v1/weights/0/files/tensors.json"):
        assert "version 0, whose files are deleted" in refused(client.get(address), 404, "unknown_version")["got"]
    assert client.get("/v1/weights/serving").json()["version"] == 1
    with pytest.raises(Refusal, match="have not loaded"):
        run.weights.confirm("job-a", Loaded(version=0, engines={"e": newer.content_hash}))


def test_a_job_confirms_a_forgotten_version_again_and_a_hash_never_changes(tmp_path):
    weights = Weights(tmp_path, *(WeightManifest(version=v, content_hash=f"h{v}", location="") for v in (0, 1)))
    weights.forget(0)
    weights.confirm("job", Loaded(version=0, engines={"e": "h0"}))
    assert weights.has_confirmed("job", 0)
    with pytest.raises(ValueError, match="has hash h0"):
        weights.release(WeightManifest(version=0, content_hash="other", location=""))


def test_names_of_engines_are_kept_for_few_versions_and_for_none_that_is_confirmed(tmp_path):
    """A job with a token may report whatever names it likes, for as long as it likes."""
    versions = range(20)
    weights = Weights(tmp_path, *(WeightManifest(version=v, content_hash=f"h{v}", location="") for v in versions))
    weights.register("job", 2)
    for version in versions:
        weights.confirm("job", Loaded(version=version, engines={"a": f"h{version}"}))
    assert weights.newest("job") == -1
    weights.confirm("job", Loaded(version=19, engines={"b": "h19"}))
    assert weights.newest("job") == 19
    weights.confirm("job", Loaded(version=0, engines={"b": "h0"}))
    assert not weights.has_confirmed("job", 0), "who had version 0 is forgotten: both are to report it again"
    weights.register("job", 0)
    for number in range(50):
        weights.confirm("job", Loaded(version=18, engines={f"{number}-{name}": "h18" for name in range(10)}))
    assert sum(len(names) for names in weights._reported["job"].values()) <= 4
