"""--transferqueue-mode external: what nobody could reach, or nothing would generate, is refused before the start."""

import json
import socket

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.config.command_line import parse_command_line
from vime.ray.preflight import _check_gateway
from vime.types import ConfigError

EXTERNAL = ["--transferqueue-mode", "external"]
ALONE = [*EXTERNAL, "--rollout-num-engines", "0"]


@pytest.fixture
def resolved(tmp_path):
    model_dir = write_model_directory(tmp_path / "model")
    (model_dir / "model.safetensors").write_bytes(b"")
    prompts = tmp_path / "train.jsonl"
    prompts.write_text(json.dumps({"input": "a"}) + "\n")

    def resolve(*flags):
        return parse_command_line(
            [
                *("--hf-checkpoint", str(model_dir), "--prompt-data", str(prompts), "--device", "cpu"),
                *("--num-rollout", "3", "--rm-type", "exact_match", "--rollout-max-response-len", "8"),
                *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", *flags),
            ]
        )

    return resolve


def test_a_run_may_have_engines_of_its_own_beside_jobs_or_none(resolved, tmp_path):
    evaluation = (
        "--eval-prompt-data",
        "held_out",
        str(tmp_path / "train.jsonl"),
    )  # by jobs without engines
    beside, alone = resolved(*EXTERNAL, *evaluation), resolved(*ALONE, *evaluation)
    assert (beside.cluster.num_engines, alone.cluster.num_engines) == (1, 0)
    assert (beside.queue.has_ledger, alone.queue.has_ledger) == (True, True)
    assert beside.queue.transferqueue_address == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rollout-num-engines", "0"], "nothing would generate"),
        ([*ALONE[2:], "--transferqueue-mode", "streaming"], "nothing would generate"),
        ([*EXTERNAL, "--transferqueue-address", "8640"], "expected HOST:PORT"),
        ([*EXTERNAL, "--transferqueue-address", "queue.example:99999"], "expected HOST:PORT"),
        ([*EXTERNAL, "--transferqueue-address", "tcp://10.0.0.1:5000"], "its protocol executes what it is sent"),
        ([*EXTERNAL, "--transferqueue-tls-cert", "cert.pem"], "give both for TLS, or none"),
        ([*EXTERNAL, "--debug-train-only"], "--rollout-num-engines 0"),
        ([*EXTERNAL, "--debug-rollout-only"], "never free their slots"),
        ([*ALONE, "--partial-rollout"], "--partial-rollout with --rollout-num-engines 0"),
        ([*ALONE, "--num-rollout-workers", "2"], "--num-rollout-workers 2 with --rollout-num-engines 0"),
        ([*ALONE, "--check-weight-update-equal"], "--check-weight-update-equal with --rollout-num-engines 0"),
        ([*EXTERNAL, "--transferqueue-storage-backend", "MooncakeStore"], "MooncakeStore"),
        ([*EXTERNAL, "--transferqueue-storage-backend", "mooncake"], "mooncake: it needs a Mooncake server"),
        (["--transferqueue-storage-backend", "yuanrong"], "yuanrong: it needs openYuanrong's data system"),
        (["--transferqueue-storage-backend", "ray"], "ray: its rows end with the process that put them"),
    ],
)
def test_what_could_not_work_is_refused_by_its_flag(resolved, flags, said):
    with pytest.raises(ConfigError, match=said):
        resolved(*flags)


def test_a_port_that_is_taken_and_a_certificate_that_is_not_there_are_refused_before_the_start(resolved, tmp_path):
    (tmp_path / "cert.pem").write_text("")
    tls = ["--transferqueue-tls-cert", str(tmp_path / "cert.pem"), "--transferqueue-tls-key", str(tmp_path / "no.pem")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"--transferqueue-address {address}: cannot be listened on"):
            _check_gateway(resolved(*EXTERNAL, "--transferqueue-address", address))
    with pytest.raises(ConfigError, match=r"--transferqueue-tls-key .*no\.pem: there is no such file"):
        _check_gateway(resolved(*EXTERNAL, *tls))
    _check_gateway(resolved(*EXTERNAL))
