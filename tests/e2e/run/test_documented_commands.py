"""Every command of the README and of the other pages runs: in a clone, as a reader would type it.

Placeholders are filled, and what would take long is cut short by flags at the end. Commands of one program share a run
that has the flags of all of them. `tests/helpers/documented_commands.py` says which test executes which command.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.documented_commands import documented_commands, merged
from tests.helpers.rollout_setup import example_module
from tests.helpers.shape_check import clone_files
from tests.helpers.training import UNREAD, Finished, TinyTask
from vime.types import Sample
from vime.utils.network import free_port

ROOT = Path(__file__).resolve().parents[3]
SCRIPTED = "--debug-engine-module vime.backends.vllm_utils.scripted_server"
SMALL = "--device cpu --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 12"
DEADLINE_S = 560.0
# pip is asked and does nothing: this environment has what the clone needs, and is not the clone's to change.
PYTHON = """#!/bin/bash
if [ "$1 $2" = "-m pip" ]; then echo "$@" >> "$(dirname "$0")/../pip.log"; exit 0; fi
exec "$(dirname "$0")/python3.11" "$@"
"""
# Accepts or refuses a command line as train.py does, and ends where that would start processes.
ONLY_FLAGS = """import sys
from pathlib import Path
from vime.config.parse import dump
from vime.ray.preflight import read_command_line
Path("accepted").write_text(dump(read_command_line(None, is_async=False)))
sys.exit(9)
"""
IS_TRAINED = pytest.mark.parametrize("is_trained", [False, pytest.param(True, marks=pytest.mark.nightly)])
"""Some command lines are only accepted in the usual session, which has runs of their kind; by night, they train."""


class Clone:
    """A clone with an environment of its own, and a shell in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # `.venv/bin/python` and `vime` of a clone are those of its own code.
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(directory)}
        self.environment["PATH"] = f"{directory / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
        self.environment.pop("VIME_VENV", None)
        self._log = directory.parent / "output.txt"

    def run(self, command: str, *, code: int = 0) -> str:
        """The output of a command that ends with `code`."""
        with self._log.open("w") as log:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command], cwd=self.directory, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started = time.monotonic()
        try:
            process.wait(DEADLINE_S)
        except BaseException:  # the deadline, or pytest's own
            os.killpg(process.pid, signal.SIGTERM)  # train.py and `vime chaos` end their own parts
            process.wait(60)
            sys.stdout.write(f"not at its end in time: {command}\n{self._log.read_text()[-4000:]}")
            raise
        sys.stdout.write(f"{time.monotonic() - started:6.1f} s  {command}\n")
        output = self._log.read_text()
        assert process.returncode == code, f"{command}\n{output}"
        assert UNREAD not in output, f"{command} shows an error of an actor that it has not read:\n{output}"
        return output


def documented(*commands: str) -> str:
    """One command line for commands that begin alike; each stands in a page."""
    known = {command.text for command in documented_commands()}
    assert set(commands) <= known, f"no page has {set(commands) - known}"
    return merged(*commands) if len(commands) > 1 else commands[0]


def filled(command: str, **words: object) -> str:
    """The command with the page's placeholders filled in; `...` is for further flags, which follow."""
    for name, value in {"\\.\\.\\.": "", **words}.items():
        command, count = re.subn(rf"(?<![\w./-]){name}(?![\w.])", str(value), command)
        assert count or name == "\\.\\.\\.", f"{command} has no {name}"
    return command


def accepted(clone: Clone, command: str) -> tuple[str, dict[str, Any]]:
    """What a command says up to where it would start processes, and the configuration that it would have."""
    (clone.directory / "runs").mkdir(exist_ok=True)
    (clone.directory / "runs/only_flags.py").write_text(ONLY_FLAGS)
    said = clone.run(command.replace("python train.py", "python runs/only_flags.py"), code=9)
    config = json.loads((clone.directory / "accepted").read_text())
    (clone.directory / "accepted").unlink()
    return said, config


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """What `git clone` makes of this working tree, with `.venv` in it."""
    here = tmp_path_factory.mktemp("user")
    source = here / "repository"
    for path in clone_files(ROOT):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    git = ["git", "-C", str(source), "-c", "user.name=test", "-c", "user.email=test"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "The working tree"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    outside = Clone(here)
    outside.run(filled(documented("git clone <this repository> vime && cd vime"), **{"<this repository>": source}))
    view_of_the_environment(here / "vime" / ".venv")
    return Clone(here / "vime")


def view_of_the_environment(directory: Path) -> None:
    """A virtual environment with the packages of the one that runs the tests, but a pip that only writes down."""
    (directory / "bin").mkdir(parents=True)
    for path in [*Path(sys.prefix).iterdir(), *(Path(sys.prefix) / "bin").iterdir()]:
        link = directory / path.relative_to(sys.prefix)
        if path.name not in ("bin", "python") and not path.name.startswith(".vime-installed"):
            link.symlink_to(path)
    (directory / "bin/python").write_text(PYTHON)
    (directory / "bin/python").chmod(0o755)


@pytest.mark.nightly
def test_the_tools_of_a_clone(clone: Clone) -> None:
    clone.run(documented("./scripts/install.sh reasoning-gym"))
    assert "-e .[cpu,dev,reasoning-gym]" in (clone.directory / ".venv/pip.log").read_text().replace("gpu", "cpu")
    some = "--ignore-glob='tests/unit/[!o]*' --ignore-glob='*/test_[!c]*.py'"
    tests = clone.run(f"{documented('./scripts/test.sh', './scripts/test.sh tests/unit -k curve')} {some}")
    assert re.search(r"[1-9]\d* passed", tests.splitlines()[-1])
    clone.run(documented("python scripts/make_flags_doc.py"))
    clone.run(documented("python scripts/make_families_table.py"))
    clone.run(documented(".venv/bin/ruff check --fix . && .venv/bin/ruff format ."))
    said = clone.run(
        f"{documented('./scripts/lint.sh')} vime/utils"
    )  # all of it is what this session runs beside itself
    assert said.splitlines()[-1] == "lint: passed"
    assert clone.run("git status --porcelain") == ""  # none of them left or changed a file that git sees


def test_the_quick_start_takes_the_flags_that_its_page_says_to_try(clone: Clone) -> None:
    """An interruption and `--load` are `test_sigterm_to_all_saves_the_last_round_and_resume_goes_on`'s."""
    command = documented(
        "./scripts/quickstart.sh",
        "SEED=1 ./scripts/quickstart.sh",
        "./scripts/quickstart.sh --transferqueue-mode streaming",
        "./scripts/quickstart.sh --actor-num-gpus-per-node 2",
        "./scripts/quickstart.sh --save-interval 10 --run-dir runs/mine",
    )
    clone.run(f"{command} {SCRIPTED} --num-rollout 1")
    assert sorted(Finished(0, "", clone.directory / "runs/mine").metrics()) == [0]
    assert (clone.directory / "runs/mine/checkpoints/iter_0000000").is_dir()


def test_the_quick_start_as_trainer_and_rollout_job_in_two_terminals(clone: Clone) -> None:
    trainer = documented("RUN=runs/external ADDRESS=127.0.0.1:8640 ./scripts/run-external-trainer.sh")
    token = documented("vime token make runs/external my-job > token")
    job = documented("VIME_TOKEN=$(cat token) ADDRESS=http://127.0.0.1:8640 ./scripts/run-external-producer.sh")
    port = free_port()  # the page's may be somebody's
    commands = [
        f"{trainer} --num-rollout 2 --save-interval 1 & trainer=$!",
        token,
        f"{job} --run-dir runs/job {SCRIPTED} || {{ kill $trainer; wait $trainer; exit 1; }}",
        "wait $trainer",
    ]
    said = clone.run("\n".join(commands).replace("8640", str(port)))
    assert sorted(Finished(0, "", clone.directory / "runs/external").metrics()) == [0, 1]
    assert "32 durable (32 by external/my-job)" in said
    assert "32 groups committed, 0 too late" in said
    assert re.search(r"job +finished +rollout job ", clone.run("vime ls runs"))


@pytest.mark.nightly
def test_the_quick_start_trains_an_adapter_and_takes_a_filter(clone: Clone) -> None:
    """With vLLM: a scripted engine gives no group in which some answers are right."""
    command = documented(
        "./scripts/quickstart.sh --train-backend fsdp --lora-rank 16 --lr 2e-3",
        "./scripts/quickstart.sh --transferqueue-mode off",
        "./scripts/quickstart.sh --num-rollout 5 --dynamic-sampling-filter-path "
        "examples/customization/filter.py:keep_mixed_groups --over-sampling-batch-size 32",
    )
    saved = "--save-interval 1 --save-hf runs/adapter-{rollout_id}"
    clone.run(f"{command} --num-rollout 1 --run-dir runs/adapter {saved}")
    assert (clone.directory / "runs/adapter-0/adapter_config.json").is_file()
    line = Finished(0, "", clone.directory / "runs/adapter").metrics()[0]
    assert 0 < line["rollout/reward_mean"] < 1  # each group has right answers and wrong ones
    whole = sum(file.stat().st_size for file in (clone.directory / "examples/quickstart/model").glob("*.safetensors"))
    assert line["weights/publish_bytes"] < whole / 2


@pytest.mark.parametrize("num_rounds", [3, pytest.param(15, marks=pytest.mark.nightly)])
def test_the_model_of_the_tool_page_learns_to_call(clone: Clone, num_rounds: int) -> None:
    """It begins by guessing in most answers. After ten of the page's 30 rounds it calls in nearly all. That what is
    trained is learned on vLLM is also `test_the_quick_start_learns`'s."""
    command = documented(
        "./scripts/quickstart.sh --custom-generate-function-path examples/tools/sorter.py:generate_with_sorter "
        "--run-dir runs/tools"
    )
    clone.run(f"{command} --num-rollout {num_rounds}")
    metrics = Finished(0, "", clone.directory / "runs/tools").metrics()
    rewards = [line["rollout/reward_mean"] for _, line in sorted(metrics.items())]
    assert len(rewards) == num_rounds
    assert 0 < sum(rewards[:3]) / 3 < 0.7
    if num_rounds >= 15:
        assert sum(rewards[-5:]) / 5 >= 0.80
    best = documented("vime samples runs/tools --best")
    clone.run(best)
    # Not among the first few alone: after so few rounds a right answer is as often a guess as the result of a call.
    assert "<think>" in clone.run(f"{best} --limit 0")
    clone.run(documented("vime report runs/tools"))


@pytest.mark.nightly
def test_the_environment_of_its_page_learns_to_call(clone: Clone) -> None:
    """An answer to a call is a second turn of the session: context between two completions, and never a second row."""
    clone.run(
        documented(
            "mkdir -p runs && cp -r examples/quickstart/model runs/model-of-agents && "
            "cp examples/agents/chat_template.jinja runs/model-of-agents/"
        )
    )
    command = documented(
        "./scripts/quickstart.sh --hf-checkpoint runs/model-of-agents --environment "
        "examples/agents/second_chance.py:SecondChance --run-dir runs/agents"
    )
    clone.run(f"{command} --num-rollout 15")
    metrics = Finished(0, "", clone.directory / "runs/agents").metrics()
    rewards = [line["rollout/reward_mean"] for _, line in sorted(metrics.items())]
    assert len(rewards) == 15
    assert 0 < sum(rewards[:2]) / 2 < 0.7
    assert {(line["train/num_samples"], line["train/num_rows"]) for line in metrics.values()} == {(128.0, 128.0)}
    assert sum(rewards[-5:]) / 5 >= 0.70
    best = documented("vime samples runs/agents --best")
    clone.run(best)
    assert "<think>" in clone.run(f"{best} --limit 0")


@pytest.mark.nightly
def test_the_quick_start_is_played_by_a_program_in_another_terminal(clone: Clone) -> None:
    """The held-out problems too: an evaluation asks the same program."""
    model = documented(
        "mkdir -p runs && cp -r examples/quickstart/model runs/model-of-agents && "
        "cp examples/agents/chat_template.jinja runs/model-of-agents/"
    )
    run = documented(
        "./scripts/quickstart.sh --hf-checkpoint runs/model-of-agents --agent-listen 127.0.0.1:8660 "
        "--run-dir runs/elsewhere --transferqueue-mode streaming"
    )
    agent = documented("python examples/agents/outside.py http://127.0.0.1:8660 runs/elsewhere/agent-key")
    commands = [
        model,
        f"{run} {SCRIPTED} --num-rollout 1 --skip-eval-before-train --eval-interval 1 & run=$!",
        "until [ -f runs/elsewhere/agent-key ]; do kill -0 $run; sleep 0.2; done",
        f"{agent} --patience-secs 60 & agent=$!",
        "wait $run && code=0 || code=$?",
        "kill $agent && wait $agent",
        "exit $code",
    ]
    said = clone.run("\n".join(commands).replace("8660", str(free_port())))
    [line] = Finished(0, "", clone.directory / "runs/elsewhere").metrics().values()
    assert (line["train/num_samples"], line["train/num_rows"]) == (128.0, 128.0)
    num_played = int(said.rpartition(" sessions played")[0].rpartition("\n")[2])
    assert num_played > 128


@pytest.fixture(scope="module")
def streamed(clone: Clone, tiny_task: TinyTask) -> Path:
    """A run in mode streaming, beside one in mode buffer."""
    usage = documented(
        "python train.py --hf-checkpoint DIR --prompt-data train.jsonl --label-key label --rm-type math "
        "--num-rollout 100 --rollout-batch-size 32 --n-samples-per-prompt 8 --lr 1e-6 --transferqueue-mode buffer"
    )
    fill = {"DIR": tiny_task.model, "train.jsonl": tiny_task.prompts}
    more = f"{SMALL} {SCRIPTED} --num-rollout 2 --save-interval 1"
    first = documented("python train.py --reference-mode ... --run-dir runs/a")
    clone.run(f"{filled(merged(usage, first), **fill)} {more}")
    second = [
        documented("python train.py --reference-mode ... --run-dir runs/b --transferqueue-mode streaming"),
        documented("python train.py ... --transferqueue-mode streaming"),
    ]
    clone.run(f"{filled(merged(usage, *second), **fill)} {more}")
    return clone.directory / "runs/b"


def test_the_usage_line_trains_the_same_in_two_modes(clone: Clone, streamed: Path) -> None:
    clone.run(
        documented(
            """diff <(grep -ho '"version": .*"content_hash": "[^"]*"' runs/a/events/driver.jsonl) """
            """<(grep -ho '"version": .*"content_hash": "[^"]*"' runs/b/events/driver.jsonl)"""
        )
    )


def test_a_run_is_looked_at(clone: Clone, streamed: Path, tmp_path: Path) -> None:
    assert str(streamed) in clone.run(filled(documented("vime report RUN"), RUN=streamed))
    clone.run(filled(documented("vime why-stuck RUN"), RUN=streamed))
    clone.run(filled(documented("vime audit RUN"), RUN=streamed))
    assert "durable" in clone.run(filled(documented("vime queue ls RUN"), RUN=streamed))
    clone.run(filled(documented("vime queue show RUN GROUP"), RUN=streamed, GROUP=0))
    clone.run(filled(documented("vime queue export RUN FILE"), RUN=streamed, FILE=tmp_path / "queue"))
    clone.run(filled(documented("vime queue import NEW_RUN FILE"), NEW_RUN=tmp_path / "new", FILE=tmp_path / "queue"))
    other = streamed.with_name("a")
    assert re.search(r"b +finished +2/2", clone.run(filled(documented("vime ls DIR"), DIR=streamed.parent)))
    compared = clone.run(filled(documented("vime compare RUN OTHER"), RUN=streamed, OTHER=other))
    assert re.search(r"--transferqueue-mode +streaming +buffer", compared)
    assert (clone.directory / "compare.html").is_file()
    assert (streamed / "report.html").is_file()
    assert "round 1, group" in clone.run(filled(documented("vime samples RUN"), RUN=streamed))
    assert "round 0, group" in clone.run(filled(documented("vime samples RUN --round 0 --worst"), RUN=streamed))
    assert re.search(r"-\d\.\d{4}  v1", clone.run(filled(documented("vime samples RUN --best --tokens"), RUN=streamed)))
    for run in (streamed, other):
        lines = clone.run(filled(documented("vime samples RUN --group 0 --json"), RUN=run)).splitlines()
        assert [json.loads(line)["group"] for line in lines] == [0] * 4


@IS_TRAINED
def test_flags_come_from_files(clone: Clone, streamed: Path, tiny_task: TinyTask, is_trained: bool) -> None:
    told = clone.run(filled(documented("vime doctor", "vime doctor --hf-checkpoint DIR"), DIR=tiny_task.model))
    assert "0 fail" in told
    assert "pass model" in told
    paths = f'hf_checkpoint = "{tiny_task.model}"\nprompt_data = "{tiny_task.prompts}"\n'
    (clone.directory / "run.toml").write_text(
        f'{paths}label_key = "label"\nrm_type = "math"\nlr = 1\nnum_rollout = 1\n'
    )
    if not is_trained:
        clone.run(f"{documented('vime train --config run.toml --lr 2e-6')} {SMALL} {SCRIPTED} --run-dir runs/toml")
        assert Finished(0, "", clone.directory / "runs/toml").metrics()[0]["train/lr"] == 2e-6
    first = json.loads((streamed / "config.json").read_text())
    words = filled(documented("vime train --config RUN --run-dir runs/again"), RUN=streamed)
    if is_trained:
        clone.run(words)
        again = json.loads((clone.directory / "runs/again/config.json").read_text())
    else:
        _, again = accepted(clone, words.replace("vime train", "python train.py"))
    assert again["tracking"].pop("run_dir") != first["tracking"].pop("run_dir")
    assert again == first


def test_generated_tasks_are_prompts(clone: Clone, tiny_task: TinyTask, tmp_path: Path) -> None:
    """With a chat template and room for long questions, which the tiny model has not."""
    model = tmp_path / "model"
    shutil.copytree(tiny_task.model, model)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for file, setting in (
        ("tokenizer_config.json", {"chat_template": template}),
        ("config.json", {"max_position_embeddings": 4096}),
    ):
        (model / file).write_text(json.dumps({**json.loads((model / file).read_text()), **setting}))
    command = documented(
        "python train.py --reasoning-gym chain_sum,gsm_symbolic --rm-type reasoning_gym --apply-chat-template ..."
    )
    more = f"--hf-checkpoint {model} --num-rollout 1 --debug-rollout-only --run-dir {tmp_path / 'run'}"
    clone.run(f"{filled(command)} {SMALL} {SCRIPTED} {more}")
    spans = [event["name"] for event in Finished(0, "", tmp_path / "run").events("span_ended")]
    assert spans.count("reward_group") == 4


@pytest.fixture
def chatting(tiny_task: TinyTask, tmp_path: Path) -> Path:
    """The tiny model with a chat template."""
    model = tmp_path / "model"
    shutil.copytree(tiny_task.model, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return model


@IS_TRAINED
def test_a_command_line_of_slime_trains(clone: Clone, tiny_task: TinyTask, tmp_path: Path, is_trained: bool) -> None:
    command = documented(
        "python train.py --hf-checkpoint DIR --ref-load DIR --prompt-data train.jsonl --input-key prompt "
        "--label-key label --rm-type deepscaler --num-rollout 100 --rollout-batch-size 32 "
        "--n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 1024 "
        "--rollout-temperature 1 --balance-data --tensor-model-parallel-size 1 --sequence-parallel "
        "--expert-tensor-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
        "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --eps-clip "
        "0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 "
        "--adam-beta1 0.9 --adam-beta2 0.98 --attention-dropout 0.0 --hidden-dropout 0.0 "
        "--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash "
        "--swiglu --disable-bias-linear --normalization RMSNorm --use-rotary-position-embeddings "
        "--group-query-attention --sglang-mem-fraction-static 0.7"
    )
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{text}", "label": "a"}}\n' for text in "abcd"))
    more = f"{SMALL} {SCRIPTED} --global-batch-size 16 --num-rollout 1 --run-dir runs/slime"
    words = f"{filled(command, **{'DIR': tiny_task.model, 'train.jsonl': data})} {more}"
    said = clone.run(words) if is_trained else accepted(clone, words)[0]
    assert "note: --sglang-mem-fraction-static 0.7: taken as --vllm-gpu-memory-utilization 0.7" in said
    if is_trained:
        assert "train/kl_loss" in Finished(0, "", clone.directory / "runs/slime").metrics()[0]


@IS_TRAINED
def test_verl_s_records_and_reward_train(clone: Clone, chatting: Path, tmp_path: Path, is_trained: bool) -> None:
    """In the usual session the reward is called by the test."""
    command = documented(
        "python train.py --hf-checkpoint DIR --prompt-data train.jsonl --input-key prompt "
        "--apply-chat-template --label-key reward_model.ground_truth --metadata-key extra_info "
        "--custom-rm-path examples/migrating/verl_reward.py:reward --rollout-batch-size 64 "
        "--n-samples-per-prompt 8 --global-batch-size 128 --rollout-max-prompt-len 512 "
        "--rollout-max-response-len 1024 --advantage-estimator grpo --calculate-per-token-loss "
        "--use-kl-loss --kl-loss-coef 0.001 --lr 1e-6 --num-epoch 15"
    )
    data = tmp_path / "data.jsonl"
    records: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": "a"},
            "extra_info": {"index": 1},
        }
        for text in "abcd"
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    more = f"{SMALL} {SCRIPTED} --global-batch-size 16 --num-epoch 1 --run-dir runs/verl"
    words = f"{filled(command, **{'DIR': chatting, 'train.jsonl': data})} {more}"
    if is_trained:
        clone.run(words)
        assert sorted(Finished(0, "", clone.directory / "runs/verl").metrics()) == [0]
    else:
        accepted(clone, words)
        sample = Sample(response=" a", label=records[0]["reward_model"]["ground_truth"], metadata={"index": 1})
        assert example_module("migrating/verl_reward.py").reward(None, sample) == 1.0


@pytest.mark.nightly
def test_chaos_kills_a_run(clone: Clone, tmp_path: Path) -> None:
    """The script ends in `vime chaos` with the flags of train.py behind `--`. The ledger is killed with a commit that
    nobody has heard of, then a trainer with gradients and old weights: the weights are those of the undisturbed run."""
    documented("vime chaos OUT --case trainer@trainer.optimizer:2 manager@driver.clear:1 -- FLAGS OF TRAIN.PY")
    script = documented("./scripts/chaos.sh OUT", "./scripts/chaos.sh OUT --random 200 --seed 1")
    cases = "--random 0 --case ledger@ledger.commit:2 trainer@trainer.optimizer:1"
    said = clone.run(f"ROUNDS=4 {filled(script, OUT=tmp_path / 'out')} {cases}")
    assert "1 restarts, exit codes [0], audit kept, weights equal, metrics whole, left nothing" in said
    assert "1 runs, 2 kills, 0 failed" in said
    table = (tmp_path / "out/table.md").read_text()
    assert re.search(r"\| ledger@ledger.commit:2 [^|]*\| continued", table)  # Ray starts it again, on its file
    assert re.search(r"\| trainer@trainer.optimizer:1 [^|]*\| restarted itself", table)
    on_vllm = filled(documented("ENGINE=vllm ./scripts/chaos.sh OUT --random 20"), OUT=tmp_path / "vllm")
    (clone.directory / "runs").mkdir(exist_ok=True)
    (clone.directory / "runs/only_flags.py").write_text(ONLY_FLAGS)
    said = clone.run(f"{on_vllm} --script runs/only_flags.py", code=3)
    assert (clone.directory / "accepted").exists(), said
    (clone.directory / "accepted").unlink()


@pytest.mark.parametrize(
    "command",
    [
        "./scripts/run-smollm2-135m-cpu.sh",
        pytest.param("./scripts/run-smollm2-135m-lora-cpu.sh", marks=pytest.mark.nightly),
    ],
)
def test_the_pretrained_model_s_scripts_train(clone: Clone, tiny_task: TinyTask, command: str) -> None:
    """With a small model in the place where the scripts put the real one, which takes a minute to make, and minutes.
    The second is the first with flags of an adapter, which the quick start has in the usual session."""
    prepare = example_module("smollm2/prepare.py")
    made = {"recipe": prepare.RECIPE, "source": prepare.GGUF_FILE, "package": metadata.version(prepare.PACKAGE)}
    model = clone.directory / "models/smollm2-135m"
    shutil.copytree(tiny_task.model, model, dirs_exist_ok=True)
    (model / "made.json").write_text(json.dumps(made))
    run = f"runs/{Path(command).stem}"
    output = clone.run(f"{documented(command)} {SMALL} {SCRIPTED} --num-rollout 1 --run-dir {run}")
    assert "models/smollm2-135m is up to date" in output
    assert sorted(Finished(0, "", clone.directory / run).metrics()) == [0]


@pytest.mark.nightly
def test_the_script_of_the_image_page_trains(clone: Clone) -> None:
    """With the model that it makes and a real engine, one round of 120: that it learns is a test of the night."""
    output = clone.run(f"{documented('./scripts/run-images-cpu.sh')} --num-rollout 1 --run-dir runs/images")
    assert "prepare: model: data/images-seed0/model" in output
    [line] = Finished(0, "", clone.directory / "runs/images").metrics().values()
    assert line["eval/held_out/reward_mean"] < 0.5  # it guesses
    assert line["train/train_rollout_logprob_abs_diff"] < 1e-4
