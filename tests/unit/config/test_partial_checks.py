"""--partial-rollout and --mixed-version-policy: what contradicts itself, or could never be trained, is refused."""

import json
from pathlib import Path

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.config.command_line import parse_command_line
from vime.config.parse import Config
from vime.ray.preflight import preflight
from vime.rollout.plugins import check_plugins
from vime.types import ConfigError

STREAMING = ["--transferqueue-mode", "streaming"]
SURPLUS = ["--partial-rollout", "--over-sampling-batch-size", "8"]
MASK = "--mask-offpolicy-in-partial-rollout"


@pytest.fixture
def resolved(tmp_path: Path):
    model_dir = write_model_directory(tmp_path / "model")
    (model_dir / "model.safetensors").write_bytes(b"")
    prompts = tmp_path / "train.jsonl"
    prompts.write_text(json.dumps({"input": "a"}) + "\n")

    def resolve(*flags: str) -> Config:
        return parse_command_line(
            [
                *("--hf-checkpoint", str(model_dir), "--prompt-data", str(prompts), "--device", "cpu"),
                *("--num-rollout", "3", "--rm-type", "exact_match", "--rollout-max-response-len", "8"),
                *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", *flags),
            ]
        )

    return resolve


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ([], "correct"),
        ([*SURPLUS, MASK], "mask"),
        ([*STREAMING, "--max-staleness", "1", "--mixed-version-policy", "reject"], "reject"),
    ],
)
def test_the_mask_flag_is_a_name_of_the_policy_mask(resolved, flags: list[str], policy: str) -> None:
    assert resolved(*flags).queue.mixed_version_policy == policy


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--partial-rollout", "--max-staleness", "1"],
            "--partial-rollout: no effect.*--over-sampling-batch-size",
        ),
        (SURPLUS, f"--transferqueue-max-staleness 0.*Add {MASK}"),
        ([*SURPLUS, MASK, "--mixed-version-policy", "correct"], f"{MASK} with --mixed-version-policy correct"),
        (
            [*SURPLUS, "--max-staleness", "1", "--mixed-version-policy", "reject"],
            "refused when it is finished",
        ),
        ([*STREAMING, "--partial-rollout", "--no-transferqueue-durable"], "kept in the spool"),
        ([*STREAMING, "--partial-rollout", MASK], f"{MASK}: no effect here.*--max-staleness above 0"),
        ([*STREAMING, "--mixed-version-policy", "mask"], "mixed-version-policy mask: no effect here"),
        (["--max-staleness", "1", "--mixed-version-policy", "mask"], "mixed-version-policy mask: no effect here"),
        ([*SURPLUS, MASK, "--reference-mode"], "--reference-mode with --partial-rollout"),
    ],
)
def test_contradictions_are_refused(resolved, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(*flags)


def test_under_train_async_a_cut_answer_needs_one_version_more(resolved) -> None:
    flags = [*SURPLUS, "--max-staleness"]
    with pytest.raises(ConfigError, match=r"train_async\.py with --transferqueue-max-staleness 1: .*Set it to 2"):
        preflight(resolved(*flags, "1"), is_async=True)
    preflight(resolved(*flags, "1"), is_async=False)
    preflight(resolved(*flags, "2"), is_async=True)
    preflight(resolved(*flags, "1", MASK), is_async=True)


def test_a_generate_function_has_to_say_that_it_can_go_on(resolved, tmp_path: Path) -> None:
    source = "async def generate(args, sample, sampling_params):\n    return sample\n"
    (tmp_path / "once.py").write_text(source)
    (tmp_path / "again.py").write_text(source + "generate.resumes = True\n")
    flags = [*SURPLUS, "--max-staleness", "1", "--custom-generate-function-path"]
    with pytest.raises(ConfigError, match=r"once\.py:generate: it does not declare .*resumes = True"):
        check_plugins(resolved(*flags, f"{tmp_path / 'once.py'}:generate").flat)
    check_plugins(resolved(*flags, f"{tmp_path / 'again.py'}:generate").flat)
    check_plugins(resolved("--custom-generate-function-path", f"{tmp_path / 'once.py'}:generate").flat)
