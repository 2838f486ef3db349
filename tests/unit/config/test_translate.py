"""Flags of slime and megatron: compared with the model, always so, named otherwise or missing, all said at once."""

import json
from pathlib import Path

import pytest

from vime.config import migration
from vime.config.command_line import parse_command_line
from vime.config.parse import Config, build_parser, parse
from vime.types import ConfigError

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "vocab_size": 40,
    "head_dim": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1e6},
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "train.jsonl").write_text('{"input": "1"}\n')
    return tmp_path


def started(model_dir: Path, *extra: str) -> Config:
    return parse_command_line(
        [
            *("--hf-checkpoint", str(model_dir), "--prompt-data", str(model_dir / "train.jsonl"), "--device", "cpu"),
            *("--num-rollout", "3", "--rm-type", "exact_match", "--rollout-max-response-len", "48"),
            *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", *extra),
        ]
    )


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(list(flags))
    return str(error.value)


def test_every_unknown_and_every_bad_flag_is_in_one_message() -> None:
    text = refusal(
        "--lr", "fast", "--no-such-thing", "3", "--rollout-top-p", "1.5", "--offload-rollout", "--adam-beta1", "2"
    )
    assert text.startswith("5 problems\n")
    for part in (
        "--lr: invalid float value",
        "unknown flag --no-such-thing",
        "--rollout-top-p: got 1.5",
        "--offload-rollout",
    ):
        assert part in text
    assert "--adam-beta1: got 2" in text


def test_contradictions_are_in_the_same_message_as_unknown_flags(model_dir: Path) -> None:
    with pytest.raises(ConfigError) as error:
        started(model_dir, "--no-such-thing", "--gamma", "0.9", "--kl-loss-coef", "0.1", "--save-hf", "here")
    for part in ("--no-such-thing", "--gamma with", "--kl-loss-coef 0.1 has no effect", "--save-hf"):
        assert part in str(error.value)


def test_what_follows_from_a_bad_flag_is_not_a_second_problem(model_dir: Path) -> None:
    """Without the bad --num-rollout neither of the two lengths would be given; the user gave one."""
    with pytest.raises(ConfigError) as error:
        started(model_dir, "--num-rollout", "many")
    assert "problems" not in str(error.value)
    assert "--num-rollout: invalid int value: 'many'" in str(error.value)


@pytest.mark.parametrize(
    ("flag", "guess"),
    [
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--num-rollouts", "--num-rollout"),
        ("--kl-loss-coeff", "--kl-loss-coef"),
        ("--rollout_batch_size", "--rollout-batch-size"),
        ("--Num-Rollout", "--num-rollout"),
        ("\u2014num-rollout", "--num-rollout"),  # what an editor makes of two hyphens
        ("-num-rollout", "--num-rollout"),
        ("--rollout-backup", None),
        ("--eval-batch-size", None),
        ("--no-such-thing", None),
    ],
)
def test_a_guess_is_made_only_where_the_two_are_nearly_the_same_word(flag: str, guess: str | None) -> None:
    text = refusal(flag, "4")
    assert (f"Did you mean {guess}?" in text) if guess else ("Did you mean" not in text)


def test_sizes_that_the_model_has_are_accepted_and_said_once(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-layers", "2", "--hidden-size", "96", "--rotary-base", "1000000", "--swiglu", "--kv-channels", "32"]
    assert started(model_dir, *flags) == started(model_dir)
    notes = [line for line in capsys.readouterr().err.splitlines() if "config.json" in line]
    assert len(notes) == 1
    for flag in flags[::2][:2]:
        assert flag in notes[0]


@pytest.mark.parametrize(
    ("flags", "entry"),
    [
        (["--num-layers", "36"], "num_hidden_layers is 2"),
        (["--rotary-base", "10000"], "rope_theta is 1000000.0"),
        (["--untie-embeddings-and-output-weights"], "tie_word_embeddings is true"),
        (["--num-query-groups", "8"], "num_key_value_heads is 2"),
        (["--num-layers"], "num_hidden_layers is 2"),
    ],
)
def test_a_size_that_contradicts_the_model_is_refused(model_dir: Path, flags: list[str], entry: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flags[0]}.*{entry}"):
        started(model_dir, *flags)


def test_what_is_always_so_is_accepted_only_where_it_says_so(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--attention-dropout", "0.0", "--optimizer", "adam", "--attention-softmax-in-fp32"]
    assert started(model_dir, *given) == started(model_dir)
    assert "--optimizer adam: always so here" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--attention-dropout 0\.1: there is no dropout, so only 0 is accepted"):
        started(model_dir, "--attention-dropout", "0.1")
    with pytest.raises(ConfigError, match="--optimizer sgd"):
        started(model_dir, "--optimizer", "sgd")


def test_the_rfcs_polling_flags_are_accepted_with_the_note_that_nothing_polls(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--polling-mode", "--transfer-queue-staleness-poll-interval", "0.5"]
    assert started(model_dir, *flags) == started(model_dir)
    said = [line for line in capsys.readouterr().err.splitlines() if "nothing polls" in line]
    assert len(said) == 1
    assert all(flag in said[0] for flag in (flags[0], flags[1]))


def test_a_flag_named_otherwise_is_taken_and_said(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(model_dir, "--use-tis").algo.off_policy_correction == "tis"
    assert "--use-tis: taken as --off-policy-correction tis" in capsys.readouterr().err
    for name in ("--sglang-mem-fraction-static", "--vllm-mem-fraction-static"):  # the prefix alone rewritten
        assert parse([name, "0.7"]).vllm_flags == ("--gpu-memory-utilization", "0.7")
    assert parse(["--vllm-attention-backend", "FLASH_ATTN"]).vllm_flags == ("--attention-backend", "FLASH_ATTN")
    assert "Remove it; vLLM's own flags" in refusal("--sglang-nsa-prefill-backend", "x")


def test_a_flag_of_another_trainer_without_its_value_or_with_too_many_is_refused() -> None:
    text = refusal("--sglang-mem-fraction-static", "--sglang-cuda-graph-bs", "--use-tis", "1", "--optimizer")
    assert "--sglang-mem-fraction-static: expected one value" in text
    assert "--sglang-cuda-graph-bs: expected at least one value" in text
    assert "--use-tis 1: expected no value" in text
    assert "--optimizer: the optimizer is Adam" in text
    assert "--sglang-page-size 1 2: expected one value" in refusal("--sglang-page-size", "1", "2")


def test_the_old_and_the_new_name_together_are_refused() -> None:
    text = refusal("--use-tis", "--off-policy-correction", "mis")
    assert "--use-tis is --off-policy-correction tis here, and --off-policy-correction mis is given too" in text


def test_a_value_named_otherwise_is_taken() -> None:
    slime = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    chosen = parse(["--dynamic-sampling-filter-path", slime]).rollout.dynamic_sampling_filter_path
    assert chosen == "vime.rollout.filter_hub.check_reward_nonzero_std"


def test_values_that_change_nothing_are_accepted(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = started(model_dir, "--expert-tensor-parallel-size", "1", "--sequence-parallel")
    assert not config.parallel.sequence_parallel
    config = started(model_dir, "--use-kl-loss", "--kl-loss-coef", "0", "--kl-loss-type", "k1")
    assert config.algo.use_kl_loss
    assert "only measures train/kl_loss" in capsys.readouterr().err


def test_bf16_and_a_sharded_optimizer_are_the_default_on_cuda_alone(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = started(model_dir)
    assert (config.parallel.bf16, config.parallel.use_distributed_optimizer) == (False, False)
    monkeypatch.setattr("vime.config.checks.has_cuda", lambda: True)
    flags = ["--device", "cuda", "--actor-num-gpus-per-node", "1"]
    config = started(model_dir, *flags)
    assert (config.parallel.bf16, config.parallel.use_distributed_optimizer) == (True, True)
    assert config.parallel.moe_grouped_gemm
    assert config.agreement.train_rollout_diff_threshold == 6e-2  # that of bf16
    assert "--bf16 is the default on cuda" in capsys.readouterr().err
    config = started(model_dir, *flags, "--no-bf16", "--no-use-distributed-optimizer")
    assert (config.parallel.bf16, config.parallel.use_distributed_optimizer) == (False, False)
    assert not config.parallel.moe_grouped_gemm
    assert not started(model_dir, *flags, "--no-moe-grouped-gemm").parallel.moe_grouped_gemm
    sharded = started(model_dir, *flags, "--train-backend", "fsdp").parallel
    assert (sharded.use_distributed_optimizer, sharded.moe_grouped_gemm) == (False, False)


def test_other_defaults_and_meanings_are_told_to_who_comes_with_other_flags(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(model_dir)
    assert capsys.readouterr().err == ""
    started(model_dir, "--attention-softmax-in-fp32", "--use-kl-loss", "--rm-type", "math", "--adam-beta2", "0.98")
    said = capsys.readouterr().err
    assert "--kl-loss-type: low_var_kl when it is not given; slime's is k1" in said
    assert "--rm-type math: math-verify judges" in said
    assert "--adam-beta2:" not in said  # given
    assert "--n-samples-per-prompt:" not in said  # given
    assert "--opsm-delta:" not in said  # nothing reads it


def test_no_table_names_a_flag_that_vime_has_and_every_new_name_is_one() -> None:
    options = {option for action in build_parser()._actions for option in action.option_strings}
    tables = [migration.FROM_MODEL, migration.ALWAYS, migration.RENAMED, migration.MISSING]
    names = [name for table in tables for name in table]
    assert not options & set(names)
    assert len(names) == len(set(names))
    renamed = [*migration.RENAMED.values(), *migration.ENGINE.values()]
    targets = [entry.to[0] for entry in renamed if isinstance(entry, migration.Renamed) and entry.to]
    assert [to for to in targets if to not in options and not to.startswith("--vllm-")] == []
    assert set(migration.VALUES) <= options


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (["--transferqueue-prefetch-groups", "4"], "ranks read their rows by key"),
        (["--transferqueue-ack-on-train-data"], "leave the queue when it is trained"),
        (["--no-transferqueue-ack-on-train-data"], "leave the queue when it is trained"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flags_of_the_queue_that_changed_nothing_any_more_are_accepted_with_a_note(
    model_dir: Path, capsys: pytest.CaptureFixture[str], given: list[str], note: str
) -> None:
    assert started(model_dir, *given) == started(model_dir)
    said = capsys.readouterr().err
    assert given[0] in said
    assert note in said


def test_a_joined_value_may_begin_with_a_dash_and_a_word_too_many_is_refused() -> None:
    assert parse(["--rollout-top-k=-1", "--rollout-stop=--end"]).rollout.rollout_stop == ("--end",)
    assert "--lr 1 2: 2 is too much after --lr" in refusal("--lr", "1", "2")
    assert "--bf16 true: true is too much after --bf16" in refusal("--bf16", "true")
    assert "train.jsonl: expected a flag in front" in refusal("train.jsonl")


def test_the_optimizer_in_host_memory_of_slimes_scripts_is_taken_as_it_is(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = ("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer")
    dtypes = ("--main-grads-dtype", "fp32", "--main-params-dtype", "fp32", "--exp-avg-dtype", "bf16")
    config = started(model_dir, *offload, *dtypes)
    optimizer = config.optimizer
    assert (optimizer.optimizer_cpu_offload, optimizer.optimizer_offload_fraction) == (True, 1.0)
    assert (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) == ("bf16", "fp32")
    said = capsys.readouterr().err
    for flag in (*offload[1:], "--main-grads-dtype fp32", "--main-params-dtype fp32"):
        assert f"{flag}: always so here" in said or f"{flag}, " in said or f", {flag}" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--main-grads-dtype", "bf16"], "so only fp32 is accepted"),
        (["--main-params-dtype", "fp16"], "main weights are in fp32, so only fp32 is accepted"),
        (["--exp-avg-dtype", "fp16"], "Say bf16"),
        (["--exp-avg-sq-dtype", "fp8"], "Say bf16"),
        (["--no-pin-cpu-params"], "page-locked"),
        (["--use-stateless-adam"], "--optimizer-cpu-offload"),
    ],
)
def test_what_the_optimizer_does_not_do_is_refused_with_what_to_say(flags: list[str], words: str) -> None:
    text = refusal(*flags)
    assert text.startswith(flags[0])
    assert words in text


@pytest.mark.parametrize(
    "words",
    [
        ["--ulysses-sequence-parallel-size", "4"],
        ["--ulysses_sequence_parallel_size", "4"],
        ["--ulysses-degree", "2"],
        ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"],
        ["--lr", "1e-6", "critic.ulysses_sequence_parallel_size=2"],
        ["--sequence-parallel-size", "4"],
        ["--ring_attn_size", "4"],
    ],
)
def test_a_sequence_cut_in_another_way_is_refused_with_the_flag_that_cuts_it_here(words: list[str]) -> None:
    text = refusal(*words)
    assert "Say --context-parallel-size SIZE" in text
    assert ("Ulysses sequence parallelism is not here" in text) == ("ulysses" in " ".join(words))
    assert "unknown flag" not in text


def test_a_context_parallel_group_gathers_however_megatron_is_told(model_dir: Path) -> None:
    assert started(model_dir, "--cp-comm-type", "p2p") == started(model_dir)
    text = refusal("--cp-comm-type", "a2a")
    assert "nothing goes all to all (Ulysses), so only p2p or all_gather is accepted" in text
