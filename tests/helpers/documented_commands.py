"""The shell commands of the project's pages, and for each the test that executes it.

Collected are the lines of shell blocks and the code spans that begin like a command. Not executed are those with the
comment `# needs a GPU`, or, behind a span, `(needs a GPU)`. Placeholders are words like RUN, OUT or DIR; `...` stands
for further flags.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.shape_check import clone_files

ROOT = Path(__file__).resolve().parents[2]
NEEDS_GPU = "needs a GPU"
HERE = "tests/e2e/run/test_documented_commands.py"
EXECUTED_BY = {
    f"{HERE}::clone": ("git clone <this repository> vime && cd vime",),
    f"{HERE}::test_the_tools_of_a_clone": (
        "./scripts/install.sh reasoning-gym",
        "./scripts/test.sh",
        "./scripts/test.sh tests/unit -k curve",
        "./scripts/lint.sh",
        ".venv/bin/ruff check --fix . && .venv/bin/ruff format .",
        "python scripts/make_flags_doc.py",
        "python scripts/make_families_table.py",
    ),
    # its parts are stand-ins there
    "tests/unit/project/test_long_scripts.py::test_the_night_runs_every_part_and_says_which_failed": (
        "./scripts/nightly.sh OUT",
    ),
    # Python and pip are stand-ins there
    "tests/unit/project/test_install_script.py::test_a_machine_without_a_gpu_can_be_given_the_packages_for_gpus": (
        "./scripts/install.sh gpu",
    ),
    "tests/e2e/run/test_refusals.py::test_help_lists_the_groups": ("python train.py --help",),
    "tests/e2e/run/test_quickstart.py::test_the_quick_start_learns": ("./scripts/quickstart.sh",),
    f"{HERE}::test_the_quick_start_takes_the_flags_that_its_page_says_to_try": (
        "SEED=1 ./scripts/quickstart.sh",
        "./scripts/quickstart.sh --transferqueue-mode streaming",
        "./scripts/quickstart.sh --actor-num-gpus-per-node 2",
        "./scripts/quickstart.sh --save-interval 10 --run-dir runs/mine",
    ),
    f"{HERE}::test_the_quick_start_as_trainer_and_rollout_job_in_two_terminals": (
        "RUN=runs/external ADDRESS=127.0.0.1:8640 ./scripts/run-external-trainer.sh",
        "vime token make runs/external my-job > token",
        "VIME_TOKEN=$(cat token) ADDRESS=http://127.0.0.1:8640 ./scripts/run-external-producer.sh",
    ),
    f"{HERE}::test_the_quick_start_trains_an_adapter_and_takes_a_filter": (
        "./scripts/quickstart.sh --train-backend fsdp --lora-rank 16 --lr 2e-3",
        "./scripts/quickstart.sh --transferqueue-mode off",
        "./scripts/quickstart.sh --num-rollout 5 --dynamic-sampling-filter-path "
        "examples/customization/filter.py:keep_mixed_groups --over-sampling-batch-size 32",
    ),
    f"{HERE}::test_the_model_of_the_tool_page_learns_to_call": (
        "./scripts/quickstart.sh --custom-generate-function-path examples/tools/sorter.py:generate_with_sorter "
        "--run-dir runs/tools",
        "vime samples runs/tools --best",
        "vime report runs/tools",
    ),
    f"{HERE}::test_the_environment_of_its_page_learns_to_call": (
        "mkdir -p runs && cp -r examples/quickstart/model runs/model-of-agents && "
        "cp examples/agents/chat_template.jinja runs/model-of-agents/",
        "./scripts/quickstart.sh --hf-checkpoint runs/model-of-agents --environment "
        "examples/agents/second_chance.py:SecondChance --run-dir runs/agents",
        "vime samples runs/agents --best",
    ),
    f"{HERE}::test_the_quick_start_is_played_by_a_program_in_another_terminal": (
        "./scripts/quickstart.sh --hf-checkpoint runs/model-of-agents --agent-listen 127.0.0.1:8660 "
        "--run-dir runs/elsewhere --transferqueue-mode streaming",
        "python examples/agents/outside.py http://127.0.0.1:8660 runs/elsewhere/agent-key",
    ),
    f"{HERE}::streamed": (
        "python train.py --hf-checkpoint DIR --prompt-data train.jsonl --label-key label --rm-type math "
        "--num-rollout 100 --rollout-batch-size 32 --n-samples-per-prompt 8 --lr 1e-6 --transferqueue-mode buffer",
        "python train.py --reference-mode ... --run-dir runs/a",
        "python train.py --reference-mode ... --run-dir runs/b --transferqueue-mode streaming",
        "python train.py ... --transferqueue-mode streaming",
    ),
    f"{HERE}::test_the_usage_line_trains_the_same_in_two_modes": (
        """diff <(grep -ho '"version": .*"content_hash": "[^"]*"' runs/a/events/driver.jsonl) """
        """<(grep -ho '"version": .*"content_hash": "[^"]*"' runs/b/events/driver.jsonl)""",
    ),
    f"{HERE}::test_a_run_is_looked_at": (
        "vime report RUN",
        "vime why-stuck RUN",
        "vime audit RUN",
        "vime queue ls RUN",
        "vime queue show RUN GROUP",
        "vime queue export RUN FILE",
        "vime queue import NEW_RUN FILE",
        "vime ls DIR",
        "vime compare RUN OTHER",
        "vime samples RUN",
        "vime samples RUN --round 0 --worst",
        "vime samples RUN --best --tokens",
        "vime samples RUN --group 0 --json",
    ),
    "tests/e2e/run/test_mismatch_run.py::test_each_fault_of_a_generate_plug_in_is_named_when_the_run_is_over": (
        "vime diagnose RUN",
        "vime diagnose RUN --round 3",
        "vime diagnose RUN --json",
    ),
    f"{HERE}::test_flags_come_from_files": (
        "vime doctor",
        "vime doctor --hf-checkpoint DIR",
        "vime train --config run.toml --lr 2e-6",
        "vime train --config RUN --run-dir runs/again",
    ),
    f"{HERE}::test_generated_tasks_are_prompts": (
        "python train.py --reasoning-gym chain_sum,gsm_symbolic --rm-type reasoning_gym --apply-chat-template ...",
    ),
    f"{HERE}::test_chaos_kills_a_run": (
        "vime chaos OUT --case trainer@trainer.optimizer:2 manager@driver.clear:1 -- FLAGS OF TRAIN.PY",
        "./scripts/chaos.sh OUT",
        "./scripts/chaos.sh OUT --random 200 --seed 1",
        "ENGINE=vllm ./scripts/chaos.sh OUT --random 20",
    ),
    f"{HERE}::test_a_command_line_of_slime_trains": (
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
        "--group-query-attention --sglang-mem-fraction-static 0.7",
    ),
    f"{HERE}::test_verl_s_records_and_reward_train": (
        "python train.py --hf-checkpoint DIR --prompt-data train.jsonl --input-key prompt "
        "--apply-chat-template --label-key reward_model.ground_truth --metadata-key extra_info "
        "--custom-rm-path examples/migrating/verl_reward.py:reward --rollout-batch-size 64 "
        "--n-samples-per-prompt 8 --global-batch-size 128 --rollout-max-prompt-len 512 "
        "--rollout-max-response-len 1024 --advantage-estimator grpo --calculate-per-token-loss "
        "--use-kl-loss --kl-loss-coef 0.001 --lr 1e-6 --num-epoch 15",
    ),
    f"{HERE}::test_the_pretrained_model_s_scripts_train": (
        "./scripts/run-smollm2-135m-cpu.sh",
        "./scripts/run-smollm2-135m-lora-cpu.sh",
    ),
    # all of it: test_images_run.py, at night
    f"{HERE}::test_the_script_of_the_image_page_trains": ("./scripts/run-images-cpu.sh",),
    "tests/e2e/run/test_streaming_run.py::test_async_streaming_trains_each_group_once_within_its_staleness": (
        "python train_async.py ... --transferqueue-mode streaming --max-staleness 1",
    ),
    # armed in the environment, with a second point
    "tests/e2e/run/test_streaming_run.py::test_a_manager_that_dies_while_it_keeps_what_a_stop_cut_costs_no_group": (
        "VIME_FAILPOINTS=trainer.optimizer:2:kill VIME_FAILPOINTS_DIR=/tmp/notes python train.py ...",
    ),
    "tests/e2e/run/test_algorithms.py::test_imitation_lowers_its_loss_without_starting_an_engine": (
        "python train.py --loss-type sft_loss --rollout-function-path vime.rollout.sft_rollout.generate_rollout "
        "--debug-train-only --prompt-data data.jsonl --label-key answer --n-samples-per-prompt 1 "
        "--calculate-per-token-loss ...",
    ),
    "tests/dist/megatron_utils/test_plan_command.py"
    "::test_the_shipped_launch_fits_80_gib_and_is_told_what_to_change_for_24": (
        "vime plan --device cuda FLAGS OF TRAIN.PY",
    ),
    "tests/dist/megatron_utils/test_plan_command.py::test_recorded_runs_say_how_fast_it_would_be_and_how_stale": (
        "vime plan FLAGS OF TRAIN.PY --like RUN",
    ),
    "tests/dist/megatron_utils/test_plan_command.py"
    "::test_30_billion_parameters_fit_one_node_with_the_optimizer_in_host_memory": (
        "vime plan --hf-checkpoint DIR --device cuda --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --colocate "
        "--rollout-num-gpus-per-engine 2 --use-kl-loss --kl-loss-coef 0.001 --rollout-max-prompt-len 2048 "
        "--rollout-max-response-len 16384 --use-dynamic-batch-size --max-tokens-per-gpu 18432 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer-cpu-offload",
    ),
    "tests/contract/gateway/test_gateway_commands.py"
    "::test_a_token_is_made_listed_and_revoked_while_the_gateway_works": (
        "vime token list RUN",
        "vime token revoke RUN ID",
    ),
    "tests/e2e/run/test_lost_engines.py"
    "::test_a_run_goes_on_while_one_of_two_scripted_engines_is_killed_twice_and_then_the_router": ("vime engines RUN",),
    "tests/e2e/run/test_fleet_changes_run.py"
    "::test_an_engine_is_added_to_a_run_of_scripted_engines_and_another_is_drained": ("vime engines RUN drain ENGINE",),
    "tests/e2e/run/test_external_engines_run.py"
    "::test_a_run_on_scripted_engines_of_others_outlives_one_of_them_and_leaves_them_running": (
        "vime engine --listen HOST:PORT --keys FILE FLAGS OF TRAIN.PY",
        "python train.py ... --rollout-external-engine-addrs 10.0.0.5:8100 10.0.0.6:8100 "
        "--rollout-external-engine-keys FILE",
    ),
    "tests/unit/cli/test_engines_changes.py::test_the_run_gets_the_request_and_its_answer_is_shown": (
        "vime engines RUN add",
        "vime engines RUN add 2",
    ),
    "tests/contract/gateway/test_external_producers.py"
    "::test_the_python_producer_feeds_a_run_with_the_log_probabilities_of_the_versions_that_it_names": (
        "VIME_TOKEN=... python examples/external/producer.py http://HOST:PORT --model DIR",
    ),
    "tests/contract/gateway/test_conformance.py"
    "::test_the_commands_of_the_page_of_the_protocol_as_a_reader_types_them": (
        "vime token make RUN NAME",
        "vime producers RUN",
        "vime conformance --producer CMD",
        "vime conformance ADDRESS",
    ),
    "tests/contract/sessions/test_session_front.py"
    "::test_a_turn_that_its_server_died_in_is_sampled_again_and_recorded_once": (
        "vime sessions-front http://HOST:PORT --listen 127.0.0.1:8650 --patience-secs 60",
    ),
}
"""The test, or its fixture, that executes each command. One of this module's own file has the command in its text."""
PROGRAMS = ("python", "pip", "git", "ray")
SHELLS = ("", "sh", "bash", "shell", "console")
MENTION_OF_VIME = re.compile(r"vime [\w-]+")  # `vime audit` is the name of a command, `vime audit RUN` is one


@dataclass(frozen=True)
class Command:
    text: str  # as `canonical` writes it
    where: str
    needs_gpu: bool


def documented_commands() -> list[Command]:
    """Of README.md, AGENTS.md and docs/*.md; not of docs/log.md, whose experiments belong to their day."""
    docs = [path for path in clone_files(ROOT / "docs", "*.md") if path.parent.name == "docs" and path.stem != "log"]
    return [command for page in (ROOT / "README.md", ROOT / "AGENTS.md", *docs) for command in _of_page(page)]


def commands_of(text: str, page: str = "page") -> Iterator[Command]:
    """The commands of a page of Markdown: blocks first, then code spans."""
    lines = text.splitlines()
    prose = ["" if line.lstrip().startswith("```") else line for line in lines]
    for first, block, language in _blocks(lines):
        prose[first : first + len(block)] = [""] * len(block)
        joined = re.sub(r"\\\n\s*", "", "\n".join(block)).splitlines()
        entries = [(canonical(re.split(r"\s+#\s", line)[0]), line) for line in joined if line.strip()]
        if language in SHELLS and any(_is_command(entry) for entry, _ in entries):
            for entry, line in entries:
                yield Command(entry, f"{page}:{first + 1}", f"# {NEEDS_GPU}" in line)
    for span in re.finditer(rf"`([^`]+)`(\s+\({NEEDS_GPU})?", "\n".join(prose)):
        entry, number = canonical(span[1]), span.string.count("\n", 0, span.start())
        if _is_command(entry) and not MENTION_OF_VIME.fullmatch(entry):
            yield Command(entry, f"{page}:{number + 1}", bool(span[2]))


def canonical(text: str) -> str:
    """One way of writing for each command: `python -m vime`, `.venv/bin/python -m vime` and `vime` are the same."""
    text = " ".join(text.split()).replace("runs/<time>", "RUN")
    text = re.sub(r"(^|\s)(\.venv/bin/python|python3)\s", r"\1python ", text).replace("python -m vime ", "vime ")
    return re.sub(r"^((?:\w+=\S+ )*)([\w/]+\.py (?:-|\.\.\.))", r"\1python \2", text)


def merged(*commands: str) -> str:
    """One command line that has the environment and the flags of all; they begin with the same program."""
    environment: list[str] = []
    calls = []
    for command in commands:
        words = shlex.split(command)
        num_assigned = next(index for index, word in enumerate(words) if "=" not in word)
        environment += words[:num_assigned]
        calls.append([word for word in words[num_assigned:] if word != "..."])
    program = list(itertools.takewhile(lambda word: not word.startswith("-"), min(calls, key=len)))
    assert all(call[: len(program)] == program for call in calls), commands
    flags = [word for call in calls for word in call[len(program) :]]
    return " ".join([*environment, *map(shlex.quote, [*program, *flags])])


def _of_page(page: Path) -> Iterator[Command]:
    return commands_of(page.read_text(), str(page.relative_to(ROOT)))


def _blocks(lines: list[str]) -> Iterator[tuple[int, list[str], str]]:
    """(number of the first line, lines, language) of each fenced block, without its fences, and each indented one."""
    start, is_fenced, language = -1, False, ""
    for number, line in enumerate([*lines, ""]):
        is_fence = line.lstrip().startswith("```")
        if start >= 0 and (is_fence if is_fenced else not line.startswith("    ")):
            yield start, lines[start:number], language
            start, language = -1, ""
        if is_fence:
            is_fenced = not is_fenced
            start, language = (number + 1, line.strip("` ")) if is_fenced else (-1, "")
        elif not is_fenced and start < 0 and line.startswith("    "):
            # A continued list item is indented too, but follows text; a block follows an empty line or a heading.
            before = lines[number - 1] if number else ""
            start = number if not before.strip() or before.startswith("#") else -1


def _is_command(text: str) -> bool:
    words = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", text).split()
    if not words:
        return False
    is_path = words[0].startswith(("./", ".venv/bin/"))
    return is_path or (len(words) > 1 and words[0] in (*PROGRAMS, "vime") and not words[1].startswith(("|", "/")))
