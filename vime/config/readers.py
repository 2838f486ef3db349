"""Which flag is read under which condition. A given flag that nothing would read is refused.

"Given" means that the command line differs from the default. Not counted: the debug modes, which run half of what
the same command line describes; plug-ins, which see every flag; and what depends on the size
of the run alone (`--balance-data` on one rank, the clips `--eps-clip` and `--value-clip` in rounds of one step), so
that one script serves every size. Flags of the algorithm that only
some estimators or corrections read are in `algo_checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vime.config.algo_checks import needs_reference
from vime.config.flags import flag_name, knobs
from vime.config.parse import SECTIONS, Config, section_of
from vime.config.problems import Problems


@dataclass(frozen=True, slots=True)
class Condition:
    """`knobs` are read when `holds`; `says` tells the user how to make it hold."""

    knobs: tuple[str, ...]
    holds: Callable[[Config], bool]
    says: str


def _has_records(config: Config) -> bool:
    is_own_source = not config.data.data_source_path.startswith("vime.")
    return bool(config.data.prompt_data or config.eval.has_sets or is_own_source)


def _uses_engines_to_train(config: Config) -> bool:
    return not config.rollout.rollout_function_path.startswith("vime.rollout.sft_rollout.")


def _may_cut_completions(config: Config) -> bool:
    """Whether a group may be aborted before it is finished."""
    rollout, is_streaming = config.rollout, config.queue.has_ledger
    has_surplus = (rollout.over_sampling_batch_size or 0) > rollout.rollout_batch_size
    has_plugin = bool(rollout.dynamic_sampling_filter_path or rollout.custom_generate_function_path)
    return _uses_engines_to_train(config) and (is_streaming or has_surplus or has_plugin)


def _may_ask_service(config: Config) -> bool:
    """Whether --eval-config, or without --rm-type the records, may name rewards."""
    return config.reward.rm_type in ("remote_rm", None) or config.eval.eval_config is not None


def _has_buffer(config: Config) -> bool:
    """Whether groups may wait in the default data source for a later round."""
    is_ours = config.data.data_source_path == "vime.rollout.data_source.RolloutDataSourceWithBuffer"
    return is_ours and not config.queue.has_ledger and _may_cut_completions(config)


def _may_mix_versions(config: Config) -> bool:
    """Whether weights may change in the middle of a completion, or between two parts of it."""
    if config.queue.has_ledger:
        return config.queue.transferqueue_max_staleness > 0
    return config.rollout.partial_rollout


READ_WHEN = (
    Condition(("gpu_memory_gib",), lambda config: config.cluster.device == "cuda", "with --device cuda"),
    Condition(
        ("min_lr", "lr_decay_iters"),
        lambda config: config.optimizer.lr_decay_style != "constant",
        "with --lr-decay-style linear or cosine",
    ),
    Condition(
        ("recompute_method", "recompute_num_layers"),
        lambda config: config.parallel.recompute_granularity == "full",
        "with --recompute-granularity full",
    ),
    Condition(
        ("lora_alpha", "lora_target_modules", "lora_dropout"),
        lambda config: config.lora.trains_adapter,
        "with --lora-rank",
    ),
    Condition(
        ("lora_merge",),
        lambda config: config.lora.trains_adapter and config.model.save_hf is not None,
        "with --lora-rank and --save-hf",
    ),
    Condition(("ref_load",), lambda config: needs_reference(config.algo), "with --use-kl-loss or --kl-coef"),
    Condition(
        ("kl_loss_type",),
        lambda config: config.algo.use_kl_loss,
        "with --use-kl-loss (--kl-coef always takes k1: in the reward the others give almost no gradient)",
    ),
    Condition(
        ("input_key", "label_key", "metadata_key", "tool_key", "multimodal_keys"),
        _has_records,
        "with --prompt-data, --eval-prompt-data, --eval-config or a --data-source-path of your own",
    ),
    Condition(
        ("apply_chat_template_kwargs",),
        lambda config: config.data.apply_chat_template or config.agents.has_agent,
        "with --apply-chat-template, --agent-command, --agent-function, --environment or --agent-listen",
    ),
    Condition(("async_save",), lambda config: config.model.save_interval is not None, "with --save-interval"),
    Condition(("reasoning_gym_size",), lambda config: config.data.reasoning_gym is not None, "with --reasoning-gym"),
    Condition(
        ("over_sampling_batch_size", "dynamic_sampling_filter_path", "rollout_sample_filter_path"),
        _uses_engines_to_train,
        "with another --rollout-function-path than sft_rollout",
    ),
    Condition(
        ("partial_rollout",),
        _may_cut_completions,
        "with --over-sampling-batch-size above --rollout-batch-size, --dynamic-sampling-filter-path, "
        "--custom-generate-function-path, or --transferqueue-mode streaming",
    ),
    Condition(
        ("buffer_filter_path",),
        _has_buffer,
        "with groups that are cut or left over (--over-sampling-batch-size above --rollout-batch-size, "
        "--dynamic-sampling-filter-path or --custom-generate-function-path), in mode off or buffer, with the default "
        "--data-source-path. In mode streaming the ledger says which group is next, so that each is trained once; "
        "--dynamic-sampling-filter-path and --stale-policy say there which are left out",
    ),
    Condition(
        ("mask_offpolicy_in_partial_rollout",), lambda config: config.rollout.partial_rollout, "with --partial-rollout"
    ),
    Condition(
        ("mask_offpolicy_in_partial_rollout", "mixed_version_policy"),
        _may_mix_versions,
        "with --partial-rollout in mode off or buffer, or --transferqueue-mode streaming and a --max-staleness above 0",
    ),
    Condition(
        ("max_reward_error_share",),
        lambda config: config.reward.on_reward_error == "drop",
        "with --on-reward-error drop",
    ),
    Condition(
        ("max_dropped_in_a_row", "on_reward_error"),
        _uses_engines_to_train,
        "with a --rollout-function-path that generates completions and scores them",
    ),
    Condition(
        (
            *("agent_timeout_secs", "agent_max_turns", "agent_max_tokens"),
            *("agent_tool_parser", "agent_reasoning_parser"),
        ),
        lambda config: config.agents.has_agent,
        "with --agent-command, --agent-function, --environment or --agent-listen",
    ),
    Condition(("agent_key_file",), lambda config: config.agents.agent_listen is not None, "with --agent-listen"),
    Condition(("rm_url",), _may_ask_service, "with --rm-type remote_rm, or where records or sets name their rewards"),
    Condition(
        ("custom_reward_post_process_path", "get_mismatch_metrics"),
        lambda config: config.algo.loss_type != "sft_loss",
        "with another --loss-type than sft_loss",
    ),
    Condition(
        ("disable_grpo_std_normalization",),
        lambda config: config.reward.custom_reward_post_process_path is None,
        "without --custom-reward-post-process-path, which replaces the normalisation",
    ),
    Condition(
        (
            *("eval_interval", "n_samples_per_eval_prompt", "eval_temperature", "eval_top_p", "eval_top_k"),
            *("eval_max_response_len", "skip_eval_before_train", "pass_reward"),
        ),
        lambda config: config.eval.has_sets,
        "with --eval-prompt-data NAME PATH or --eval-config FILE",
    ),
    Condition(
        ("eval_prompt_data", "eval_config"),
        lambda config: config.eval.eval_interval is not None or not config.eval.skip_eval_before_train,
        "with --eval-interval, or without --skip-eval-before-train",
    ),
    Condition(
        ("vllm_server_concurrency",),
        lambda config: not config.debug.reference_mode,
        "without --reference-mode, which sends an engine one request at a time",
    ),
    Condition(
        ("vllm_router_count",),
        lambda config: config.cluster.num_engines > 0 and not config.debug.debug_train_only,
        "with engines of this run: a --rollout-num-engines above 0, and no --debug-train-only",
    ),
    Condition(
        ("network_interface", "coordinator_node"),
        lambda config: config.cluster.ray_address is not None,
        "with --ray-address",
    ),
    Condition(
        ("eps_clip_high",), lambda config: config.algo.loss_type == "policy_loss", "with --loss-type policy_loss"
    ),
    Condition(
        ("micro_batch_size",),
        lambda config: not config.batch.use_dynamic_batch_size,
        "without --use-dynamic-batch-size, where --max-tokens-per-gpu says how much is in a micro-batch",
    ),
    Condition(("balance_data_by",), lambda config: config.batch.balance_data, "with --balance-data"),
    Condition(
        ("max_tokens_per_gpu",), lambda config: config.batch.use_dynamic_batch_size, "with --use-dynamic-batch-size"
    ),
    Condition(
        ("transferqueue_partition", "num_data_storage_units"),
        lambda config: config.queue.transferqueue_mode != "off",
        "with --transferqueue-mode buffer, streaming or external",
    ),
    Condition(
        (
            *("stale_policy", "transferqueue_durable", "transferqueue_fsync", "num_rollout_workers"),
            *("transferqueue_lease_timeout_secs", "transferqueue_max_groups", "transferqueue_max_tokens"),
            *("transferqueue_max_bytes", "train_early_groups"),
            "transferqueue_round_order",
        ),
        lambda config: config.queue.has_ledger,
        "with --transferqueue-mode streaming or external",
    ),
    Condition(
        ("transferqueue_address", "transferqueue_tls_cert", "transferqueue_tls_key"),
        lambda config: config.queue.transferqueue_mode == "external",
        "with --transferqueue-mode external",
    ),
    Condition(
        ("transferqueue_fsync",),
        lambda config: config.queue.transferqueue_durable,
        "without --no-transferqueue-durable",
    ),
    Condition(
        ("update_weight_disk_dir",),
        lambda config: config.weights.update_weight_transport == "disk",
        "with --update-weight-transport disk",
    ),
    Condition(
        ("wandb_project", "wandb_group", "wandb_mode"), lambda config: config.tracking.use_wandb, "with --use-wandb"
    ),
)


def check_given(given: Config, config: Config, problems: Problems | None = None) -> None:
    """`given` is what the command line says, `config` the same after `checks.resolve`. What is wrong is added to
    `problems`, or raised where there are none."""
    found = Problems() if problems is None else problems
    for condition in READ_WHEN:
        idle = [name for name in condition.knobs if is_given(given, name)]
        if idle and not condition.holds(config):
            flags = ", ".join(_as_given(given, name) for name in idle)
            found.add(
                f"{flags}: no effect here. Read only {condition.says}. Remove {'it' if len(idle) == 1 else 'them'}, or "
                "change that."
            )
    if problems is None:
        found.raise_all()


def is_given(config: Config, name: str) -> bool:
    """Whether the knob was set to something else than its default."""
    section = section_of(name)
    return bool(getattr(getattr(config, section), name) != getattr(getattr(Config(), section), name))


def _as_given(given: Config, name: str) -> str:
    value = getattr(given.flat, name)
    if value is False:
        return "--no-" + _FLAGS[name].removeprefix("--")
    shown = "" if isinstance(value, bool) else " " + (" ".join(value) if isinstance(value, tuple) else str(value))
    return _FLAGS[name] + shown


_FLAGS = {spec.name: flag_name(spec) for section in SECTIONS.values() for _, spec in knobs(section)}
