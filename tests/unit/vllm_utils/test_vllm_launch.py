"""Command lines and environments of engines and router, and which flags are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime.backends.vllm_utils import launch
from vime.backends.vllm_utils.launch import (
    Part,
    awaiting_update,
    engine_command,
    engine_environment,
    validate_vllm_flags,
)
from vime.backends.vllm_utils.router import router_command
from vime.config.parse import Config, parse
from vime.types import ConfigError, EngineAddress
from vime.utils.heap import KEEP_FREED_MEMORY, LARGE_BLOCK_BYTES, MMAP_THRESHOLD


def cpu(*argv: str) -> Config:
    return parse(["--hf-checkpoint", "models/m", "--device", "cpu", *argv])


def command(config: Config, index: int = 0) -> list[str]:
    return engine_command(config, index=index, host="127.0.0.1", port=8100)


def value(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1
    return arguments[arguments.index(name) + 1]


def test_a_cpu_engine_is_eager_fp32_with_an_explicit_cache():
    arguments = command(cpu("--vllm-kv-cache-memory-bytes", "2097152", "--rollout-max-context-len", "512"))
    assert value(arguments, "--model") == "models/m"
    assert (value(arguments, "--host"), value(arguments, "--port")) == ("127.0.0.1", "8100")
    assert value(arguments, "--dtype") == "float32"
    assert value(arguments, "--kv-cache-memory-bytes") == "2097152"
    assert value(arguments, "--max-model-len") == "512"
    assert json.loads(value(arguments, "--weight-transfer-config")) == {"backend": "vime"}
    assert "--enforce-eager" in arguments
    assert "--disable-log-stats" not in arguments  # its own /metrics stay; vLLM has no flag to turn them on again
    assert "--enable-scale-out" in arguments
    assert "--tensor-parallel-size" not in arguments


def test_an_engine_that_waits_for_an_update_reads_no_weights_unless_it_needs_more_of_the_checkpoint():
    assert "--load-format" not in command(cpu())
    assert value(command(awaiting_update(cpu("--vllm-max-num-seqs", "8"))), "--load-format") == "dummy"
    for flags in (
        ["--vllm-load-format", "auto"],
        ["--vllm-quantization=fp8"],
        ["--vllm-speculative-config.model", "draft"],
        ["--vllm-spec-model", "draft"],
        ["--multimodal-keys", '{"image": "images"}'],
    ):
        assert "dummy" not in command(awaiting_update(cpu(*flags)))


def test_short_answers_of_one_prompt_share_blocks_on_the_cpu_and_a_user_may_choose_their_size():
    assert value(command(cpu()), "--block-size") == "32"
    chosen = command(cpu("--vllm-block-size", "64"))
    assert chosen.index("32") < chosen.index("64")  # vLLM takes the last
    assert "--block-size" not in command(cpu("--reference-mode", "--rollout-max-context-len", "64"))


def test_latent_attention_on_the_cpu_gets_the_parts_of_vllm_that_compute_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "kv_lora_rank": 512}))
    model = ["--hf-checkpoint", str(tmp_path)]
    arguments = command(parse([*model, "--device", "cpu"]))
    assert value(arguments, "--attention-backend") == "CPU_MLA"
    assert json.loads(value(arguments, "--compilation-config")) == {"custom_ops": ["all", "-rotary_embedding"]}
    for other in (cpu(), parse([*model, "--device", "cuda", "--bf16"])):
        assert "--attention-backend" not in command(other)


def test_another_engine_gets_vllms_command_line():
    ours, vllms = command(cpu("--debug-engine-module", "my.engine")), command(cpu())
    assert ours[1:3] == ["-m", "my.engine"]
    assert ours[3:] == vllms[3:]


def test_a_gpu_engine_takes_the_tensor_parallel_size_and_vllms_own_cache():
    config = parse(["--hf-checkpoint", "m", "--device", "cuda", "--rollout-num-gpus-per-engine", "4", "--bf16"])
    arguments = command(config)
    assert value(arguments, "--tensor-parallel-size") == "4"
    assert value(arguments, "--dtype") == "bfloat16"
    assert "--kv-cache-memory-bytes" not in arguments
    assert "--enforce-eager" not in arguments


SIXTEEN = ("--hf-checkpoint", "m", "--device", "cuda", "--rollout-num-gpus-per-engine", "16")


def test_a_part_of_an_engine_meets_the_first_and_only_the_first_has_a_server():
    first, last = (Part(number=number, of=4, address="10.0.0.1", port=21_000) for number in (0, 3))
    config = parse([*SIXTEEN, "--vllm-max-num-seqs", "8"])
    ours = engine_command(config, index=1, host="10.0.0.1", port=8000, part=first)
    theirs = engine_command(config, index=1, host="10.0.0.4", port=0, part=last)
    assert ours[2] == "vllm.entrypoints.launchers.api_server.entry"
    assert theirs[2] == "vime.backends.vllm_utils.follower"
    for arguments, rank in ((ours, "0"), (theirs, "3")):
        assert (value(arguments, "--nnodes"), value(arguments, "--node-rank")) == ("4", rank)
        assert (value(arguments, "--master-addr"), value(arguments, "--master-port")) == ("10.0.0.1", "21000")
        assert value(arguments, "--tensor-parallel-size") == "16"
        assert arguments[-2:] == ["--max-num-seqs", "8"]
        assert ("--headless" in arguments) == (rank == "3")
    alike = [[word for word in each[3:] if word != "--headless"] for each in (ours, theirs)]
    assert [pair for pair in zip(*alike, strict=True) if pair[0] != pair[1]] == [
        *(("10.0.0.1", "10.0.0.4"), ("8000", "0"), ("0", "3"))
    ], "all workers compute the same model in the same way"
    assert "--nnodes" not in command(config)


def test_stages_of_a_pipeline_divide_the_gpus_of_an_engine():
    """16 GPUs in 2 stages: each layer is cut over 8."""
    assert value(command(parse([*SIXTEEN, "--vllm-pipeline-parallel-size", "2"])), "--tensor-parallel-size") == "8"
    assert value(command(parse([*SIXTEEN, "--vllm-pipeline-parallel-size=4"])), "--tensor-parallel-size") == "4"
    with pytest.raises(ConfigError, match=r"--vllm-pipeline-parallel-size 3: an engine has 16 GPU .* divisor of 16"):
        command(parse([*SIXTEEN, "--vllm-pipeline-parallel-size", "3"]))


def test_without_a_context_limit_the_model_decides():
    assert "--max-model-len" not in command(cpu())


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_log_probs_are_those_of_the_sampled_distribution(temperature):
    # also at temperature 1: a plug-in may truncate, and that must show in what is recorded
    assert value(command(cpu("--rollout-temperature", temperature)), "--logprobs-mode") == "processed_logprobs"


def test_engines_sample_from_different_seeds():
    config = cpu("--rollout-seed", "10")
    assert [value(command(config, index), "--seed") for index in (0, 1)] == ["10", "11"]


def test_a_group_larger_than_vllms_limit_of_sequences_raises_the_limit():
    assert "--max-num-seqs" not in command(cpu("--n-samples-per-prompt", "128"))
    assert value(command(cpu("--n-samples-per-prompt", "129")), "--max-num-seqs") == "129"


def test_user_flags_come_last_as_vllm_spells_them():
    arguments = command(cpu("--vllm-max-num-seqs", "8", "--vllm-enable-prefix-caching"))
    assert arguments[-3:] == ["--max-num-seqs", "8", "--enable-prefix-caching"]


def test_an_engine_of_reference_mode_computes_one_whole_sequence_after_the_other():
    config = cpu("--reference-mode", "--n-samples-per-prompt", "129", "--rollout-max-context-len", "6000")
    arguments = command(config)
    assert value(arguments, "--max-num-seqs") == "1"  # also for a group of 129: each answer is a request
    # no smaller than any prompt: a prompt cut in two, with a seed, kills vLLM's CPU engine
    assert value(arguments, "--max-num-batched-tokens") == value(arguments, "--max-model-len") == "6000"
    assert "--no-enable-prefix-caching" in arguments
    changes = engine_environment(config, {"OMP_NUM_THREADS": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-3"})
    assert (changes["OMP_NUM_THREADS"], changes["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")


def test_without_a_context_limit_an_engine_of_reference_mode_takes_the_models_positions(tmp_path):
    shape = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 96, "max_position_embeddings": 5120}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = parse(["--hf-checkpoint", str(tmp_path), "--device", "cpu", "--reference-mode"])
    assert value(command(config), "--max-num-batched-tokens") == "5120"


def test_cpu_environment_requires_what_control_needs_and_leaves_the_users_choices():
    changes = engine_environment(cpu(), {"OMP_NUM_THREADS": "4", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert "OMP_NUM_THREADS" not in changes
    assert changes["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert changes["VLLM_SERVER_DEV_MODE"] == "1"
    assert changes["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_PLUGINS" not in changes


def test_an_engine_of_a_local_ray_gives_large_blocks_back_at_once_and_what_the_user_set_counts():
    assert engine_environment(cpu(), KEEP_FREED_MEMORY)[MMAP_THRESHOLD] == str(LARGE_BLOCK_BYTES)
    for inherited in ({}, {MMAP_THRESHOLD: "1000000"}):
        assert MMAP_THRESHOLD not in engine_environment(cpu(), inherited)


def test_a_list_of_plugins_gets_ours_added_once():
    assert engine_environment(cpu(), {"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"] == "mine,vime_weight_transfer"
    both = "vime_weight_transfer,mine"
    assert engine_environment(cpu(), {"VLLM_PLUGINS": both})["VLLM_PLUGINS"] == both


def test_an_engine_in_fp32_on_a_gpu_computes_attention_in_fp32_unless_the_user_says_otherwise():
    name, fp32 = "TRITON_F32_DEFAULT", parse(["--device", "cuda", "--no-bf16"])
    assert engine_environment(fp32, {})[name] == "ieee"
    assert name not in engine_environment(fp32, {name: "tf32"})
    assert name not in engine_environment(parse(["--device", "cuda", "--bf16"]), {})


def test_a_gpu_engine_gets_a_cache_size_only_where_one_is_given():
    assert "--kv-cache-memory-bytes" not in command(parse(["--device", "cuda"]))
    given = command(parse(["--device", "cuda", "--vllm-kv-cache-memory-bytes", "2097152"]))
    assert value(given, "--kv-cache-memory-bytes") == "2097152"
    assert value(command(cpu()), "--kv-cache-memory-bytes") == str(128 << 20)


def test_gpu_environment_has_nothing_of_the_cpu_profile():
    changes = engine_environment(parse(["--device", "cuda"]), {})
    assert not {"TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"} & changes.keys()


@pytest.fixture
def known_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of the installed vLLM, as an earlier run remembered it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "vime" / f"vllm-flags-{launch._vllm_version()}.json"
    cache.parent.mkdir()
    cache.write_text(json.dumps(["--max-num-seqs", "--max-num-batched-tokens", "--enable-prefix-caching"]))


def test_without_vllm_flags_vllm_is_not_asked(monkeypatch):
    monkeypatch.setattr(launch, "installed_flags", lambda: pytest.fail("asked"))
    validate_vllm_flags(cpu())


@pytest.mark.usefixtures("known_flags")
def test_known_flags_pass():
    validate_vllm_flags(cpu("--vllm-max-num-seqs", "8", "--vllm-enable-prefix-caching"))
    validate_vllm_flags(cpu("--vllm-max-num-seqs=8"))


def test_a_user_without_a_home_asks_vllm_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    asked: list[object] = []

    def asks(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout='{"--max-num-seqs": {}}\n')

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(launch.subprocess, "run", asks)
    assert [set(launch.installed_flags()) for _ in range(2)] == [{"--max-num-seqs"}] * 2
    assert len(asked) == 2


@pytest.mark.usefixtures("known_flags")
def test_a_near_miss_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"--vllm-max-num-seq: .*Did you mean --vllm-max-num-seqs\?"):
        validate_vllm_flags(cpu("--vllm-max-num-seq", "8"))


@pytest.mark.parametrize(
    ("given", "decided_by"),
    [
        ("--vllm-port", "Leave it out"),
        ("--vllm-model", "--hf-checkpoint"),
        ("--vllm-tensor-parallel-size", "--rollout-num-gpus-per-engine"),
        ("--vllm-nnodes", "--rollout-num-gpus-per-engine"),
        ("--vllm-node-rank", "--rollout-num-gpus-per-engine"),
        ("--vllm-master-addr", "Leave it out"),
        ("--vllm-master-port", "Leave it out"),
        ("--vllm-headless", "Leave it out"),
        ("--vllm-dtype", "--bf16"),
        ("--vllm-max-model-len", "--rollout-max-context-len"),
    ],
)
def test_a_flag_that_the_run_decides_is_refused_naming_both(given, decided_by):
    with pytest.raises(ConfigError, match=f"{given}: .*{decided_by}"):
        validate_vllm_flags(cpu(given, "1"))


@pytest.mark.parametrize("given", ["--vllm-max-num-seqs=8", "--vllm-enable-prefix-caching"])
def test_reference_mode_decides_how_an_engine_batches_and_caches(given):
    with pytest.raises(ConfigError, match=rf"{given.partition('=')[0]} with --reference-mode"):
        validate_vllm_flags(cpu("--reference-mode", given))


ENGINES = [EngineAddress(name=f"engine-{n}", url=f"http://127.0.0.1:{8100 + n}") for n in range(2)]


def test_the_router_gets_every_engine_and_the_policy():
    config = parse(["--vllm-router-policy", "consistent_hash"])
    arguments = router_command(config, ENGINES, host="127.0.0.1", port=8000)
    assert arguments[arguments.index("--worker-urls") + 1 :] == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    assert value(arguments, "--policy") == "consistent_hash"
    assert value(arguments, "--port") == "8000"


def test_a_router_flag_of_the_user_replaces_the_default():
    config = parse(["--router-health-check-interval-secs", "30"])
    assert value(router_command(config, ENGINES, host="127.0.0.1", port=8000), "--health-check-interval-secs") == "30"


def test_the_router_waits_for_the_longest_answer_of_any_set(tmp_path):
    assert value(router_command(cpu(), ENGINES, host="127.0.0.1", port=8000), "--request-timeout-secs") == "600"
    sets = tmp_path / "sets.toml"
    sets.write_text('[[datasets]]\nname = "long"\npath = "long.jsonl"\nmax_response_len = 32768\n')
    arguments = router_command(cpu("--eval-config", str(sets)), ENGINES, host="127.0.0.1", port=8000)
    assert value(arguments, "--request-timeout-secs") == "1828"


def test_a_router_flag_that_the_run_decides_is_refused_naming_both():
    with pytest.raises(ConfigError, match=r"--router-policy: .*--vllm-router-policy"):
        router_command(parse(["--router-policy", "random"]), ENGINES, host="127.0.0.1", port=8000)


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (5, "8"), (8, "8"), (16, "16"), (257, "320"), (512, "512")])
def test_an_engine_has_room_for_adapters_of_the_next_rank_that_vllm_knows(rank, room):
    arguments = command(cpu("--lora-rank", str(rank), "--lora-target-modules", "q_proj", "down_proj"))
    assert value(arguments, "--max-lora-rank") == room
    assert value(arguments, "--max-loras") == "4"
    targets = arguments.index("--lora-target-modules")
    assert arguments[targets + 1 : targets + 3] == ["q_proj", "down_proj"]
    assert arguments.count("--enable-lora") == 1


def test_without_an_adapter_an_engine_has_room_for_none():
    assert not [argument for argument in command(cpu()) if argument.startswith("--") and "lora" in argument]


@pytest.mark.parametrize("name", ["enable-lora", "max-loras", "max-lora-rank", "lora-target-modules"])
def test_the_engines_room_for_adapters_is_not_the_users(name):
    with pytest.raises(ConfigError, match=f"--vllm-{name}"):
        launch.refuse_owned([f"--{name}", "4"], launch.OWNED_FLAGS, prefix="--vllm-", whose="the engine's")
