"""A run that cannot go on from a checkpoint is told so, with every reason, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime.config.lora import LINEAR_LAYERS
from vime.config.parse import Config, parse
from vime.ray.checkpoint import RunState, read_run_state, save_checkpoint
from vime.ray.checkpoint_damage import refuse_damage
from vime.ray.checkpoint_identity import facts_of, refuse_other_run
from vime.ray.preflight import preflight
from vime.types import CheckpointError, ConfigError
from vime.utils.manifest import MANIFEST

SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


def config(directory: Path, *flags: str, **shape: object) -> Config:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**SHAPE, **shape}))
    return parse(["--hf-checkpoint", str(directory), "--device", "cpu", *flags])


def written_by(chosen: Config, root: Path) -> Path:
    state = RunState(rollout_id=0, version=1, data_source={}, written_with=facts_of(chosen))
    return save_checkpoint(root, state, lambda _: None)


def refusal(writer: Config, reader: Config, root: Path) -> str:
    """What the reader is told; empty when it may load."""
    checkpoint = written_by(writer, root)
    try:
        refuse_other_run(checkpoint, read_run_state(checkpoint).written_with, reader)
    except ConfigError as error:
        return str(error)
    return ""


ADAPTER = "--train-backend fsdp --lora-rank 8"


@pytest.mark.parametrize(
    ("writer", "reader", "says"),
    [
        ("", "", ""),
        ("", "--train-backend fsdp", "written with --train-backend megatron, this run has fsdp"),
        ("--train-backend fsdp", "", "written with --train-backend fsdp, this run has megatron"),
        ("--use-distributed-optimizer", "", "written with --use-distributed-optimizer, this run is without it"),
        ("", "--use-distributed-optimizer", "written without --use-distributed-optimizer, this run is with it"),
        ("--bf16", "", "written with --bf16, this run is without it"),
        ("", "--bf16", "written without --bf16, this run is with it"),
        ("--bf16 --use-distributed-optimizer", "--use-distributed-optimizer", ""),
        ("--use-distributed-optimizer --no-save-optim", "--bf16", ""),
        ("--train-backend fsdp --bf16", "--train-backend fsdp", ""),
        ("", "--advantage-estimator ppo", "holds no critic, which this --advantage-estimator needs"),
        ("--advantage-estimator ppo", "", ""),
        ("--lr 1e-3 --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2", "--lr 1e-4", ""),
        (ADAPTER, ADAPTER, ""),
        (ADAPTER, f"{ADAPTER} --lora-target-modules {' '.join(reversed(LINEAR_LAYERS))}", ""),
        ("--train-backend fsdp", ADAPTER, "holds a whole model, and this run trains an adapter: remove --lora-rank"),
        (ADAPTER, "--train-backend fsdp", "holds an adapter, and this run trains the whole model: give --lora-rank 8"),
        (
            ADAPTER,
            "--train-backend fsdp --lora-rank 4 --lora-alpha 8 --lora-target-modules q_proj",
            "trained with --lora-rank 8, not 4; --lora-alpha 32.0, not 8.0; --lora-target-modules down_proj gate_proj",
        ),
    ],
)
def test_what_a_run_needs_and_the_checkpoint_has_not_is_named(
    writer: str, reader: str, says: str, tmp_path: Path
) -> None:
    said = refusal(config(tmp_path / "m", *writer.split()), config(tmp_path / "m", *reader.split()), tmp_path / "c")
    assert says in said
    assert bool(said) == bool(says)
    if says:
        assert f"--load {tmp_path / 'c' / 'iter_0000000'}: does not fit this run." in said
        assert "--save-hf export (--hf-checkpoint)" in said


def test_another_model_is_named_by_each_number_that_differs_and_all_reasons_are_said_at_once(tmp_path: Path) -> None:
    writer = config(tmp_path / "one", max_position_embeddings=128)
    reader = config(tmp_path / "two", "--bf16", num_hidden_layers=3, vocab_size=48)
    said = refusal(writer, reader, tmp_path / "c")
    assert "another model than --hf-checkpoint: num_layers 2, not 3; vocab_size 40, not 48." in said
    assert "written without --bf16" in said


def test_a_misfit_is_refused_in_preflight_and_a_checkpoint_without_facts_is_left_to_the_ranks(tmp_path: Path) -> None:
    plain, root = config(tmp_path / "m"), tmp_path / "c"
    written_by(plain, root)
    preflight(plain.replace(load=str(root)), is_async=False)
    other = plain.replace(load=str(root), bf16=True)
    with pytest.raises(ConfigError, match="without --bf16"):
        preflight(other, is_async=False)
    preflight(other.replace(debug_rollout_only=True), is_async=False)  # loads no weight
    save_checkpoint(root, RunState(rollout_id=1, version=2, data_source={}), lambda _: None)
    preflight(other, is_async=False)


def test_a_manifest_that_was_there_is_missed(tmp_path: Path) -> None:
    checkpoint = written_by(config(tmp_path / "m"), tmp_path / "c")
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: is missing"):
        refuse_damage(checkpoint)


def test_a_model_directory_that_went_away_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    chosen = config(tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    assert facts_of(chosen)["model"] == {}
