"""`vime plan` without its dry run: flags, the largest micro-batch, the verdict, advice and estimates."""

import json
from pathlib import Path

import pytest

from tests.helpers.recorded_run import record_run
from vime.backends.memory import ModelBytes, RankBytes
from vime.cli.main import main
from vime.cli.plan import advice, play, read_flags, unlike
from vime.cli.plan_figures import GIB, RESERVE_GIB, Rates, _speed, deadlines, doubts, estimate, verdict
from vime.config.parse import Config
from vime.ray.dry_run import Part, longest_row, pack_lengths, parts_of, world_size
from vime.types import ConfigError, Role

SHAPE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "head_dim": 16}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
SHAPE |= {"max_position_embeddings": 64, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


def part(*, static_gib: float, activations_gib: float = 0.0, roles: tuple[Role, ...] = (Role.ACTOR,)) -> Part:
    held = ModelBytes(num_parameters=1, parameters=round(static_gib * GIB), activations=round(activations_gib * GIB))
    return Part(roles, (RankBytes(rank=0, stages=(0,), count=4, models={"actor": held}),))


def test_flags_of_gpus_are_read_where_there_are_none_and_layouts_are_still_checked(model: str) -> None:
    flags = ["--hf-checkpoint", model, "--device", "cuda", "--prompt-data", "/nowhere/train.jsonl"]
    config, notes = read_flags(flags)
    assert (world_size(config), config.parallel.bf16, config.parallel.use_distributed_optimizer) == (8, True, True)
    assert notes == []
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 4 does not divide"):
        read_flags([*flags, "--tensor-model-parallel-size", "4"])
    config, notes = read_flags([*flags, "--transformer-impl", "transformer_engine"])
    assert "counted with local layers" in notes[0]


def test_a_flag_that_is_unknown_ends_with_2_and_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hf-checkpoint", model, "--nosuch", "1"]) == 2
    assert "vime plan: unknown flag --nosuch" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--trainer-tflops", "--engine-tokens-per-sec", "--update-gb-per-sec"])
@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "many"])
def test_a_rate_that_nothing_can_be_divided_by_is_refused(
    model: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--hf-checkpoint", model, f"{flag}={value}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert flag in said
    assert f"got {value}, expected a finite number above 0" in said


def test_evaluation_sets_that_cannot_be_read_are_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hf-checkpoint", model, "--no-passes", "--eval-config", "/nowhere.toml"]) == 2
    assert "vime plan: --eval-config /nowhere.toml: cannot be read" in capsys.readouterr().err


def test_the_largest_micro_batch_is_of_whole_sequences_and_a_rest() -> None:
    """Limit 100 tokens a rank on 2 context ranks: 200 = 3 x 60 + 20. A sequence above it is a pack alone."""
    config = Config().replace(rollout_max_response_len=50, rollout_max_prompt_len=10)
    assert pack_lengths(config.replace(micro_batch_size=3)) == [60, 60, 60]
    dynamic = config.replace(use_dynamic_batch_size=True, max_tokens_per_gpu=100, context_parallel_size=2)
    assert pack_lengths(dynamic) == [60, 60, 60, 20]
    assert pack_lengths(dynamic.replace(max_tokens_per_gpu=20)) == [60]
    assert longest_row(config.replace(rollout_max_context_len=55)) == 55
    assert longest_row(config.replace(rollout_max_prompt_len=None)) == 51


def test_a_role_with_ranks_of_its_own_is_a_part_of_its_own() -> None:
    config = Config().replace(use_kl_loss=True, kl_loss_coef=0.1)
    assert parts_of(config) == [(Role.ACTOR, Role.REFERENCE)]
    assert parts_of(config.replace(separate_roles=("reference",))) == [(Role.ACTOR,), (Role.REFERENCE,)]


def test_the_peak_and_the_reserve_must_fit_on_a_gpu_and_nothing_is_compared_on_a_cpu() -> None:
    fits, over = part(static_gib=60, activations_gib=20 - RESERVE_GIB), part(static_gib=60, activations_gib=16.01)
    cuda = Config().replace(device="cuda")
    assert verdict(cuda, [fits]) == (True, 80.0)
    assert verdict(cuda, [fits, over]) == (False, 80.0)
    assert verdict(cuda.replace(gpu_memory_gib=81.0), [over]) == (True, 81.0)
    assert verdict(Config().replace(device="cpu"), [over]) == (True, None)


def test_advice_names_what_the_flags_leave_and_nothing_that_they_have(model: str) -> None:
    heavy = part(static_gib=90, activations_gib=1, roles=(Role.ACTOR, Role.REFERENCE))
    config = Config().replace(device="cuda", hf_checkpoint=model, actor_num_gpus_per_node=8, gpu_memory_gib=80.0)
    said = "\n".join(advice(config, [heavy]))
    for flag in ("--bf16", "--use-distributed-optimizer: main weights and moments are cut over 8 ranks"):
        assert flag in said
    for flag in ("--separate-roles reference", "--recompute-granularity full", "--micro-batch-size 1"):
        assert flag in said
    for flag in ("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "more GPUs: 90.0 GiB"):
        assert flag in said
    assert "--expert-model-parallel-size" not in said
    assert " ranks or a multiple" not in said
    on_one = "\n".join(advice(config.replace(actor_num_gpus_per_node=1), [heavy]))
    for cut in ("half of every layer a rank", "half of the layers a rank"):
        assert f"{cut}, on 2 ranks or a multiple (now 1)" in on_one
    done = config.replace(bf16=True, use_distributed_optimizer=True, recompute_granularity="full")
    done = done.replace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=1)
    left = advice(done, [part(static_gib=78, activations_gib=1)])
    assert left == ["shorter sequences: --rollout-max-response-len is 1024"]
    sharded = "\n".join(advice(config.replace(train_backend="fsdp"), [heavy]))
    assert "--actor-num-nodes" in sharded
    assert "--tensor-model-parallel-size" not in sharded


def test_estimates_divide_rates_by_work_and_say_which_were_assumed(model: str) -> None:
    """Rows of 1 + 4 tokens, of which 4 have logits, fp32. A layer: query, key, value 2 x 32 x 6 x 16 = 6144, output
    2 x 32 x 32 = 2048, MLP 6 x 32 x 64 = 12288 a token, 20480 x 5, attention 2 x 32 x 5 x 6 = 1920: 104320; two layers
    and logits 2 x 32 x 40 x 4 = 10240 make 218880 forward, three times that in all: 656640. 2 ranks of 1 TFLOP/s:
    4 x 2e12 / 656640 tokens/s. Weights: 2 x (2 x 32 x 4 x 16 + 3 x 32 x 64) + 2 x 40 x 32 = 23040, of 4 bytes."""
    config = Config().replace(hf_checkpoint=model, rollout_max_response_len=4, actor_num_gpus_per_node=2)
    config = config.replace(rollout_num_engines=3)
    given = estimate(config, Rates(trainer_tflops=1.0, engine_tokens_per_sec=1e6, update_gb_per_sec=0.5))
    assert given.trainer_tokens_per_sec == pytest.approx(8e12 / 656640)
    assert given.engines_for_balance == pytest.approx(8e6 / 656640)
    assert given.engine_tokens_per_sec == 3e6
    assert given.update_secs == pytest.approx(23040 * 4 / 1e9 / 0.5)
    assert not given.is_trainer_assumed
    assert not given.is_update_assumed
    assert _speed(config, [], given, is_played=False)[0] == "0 trainer ranks, 3 engine(s) of 1 GPU(s)"
    shared = _speed(config.replace(colocate=True), [], given, is_played=False)[0]
    assert shared == "0 trainer ranks, 3 engine(s) of 1 GPU(s), which are those of the policy's ranks"
    assumed = estimate(config, Rates())
    assert assumed.is_trainer_assumed
    assert assumed.is_update_assumed
    assert assumed.engines_for_balance is None


def test_deadlines_have_their_flags_and_one_that_an_estimate_passes_is_named(model: str) -> None:
    """92,160 bytes at 1e-7 GB/s are 922 s, and the deadline is 300; 32 x 8 answers of 4 tokens are soon trained."""
    config = Config().replace(hf_checkpoint=model, rollout_max_response_len=4, train_timeout_secs=7.0)
    slow = deadlines(config, estimate(config, Rates(update_gb_per_sec=1e-7)))
    assert {one.flag: one.secs for one in slow} == {
        "--start-timeout-secs": 300,
        "--generate-timeout-secs": 600,
        "--rollout-timeout-secs": 3600,
        "--train-timeout-secs": 7,
        "--update-weight-timeout-secs": 300,
    }
    [passed, unknown] = doubts(config, slow)
    assert passed == (
        "one weight update: about 922 s by the estimates, its deadline is 300 s: raise --update-weight-timeout-secs, "
        "or it fails then."
    )
    assert unknown == "the weights are not here: deadlines of starts and updates are for files of 0.0 GB, bf16."
    with Path(model, "model.safetensors").open("wb") as file:
        file.truncate(3 * 10**9)  # a file with a hole: 30 s more to read, 6 s more to send
    soon = deadlines(config, estimate(config, Rates()))
    assert [one.secs for one in soon] == [330, 600, 3600, 7, 306]
    assert doubts(config, soon) == []
    trained = estimate(config, Rates(trainer_tflops=1e-6)).trainer_tokens_per_sec
    [train] = doubts(config, deadlines(config, estimate(config, Rates(trainer_tflops=1e-6))))
    assert train.startswith(f"one round of training: about {32 * 8 * 4 / trained:.0f} s")


def test_files_that_are_not_here_count_as_bf16_in_the_deadlines(tmp_path: Path) -> None:
    """82 GB at 0.2 GB/s are 410 s, and the run has 464. Without the files' bytes it would be named with 300."""
    shape = SHAPE | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 20000, "vocab_size": 100_000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = Config().replace(hf_checkpoint=str(tmp_path), bf16=True)
    figures = estimate(config, Rates(update_gb_per_sec=0.2))
    waits = {one.flag: one for one in deadlines(config, figures)}
    num_bytes = round(figures.update_gb * 1e9)
    assert waits["--update-weight-timeout-secs"].secs == 300 + 2 * num_bytes // 10**9
    assert waits["--start-timeout-secs"].secs == 300 + num_bytes // 10**8
    assert 300 < figures.update_secs < waits["--update-weight-timeout-secs"].secs
    [unknown] = doubts(config, list(waits.values()))
    assert f"{figures.update_gb:.1f} GB" in unknown


def test_a_run_without_engines_is_not_played(tmp_path: Path) -> None:
    config = Config().replace(transferqueue_mode="external", rollout_num_engines=0)
    with pytest.raises(ConfigError, match=r"no engine of its own .*Say --rollout-num-engines for as many"):
        play(config, [record_run(tmp_path)], overlaps=False)


def test_what_makes_a_recorded_run_unlike_this_one_is_said(tmp_path: Path) -> None:
    alike = Config().replace(hf_checkpoint="m", actor_num_nodes=2, actor_num_gpus_per_node=4)
    run = record_run(tmp_path)
    assert unlike(alike, [run]) == []
    assert unlike(alike.replace(hf_checkpoint="n", actor_num_nodes=1), [run]) == [
        f"--like {run}: trained m, not n.",
        f"--like {run}: had 8 trainer rank(s), not 4.",
    ]


def test_an_adapter_is_estimated_by_what_it_computes_and_sends(model: str) -> None:
    """As above: 218880 forward, once more towards the inputs, and the base as the reference. Rank 8 on two layers of
    q (32 to 32), k (32 to 32) and down (64 to 32): 8 x (64 + 64 + 96) numbers of 4 bytes a layer."""
    config = Config().replace(hf_checkpoint=model, rollout_max_response_len=4, lora_rank=8, use_kl_loss=True)
    config = config.replace(lora_target_modules=("q_proj", "k_proj", "down_proj"), bf16=True)
    given = estimate(config, Rates(trainer_tflops=1.0))
    assert given.trainer_tokens_per_sec == pytest.approx(4 * 1e12 / (3 * 218880))
    assert given.update_gb == pytest.approx(2 * 8 * 224 * 4 / 1e9)
