"""`vime token` and `vime producers`, against a gateway that works."""

import json

import pytest

from tests.helpers.gateway_run import HASH, GatewayRun, group_of, job_client, lease
from vime.cli.main import main
from vime.gateway.messages import WeightManifest
from vime.gateway.tokens import Scope
from vime.observability.run_dir import RunDir


@pytest.fixture
def run(tmp_path):
    run = GatewayRun(tmp_path / "run")
    yield run
    run.close()


def made(capsys, *words):
    assert main(["token", "make", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    [token] = out.splitlines()
    return token, err


def test_a_token_is_made_listed_and_revoked_while_the_gateway_works(run, tmp_path, capsys):
    token, said = made(capsys, tmp_path / "run", "job-a", "--days", "0.5")
    assert ("scopes train" in said, "0.5 days" in said, token in said) == (True, True, False)
    client = job_client(run.server.url, token)
    assert client.post("/v1/producers/heartbeat", json={}).status_code == 200
    assert client.get("/v1/queue").status_code == 403
    token_id = token.split("_")[1]
    assert main(["token", "list", str(tmp_path / "run")]) == 0
    listed = capsys.readouterr().out
    assert (token_id in listed, "job-a" in listed, token.split("_")[2] in listed) == (True, True, False)
    assert main(["token", "revoke", str(tmp_path / "run"), token_id]) == 0
    assert client.post("/v1/producers/heartbeat", json={}).status_code == 401
    assert main(["token", "revoke", str(tmp_path / "run"), token_id]) == 2
    assert main(["token", "list", str(tmp_path / "run")]) == 0
    assert "no tokens" in capsys.readouterr().out


def test_a_token_is_made_before_the_run_directory_exists_and_outlives_the_start_of_the_run(tmp_path, capsys):
    directory = tmp_path / "runs" / "mine"
    token, _ = made(capsys, directory, "job-a", "--scopes", "train,read")
    for _ in range(2):  # a start that failed before anything was trained, and the next one
        RunDir.create(str(directory), "{}").close()
    run = GatewayRun(directory)
    try:
        client = job_client(run.server.url, token)
        assert client.post("/v1/producers/heartbeat", json={}).status_code == 200
        assert client.get("/v1/queue").status_code == 200
    finally:
        run.close()


def test_wrong_words_are_refused_by_name(tmp_path, capsys):
    for words, said in (
        (["make", str(tmp_path), "job", "--scopes", "root"], "--scopes root"),
        (["make", str(tmp_path), "job", "--days", "0"], "--days 0"),
        (["make", str(tmp_path), "../job"], "'../job'"),
        (["list", str(tmp_path / "none")], "gateway_tokens.json"),
        (["revoke", str(tmp_path / "none"), "0"], "gateway_tokens.json"),
    ):
        assert main(["token", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, said in err) == ("", True), err
    assert not (tmp_path / "none").exists()


def test_producers_are_shown_with_versions_leases_groups_and_refusals(run, tmp_path, capsys, monkeypatch):
    client, idle = run.client("job-a", confirms=False), run.client("job-b", confirms=False)
    client.post("/v1/producers/register", json={"model": "tiny [bold]", "engines": 2})
    loaded = {"version": 0, "engines": {"left": f"{HASH}0", "right": f"{HASH}0"}}
    assert client.post("/v1/weights/loaded", json=loaded).status_code == 200
    idle.post("/v1/producers/register", json={})
    first, *_ = lease(client, 3)
    client.post("/v1/groups", json=group_of(first))
    client.post("/v1/groups", json=group_of(first) | {"lease": "none"})
    run.weights.release(WeightManifest(version=1, content_hash="x", location=""))
    (tmp_path / "run" / "gateway.json").write_text(json.dumps({"url": run.server.url}))
    monkeypatch.setenv("VIME_TOKEN", run.tokens.make("eyes", (Scope.READ,), seconds=60))
    monkeypatch.setenv("COLUMNS", "200")
    job = run.gateway.job("job-a")
    job.began -= 1000  # so that the last 180 s count: one group in them, and one before
    job.commits.appendleft(job.commits[0] - 181)
    for target in (str(tmp_path / "run"), run.server.url):
        assert main(["producers", target]) == 0
        out = capsys.readouterr().out
        [shown] = [line for line in out.splitlines() if line.lstrip().startswith("job-a")]
        assert shown.split()[:8] == ["job-a", "yes", "0", "1", "1", "0.0056", "2", "unknown_lease"]  # 1 / 180
        assert ("tiny [bold] (2 engines)" in shown, "to load version 1" in shown) == (True, True)
        [other] = [line for line in out.splitlines() if line.lstrip().startswith("job-b")]
        assert other.split()[:7] == ["job-b", "yes", "none", "0", "0", "0", "none"]
        assert "1 groups ready" in out


def test_producers_without_a_token_an_address_or_the_scope_say_what_to_do(run, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("VIME_TOKEN", raising=False)
    token = run.tokens.make("job-a", (Scope.TRAIN,), seconds=60)
    for words, code, said in (
        ([run.server.url], 2, "--token"),
        ([run.server.url, "--token", token], 2, "scope read"),
        ([str(tmp_path), "--token", token], 2, "gateway.json"),
        (["http://127.0.0.1:9", "--token", token], 3, "does not respond"),
    ):
        assert main(["producers", *words]) == code
        assert said in capsys.readouterr().err
