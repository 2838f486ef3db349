"""`vime conformance`: what is right passes every check, and each program that is broken on purpose fails the one that
names its fault."""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from starlette.responses import JSONResponse
from transformers import AutoConfig, AutoModelForCausalLM

from tests.contract.gateway.test_gateway_evaluation import evaluation
from tests.helpers.external_run import EXAMPLES
from tests.helpers.gateway_run import ROOT, GatewayRun
from tests.helpers.rollout_setup import write_model_directory
from tests.helpers.weight_files import write_weights
from vime.cli.conformance import check_producer
from vime.cli.main import main
from vime.gateway import messages as m
from vime.gateway.address import write_address
from vime.gateway.conformance import check_gateway
from vime.gateway.scripted import ScriptedGateway
from vime.gateway.tokens import Scope
from vime.weights.hashing import ordered_hash

TENSORS = {"b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "c": torch.tensor(1.5)}
LEASE_S = 3.0  # of the scripted gateway: a producer's script lasts twice as long
BROKEN = f"{shlex.quote(sys.executable)} {ROOT}/tests/helpers/broken_producer.py"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH: its packages are not ours")


@pytest.fixture
def run(tmp_path):
    run = GatewayRun(tmp_path, manifest=write_weights(tmp_path / "weights" / "0", TENSORS, 0))
    yield run
    run.close()


def failed(checks):
    return {check.name: check.found for check in checks if not check.is_good}


def checked(run):
    """Names of the failed checks, by a producer and a second one."""
    first, second = (run.tokens.make(name, (Scope.TRAIN,), seconds=600) for name in ("job-a", "job-b"))
    return failed(check_gateway(run.server.url, first, second))


def test_the_gateway_passes_every_check_and_nothing_stays_leased(run, capsys, monkeypatch):
    first, second = (run.tokens.make(name, (Scope.TRAIN,), seconds=600) for name in ("job-a", "job-b"))
    monkeypatch.setenv("VIME_TOKEN", first)
    code = main(["conformance", run.server.url, "--other-token", second])
    out = capsys.readouterr().out
    assert (code, "FAIL" in out) == (0, False), out
    assert "17 checks, 0 failed" in out
    status = run.port.call(run.ledger.status.__func__)
    assert (status.ready, status.producers) == (3, {}), "three groups were put, everything else was given back"


def test_a_gateway_without_prompts_is_waited_for_once(run, monkeypatch):
    monkeypatch.setattr("vime.gateway.conformance.LEASE_S", 0.5)
    waits = []

    async def none(producer, call):
        waits.append(call.wait_s)
        return m.Prompts(prompts=[], serving=0, waits_for="a slot")

    monkeypatch.setattr(run.gateway, "lease", none)
    found = checked(run)
    assert "no prompt within 0.5 s; it waits for: a slot" in found["split and impossible groups are refused"]
    assert "no prompt within 0 s; it waits for: a slot" in found["leave gives every lease back"]
    assert waits.count(0.5) == 3, "two of one request, then one"
    assert waits.count(0.0) > 3, "the rest do not wait"


@pytest.fixture
def evaluating(run):
    run.gateway.evaluations.current = evaluation()
    return run.gateway.evaluations.current


def test_a_gateway_that_evaluates_passes_and_gets_one_result(run, evaluating):
    token = run.tokens.make("job-a", (Scope.TRAIN, Scope.EVAL), seconds=600)
    assert failed(check_gateway(run.server.url, token)) == {}
    assert list(evaluating.by.values()) == ["job-a"]


EVALUATED = "an evaluated prompt counts once"


def test_a_gateway_whose_evaluation_is_broken_on_purpose_fails(run, evaluating, monkeypatch):
    monkeypatch.setattr("vime.gateway.conformance.LEASE_S", 2.0)
    monkeypatch.setattr("vime.gateway.conformance.BUSY_S", 2.0)
    token = run.tokens.make("job-a", (Scope.TRAIN, Scope.EVAL), seconds=600)

    def always_new(producer, task, call):
        return m.Evaluated(repeated=False)

    with monkeypatch.context() as patch:
        patch.setattr(run.gateway.evaluations, "put", always_new)
        assert EVALUATED in failed(check_gateway(run.server.url, token))
    monkeypatch.setattr(
        run.gateway.evaluations, "lease", lambda *_: m.EvalPrompts(prompts=[], serving=0, waits_for="", is_over=False)
    )
    assert "does not say why" in failed(check_gateway(run.server.url, token))[EVALUATED]


class Faults:
    """Ways to break a gateway, each with the check that must name it."""

    @staticmethod
    def counts_a_put_twice(run, monkeypatch):
        async def never(producer, task):
            return False

        async def committed(producer, task, given):
            run.gateway._forget(task)

        monkeypatch.setattr(run.gateway, "_is_committed", never)
        monkeypatch.setattr(run.gateway, "_commit", committed)
        return "a repeated put counts once"

    @staticmethod
    def takes_any_hash(run, monkeypatch):
        monkeypatch.setattr(run.weights, "confirm", lambda producer, loaded: None)
        return "confirms the right hash only"

    @staticmethod
    def takes_one_engine_for_all(run, monkeypatch):
        monkeypatch.setattr(run.weights, "register", lambda producer, num_engines: None)
        return "waits for every engine that was registered"

    @staticmethod
    def trusts_the_lease_as_written(run, monkeypatch):
        monkeypatch.setattr("vime.gateway.service.hmac.compare_digest", lambda *_: True)
        return "no lease of somebody else can be used"

    @staticmethod
    def lets_everybody_in(run, monkeypatch):
        monkeypatch.setattr(run.tokens, "check", lambda header, scope: "job-a")
        return "no call without a valid token"

    @staticmethod
    def forgets_requests(run, monkeypatch):
        lease, number = run.gateway.lease, iter(range(1000))

        async def anew(producer, call):
            call.request = f"{call.request}-{next(number)}"
            return await lease(producer, call)

        monkeypatch.setattr(run.gateway, "lease", anew)
        return "the same request returns the same leases"

    @staticmethod
    def shows_its_faults(run, monkeypatch):
        def decoded(body, encoding, kind):
            return kind(**json.loads(body))

        monkeypatch.setattr("vime.gateway.app._decoded", decoded)
        return "hostile bytes and unknown fields are refused"

    @staticmethod
    def takes_part_of_a_group(run, monkeypatch):
        monkeypatch.setattr(run.gateway, "_check", lambda *_, **__: None)

        async def committed(producer, task, given):
            pass

        monkeypatch.setattr(run.gateway, "_commit", committed)
        return "split and impossible groups are refused"

    @staticmethod
    def takes_any_content_under_a_key(run, monkeypatch):
        monkeypatch.setattr("vime.gateway.service.own_content", lambda call: "same")
        return "a group of a job's own counts once under its key"

    @staticmethod
    def keeps_leases_of_who_left(run, monkeypatch):
        async def left(producer, said):
            return m.Left(given_back=1)

        monkeypatch.setattr(run.gateway, "leave", left)
        return "leave gives every lease back"

    @staticmethod
    def closes_the_connection_at_hostile_bytes(run, monkeypatch):
        def decoded(body, encoding, kind):
            raise GeneratorExit  # ends the call without a response

        monkeypatch.setattr("vime.gateway.app._decoded", decoded)
        return "hostile bytes and unknown fields are refused"

    @staticmethod
    def refuses_in_other_words(run, monkeypatch):
        refused = JSONResponse({"detail": "no"}, status_code=409)
        monkeypatch.setattr("vime.gateway.app._refused", lambda request, refusal: refused)
        return "a late put is refused"


@pytest.mark.parametrize("fault", [name for name in vars(Faults) if not name.startswith("_")])
def test_a_gateway_that_is_broken_on_purpose_fails_the_check_of_its_fault(run, monkeypatch, fault):
    monkeypatch.setattr("vime.gateway.conformance.LEASE_S", 2.0)
    monkeypatch.setattr("vime.gateway.conformance.BUSY_S", 2.0)
    name = getattr(Faults, fault)(run, monkeypatch)
    found = checked(run)
    assert name in found, found


@pytest.mark.parametrize("source", ["made up", "model"])
def test_the_scripted_gateway_s_hash_is_that_of_the_run(tmp_path, source):
    """The hash is computed there from the bytes of the files, and in vime/weights from tensors."""
    from safetensors.torch import load_file, save_file

    model = None
    if source == "model":
        model = tmp_path / "model"
        model.mkdir()
        save_file({"x": torch.randn(3, 4), "y": torch.arange(5)}, model / "model.safetensors")
    gateway = ScriptedGateway(tmp_path / "gateway", model=model)
    try:
        hashes = set()
        for manifest in gateway.manifests:
            [file] = [file.name for file in manifest.files if file.name != "tensors.json"]
            directory = tmp_path / "gateway" / "weights" / str(manifest.version)
            tensors, listed = load_file(directory / file), json.loads((directory / "tensors.json").read_text())
            ordered = {entry["name"]: tensors[entry["name"]] for entry in listed["tensors"]}
            assert ordered_hash(ordered) == manifest.content_hash == listed["content_hash"]
            hashes.add(manifest.content_hash)
        assert len(hashes) == 2
    finally:
        gateway.close()


def judged(command, **options):
    options = {"model": None, "lease_timeout_s": LEASE_S, "timeout_s": 120.0} | options
    return failed(check_producer(command, **options))


def test_the_python_producer_of_the_examples_passes_every_check(tmp_path):
    model = write_model_directory(tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    command = f"exec {sys.executable} {EXAMPLES}/producer.py --model {model} --max-new-tokens 4"
    assert judged(command, model=model, lease_timeout_s=6.0) == {}


@pytest.mark.timeout(300)
def test_our_own_job_passes_every_check(tiny_task, tmp_path):
    """Its engine is a scripted one; it leases one prompt at a time, so that some are left for the second version."""
    job = (
        f"-m vime produce $VIME_GATEWAY --run-dir {tmp_path / 'job'} --hf-checkpoint {tiny_task.model} "
        f"--custom-rm-path {tiny_task.reward} --device cpu --rollout-batch-size 1 --n-samples-per-prompt 2 "
        "--rollout-max-response-len 12 --rollout-max-context-len 64 "
        "--debug-engine-module vime.backends.vllm_utils.scripted_server"
    )
    command = f"cd {ROOT}; exec {sys.executable} {job}"
    assert judged(command, model=tiny_task.model, lease_timeout_s=6.0, timeout_s=200.0) == {}


@needs_node
def test_the_javascript_producer_of_the_examples_passes_every_check(tmp_path):
    model = write_model_directory(tmp_path / "model")
    assert judged(f"exec node {EXAMPLES}/producer.mjs --model {model}") == {}


FAULTS = {
    "none": set(),
    "not-registered": {"registers first"},
    "other-request": {"repeats a call whose response was lost, as it was"},
    "other-content": {"repeats a call whose response was lost, as it was", "puts the same content each time"},
    "own-key-twice": {"puts one group under each key of its own"},
    "impatient": {"waits for Retry-After"},
    "wrong-hash": {"reports the right hash of every version"},
    "old-version": {"names the version that sampled each token"},
    "repeats-for-ever": {"discards the work of a lost lease"},
    "never-reports-again": {"reports its hashes again when asked"},
    "no-heartbeat": {"sends heartbeats in time"},
    "no-leave": {"leaves when no prompt is left"},
    "split": {"every message is well formed", "puts whole groups"},
    "no-repeat": {"repeats a call whose response was lost, as it was"},
    "trusting": {"outlives hostile bytes"},
}


USUAL = ("none", "own-key-twice", "other-content", "repeats-for-ever", "no-heartbeat", "old-version", "trusting")
"""Of each kind of promise one: about repeating, leases, time and content."""


CASES = [pytest.param(name, marks=[] if name in USUAL else pytest.mark.nightly) for name in FAULTS]


@pytest.fixture(scope="module")
def findings(request):
    """What is found about each broken producer whose test was chosen. Several run at once: mostly they wait."""
    stops = {"wrong-hash", "split", "never-reports-again"}  # such a job never comes to the end of the script
    chosen = [item.callspec.params["fault"] for item in request.session.items if "findings" in item.fixturenames]
    log = logging.getLogger("uvicorn.error")
    was_disabled = log.disabled  # `check_producer` switches it off and back on, which several at once do in any order
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(judged, f"exec {BROKEN} {name}", timeout_s=15.0 if name in stops else 120.0)
            for name in chosen
        }
    log.disabled = was_disabled


@pytest.mark.parametrize("fault", CASES)
def test_a_producer_that_is_broken_on_purpose_fails_the_check_of_its_fault(findings, fault):
    found = findings[fault].result(timeout=400)
    assert FAULTS[fault] <= set(found), found
    assert fault != "none" or found == {}


def test_a_producer_that_ends_at_once_fails_and_wrong_words_are_refused(capsys, monkeypatch):
    assert main(["conformance", "--producer", "exit 3", "--lease-timeout", "1"]) == 1
    out = capsys.readouterr().out
    assert "no call at all" in out
    assert main(["conformance"]) == 2
    assert main(["conformance", "http://127.0.0.1:9", "--producer", "true"]) == 2
    monkeypatch.delenv("VIME_TOKEN", raising=False)
    assert main(["conformance", "http://127.0.0.1:9"]) == 2


def test_the_commands_of_the_page_of_the_protocol_as_a_reader_types_them(tmp_path):
    """One gateway; RUN and NAME are these very words."""
    page = (ROOT / "docs" / "producer-protocol.md").read_text()
    run = GatewayRun(tmp_path / "RUN", manifest=write_weights(tmp_path / "weights" / "0", TENSORS, 0))
    write_address(tmp_path / "RUN", run.server.url)
    words = {"ADDRESS": run.server.url, "CMD": shlex.quote(f"exec {BROKEN} none")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def typed(line, token=""):
        assert f"\n    {line} " in page
        for word, meant in words.items():
            line = re.sub(rf"\b{word}\b", lambda _, meant=meant: meant, line)
        variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "VIME_TOKEN": token, "COLUMNS": "200"}
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        token = typed("vime token make RUN NAME").strip()
        assert "17 checks, 0 failed" in typed("vime conformance ADDRESS", token)
        eyes = run.tokens.make("eyes", (Scope.READ,), seconds=600)
        assert re.search(r"^ *NAME +yes +0 +0 +3 ", typed("vime producers RUN", eyes), re.MULTILINE)
        assert " 0 failed" in typed("vime conformance --producer CMD")
    finally:
        run.close()
