"""The command line and environment of one vLLM server, and which --vllm-* flags the user may give.

`vllm serve` cannot be used: with the CPU distribution it looks for a package called `vllm` and ends. The module below
is what it runs for one API server. Chunked prefill and max_num_batched_tokens stay at vLLM's defaults, which admit any
prompt up to max-model-len; a user flag may change them, except under --reference-mode.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vime.backends.vllm_utils.flag_values import FlagShape, check_values, flag_names, refuse_owned, value_of
from vime.backends.vllm_utils.guard import DIE_WITH_PARENT
from vime.backends.vllm_utils.plugin import BACKEND
from vime.backends.vllm_utils.routes import MAX_ADAPTERS
from vime.config.hf_config import has_latent_attention, read_model_shape
from vime.config.lora import ADAPTER_RANKS, LoraConfig
from vime.config.parse import Config
from vime.types import ConfigError
from vime.utils.heap import KEEP_FREED_MEMORY, LARGE_BLOCK_BYTES, MMAP_THRESHOLD

SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
CPU_SERVER_MODULE = "vime.backends.vllm_utils.cpu_server"  # the same, started in half the time
FOLLOWER_MODULE = "vime.backends.vllm_utils.follower"
PLUGIN = "vime_weight_transfer"  # the entry point's name in setup.py
MIDDLEWARE = "vime.backends.vllm_utils.routes.EngineMiddleware"
WORKER_EXTENSION = "vime.backends.vllm_utils.weight_transfer.UpdateWorker"
SERVED_MODEL = "policy"
FLAG_LIST_MODULE = "vime.backends.vllm_utils.flag_list"
LIST_FLAGS_TIMEOUT_S = 180
MAX_NUM_SEQS_CPU = 128  # default of vLLM 0.32 for one CPU worker
KV_CACHE_BYTES_CPU = 128 << 20
BLOCK_SIZE_CPU = 32
LATENT_BACKEND_CPU = "CPU_MLA"  # the one that vLLM chooses where it finds AMX takes no fp32
LATENT_OPS_CPU = {"custom_ops": ["all", "-rotary_embedding"]}
"""vLLM 0.32's own rotation of positions on the CPU misses queries that are a view, as they are with latent attention:
log-probabilities were off by 3.4. Without it vLLM takes torch's."""
"""Tokens of a block of the CPU engine's KV cache: the smallest that its attention is made for. By vLLM's own default of
128 a short sequence takes a block all the same, so that few run at once, and the samples of a prompt share what they
have in common only in whole blocks."""

# Flags that the run itself decides, and the flag of Vime that decides it (empty: none does).
OWNED_FLAGS = {
    "--model": "--hf-checkpoint",
    "--host": "",
    "--port": "",
    "--served-model-name": "",
    "--weight-transfer-config": "--update-weight-transport",
    "--worker-extension-cls": "",
    "--tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "--nnodes": "--rollout-num-gpus-per-engine",
    "--node-rank": "--rollout-num-gpus-per-engine",
    "--master-addr": "",
    "--master-port": "",
    "--headless": "",
    "--dtype": "--bf16",
    "--max-model-len": "--rollout-max-context-len",
    "--logprobs-mode": "",
    "--enable-scale-out": "",
    "--seed": "--rollout-seed",
    "--enable-return-routed-experts": "--use-rollout-routing-replay",
    "--enable-lora": "--lora-rank",
    "--enable-sleep-mode": "--colocate",
    "--max-lora-rank": "--lora-rank",
    "--max-loras": "",
    "--lora-target-modules": "--lora-target-modules",
}

# Of --reference-mode: a completion depends on its prompt, its seed and the weights, not on those beside or before
# it. Batches change the order of sums; a cached prefix changes the shape of what is left to compute; a prompt cut in
# two kills vLLM's CPU engine when its request has a seed ("CPU Generator does not use offset"). A token budget of the
# whole context, and no second sequence to share it with, never cuts one.
REFERENCE_OWNED_FLAGS = frozenset(
    {
        *("--max-num-seqs", "--max-num-batched-tokens", "--long-prefill-token-threshold", "--speculative-config"),
        *("--spec-model", "--spec-method", "--spec-tokens"),
        *("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill"),
        *("--no-enable-chunked-prefill", "--config"),
    }
)

# Of an engine that needs more of the checkpoint than an update brings (a draft model, scales of a quantised model or
# cache), or of whose loading the user decides.
LOADING_FLAGS = frozenset(
    {
        *("--load-format", "--model-loader-extra-config", "--quantization", "--quantization-config"),
        *("--kv-cache-dtype", "--speculative-config", "--spec-model", "--spec-method", "--spec-tokens", "--config"),
    }
)

# Without these the control routes, the in-process worker or the weight transfer are missing.
REQUIRED_ENV = {"VLLM_SERVER_DEV_MODE": "1", DIE_WITH_PARENT: "1"}
REQUIRED_ENV_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # worker inside EngineCore: 2 processes instead of 3, 28 instead of 45 CPU s
}
DEFAULT_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a local directory; a look-up would wait for a network
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # 5 s would close the router's and the trainer's idle connections
    "VLLM_LOGGING_COLOR": "0",
}
DEFAULT_ENV_CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # the first request with log-probabilities would wait 28 s for one C++ compile
    "TORCHDYNAMO_DISABLE": "1",  # and torch's compiler is not imported (a local run says it to all its processes)
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins every engine of the machine to the same core
    "OMP_NUM_THREADS": "1",
}
DEFAULT_ENV_GPU_FP32 = {
    "TRITON_F32_DEFAULT": "ieee",  # Triton's own default is TF32: attention was off by 9e-3 nats on an H100
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one node has of an engine that is on several: vLLM's workers on it. The first has the server too."""

    number: int
    of: int
    address: str  # where all parts meet: a free port on the first one's node
    port: int

    @property
    def flags(self) -> list[str]:
        meet = ["--master-addr", self.address, "--master-port", str(self.port)]
        flags = ["--nnodes", str(self.of), "--node-rank", str(self.number), *meet]
        return [*flags, "--headless"] if self.number else flags


def engine_command(config: Config, *, index: int, host: str, port: int, part: Part | None = None) -> list[str]:
    """Command line of engine number `index`, or of a part of it; user flags come last."""
    rollout, on_cpu = config.rollout, config.cluster.device == "cpu"
    module = CPU_SERVER_MODULE if on_cpu else SERVER_MODULE
    if part is not None and part.number:
        module = FOLLOWER_MODULE
    module = config.debug.debug_engine_module or module
    command = [sys.executable, "-m", module]
    command += ["--model", config.model.hf_checkpoint, "--host", host, "--port", str(port)]
    command += ["--served-model-name", SERVED_MODEL, "--dtype", "bfloat16" if config.parallel.bf16 else "float32"]
    # Engines with one seed would sample alike; each request may still bring its own.
    command += ["--seed", str(config.data.rollout_seed + index)]
    command += ["--enable-scale-out", "--disable-uvicorn-access-log", "--middleware", MIDDLEWARE]
    command += ["--enable-prompt-tokens-details"]  # how much of a prompt was in the prefix cache
    command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    command += ["--worker-extension-cls", WORKER_EXTENSION]
    if rollout.rollout_max_context_len is not None:
        command += ["--max-model-len", str(rollout.rollout_max_context_len)]
    # vLLM's default is log_softmax(logits) before temperature and truncation. The policy ratio needs what was sampled
    # from; and a plug-in that truncates would go unseen. The two agree at temperature 1 without truncation.
    command += ["--logprobs-mode", "processed_logprobs"]
    if config.lora.trains_adapter:
        command += adapter_flags(config.lora)
    if config.debug.reference_mode:
        command += reference_flags(config)
    # On the CPU always: vLLM otherwise takes 92 % of the memory node. With eager mode it also skips the warm-up.
    cache_bytes = config.engine.vllm_kv_cache_memory_bytes or (KV_CACHE_BYTES_CPU if on_cpu else None)
    if cache_bytes is not None:
        command += ["--kv-cache-memory-bytes", str(cache_bytes)]
    command += _cpu_flags(config) if on_cpu else _gpu_flags(config)
    if part is not None or not on_cpu:
        command += ["--tensor-parallel-size", str(tensor_parallel_size(config))]
    if part is not None:
        command += part.flags
    return [*command, *config.vllm_flags]


def may_start_random(config: Config) -> bool:
    """Return whether an update brings such an engine all that it computes with. Not what the loader of a model with
    images keeps beside its weights."""
    given = {name.partition(".")[0] for name in flag_names(config.vllm_flags)}
    return not (LOADING_FLAGS & given or config.flat.multimodal_keys)


def awaiting_update(config: Config) -> Config:
    """Return the configuration of an engine that gets all weights from an update before its first prompt: it starts
    with random ones. Those of the checkpoint would be right where the first update misses a value, which nobody would
    notice before training has moved it (decision 0055)."""
    if not may_start_random(config):
        return config
    return dataclasses.replace(config, vllm_flags=("--load-format", "dummy", *config.vllm_flags))


def _cpu_flags(config: Config) -> list[str]:
    flags = ["--enforce-eager"]
    if not config.debug.reference_mode:  # there one sequence runs at a time and nothing is shared
        flags += ["--block-size", str(BLOCK_SIZE_CPU)]
    if has_latent_attention(config.model.hf_checkpoint):
        flags += ["--attention-backend", LATENT_BACKEND_CPU, "--compilation-config", json.dumps(LATENT_OPS_CPU)]
    if config.rollout.n_samples_per_prompt > MAX_NUM_SEQS_CPU and not config.debug.reference_mode:
        # a group is one request, refused above this limit
        flags += ["--max-num-seqs", str(config.rollout.n_samples_per_prompt)]
    return flags


def _gpu_flags(config: Config) -> list[str]:
    flags = list[str]()
    if config.cluster.colocate:  # vLLM's CPU build refuses the flag; its /sleep keeps the states and frees nothing
        flags += ["--enable-sleep-mode"]
    if config.algo.use_rollout_routing_replay:  # on the CPU the engine refuses it: it needs model runner V2, Triton
        flags += ["--enable-return-routed-experts"]
    return flags


def tensor_parallel_size(config: Config) -> int:
    """Return over how many GPUs of an engine each layer is cut: all of a stage of its pipeline. ConfigError when its
    GPUs cannot be divided into --vllm-pipeline-parallel-size stages."""
    size, stages = config.cluster.rollout_num_gpus_per_engine, pipeline_stages(config)
    if size % stages:
        raise ConfigError(
            f"--vllm-pipeline-parallel-size {stages}: an engine has {size} GPU (--rollout-num-gpus-per-engine), which "
            f"are not so many equal stages. Expected a divisor of {size}. Change one of the two."
        )
    return size // stages


def pipeline_stages(config: Config) -> int:
    """Return what the user's flags of vLLM say, whose values have been checked."""
    return int(value_of(config.vllm_flags, "--pipeline-parallel-size") or 1)


def adapter_flags(lora: LoraConfig) -> list[str]:
    """Room for adapters: requests that began with an older version finish with it while new ones use the newest."""
    room = next(rank for rank in ADAPTER_RANKS if rank >= lora.lora_rank)
    flags = ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(MAX_ADAPTERS)]
    return [*flags, "--lora-target-modules", *lora.lora_target_modules]


def reference_flags(config: Config) -> list[str]:
    """One sequence at a time, its prompt in one piece, nothing remembered of the one before."""
    positions = config.rollout.rollout_max_context_len
    positions = positions or read_model_shape(config.model.hf_checkpoint).max_position_embeddings
    return ["--max-num-seqs", "1", "--max-num-batched-tokens", str(positions), "--no-enable-prefix-caching"]


def engine_environment(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """What to change in `inherited` for an engine: required values always, defaults only where the user set none (with
    --reference-mode those of the CPU always: they decide threads and kernels)."""
    on_cpu = config.cluster.device == "cpu"
    required = {**REQUIRED_ENV, **(REQUIRED_ENV_CPU if on_cpu else {})}
    if config.debug.reference_mode:
        required |= DEFAULT_ENV_CPU
    of_device = DEFAULT_ENV_CPU if on_cpu else {} if config.parallel.bf16 else DEFAULT_ENV_GPU_FP32
    defaults = {**DEFAULT_ENV, **of_device}
    changes = {name: value for name, value in defaults.items() if name not in inherited} | required
    if inherited.get(MMAP_THRESHOLD) == KEEP_FREED_MEMORY[MMAP_THRESHOLD]:  # a local Ray set it, not the user
        changes[MMAP_THRESHOLD] = str(LARGE_BLOCK_BYTES)
    if inherited.get("VLLM_PLUGINS"):  # a list there means "only these"
        named = inherited["VLLM_PLUGINS"].split(",")
        changes["VLLM_PLUGINS"] = ",".join([*named, PLUGIN] if PLUGIN not in named else named)
    return changes


def validate_vllm_flags(config: Config) -> None:
    """ConfigError for a --vllm-* flag that the run owns, that the installed vLLM does not have, or whose value it would
    not take.

    Asks the installed vLLM once a version (about 10 s) and keeps what it says. Without such a flag it does nothing.
    """
    if not config.vllm_flags:
        return
    refuse_owned(config.vllm_flags, OWNED_FLAGS, prefix="--vllm-", whose="the engine's")
    for name in flag_names(config.vllm_flags):
        if config.debug.reference_mode and name in REFERENCE_OWNED_FLAGS:
            raise ConfigError(
                f"--vllm-{name.lstrip('-')} with --reference-mode, which decides how an engine batches and caches: one "
                "sequence at a time, without a prefix cache. Leave one of the two out."
            )
    check_values(config.vllm_flags, installed_flags(), prefix="--vllm-", whose=f"vLLM {_vllm_version()}")
    tensor_parallel_size(config)


def installed_flags() -> dict[str, FlagShape]:
    """Of the installed vLLM, which is asked once a version: some 10 s. scripts/install.sh calls it too."""
    try:
        return msgspec.json.decode(_cache_file().read_bytes(), type=dict[str, FlagShape])
    except (OSError, msgspec.DecodeError, RuntimeError):
        pass  # first use, an unreadable cache, or a user without a home: ask again
    try:
        asked = subprocess.run(
            [sys.executable, "-m", FLAG_LIST_MODULE],
            capture_output=True,
            text=True,
            timeout=LIST_FLAGS_TIMEOUT_S,
            check=True,
        )
        said = asked.stdout.strip().splitlines()[-1]
        shapes = msgspec.json.decode(said, type=dict[str, FlagShape])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        detail = getattr(error, "stderr", None) or error
        raise ConfigError(
            f"--vllm-* flags cannot be checked: asking the installed vLLM for its flags failed: {str(detail)[-800:]}. "
            "Repair the installation (scripts/install.sh)."
        ) from error
    try:
        cache = _cache_file()
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_name(f"{cache.name}.{os.getpid()}")
        partial.write_text(said)
        partial.replace(cache)
    except (OSError, RuntimeError):
        pass  # a read-only home, or none, only costs the time to ask again
    return shapes


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed: neither `vllm` nor `vllm-cpu` is there. Run scripts/install.sh.")


def _cache_file() -> Path:
    """Return where the answer is kept. RuntimeError for a user without a home."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vime"
    return directory / f"vllm-flag-shapes-{_vllm_version()}.json"
