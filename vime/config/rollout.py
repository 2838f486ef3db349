"""Sections about generation: data, sampling, rewards, evaluation, engines."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import PathKind, flag

LEASED_PROMPTS = "vime.rollout.leased.LeasedPrompts"
"""The data source of `vime produce`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts: where they come from and how a record is read."""

    prompt_data: str | None = flag(
        None,
        "prompts: a jsonl or parquet file, a pattern such as `dir/train-*.parquet`, a directory that `datasets` saved, "
        "or `owner/name[:split]` of the hub; `@[a:b]` behind it takes a slice (docs/data.md)",
        path=PathKind.FILE,
    )
    input_key: str = flag("input", "record key of the prompt")
    label_key: str | None = flag(None, "record key of the label that the reward compares with")
    metadata_key: str = flag("metadata", "record key of a dict handed to plug-ins")
    source_key: str = flag(
        "data_source",
        "key that names a record's data source, in the record or in its metadata: metrics by source",
    )
    tool_key: str | None = flag(None, "record key of tool definitions for the chat template")
    multimodal_keys: str | None = flag(
        None,
        'JSON object that names the record key of images, `{"image": "images"}`: paths, data URLs, base64 or bytes '
        "(docs/images.md)",
    )
    apply_chat_template: bool = flag(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: str | None = flag(None, "JSON object of extra arguments for the chat template")
    rollout_shuffle: bool = flag(False, "shuffle the prompts anew each epoch")
    rollout_seed: int = flag(42, "seed of the shuffle and of sampling", minimum=0, maximum=2**31 - 1)
    data_source_path: str = flag(
        "vime.rollout.data_source.RolloutDataSourceWithBuffer",
        "class of the data source (dotted path or file.py:Name)",
        path=PathKind.PLUGIN,
    )
    reasoning_gym: str | None = flag(
        None, "generate prompts with reasoning-gym instead of --prompt-data, for example chain_sum,gsm_symbolic"
    )
    reasoning_gym_size: int = flag(10_000, "problems generated for each reasoning-gym task", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Rollout: how many prompts, how completions are sampled."""

    rollout_function_path: str = flag(
        "vime.rollout.vllm_rollout.generate_rollout",
        "rollout function (dotted path or file.py:name)",
        path=PathKind.PLUGIN,
    )
    num_rollout: int | None = flag(None, "rounds to train; or give --num-epoch", minimum=0)
    num_epoch: int | None = flag(None, "passes over the prompts; used when --num-rollout is empty", minimum=1)
    rollout_batch_size: int = flag(32, "prompt groups of one round", minimum=1)
    n_samples_per_prompt: int = flag(8, "answers per prompt", minimum=1)
    over_sampling_batch_size: int | None = flag(
        None,
        "prompt groups requested at a time; surplus groups are aborted or kept for later (empty: --rollout-batch-size)",
        minimum=1,
    )
    partial_rollout: bool = flag(
        False,
        "aborted completions keep tokens, log-probabilities and versions, and are continued before any new prompt: "
        "surplus groups of a round; mode streaming: groups in flight when the run stops, from disk",
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "with --partial-rollout: tokens of older weights leave the loss; the same as --mixed-version-policy mask"
    )
    dynamic_sampling_filter_path: str | None = flag(
        None,
        "keeps or drops a finished group, for example vime.rollout.filter_hub.check_reward_nonzero_std",
        path=PathKind.PLUGIN,
    )
    buffer_filter_path: str | None = flag(
        None,
        "def choose(args, rollout_id, buffer, num_samples) -> groups: takes groups out of the waiting ones, in place; "
        "empty: the oldest first",
        path=PathKind.PLUGIN,
    )
    max_dropped_in_a_row: int | None = flag(
        None,
        "end the run when this many groups in a row were dropped and none was kept; empty: 10 x "
        "--rollout-batch-size, at least 64",
        minimum=1,
    )
    rollout_max_prompt_len: int | None = flag(
        None, "longest prompt, tokens; a longer one is left out, and counted at start", minimum=1
    )
    refuse_long_prompts: bool = flag(
        False, "a prompt over --rollout-max-prompt-len, or one that leaves no token for a completion, ends the start"
    )
    rollout_max_response_len: int = flag(1024, "longest answer, tokens", minimum=1)
    rollout_max_context_len: int | None = flag(
        None, "longest prompt + completion, tokens; empty: the model's limit", minimum=2
    )
    rollout_temperature: float = flag(1.0, "sampling temperature", minimum=0, maximum=2)
    rollout_top_p: float = flag(1.0, "nucleus sampling mass", minimum=0, maximum=1)
    rollout_top_k: int = flag(-1, "sample among the k likeliest tokens; -1: all", minimum=-1)
    rollout_stop: tuple[str, ...] = flag((), "strings that end a completion", nargs="+")
    rollout_stop_token_ids: tuple[int, ...] = flag((), "token ids that end a completion", nargs="+")
    custom_generate_function_path: str | None = flag(
        None, "async def generate(args, sample, sampling_params)", path=PathKind.PLUGIN
    )
    generate_timeout_secs: float | None = flag(
        None,
        "deadline of one generation request, seconds; empty: 600, and one more for each 20 tokens of the longest "
        "answer beyond 8192",
        minimum=0.1,
    )
    rollout_timeout_secs: float | None = flag(
        None,
        "deadline of one round of generation, and of one evaluation, seconds; empty: 3600, and one more for each 20 "
        "tokens beyond 8192 of the longest answers that follow one another in a round, because an engine takes "
        "--vllm-server-concurrency requests at once",
        minimum=1,
    )
    rollout_sample_filter_path: str | None = flag(
        None, "def mark(args, groups): sets sample.remove_sample to leave samples out of the loss", path=PathKind.PLUGIN
    )
    rollout_backend: str = flag("vllm", "generation engine; only vllm is supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Agents: a program or a function answers each prompt, over the APIs of OpenAI or Anthropic."""

    agent_command: str | None = flag(
        None,
        "program to start for each sample, with its arguments; it finds address, key and prompt in its environment",
    )
    agent_function: str | None = flag(
        None,
        "def agent(task) -> reward, or None for the run's reward function; `async def` too",
        path=PathKind.PLUGIN,
    )
    environment: str | None = flag(
        None,
        "class with reset(task), step(message) and reward(); one is made for each sample",
        path=PathKind.PLUGIN,
    )
    agent_listen: str | None = flag(
        None,
        "HOST:PORT where agents that run elsewhere ask for sessions; another host than loopback lets other machines in",
    )
    agent_key_file: str | None = flag(
        None,
        "file with the key for --agent-listen, made when it is missing (empty: RUN/agent-key)",
        path=PathKind.FILE,
    )
    agent_timeout_secs: float = flag(
        300.0,
        "longest time of one agent, seconds, with --agent-listen from its claim; then its sample has failed",
        minimum=0.1,
    )
    agent_max_turns: int | None = flag(None, "most completions of one agent; a further one is refused", minimum=1)
    agent_max_tokens: int | None = flag(None, "most sampled tokens of one agent", minimum=1)
    agent_tool_parser: str | None = flag(
        None, "vLLM's --tool-call-parser for the model's family; empty: calls stay text"
    )
    agent_reasoning_parser: str | None = flag(
        None, "vLLM's --reasoning-parser for the model's family; empty: reasoning stays text"
    )

    @property
    def has_agent(self) -> bool:
        return bool(self.agent_command or self.agent_function or self.environment or self.agent_listen)


BOXED = "boxed_"
"""Prefix of a grader's name: the grader judges only the last box of the completion."""
RM_TYPES = (
    *("exact_match", "math", "remote_rm", "reasoning_gym", "deepscaler", "dapo", "f1", "gpqa"),
    *(BOXED + name for name in ("exact_match", "math", "f1", "gpqa")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Reward: what scores a completion."""

    rm_type: str | None = flag(
        None,
        "built-in reward (docs/customization.md), unless a record's metadata names an `rm_type`; dapo returns a dict, "
        "of which --reward-key score is trained on; boxed_<name> judges the last \\boxed{} alone",
        choices=RM_TYPES,
    )
    rm_url: str | None = flag(None, "address that --rm-type remote_rm posts samples to")
    reward_key: str | None = flag(None, "entry to train on when the reward is a dict")
    group_rm: bool = flag(False, "call the reward function once per group (a list in, a list out)")
    custom_rm_path: str | None = flag(
        None, "async def custom_rm(args, sample, **kwargs) -> float | dict", path=PathKind.PLUGIN
    )
    custom_reward_post_process_path: str | None = flag(
        None,
        "def post_process(args, groups) -> list of lists of rewards; replaces the group normalisation",
        path=PathKind.PLUGIN,
    )
    rm_timeout_secs: float = flag(60.0, "deadline of one reward call, seconds", minimum=0.01)
    on_reward_error: str = flag(
        "stop",
        "a reward that raises, returns no number or is late ends the run (stop), or its group is left out and counted "
        "as rollout/dropped_reward_error (drop); no reward is ever made up",
        choices=("stop", "drop"),
    )
    max_reward_error_share: float = flag(
        0.1,
        "with --on-reward-error drop: largest share of the last 100 groups that may be left out; above it the run ends",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation."""

    eval_interval: int | None = flag(None, "rounds between evaluations", minimum=1)
    eval_prompt_data: tuple[str, ...] = flag(
        (), "NAME PATH [NAME PATH ...] of evaluation files", nargs="+", path=PathKind.PAIRS
    )
    eval_config: str | None = flag(
        None,
        "YAML or TOML file of evaluation sets, each with keys, reward, number of completions and sampling of its own "
        "(docs/customization.md)",
        path=PathKind.FILE,
    )
    n_samples_per_eval_prompt: int = flag(1, "completions per evaluation prompt", minimum=1)
    eval_temperature: float | None = flag(None, "empty: --rollout-temperature", minimum=0, maximum=2)
    eval_top_p: float | None = flag(None, "empty: --rollout-top-p", minimum=0, maximum=1)
    eval_top_k: int | None = flag(None, "empty: --rollout-top-k", minimum=-1)
    pass_reward: float = flag(
        1.0, "pass@k: a completion of an evaluation is right when its reward is at least this (of a dict, --reward-key)"
    )
    eval_max_response_len: int | None = flag(None, "tokens; empty: --rollout-max-response-len", minimum=1)
    skip_eval_before_train: bool = flag(False, "no evaluation of the initial weights")

    @property
    def has_sets(self) -> bool:
        return bool(self.eval_prompt_data or self.eval_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """vLLM engines and router.

    Any flag of the installed vLLM can be given as --vllm-<flag>, any flag of the router as --router-<flag>.
    """

    vllm_server_concurrency: int = flag(64, "requests in flight per engine", minimum=1)
    vllm_kv_cache_memory_bytes: int | None = flag(
        None,
        "KV cache of one engine, bytes; empty: 128 MiB on the CPU, what --vllm-gpu-memory-utilization leaves on a GPU",
        minimum=1 << 20,
    )
    vllm_router_count: int = flag(
        1,
        "routers, each in front of all engines. A prompt group or session stays with one of them, and while that one "
        "is away the others have its requests. Each takes some 28,000 connections",
        minimum=1,
        maximum=64,
    )
    vllm_router_ip: str | None = flag(
        None, "filled in when Vime has started its router, for plug-ins to read; refused when given"
    )
    vllm_router_port: int | None = flag(
        None,
        "router port; empty: a free one. Of several routers the first: the others have those that follow",
        minimum=1,
        maximum=65535,
    )
    vllm_router_policy: str | None = flag(
        None,
        "how the router picks an engine. Empty: round_robin; consistent_hash with an agent and several engines, so "
        "that all turns of a session reach the engine that has their beginning",
        choices=("round_robin", "random", "power_of_two", "cache_aware", "consistent_hash", "sticky_least_loaded"),
    )

    engine_health_interval_secs: float = flag(5.0, "seconds between engine health checks", minimum=0.5)
    engine_health_timeout_secs: float = flag(
        60.0,
        "a live engine that does not respond to a health check for this long counts as hanging: it is lost; on a CPU "
        "the time of a step of prompts is added, which grows with the model",
        minimum=0.5,
    )

    @property
    def router_ports(self) -> range:
        """Return the port of each router; empty while they are not chosen."""
        return range(0) if (first := self.vllm_router_port) is None else range(first, first + self.vllm_router_count)
