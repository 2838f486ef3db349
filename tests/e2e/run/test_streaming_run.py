"""Mode streaming through train.py and train_async.py, with real parts and real SIGKILLs."""

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest

from tests.helpers.metrics_page import documented_spans, undocumented
from tests.helpers.ports import Port, no_keys, ports_on_loopback, send_pickle
from tests.helpers.run_flips import Subject, run_trial
from tests.helpers.training import Finished, TinyTask, Training, train
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims

STREAMING = ["--transferqueue-mode", "streaming"]


def assert_every_round_trained_once(finished: Finished, num_rounds: int, *, last_checkpoint: int | None) -> None:
    """4 groups a round, by the ledger's own history; the audit re-derives it with rules of its own."""
    saved = newest_checkpoint(finished.run_dir)
    assert (None if saved is None else saved.round_id) == last_checkpoint
    report = audit_run(finished.run_dir, saved=saved, claims=partial(read_claims, finished.run_dir))
    assert report.findings == ()
    assert (report.receipts, report.num_unhashed) == ((0, num_rounds - 1), 0)
    state = "trained" if last_checkpoint is None else "durable"
    assert report.groups == {state: 4 * num_rounds}
    assert sorted(finished.metrics()) == list(range(num_rounds))
    assert undocumented(name for line in finished.metrics().values() for name in line) == []


ENGINE_ROUTES = ("/collective_rpc", "/pause", "/update_weights", "/vime/update_weights", "/inference/v1/generate")
RAY_METHODS = (
    "NodeInfoGcsService/GetClusterId", "JobInfoGcsService/GetAllJobInfo", "NodeManagerService/GetNodeStats",
    "CoreWorkerService/GetCoreWorkerStats", "CoreWorkerService/PushTask", "ObjectManagerService/Pull",
)  # fmt: skip


def assert_a_stranger_gets_nothing(training: Training, touched: Path) -> None:
    """Each listening port of the run is on loopback and has a known owner; a process that knows no secret of the run,
    also one of this machine, is turned away; and the secrets are where nobody reads them."""
    ports = ports_on_loopback(training)
    owners = {port.owner for port in ports}
    assert owners >= {"driver", "Ray", "TransferQueue controller", "TransferQueue storage unit", "ledger", "router"}
    assert owners >= {"RolloutManager", "trainer rank", "vLLM server"}

    def is_let_in(port: Port) -> bool | None:  # None: not a port of ZeroMQ
        return send_pickle(f"tcp://127.0.0.1:{port.number}", no_keys, touched, deadline_ms=2000)

    with ThreadPoolExecutor(len(ports), thread_name_prefix="stranger") as strangers:
        let_in = dict(zip(ports, strangers.map(is_let_in, ports), strict=True))
    assert ([port for port in ports if let_in[port]], touched.exists()) == ([], False)
    turned_away = [port.owner for port in ports if let_in[port] is False]
    assert turned_away.count("TransferQueue controller") >= 2  # two of its own, and perhaps one of Ray
    refused = {route: {401} for route in ENGINE_ROUTES}
    assert answers_of(ports, "vLLM server") == refused
    assert answers_of(ports, "router") == refused  # which the engine behind it says
    assert_secrets_are_kept(training)
    answers = ask_ray(ports)
    assert {port: codes for port, codes in answers.items() if "OK" in codes} == {}
    refused_by = {port.owner for port, codes in answers.items() if "UNAUTHENTICATED" in codes}
    assert refused_by >= {"Ray", "RolloutManager", "trainer rank", "ledger", "TransferQueue controller"}


def ask_ray(ports: list[Port]) -> dict[Port, set[str]]:
    """What each port answers to calls of Ray's without a token: to the GCS, a node, a worker, an object."""

    def codes(port: Port) -> set[str]:
        with grpc.insecure_channel(f"127.0.0.1:{port.number}") as channel:
            calls = [channel.unary_unary(f"/ray.rpc.{method}") for method in RAY_METHODS]
            failures = [answer.exception() for answer in [call.future(b"", timeout=5) for call in calls]]
        return {"OK" if failure is None else failure.code().name for failure in failures}

    with ThreadPoolExecutor(len(ports), thread_name_prefix="stranger") as strangers:
        return dict(zip(ports, strangers.map(codes, ports), strict=True))


def answers_of(ports: list[Port], owner: str) -> dict[str, set[int]]:
    """The status of each control route and of generation at every port of `owner`, without a key. Left out is the
    router's port of metrics, which says them on every path."""
    body = {"method": "vime_weight_report", "token_ids": [1], "sampling_params": {}}
    with httpx.Client(timeout=30, trust_env=False) as client:
        urls = [f"http://127.0.0.1:{port.number}" for port in ports if port.owner == owner]
        urls = [url for url in urls if client.get(url + "/no_such_route").status_code != 200]
        return {route: {client.post(url + route, json=body).status_code for url in urls} for route in ENGINE_ROUTES}


def assert_secrets_are_kept(training: Training) -> None:
    """On no command line and in no file of the run."""
    environments = [process.environ() for process, command in training._members() if "cpu_server" in command]
    names = ("VIME_ENGINE_CONTROL_KEY", "VIME_ENGINE_GENERATE_KEY", "RAY_AUTH_TOKEN")
    secrets = [environments[0][name] for name in names]
    written = [
        path for path in training.run_dir.rglob("*") if path.is_file() and not path.is_relative_to("checkpoints")
    ]
    commands = [command for _, command in training._members()]
    assert [secret for secret in secrets if any(secret in command for command in commands)] == []
    assert [path for path in written if any(secret.encode() in path.read_bytes() for secret in secrets)] == []


@pytest.mark.timeout(1200)  # three starts of vLLM
def test_a_killed_engine_and_then_a_killed_driver_cost_no_group_and_repeat_none(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    flags = [*tiny_task.flags(), *STREAMING, "--save-interval", "2", "--num-rollout", "14"]
    training = Training("train.py", flags, tmp_path / "run")
    training.wait_for_event("round_trained", count=3)
    assert training.member("EngineCore").nice() > training.member("TrainerActor").nice()  # they share the cores
    assert training.member("TrainerActor").environ().get("MALLOC_ARENA_MAX") == "1"  # freed memory is kept
    training.process.send_signal(signal.SIGSTOP)  # the run would be over before everybody was asked
    assert_a_stranger_gets_nothing(training, tmp_path / "touched")
    training.process.send_signal(signal.SIGCONT)
    training.kill_member("EngineCore")
    training.wait_for_event("run_restarted")
    training.wait_for_event("round_trained", count=7)
    training.process.send_signal(signal.SIGKILL)
    assert training.survivors(grace_s=30) == []  # nobody outlives the driver, Ray's agents neither
    killed = Path(shutil.copytree(tmp_path / "run", tmp_path / "killed"))
    trained_before = len({event["rollout_id"] for event in training.so_far().events("round_trained")})
    finished = train([*flags, "--load", str(tmp_path / "run" / "checkpoints")], tmp_path / "run")
    assert finished.code == 0, finished.output
    assert trained_before < 14
    assert "audit: every promise kept, 56 groups: 56 durable" in finished.output
    assert_every_round_trained_once(finished, 14, last_checkpoint=13)
    assert_no_flipped_bit_is_silent(killed, [*flags, "--num-rollout", "15"])


def assert_no_flipped_bit_is_silent(run: Path, flags: list[str]) -> None:
    """In any kind of file, one each. `python -m tests.helpers.run_flips DIR` (scripts/nightly.sh) makes 300, in runs
    that ended and that went back too, and resumes some for real."""
    subject = Subject.of(run, flags)
    made = run_trial([subject], tries=len(subject.kinds()), seed=0)
    assert [str(one) for one in made if one.verdict == "SILENT"] == []
    named = {one.kind for one in made if one.verdict == "named"}
    assert named >= {"checkpoints/iter_N/run_state.json", "ledger.db.lock", "spool/segment-N.vsp"}


SLOWLY = {"VIME_SCRIPTED_TOKENS_PER_SECOND": "6"}
"""Answers have up to 12 tokens: groups of a round finish up to 2 seconds apart."""
EARLY = ["--debug-engine-module", "vime.backends.vllm_utils.scripted_server", "--train-early-groups", "1"]


def assert_some_step_began_before_its_round_was_whole(finished: Finished) -> None:
    assert {line["train/num_samples"] for line in finished.metrics().values()} == {16.0}
    early_batches = [event for event in finished.events("span_ended") if event["name"] == "train_early_batch"]
    assert early_batches
    assert [event["error"] for event in early_batches] == [None] * len(early_batches)


def test_async_streaming_trains_each_group_once_within_its_staleness(tiny_task: TinyTask, tmp_path: Path) -> None:
    """Trainers begin a round with its finished groups, and every sample is trained. Asynchronous rounds on vLLM:
    `test_prefetch_trains_tokens_one_version_old`; streaming on vLLM: the first test of this file."""
    flags = [*tiny_task.flags(), *STREAMING, *EARLY, "--max-staleness", "1", "--num-rollout", "5"]
    finished = train(flags, tmp_path / "run", script="train_async.py", variables=SLOWLY)
    assert finished.code == 0, finished.output
    assert_every_round_trained_once(finished, 5, last_checkpoint=None)
    assert_some_step_began_before_its_round_was_whole(finished)
    staleness = [line["transferqueue/sample_staleness/max"] for line in finished.metrics().values()]
    assert set(staleness) <= {0.0, 1.0}
    assert max(staleness) == 1.0  # the second round was answered by the weights of the first
    trace = json.loads((finished.run_dir / "trace.json").read_text())["traceEvents"]
    spans = {entry["name"] for entry in trace if entry["ph"] == "X"}
    assert spans <= set(documented_spans())
    assert spans >= {  # a group from its prompt to the weights that it made
        "generate_group", "reward_group", "transferqueue_put_group", "commit_groups", "lease_round",
        "transferqueue_get_groups", "transferqueue_ack_groups", "encode_group", "plan_round", "forward_backward",
        "optimizer_step", "note_trained", "pause_engines", "load_weights", "confirm_weights", "resume_engines",
        "release_slots",
    }  # fmt: skip
    assert [entry for entry in trace if entry["ph"] == "B"] == []  # whatever began has ended


@pytest.mark.nightly
def test_trainers_begin_a_round_with_its_finished_groups_and_every_sample_is_trained(
    tiny_task: TinyTask, tmp_path: Path
) -> None:
    """Without tokens of older weights; with them, in the usual session, the test before."""
    flags = [*tiny_task.flags(), *STREAMING, *EARLY, "--num-rollout", "4", "--max-staleness", "0"]
    finished = train(flags, tmp_path / "run", variables=SLOWLY)
    assert finished.code == 0, finished.output
    assert_every_round_trained_once(finished, 4, last_checkpoint=None)
    assert_some_step_began_before_its_round_was_whole(finished)


@pytest.mark.nightly
def test_async_streaming_on_vllm_trains_each_group_once(tiny_task: TinyTask, tmp_path: Path) -> None:
    flags = [*tiny_task.flags(), *STREAMING, "--max-staleness", "1", "--num-rollout", "5"]
    finished = train(flags, tmp_path / "run", script="train_async.py")
    assert finished.code == 0, finished.output
    assert_every_round_trained_once(finished, 5, last_checkpoint=None)
    assert {line["transferqueue/sample_staleness/max"] for line in finished.metrics().values()} == {0.0, 1.0}


@pytest.mark.nightly
def test_a_manager_that_dies_while_it_keeps_what_a_stop_cut_costs_no_group(
    tiny_task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer dies while the next round is answered; the manager, told to stop, dies with the first group kept."""
    notes = tmp_path / "notes"
    monkeypatch.setenv("VIME_FAILPOINTS", "trainer.optimizer:2:kill,manager.keep:1:kill")
    monkeypatch.setenv("VIME_FAILPOINTS_DIR", str(notes))
    # a first token at once and a last one after seconds: the stop finds groups with tokens, whenever it comes
    monkeypatch.setenv("VIME_SCRIPTED_TOKENS_PER_SECOND", "64")
    engine = ["--debug-engine-module", "vime.backends.vllm_utils.scripted_server"]
    length = ["--rollout-max-response-len", "400", "--rollout-max-context-len", "480"]
    flags = [*tiny_task.flags(), *STREAMING, *engine, *length, "--max-staleness", "1", "--partial-rollout"]
    finished = train([*flags, "--num-rollout", "4"], tmp_path / "run", script="train_async.py")
    assert finished.code == 0, finished.output
    assert {note.name for note in notes.iterdir()} == {"trainer.optimizer.2", "manager.keep.1"}
    assert len(finished.events("run_restarted")) == 1
    assert_every_round_trained_once(finished, 4, last_checkpoint=None)


SLOW_WHEN_EVALUATED = '''"""An evaluation takes longer than a lease lasts."""

import asyncio


async def reward(args, sample, **kwargs):
    if sample.label == "slow":
        await asyncio.sleep(9.0)
    return float(len(set(sample.tokens)) % 3)
'''


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_round_waits_for_the_trainers_for_longer_than_a_lease_lasts(tiny_task: TinyTask, tmp_path: Path) -> None:
    """As it does in real runs, whose rounds train for longer than the 600 s of a lease."""
    (tmp_path / "slow.py").write_text(SLOW_WHEN_EVALUATED)
    [first, *_] = tiny_task.prompts.read_text().splitlines()
    (tmp_path / "held.jsonl").write_text(json.dumps(json.loads(first) | {"label": "slow"}) + "\n")
    flags = [
        *tiny_task.flags(), *STREAMING, "--transferqueue-max-staleness", "1",
        "--num-rollout", "3", "--save-interval", "1",
        "--custom-rm-path", f"{tmp_path / 'slow.py'}:reward", "--transferqueue-lease-timeout-secs", "6",
        "--eval-prompt-data", "held", str(tmp_path / "held.jsonl"), "--eval-interval", "1", "--max-restarts", "0",
        "--debug-engine-module", "vime.backends.vllm_utils.scripted_server",
    ]  # fmt: skip
    finished = train(flags, tmp_path / "run", script="train_async.py")
    assert finished.code == 0, finished.output
    assert_every_round_trained_once(finished, 3, last_checkpoint=2)
