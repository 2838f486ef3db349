"""Engines that somebody else started: what a run refuses of them before it starts anything, and whose they are."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.backends.vllm_utils import about as about_module
from vime.backends.vllm_utils import external
from vime.backends.vllm_utils.about import CLAIM_ROUTE, Claim, flags_of, model_digest
from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.external import ExternalEngine, check_external, owner_name
from vime.backends.vllm_utils.fake import FakeEngine
from vime.backends.vllm_utils.launch import engine_command
from vime.config.checks import resolve
from vime.config.external_engines import check_external_addresses
from vime.config.parse import Config, parse
from vime.types import ConfigError, EngineLostError, WaitTimeoutError

FLAGS = ["--device", "cpu", "--rollout-max-context-len", "64"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model")


@pytest.fixture
def keys(tmp_path: Path) -> EngineKeys:
    made = EngineKeys.make()
    made.write(tmp_path / "keys")
    return made


def engine_of(keys: EngineKeys, model: Path, *more: str) -> FakeEngine:
    config = parse([*FLAGS, "--hf-checkpoint", str(model), *more])
    return FakeEngine(keys=keys, argv=engine_command(config, index=7, host="elsewhere", port=1)[3:])


@pytest.fixture
def engine(keys: EngineKeys, model: Path) -> Iterator[FakeEngine]:
    with engine_of(keys, model) as started:
        yield started


def place(engine: FakeEngine) -> str:
    return engine.address.url.removeprefix("http://")


def run_config(tmp_path: Path, model: Path, *engines: FakeEngine, flags: tuple[str, ...] = ()) -> Config:
    addresses = [place(engine) for engine in engines]
    own = ["--rollout-external-engine-addrs", *addresses, "--rollout-external-engine-keys", str(tmp_path / "keys")]
    return resolve(parse([*FLAGS, "--hf-checkpoint", str(model), *own, *flags]))


def held(engine: FakeEngine, model: Path, owner: str) -> ExternalEngine:
    config = parse([*FLAGS, "--hf-checkpoint", str(model)])
    return ExternalEngine(config, index=0, place=place(engine), keys=engine.keys, owner=owner)


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        check_external(config)
    return str(refused.value)


def test_an_engine_that_is_as_the_run_would_start_it_is_taken_whatever_its_seed_and_place(
    tmp_path: Path, model: Path, keys: EngineKeys, engine: FakeEngine
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    with engine_of(keys, copy) as other:
        config = run_config(tmp_path, model, engine, other)
        assert config.cluster.num_engines == 2
        assert config.cluster.num_started_engines == 0
        check_external(config)


def test_another_context_precision_or_model_is_refused_with_what_it_has(tmp_path, model, engine) -> None:
    said = refusal(run_config(tmp_path, model, engine, flags=("--rollout-max-context-len", "32", "--bf16")))
    assert f"{place(engine)}: it has --dtype float32, expected --dtype bfloat16. Start it with `vime engine`" in said
    assert "it has --max-model-len 64, expected --max-model-len 32" in said
    other = tmp_path / "other"
    shutil.copytree(model, other)
    record = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**record, "rms_norm_eps": 0.5}))
    assert "its model is another than --hf-checkpoint" in refusal(run_config(tmp_path, other, engine))


def test_a_server_without_vimes_middleware_or_dev_routes_is_refused(tmp_path, model, engine) -> None:
    engine.faults.status = {"/vime/about": 404}
    assert "has no /vime/about: it was started without Vime's middleware" in refusal(
        run_config(tmp_path, model, engine)
    )
    engine.faults.status = {"/is_paused": 404}
    assert "has no /is_paused" in refusal(run_config(tmp_path, model, engine))


def test_other_versions_of_vllm_and_vime_are_refused(tmp_path, model, engine, monkeypatch) -> None:
    monkeypatch.setattr(external, "version_of", lambda name, *_: {"vllm": "9.9", "vime": "8.8"}[name])
    said = refusal(run_config(tmp_path, model, engine))
    assert ", expected 9.9, as here" in said
    assert ", expected 8.8, as here" in said


def test_engines_that_cannot_be_reached_or_have_other_keys_are_refused_at_once_by_name(tmp_path, model, engine) -> None:
    engine.stop()
    with engine_of(EngineKeys.make(), model) as locked:
        said = refusal(run_config(tmp_path, model, engine, locked))
    assert f"{place(engine)}: cannot be reached" in said
    assert f"{place(locked)}: has other keys. Give --rollout-external-engine-keys" in said


def test_an_engine_of_another_run_is_refused_and_that_of_the_run_that_is_resumed_is_not(
    tmp_path, model, engine
) -> None:
    mine, other = (held(engine, model, owner_name(tmp_path / name)) for name in ("mine", "other"))
    mine.wait_ready(10)
    said = refusal(run_config(tmp_path, model, engine))
    assert f"it belongs to the run {owner_name(tmp_path / 'mine')}" in said
    check_external(run_config(tmp_path, model, engine, flags=("--run-dir", str(tmp_path / "mine"))))
    with pytest.raises(EngineLostError, match=r"belongs to another run: .*mine"):
        other.check_health(10, is_updating=False)
    mine.stop()
    assert engine.handle("/is_paused", {}, b"")[1] == {"is_paused": True}
    check_external(run_config(tmp_path, model, engine))
    other.wait_ready(10)
    other.stop()


def test_a_claim_that_nobody_renews_ends(monkeypatch) -> None:
    monkeypatch.setattr(about_module, "CLAIM_S", 0.0)
    claim = Claim()
    assert claim.take("a") == ""  # over at once
    assert claim.take("b") == ""
    monkeypatch.setattr(about_module, "CLAIM_S", 60.0)
    assert [claim.take(run) for run in ("a", "b", "a")] == ["a", "a", "a"]
    assert claim.take("b", is_released=True) == "a"
    assert claim.take("a", is_released=True) == ""
    assert claim.take("b") == "b"


def test_a_run_that_asks_for_no_health_keeps_its_engine_until_it_gives_it_back(model, engine, monkeypatch) -> None:
    """As while it saves, or builds its model."""
    monkeypatch.setattr(about_module, "CLAIM_S", 2.0)
    monkeypatch.setattr(external, "CLAIM_S", 2.0)
    mine = held(engine, model, "here:/run")
    mine.wait_ready(10)
    ends = time.monotonic() + 3.5
    while time.monotonic() < ends:
        assert engine.about.claim.run == "here:/run"
        time.sleep(0.05)
    mine.stop()
    assert engine.about.claim.run is None
    time.sleep(1.0)
    assert engine.about.claim.run is None, "nothing renews it any more"


def test_a_claim_needs_the_control_key(engine) -> None:
    for key in ("", engine.keys.generate):
        response = httpx.post(engine.address.url + CLAIM_ROUTE, json={"run": "x"}, headers={"X-Vime-Key": key})
        assert response.status_code == 401


def test_the_same_engine_by_two_names_is_refused(tmp_path, model, engine) -> None:
    config = run_config(tmp_path, model, engine)
    port = place(engine).rpartition(":")[2]
    both = (place(engine), f"localhost:{port}")
    config = replace(config, cluster=replace(config.cluster, rollout_external_engine_addrs=both))
    assert f"localhost:{port}: it is the same engine as {place(engine)}" in refusal(config)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--update-weight-transport shm ends at this machine, and the engine is on another one"),
        (("--update-weight-transport", "gloo"), "gloo of a local Ray listens on loopback only"),
        (("--update-weight-transport", "disk"), "disk with --update-weight-disk-dir DIR that both see"),
    ],
)
def test_a_transport_that_does_not_reach_another_machine_is_refused_by_name(
    tmp_path, model, engine, monkeypatch, flags, words
) -> None:
    check_external(run_config(tmp_path, model, engine, flags=flags))
    monkeypatch.setattr(external, "machine", lambda: "another boot")
    assert words in refusal(run_config(tmp_path, model, engine, flags=flags))


def test_a_directory_of_weights_has_to_be_seen_by_the_engine(tmp_path, model, engine, monkeypatch) -> None:
    monkeypatch.setattr(external, "machine", lambda: "another boot")
    flags = ("--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path / "weights"))
    check_external(run_config(tmp_path, model, engine, flags=flags))
    assert list((tmp_path / "weights").iterdir()) == []
    monkeypatch.setattr(about_module.os.path, "exists", lambda _: False)
    assert "the engine does not see it" in refusal(run_config(tmp_path, model, engine, flags=flags))


def test_an_engine_that_was_started_anew_or_as_another_is_lost(tmp_path, model, engine, monkeypatch) -> None:
    monkeypatch.setattr(external, "POLL_S", 0.01)
    config = parse([*FLAGS, "--hf-checkpoint", str(model)])
    mine = held(engine, model, "here:/run")
    mine.wait_ready(10)
    assert mine.check_health(10, is_updating=False) == "default"
    assert mine.num_requests(10) == 0
    engine.about = about_module.About(argv=engine_command(config, index=7, host="", port=1)[3:])
    with pytest.raises(EngineLostError, match="was started anew by its owner"):
        mine.check_health(10, is_updating=False)
    before = mine.address
    mine.wait_ready(10)
    assert mine.address.url == before.url
    assert mine.address != before, "whoever holds a connection for weights has to make a new one"
    before = mine.address
    mine.wait_ready(10)  # the same process, which was lost in an update: it may have half of the weights
    assert mine.address != before
    engine.about = about_module.About(argv=["--model", str(model), "--dtype", "half"])
    with pytest.raises(WaitTimeoutError, match="it has --dtype half, expected --dtype float32"):
        mine.wait_ready(0.05)
    mine.stop()


ADDRS, KEYS = "--rollout-external-engine-addrs", "--rollout-external-engine-keys"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([ADDRS, "here"], "expected HOST:PORT"),
        ([ADDRS, "a:1", "a:1"], "an address is there twice"),
        ([ADDRS, "a:1"], f"needs {KEYS} FILE"),
        ([ADDRS, "a:1", "b:1", "--rollout-num-engines", "3", KEYS, "f"], "--rollout-num-engines 3 with 2 addresses"),
        ([ADDRS, "a:1", KEYS, "f", "--vllm-max-num-seqs", "4"], f"--vllm-max-num-seqs with {ADDRS}: the run starts no"),
        ([ADDRS, "a:1", KEYS, "f", "--debug-train-only"], "no engine is used"),
        ([KEYS, "f"], "no effect"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(model, flags, words) -> None:
    with pytest.raises(ConfigError, match=words):
        check_external_addresses(resolve(parse([*FLAGS, "--hf-checkpoint", str(model), *flags])))


def test_a_file_of_keys_is_its_owners_alone(tmp_path: Path, keys: EngineKeys) -> None:
    path = tmp_path / "keys"
    assert EngineKeys.read(path, flag="--keys") == keys
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        EngineKeys.read(path, flag="--keys")
    with pytest.raises(FileExistsError):
        keys.write(path)


def test_flags_are_read_with_both_spellings_and_the_last_one_counts() -> None:
    assert flags_of(["--a", "1", "2", "--b=3", "--c", "--a", "4"]) == {"--a": ["4"], "--b": ["3"], "--c": []}


def test_a_digest_of_a_model_knows_its_tensors_and_not_its_weights(tmp_path: Path, model: Path) -> None:
    first = model_digest(str(model))
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert model_digest(str(copy)) == first != ""
    assert model_digest(str(tmp_path)) == ""
